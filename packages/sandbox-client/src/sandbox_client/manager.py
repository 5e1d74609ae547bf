"""The service behind the contract: leases, limits and defaults over one back-end."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

import sandbox_client
from sandbox_client.backends.base import (
    Backend,
    BackendSandbox,
    ExecHooks,
    PullsImages,
    Reattaching,
)
from sandbox_client.checks import check_names, complete_command, complete_lease, complete_spec
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.leases import KeyConflictError
from sandbox_client.core.limits import LimiterStatus, TokenBucket
from sandbox_client.errors import (
    IdempotencyConflict,
    QuotaExhausted,
    SandboxGone,
    SandboxUnavailable,
    ServiceError,
    WrongRequest,
)
from sandbox_client.faults import DelayInjector, FaultInjector
from sandbox_client.limiter import Limiter, Quota
from sandbox_client.pool import PoolKeeper
from sandbox_client.residents import Resident, Residents
from sandbox_client.snapshots import Snapshots
from sandbox_client.spool import Spool
from sandbox_client.types import (
    Command,
    ExecResult,
    SandboxClaim,
    SandboxInfo,
    SandboxSpec,
    ServiceStatus,
    SnapshotInfo,
)

__all__ = ["Created", "SandboxManager"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Created:
    """Answer to a create."""

    sandbox_id: str
    lease_s: float
    workdir: str
    existed: bool


class SandboxManager:
    """All sandboxes of one service. `reap_forever` has to run beside it."""

    def __init__(
        self,
        config: SandboxServiceConfig,
        backend: Backend,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: f"sb-{secrets.token_hex(8)}",
    ) -> None:
        self._config = config
        self._backend = backend
        self._clock = clock
        self._new_id = new_id
        self._residents = Residents(clock, self._leaving, self._ended)
        self._leases = self._residents.leases
        self._pending: dict[str, asyncio.Future[None]] = {}
        limits = config.limits
        self._starts = Limiter("concurrent_starts", limits.concurrent_starts, clock=clock)
        self._commands = Limiter("commands", limits.commands, clock=clock)
        self._rate = TokenBucket(limits.starts_per_s, limits.start_burst, now=clock())
        self._pool = PoolKeeper(
            config.pool,
            backend,
            starts=self._starts,
            rate=self._rate,
            clock=clock,
            new_id=new_id,
        )
        self._snapshots = Snapshots(backend, limits, clock)
        room = Quota("spool_bytes", limits.spool_bytes, limits.retry_after_s)
        self.spool = Spool(config.state_dir, room, limits.upload_bytes)
        """The files and trees that are on their way."""
        self._also: list[Callable[[], list[LimiterStatus]]] = []
        self._faults = FaultInjector(config.faults)
        self._delays = DelayInjector(config.delay)

    async def start(self) -> None:
        """Starts the back-end, and takes over what lives there from an earlier run."""
        await self._backend.start()
        if isinstance(self._backend, Reattaching):
            for found in await self._backend.reattach():
                self._residents.adopt(found, self._config.lease.default_s)
        if self._config.faults.active:
            logger.warning("faults are injected, as this service's configuration asks for")

    async def stop(self) -> None:
        """Ends every sandbox and the back-end."""
        await self._residents.end_all()
        await self._pool.stop()
        await self._backend.stop()

    # -- environments

    def missing_environments(self, digests: Sequence[str]) -> list[str]:
        """Which of these environments have to be put before a create."""
        return self._backend.missing_environments(digests)

    async def put_environment(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores an environment; False if it was there."""
        return await self._backend.put_environment(digest, archive)

    # -- images

    def images(self) -> PullsImages:
        """The back-end's images.

        Raises:
            WrongRequest: it has none.
        """
        if not isinstance(self._backend, PullsImages):
            raise WrongRequest(
                f"back-end `{self._backend.name}` pulls no images; only `docker` does"
            )
        return self._backend

    # -- creating and ending

    async def create(
        self,
        *,
        key: str,
        owner: str,
        spec: SandboxSpec,
        lease_s: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ) -> Created:
        """Makes a sandbox, or finds the one that this key has made.

        Raises:
            WrongRequest, IdempotencyConflict: the request is at fault.
            QuotaExhausted: a limit is used up; retry after the given time.
            EnvironmentUnknown: put the environment, or make the snapshot, first.
            SandboxUnavailable, InjectedFault: the host is at fault.
        """
        check_names(key, owner, labels or {})
        lease_s = complete_lease(self._config.lease, lease_s)
        given = repr((spec, sorted((labels or {}).items())))
        fingerprint = hashlib.sha256(given.encode()).hexdigest()
        spec = complete_spec(self._config.sandbox, spec)
        try:
            claim = self._leases.claim(
                owner=owner,
                key=key,
                fingerprint=fingerprint,
                new_id=self._pool.find(spec) or self._new_id(),
                now=self._clock(),
                labels=dict(labels or {}),
            )
        except KeyConflictError as error:
            raise IdempotencyConflict(str(error)) from error
        sandbox_id = claim.sandbox_id
        if claim.is_new:
            await self._make(sandbox_id, f"{owner}/{key}", spec)
        else:
            pending = self._pending.get(sandbox_id)
            if pending is not None:
                await asyncio.shield(pending)
        if sandbox_id not in self._leases:
            raise SandboxGone(f"sandbox {sandbox_id} of key {key!r} was destroyed meanwhile")
        self._leases.grant(sandbox_id, lease_s=lease_s, now=self._clock())
        workdir = self._residents.get(sandbox_id).environment.workdir
        return Created(sandbox_id, lease_s, workdir, existed=not claim.is_new)

    async def _make(self, sandbox_id: str, key: str, spec: SandboxSpec) -> None:
        """Makes the sandbox of a new claim; gives the claim back if that fails."""
        pending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A failure concerns those who wait as well; if nobody does, it is not lost but raised here.
        pending.add_done_callback(_retrieve)
        self._pending[sandbox_id] = pending
        try:
            self._admit(starts=self._pool.find(spec) is None)
            self._faults.on_create(key)
            sandbox = self._pool.take(spec)
            if sandbox is None:
                spec = self._resolved(spec)
                sandbox = await self._start(sandbox_id, spec)
        except BaseException as error:
            self._leases.release(sandbox_id)
            pending.set_exception(
                error
                if isinstance(error, ServiceError)
                else SandboxUnavailable(f"the create that this one waited for failed: {error!r}")
            )
            raise
        else:
            self._residents.add(sandbox_id, Resident(sandbox, key, spec.environment))
            pending.set_result(None)
        finally:
            del self._pending[sandbox_id]

    async def _start(self, sandbox_id: str, spec: SandboxSpec) -> BackendSandbox:
        try:
            async with self._starts.slot():
                return await self._backend.create(sandbox_id, self._claimed(sandbox_id, spec))
        except BaseException:
            self._snapshots.let_go(spec.environment.snapshot)
            raise
        finally:
            self._pool.wake()

    def _claimed(self, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        """The specification with who asked for it."""
        record = self._leases.get(sandbox_id)
        if record is None:
            return spec
        claim = SandboxClaim(record.owner, record.key, record.fingerprint, record.labels)
        return replace(spec, claim=claim)

    def _resolved(self, spec: SandboxSpec) -> SandboxSpec:
        """The specification with what its snapshot knows, which is held from now on."""
        given = spec.environment
        if not given.snapshot:
            return spec
        kept = self._snapshots.hold(given.snapshot)
        environment = replace(given, workdir=kept.workdir, env={**kept.env, **given.env})
        return replace(spec, environment=environment)

    def _admit(self, *, starts: bool) -> None:
        limits = self._config.limits
        used = self._residents.places
        if used > limits.sandboxes:
            raise QuotaExhausted(
                f"{used - 1} sandboxes are alive, limits.sandboxes allows {limits.sandboxes}; "
                "retry when one has ended",
                retry_after_s=limits.retry_after_s,
            )
        wait_s = self._rate.take(self._clock()) if starts else 0.0
        if wait_s > 0:
            raise QuotaExhausted(
                f"limits.starts_per_s allows {limits.starts_per_s:g} starts a second",
                retry_after_s=wait_s,
            )

    def renew(
        self, sandbox_ids: Sequence[str], lease_s: float, snapshot_ids: Sequence[str] = ()
    ) -> list[str]:
        """Prolongs leases; returns the ids that are gone."""
        lease_s = complete_lease(self._config.lease, lease_s)
        gone = self._residents.renew(sandbox_ids, lease_s)
        return gone + self._snapshots.renew(snapshot_ids, lease_s)

    async def destroy(self, sandbox_id: str) -> bool:
        """Ends a sandbox; False if there was none. Returns when nothing of it is left."""
        pending = self._pending.get(sandbox_id)
        if pending is not None:
            await asyncio.wait([pending])
        ending = self._residents.end(sandbox_id)
        if ending is None:
            return False
        await asyncio.shield(ending)
        return True

    def _leaving(self, sandbox_id: str, resident: Resident) -> None:
        self._faults.forget(resident.key, sandbox_id)
        self._delays.forget(resident.key)

    def _ended(self, resident: Resident) -> None:
        self._snapshots.let_go(resident.environment.snapshot)

    def reap(self) -> list[str]:
        """Ends sandboxes whose lease is over and those that are lost; returns their ids."""
        return self._residents.reap()

    async def reap_forever(self) -> None:
        """The reaper: runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._config.lease.reap_interval_s)
            self.reap()
            await self._snapshots.reap()

    async def keep_pool_forever(self) -> None:
        """Keeps the warm pool: runs until it is cancelled."""
        await self._pool.keep_forever()

    # -- snapshots

    async def snapshot(
        self, sandbox_id: str, key: str, lease_s: float, *, stopped: bool = False
    ) -> SnapshotInfo:
        """Keeps a sandbox's files for others to start from; see `Snapshots.make`.

        With `stopped` the caller vouches for it that no process in there writes meanwhile.
        """
        check_names(key, "", {})
        lease_s = complete_lease(self._config.lease, lease_s)
        living = self._residents.get(sandbox_id)
        if living.running and not stopped:
            raise WrongRequest(
                f"{living.running} commands are running in sandbox {sandbox_id}; what they write "
                "could be caught half done: snapshot it when they have ended"
            )
        return await self._snapshots.make(
            sandbox_id, living.sandbox, key, lease_s=lease_s, environment=living.environment
        )

    async def destroy_snapshot(self, snapshot_id: str) -> bool:
        """Ends a snapshot's lease; False if there was none."""
        return await self._snapshots.destroy(snapshot_id)

    # -- using

    def get(self, sandbox_id: str) -> BackendSandbox:
        """A living sandbox.

        Raises:
            SandboxGone: it is not living, or never was.
        """
        return self._residents.get(sandbox_id).sandbox

    async def run(
        self, sandbox_id: str, command: Command, hooks: ExecHooks | None = None
    ) -> ExecResult:
        """Runs one command. Waiting in line is not part of its run time."""
        command = complete_command(self._config.exec, command)
        living = self._residents.get(sandbox_id)
        self._faults.on_exec(sandbox_id)
        async with self._commands.slot():
            living.running += 1
            try:
                delay_s = self._delays.wait_s(living.key)
                if delay_s:
                    await asyncio.sleep(delay_s)
                result = await living.sandbox.run(command, hooks or ExecHooks())
            finally:
                living.running -= 1
        return replace(result, wall_s=result.wall_s + delay_s) if delay_s else result

    # -- looking

    def sandboxes(self, owner: str | None = None) -> list[SandboxInfo]:
        """The living sandboxes, oldest first."""
        return self._residents.listing(owner)

    def show(self, limiters: Callable[[], list[LimiterStatus]]) -> None:
        """Lets what is built upon the manager tell of its own limiters too."""
        self._also.append(limiters)

    def limiters(self) -> list[LimiterStatus]:
        """Every limiter of the service, under the name of its config field."""
        limits = self._config.limits
        return [
            LimiterStatus("sandboxes", float(limits.sandboxes), float(self._residents.places)),
            LimiterStatus("starts_per_s", limits.starts_per_s, self._rate.used(self._clock())),
            self._starts.status(),
            self._commands.status(),
            self.spool.status(),
            self._snapshots.status(),
            *self._pool.status(),
            *self._backend.limiters(),
            *(status for limiters in self._also for status in limiters()),
        ]

    def status(self) -> ServiceStatus:
        """The service as a whole."""
        return ServiceStatus(
            self._backend.name,
            sandbox_client.__version__,
            len(self._residents),
            tuple(self.limiters()),
            self._backend.missing_protections(),
        )


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
