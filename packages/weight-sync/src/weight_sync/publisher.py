"""Publish a run's versions: what a trainer calls straight after its optimizer step.

    channel = open_channel(ChannelConfig(target="127.0.0.1:7103"), contracts=[...])
    publisher = await Publisher.acquire(channel, run="my-run")
    version = await publisher.publish({"w": np.zeros(3, np.float32)}, step=1)

It needs numpy, not torch: bf16 tensors come as their raw bits, `RawTensor(bits, "BF16")`.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from service_kit.deadlines import Deadline
from service_kit.errors import Reason, ServiceError
from service_kit.telemetry import current_traceparent

from weight_sync.client import WeightClient
from weight_sync.codecs import Dense, Tensor, delta_codec
from weight_sync.config import PublishConfig
from weight_sync.core.manifest import Manifest, PolicyVersion, build_manifest, check_run
from weight_sync.core.plan import Link, anchor_due, prunable
from weight_sync.core.shards import ShardTicket
from weight_sync.errors import Fenced, PayloadMissing
from weight_sync.sharded import collect_shards
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.stores import Store, open_store
from weight_sync.telemetry import Instruments, tracer
from weight_sync.tensors import RawTensor, TensorLike, raw_tensor
from weight_sync.transports.base import Sender
from weight_sync.types import AnnouncedVersion, Needed

__all__ = [
    "PolicyVersion",
    "PublishConfig",
    "Published",
    "Publisher",
    "RawTensor",
    "TensorLike",
]

logger = logging.getLogger(__name__)

_ANNOUNCE_S = 10.0
_PLAN_S = 2.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing one version took."""

    version: PolicyVersion
    base: int
    """Number of the version it went out as a delta of; 0: it went out whole."""
    payload_bytes: int
    write_s: float
    announce_s: float


class Publisher:
    """One incarnation of a run's publisher. Make it with `acquire`; not for several at once."""

    def __init__(
        self,
        client: WeightClient,
        store: Store,
        *,
        run: str,
        incarnation: int,
        last_number: int,
        config: PublishConfig,
        keep_latest: int = 2,
        links: Mapping[int, Link] | None = None,
        sender: Sender | None = None,
    ) -> None:
        self.run = run
        self.incarnation = incarnation
        """This publisher's; a higher one fences it off."""
        self.last: Published | None = None
        """The last version published here, and what it took."""
        self._client = client
        self._store = store
        self._next = last_number + 1
        self._keep_latest = keep_latest
        self._config = config
        self._snapshot: Snapshot | None = None
        self._shards_since: tuple[int, int] | None = None
        """The last version of several ranks, if they hold it, and its deltas since the anchor."""
        self._links = dict(links or {})
        self._sender = sender
        self._busy = asyncio.Lock()
        self._instruments = Instruments()

    @classmethod
    async def acquire(
        cls,
        channel: grpc.aio.Channel,
        *,
        run: str,
        store: Store | None = None,
        config: PublishConfig | None = None,
        holder: str = "",
        known_number: int = 0,
        keep_latest: int = 2,
        sender: Sender | None = None,
        timeout_s: float = 30.0,
    ) -> "Publisher":
        """Take over publishing for a run, fencing off whoever did before.

        Args:
            channel: to the WeightService, from `service_kit.channel.open_channel`.
            run: its name; becomes a folder.
            store: where to write; None: the store that the service names.
            config: how to write; None: every version whole.
            holder: free text for people; default host and pid.
            known_number: the highest number in the trainer's checkpoint; 0: none.
            keep_latest: newest versions to keep whatever receivers need, at least 1.
            sender: offers each version to receivers beside the store, such as `CollectiveSender`.
            timeout_s: for all of it.

        Raises:
            ServiceError: the service refused or could not be reached.
            ManifestError: `run` is no name for a run.
        """
        check_run(run)
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be at least 1, got {keep_latest}")
        client = WeightClient(channel)
        async with asyncio.timeout(timeout_s):
            grant = await client.acquire_publisher(
                run,
                holder=holder or f"{socket.gethostname()}:{os.getpid()}",
                known_number=known_number,
                timeout_s=timeout_s,
            )
            store = store or open_store(grant.store_uri)
            announced = await client.list_versions(run, timeout_s=timeout_s)
            # What a killed publisher left half written has a number too: go on above it.
            in_store = await asyncio.to_thread(store.last_number, run)
            await asyncio.to_thread(store.sweep, run, before_incarnation=grant.incarnation)
        return cls(
            client,
            store,
            run=run,
            incarnation=grant.incarnation,
            last_number=max(grant.last_number, in_store),
            config=config or PublishConfig(),
            keep_latest=keep_latest,
            links={v.version.number: Link(v.version.number, v.base) for v in announced.versions},
            sender=sender,
        )

    async def publish(
        self,
        tensors: Mapping[str, TensorLike],
        *,
        step: int,
        parent: int | None = None,
        timeout_s: float = 60.0,
    ) -> PolicyVersion:
        """Write a version, commit and announce it.

        The tensors are read from their own memory, in a thread: they must not change before this
        returns. Names are those of the HF checkpoint that the engines load.

        Args:
            tensors: arrays, or raw bits with a dtype; every tensor of the model.
            step: optimizer steps along the version's lineage.
            parent: number of the version it was trained from; None: the last published here.
            timeout_s: for writing and announcing. A version that was late may still be announced;
                the next one gets another number, so publishing again is safe.

        Raises:
            Fenced: a newer incarnation publishes; stop.
            StoreFull: no space is left; free some and publish again.
            PayloadMissing: what was written is gone; publish again, which tells why.
            ServiceError: the service refused, or could not be reached in all that time.
            ValueError: a tensor is not what its label says.
            TimeoutError: writing took too long.
        """
        if parent is None:
            parent = self.last.version.number if self.last else 0
        deadline = Deadline.after(timeout_s)
        async with self._busy:
            with tracer().start_as_current_span("weight_sync.publish") as span:
                began_s = time.perf_counter()
                number, self._next = self._next, self._next + 1
                raw = [raw_tensor(name, value) for name, value in tensors.items()]
                base = await self._base(raw, deadline)
                # An abandoned write goes on in its thread, into a folder of its own.
                async with asyncio.timeout(deadline.remaining_s()):
                    manifest, uri = await asyncio.to_thread(
                        self._write, raw, base, number, step, parent
                    )
                written_s = time.perf_counter()
                needed = await self._make_known(manifest, uri, deadline)
                announced_s = time.perf_counter()
                await self._remember(raw, manifest)
                await asyncio.to_thread(self._prune, needed)
                span.set_attribute("weight_sync.version", number)
        return self._published(manifest, began_s, written_s, announced_s)

    async def begin_shards(
        self, *, shards: int, step: int, parent: int | None = None
    ) -> ShardTicket:
        """Begin a version that several ranks write; hand the ticket to all of them.

        Each rank has its `weight_sync.sharded.ShardWriter` write; then `commit_shards` here.
        """
        if parent is None:
            parent = self.last.version.number if self.last else 0
        since, self._shards_since = self._shards_since, None
        if since is not None and (
            anchor_due(since_anchor=since[1], anchor_every=self._config.anchor_every)
            or await self._stuck(_PLAN_S)
        ):
            since = None
        number, self._next = self._next, self._next + 1
        await asyncio.to_thread(self._store.begin, self.run, number, self.incarnation)
        return ShardTicket(
            run=self.run,
            incarnation=self.incarnation,
            number=number,
            step=step,
            parent=parent,
            shards=shards,
            store_uri=self._store.uri,
            base=since[0] if since else 0,
            since_anchor=since[1] + 1 if since else 0,
            codec=self._config.codec,
        )

    async def commit_shards(self, ticket: ShardTicket, *, timeout_s: float = 60.0) -> PolicyVersion:
        """Wait until every rank has written its shard, then commit and announce.

        Raises:
            ShardMissing: a rank was late; the version was given up.
            Fenced, StoreFull, ServiceError: as for `publish`.
        """
        deadline = Deadline.after(timeout_s)
        async with self._busy:
            began_s = time.perf_counter()
            manifest, uri = await asyncio.to_thread(
                collect_shards, ticket, self._store, timeout_s=deadline.remaining_s()
            )
            written_s = time.perf_counter()
            needed = await self._make_known(manifest, uri, deadline)
            announced_s = time.perf_counter()
            if ticket.codec != Dense.id:
                self._shards_since = (ticket.number, ticket.since_anchor)
            await asyncio.to_thread(self._prune, needed)
        return self._published(manifest, began_s, written_s, announced_s)

    def _published(
        self, manifest: Manifest, began_s: float, written_s: float, announced_s: float
    ) -> PolicyVersion:
        share = manifest.payload_bytes / max(1, manifest.model_bytes)
        self._instruments.published_bytes.add(manifest.payload_bytes)
        self._instruments.payload_share.record(share, {"codec": manifest.codec})
        self._instruments.publish_s.record(announced_s - began_s)
        self.last = Published(
            manifest.version,
            manifest.base,
            manifest.payload_bytes,
            write_s=written_s - began_s,
            announce_s=announced_s - written_s,
        )
        return manifest.version

    async def _make_known(self, manifest: Manifest, uri: str, deadline: Deadline) -> Needed:
        """Announce, and offer to whoever takes part in the sender's transport."""
        if self._sender is None:
            return await self._announce(manifest, uri, deadline)
        await asyncio.to_thread(self._sender.open, uri, manifest)
        needed = await self._announce(manifest, uri, deadline)
        self._sender.start(uri, manifest)
        return needed

    async def _base(self, tensors: list[Tensor], deadline: Deadline) -> Snapshot | None:
        """Return what to send a delta of; None: send an anchor."""
        if self._snapshot is None or await self._stuck(deadline.within(_PLAN_S)):
            return None
        return self._snapshot

    async def _stuck(self, timeout_s: float) -> bool:
        """Ask whether there are hosts that a delta would not help."""
        try:
            hosts = await self._client.plan_version(self.run, timeout_s=timeout_s)
        except ServiceError as error:
            # Nobody is helped by waiting: whoever is stuck will still be at the next version.
            logger.warning("could not ask whether a delta will do: %s", error)
            return False
        if hosts:
            logger.warning("publishing an anchor for hosts that are stuck: %s", ", ".join(hosts))
        return bool(hosts)

    def _write(
        self,
        tensors: list[Tensor],
        snapshot: Snapshot | None,
        number: int,
        step: int,
        parent: int,
    ) -> tuple[Manifest, str]:
        config = self._config
        base = None
        if snapshot is not None:
            told = self._instruments.changed_share.record
            base = snapshot.base_for(tensors, config, on_changed=told)
        publication = self._store.begin(self.run, number, self.incarnation)
        try:
            with self._pool() as pool:
                if base is None:
                    codec_id, name = Dense.id, Dense.payload_name
                    pieces = Dense().encode(tensors)
                else:
                    codec = delta_codec(config.codec, dense_above=config.dense_above)
                    codec_id, name = codec.id, codec.payload_name
                    pieces = codec.encode(tensors, base, pool)
                with self._instruments.timed("encode"):
                    payload = publication.write(name, pieces)
                entries = list(pool.map(Tensor.entry, tensors))
            manifest = build_manifest(
                run=self.run,
                incarnation=self.incarnation,
                number=number,
                step=step,
                parent=parent,
                base=snapshot.number if snapshot and base is not None else 0,
                codec=codec_id,
                tensors=entries,
                payloads=[payload],
            )
            return manifest, publication.commit(manifest)
        except FileNotFoundError as error:
            raise PayloadMissing(
                f"what was written of version {number} is gone: another publisher took over run "
                f"{self.run} and swept it, or the store was deleted. Publish again, which tells"
            ) from error
        except BaseException:
            publication.abandon()
            raise

    async def _remember(self, tensors: list[Tensor], manifest: Manifest) -> None:
        """Keep a copy of what was announced, for the next delta."""
        if self._config.codec == Dense.id:
            return
        # Nobody has it while it changes: a publisher that is cancelled here goes on with an anchor.
        older, self._snapshot = self._snapshot, None
        number, is_anchor = manifest.version.number, manifest.is_anchor

        def copy() -> Snapshot:
            with self._pool() as pool, self._instruments.timed("remember"):
                return take_snapshot(older, tensors, number=number, is_anchor=is_anchor, pool=pool)

        self._snapshot = await asyncio.to_thread(copy)

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._config.threads, "weight-sync")

    async def _announce(self, manifest: Manifest, uri: str, deadline: Deadline) -> Needed:
        """Announce until it is heard: a service that restarts must not cost a version."""
        announced = AnnouncedVersion(
            version=manifest.version,
            manifest_uri=uri,
            payload_bytes=manifest.payload_bytes,
            base=manifest.base,
            traceparent=current_traceparent(),
        )
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                needed = await self._client.announce(
                    announced, timeout_s=deadline.within(_ANNOUNCE_S)
                )
                break
            except ServiceError as error:
                if error.reason is Reason.FENCED:
                    raise Fenced(error.message) from error
                if not error.retryable or deadline.remaining_s() <= wait_s:
                    raise
                number = manifest.version.number
                logger.warning("version %d is not announced yet: %s", number, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self._links[manifest.version.number] = Link(manifest.version.number, manifest.base)
        return needed

    def _prune(self, needed: Needed) -> None:
        """Delete versions that no live receiver may need; a failure costs space, nothing else."""
        if not needed.settled:
            return
        try:
            stored = self._store.committed(self.run)
            numbers = {version.number for version in stored}
            # Versions pruned before are no links any more.
            self._links = {n: link for n, link in self._links.items() if n in numbers}
            gone = prunable(
                self._links,
                targets=needed.targets,
                keep_latest=self._keep_latest,
            )
            for version in sorted(stored, key=lambda version: -version.number):
                # What was never announced, and no longer will be, is nobody's.
                stray = version.number not in self._links
                own = version.incarnation <= self.incarnation
                if version.number in gone or (stray and own):
                    self._store.remove(version)
        except OSError:
            logger.exception("run %s: could not prune old versions", self.run)
