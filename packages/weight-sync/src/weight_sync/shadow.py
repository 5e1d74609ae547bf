"""The verified copy of a version on a receiver's host, as a model folder that engines load."""

import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weight_sync.codecs import Delta, anchor_codec, delta_codec
from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.core.plan import Link, chain
from weight_sync.errors import ChecksumMismatch, ManifestError, PayloadMissing, WeightSyncError
from weight_sync.locks import exclusive
from weight_sync.model_files import copy_file, model_files, tensors_in
from weight_sync.model_index import write_index
from weight_sync.rebuild import Rebuild, verify
from weight_sync.stores.base import Step, no_step
from weight_sync.telemetry import Instruments
from weight_sync.transports import Fetched, ModelSource, StoreTransport, Transport
from weight_sync.types import AnnouncedVersion

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_HIDDEN = ".part-"


@dataclass(frozen=True, slots=True)
class Shadow:
    """A prepared version."""

    announced: AnnouncedVersion
    manifest: Manifest
    folder: Path
    """HF model folder: model.safetensors, and links to the base model's other files."""
    moved_bytes: int
    """Payload bytes copied to make it; 0 when they were shared."""
    prepare_s: float


class ShadowFolder:
    """Makes and deletes shadows under one folder, which no other receiver may use.

    A shadow is built under a hidden name and renamed once every tensor is what its manifest says.
    An anchor's shadow is its payload. A delta's is a copy of one made before, or of the newest
    anchor, changed by the deltas since; what it was copied from is never written to. Nothing is
    trusted across a restart: an old shadow is verified again before it is used again.
    """

    def __init__(
        self,
        root: Path,
        *,
        transport: Transport | None = None,
        threads: int = 4,
        models: ModelSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Step = no_step,
    ) -> None:
        """Take the folder, and delete what a killed receiver left half made.

        Args:
            root: the folder.
            transport: brings manifests and payloads; None: out of the store that a URI names.
            threads: decode and verify.
            models: asked for whole models while there is no shadow yet; None: nobody is.
            clock: for durations.
            on_step: for tests: called before every step that changes the folder.

        Raises:
            StartupError: another process uses it.
        """
        self.root = root.absolute()
        self._lock = exclusive(
            self.root / ".lock", "set receiver.shadow_folder to a folder of its own"
        )
        self._transport = transport or StoreTransport()
        self._models = models
        self._threads = threads
        self._clock = clock
        self._on_step = on_step
        self._instruments = Instruments()
        self._tries = itertools.count()
        self._whole: dict[Path, Manifest] = {}
        """Shadows that this process has verified."""
        for rest in self.root.glob(f"{_HIDDEN}*"):
            shutil.rmtree(rest)

    def close(self) -> None:
        """Delete the shadows, which engines have loaded by now, and free the folder."""
        self.prune([])
        self._lock.close()

    def read_manifest(self, announced: AnnouncedVersion) -> Manifest:
        """Read what was announced.

        Raises:
            PayloadMissing, ManifestError: it is not there, or not what was announced.
        """
        uri = announced.manifest_uri
        manifest = self._transport.read_manifest(uri)
        if manifest.version != announced.version:
            raise ManifestError(f"{uri} holds {manifest.version}, expected {announced.version}")
        if manifest.base != announced.base:
            raise ManifestError(
                f"{uri} is a delta of {manifest.base}, announced as a delta of {announced.base}"
            )
        return manifest

    def prepare(
        self,
        announced: AnnouncedVersion,
        base_model: Path,
        history: Iterable[AnnouncedVersion] = (),
    ) -> Shadow:
        """Make a verified shadow of a version, the base model's files linked beside it.

        Args:
            announced: what to prepare.
            base_model: HF model folder with config and tokenizer.
            history: the run's announced versions; needed for a delta.

        Raises:
            WeightSyncError: it could not be fetched or is not what the manifest says.
            OSError: of the file system.
        """
        began_s = self._clock()
        manifest = self.read_manifest(announced)
        folder = self.root / f"{announced.version.number:010d}-{announced.version.root_hash[:16]}"
        moved_bytes = 0
        with ThreadPoolExecutor(self._threads, "weight-sync") as pool:
            if not self._still_good(folder, manifest, pool):
                # Its own name for each try: one that ran out of time may still be writing.
                hidden = self.root / f"{_HIDDEN}{folder.name}-{next(self._tries)}"
                self._on_step("mkdir")
                hidden.mkdir()
                try:
                    moved_bytes = self._bring(hidden, announced, manifest, history, pool)
                    self._on_step("link base model")
                    _link_base(base_model, hidden)
                    self._on_step("rename")
                    hidden.rename(folder)
                except BaseException:
                    shutil.rmtree(hidden, ignore_errors=True)
                    raise
        self._whole[folder] = manifest
        return Shadow(announced, manifest, folder, moved_bytes, prepare_s=self._clock() - began_s)

    def prune(self, keep: Iterable[Path]) -> None:
        """Delete every shadow but these."""
        kept = set(keep)
        for folder in self.root.iterdir():
            if folder.is_dir() and folder not in kept and not folder.name.startswith("."):
                self._whole.pop(folder, None)
                self._on_step("remove")
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)

    def _still_good(self, folder: Path, manifest: Manifest, pool: Executor) -> bool:
        if not folder.exists():
            return False
        try:
            verify(tensors_in(folder), manifest, pool)
        except ChecksumMismatch:
            # What changed this one may have changed those that were proven here before, too.
            self._whole.clear()
            shutil.rmtree(folder)
            return False
        return True

    def _bring(
        self,
        hidden: Path,
        announced: AnnouncedVersion,
        manifest: Manifest,
        history: Iterable[AnnouncedVersion],
        pool: Executor,
    ) -> int:
        """Get to a version by one way after another; return the payload bytes moved."""

        def payloads(afresh: bool) -> int:
            return self._from_payloads(hidden, announced, manifest, history, pool, afresh=afresh)

        def peers() -> int:
            return self._from_peers(announced, manifest, hidden, pool)

        ways: list[Callable[[], int]] = [partial(payloads, False), partial(payloads, True)]
        if self._models is not None:
            # A newcomer is spared the anchor and every delta; others need peers only when stuck.
            newcomer = not any(not path.name.startswith(".") for path in self.root.iterdir())
            ways.insert(0 if newcomer else len(ways), peers)
        for way in ways[:-1]:
            try:
                return way()
            except WeightSyncError as error:
                if not error.anchor_helps:
                    raise
                logger.info("version %s: %s; trying otherwise", manifest.version.label, error)
            for path in hidden.iterdir():
                path.unlink()
        return ways[-1]()

    def _from_payloads(
        self,
        hidden: Path,
        announced: AnnouncedVersion,
        manifest: Manifest,
        history: Iterable[AnnouncedVersion],
        pool: Executor,
        *,
        afresh: bool,
    ) -> int:
        """Fetch an anchor, or rebuild a delta; return the payload bytes moved.

        Files that are shared with the store are not read before they are used, and shadows that
        were proven once are built on; what comes of it is verified. `afresh` takes neither on
        trust: a shared file that is damaged is then fetched by the next transport.
        """
        if not manifest.is_anchor:
            return self._rebuild(hidden, announced, manifest, history, pool, afresh=afresh)
        moved_bytes = self._fetch_anchor(hidden, announced, manifest, read=afresh)
        with self._instruments.timed("verify"):
            verify(tensors_in(hidden), manifest, pool)
        return moved_bytes

    def _rebuild(
        self,
        hidden: Path,
        announced: AnnouncedVersion,
        manifest: Manifest,
        history: Iterable[AnnouncedVersion],
        pool: Executor,
        *,
        afresh: bool,
    ) -> int:
        """Copy the nearest version at hand, apply the deltas since, verify what they changed.

        Returns:
            Payload bytes moved.
        """
        versions = {v.version.number: v for v in (*history, announced)}
        held = {} if afresh else self._held(versions)
        links = {number: Link(number, v.base) for number, v in versions.items()}
        steps = chain(links, announced.version.number, held=held)
        source = held.get(links[steps[0]].base) or versions[steps.pop(0)]
        # All of them before the copy, which takes long: one that is damaged costs little then.
        deltas: list[tuple[Path, Delta]] = []
        moved_bytes = 0
        for number in steps:
            delta = self.read_manifest(versions[number])
            for payload in delta.payloads:
                into = hidden / f".{number}-{payload.name}"
                moved_bytes += self._fetch(versions[number], payload, into, read=True).moved_bytes
                deltas.append((into, delta_codec(delta.codec)))
        if isinstance(source, Path):
            start = self._whole[source]
            for path in model_files(source):
                self._on_step("copy shadow")
                copy_file(path, hidden / path.name)
        else:
            start = self.read_manifest(source)
            moved_bytes += self._fetch_anchor(hidden, source, start, read=afresh, own=True)
        if start.layout_hash != manifest.layout_hash:
            raise ManifestError(
                f"version {announced.version.number} is a delta of version "
                f"{start.version.number}, which has other tensors. Publish an anchor"
            )
        rebuild = Rebuild(hidden, start, pool, proven=isinstance(source, Path))
        for into, codec in deltas:
            self._on_step("apply delta")
            with self._instruments.timed("decode"):
                rebuild.apply(into, codec)
            self._on_step("remove delta")
            into.unlink()
        with self._instruments.timed("verify"):
            rebuild.verify(manifest)
        return moved_bytes

    def _held(self, versions: Mapping[int, AnnouncedVersion]) -> dict[int, Path]:
        """Return the whole shadows of these versions, by number."""
        return {
            manifest.version.number: folder
            for folder, manifest in self._whole.items()
            if (known := versions.get(manifest.version.number)) is not None
            and known.version == manifest.version
            and folder.exists()
        }

    def _fetch_anchor(
        self,
        into: Path,
        announced: AnnouncedVersion,
        manifest: Manifest,
        *,
        read: bool,
        own: bool = False,
    ) -> int:
        """Put an anchor's model files into a folder; with `own`, not as files that others share.

        Returns:
            Payload bytes moved.
        """
        anchor_codec(manifest.codec)
        many = len(manifest.payloads) > 1
        moved_bytes = 0
        for index, payload in enumerate(manifest.payloads):
            name = f"model-{index + 1:05d}.safetensors" if many else "model.safetensors"
            fetched = self._fetch(announced, payload, into / name, read=read)
            moved_bytes += fetched.moved_bytes
            if own and not fetched.moved_bytes:
                shared = into / f".{name}"
                self._on_step("copy anchor")
                fetched.path.rename(shared)
                copy_file(shared, into / name)
                shared.unlink()
        return moved_bytes

    def _fetch(
        self, announced: AnnouncedVersion, payload: PayloadFile, into: Path, *, read: bool
    ) -> Fetched:
        self._on_step("fetch payload")
        with self._instruments.timed("fetch"):
            return self._transport.fetch(announced.manifest_uri, payload, into, read=read)

    def _from_peers(
        self, announced: AnnouncedVersion, manifest: Manifest, into: Path, pool: Executor
    ) -> int:
        """Take verified model files of other receivers.

        Returns:
            Bytes moved.

        Raises:
            PayloadMissing: nobody has them.
            ChecksumMismatch: what came is not the version.
        """
        self._on_step("fetch from peers")
        models = list(self._models.fetch_model(announced, into)) if self._models else []
        if not models:
            raise PayloadMissing(f"no peer has version {manifest.version.label}")
        verify(tensors_in(into), manifest, pool)
        return sum(path.stat().st_size for path in models)


def _link_base(base_model: Path, into: Path) -> None:
    write_index(into)
    for path in base_model.absolute().iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            (into / path.name).symlink_to(path)
