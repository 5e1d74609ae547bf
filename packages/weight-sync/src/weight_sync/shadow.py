"""The verified copy of a version on a receiver's host, as a model folder that engines load."""

import itertools
import mmap
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weight_sync.codecs import Codec, codec_by_id
from weight_sync.core.manifest import Manifest
from weight_sync.errors import AnchorRequired, ChecksumMismatch, ManifestError
from weight_sync.locks import exclusive
from weight_sync.stores import open_store
from weight_sync.transports import FileTransport, Transport
from weight_sync.types import AnnouncedVersion

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
    """Bytes copied to make it; 0 when its files are links."""
    prepare_s: float


class ShadowFolder:
    """Makes and deletes shadows under one folder, which no other receiver may use.

    A shadow is built under a hidden name and renamed once every tensor matches its manifest. An
    old one is verified again before it is used again: nothing is trusted across a restart.
    """

    def __init__(
        self,
        root: Path,
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the folder, and delete what a killed receiver left half made.

        Raises:
            StartupError: another process uses it.
        """
        self.root = root.absolute()
        self._lock = exclusive(
            self.root / ".lock", "set receiver.shadow_folder to a folder of its own"
        )
        self._transport = transport or FileTransport()
        self._clock = clock
        self._tries = itertools.count()
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
        manifest = open_store(_store_root(uri)).read_manifest(uri)
        if manifest.version != announced.version:
            raise ManifestError(f"{uri} holds {manifest.version}, expected {announced.version}")
        return manifest

    def prepare(self, announced: AnnouncedVersion, base_model: Path) -> Shadow:
        """Fetch and verify a version, and link the base model's files beside it.

        Args:
            announced: what to prepare.
            base_model: HF model folder with config and tokenizer.

        Raises:
            WeightSyncError: it could not be fetched or is not what the manifest says.
            OSError: of the file system.
        """
        began_s = self._clock()
        manifest = self.read_manifest(announced)
        codec = codec_by_id(manifest.codec)
        if not manifest.is_anchor or not codec.payload_is_model:
            raise AnchorRequired(
                f"version {announced.version.number} is a delta of {manifest.base}; this release "
                "prepares anchors only. Publish with the dense codec"
            )
        folder = self.root / f"{announced.version.number:010d}-{announced.version.root_hash[:16]}"
        moved_bytes = 0
        if not self._still_good(folder, manifest, codec):
            moved_bytes = self._build(folder, announced, manifest, codec, base_model)
        return Shadow(announced, manifest, folder, moved_bytes, prepare_s=self._clock() - began_s)

    def prune(self, keep: Iterable[Path]) -> None:
        """Delete every shadow but these."""
        kept = set(keep)
        for folder in self.root.iterdir():
            if folder.is_dir() and folder not in kept and not folder.name.startswith("."):
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)

    def _still_good(self, folder: Path, manifest: Manifest, codec: Codec) -> bool:
        if not folder.exists():
            return False
        try:
            self._verify(sorted(folder.glob("*.safetensors")), manifest, codec)
        except ChecksumMismatch:
            shutil.rmtree(folder)
            return False
        return True

    def _build(
        self,
        folder: Path,
        announced: AnnouncedVersion,
        manifest: Manifest,
        codec: Codec,
        base_model: Path,
    ) -> int:
        # Its own name for each try: one that ran out of time may still be writing.
        hidden = self.root / f"{_HIDDEN}{folder.name}-{next(self._tries)}"
        hidden.mkdir()
        try:
            moved_bytes = 0
            models = []
            for index, payload in enumerate(manifest.payloads):
                many = len(manifest.payloads) > 1
                name = f"model-{index + 1:05d}.safetensors" if many else "model.safetensors"
                fetched = self._transport.fetch(announced.manifest_uri, payload, hidden / name)
                moved_bytes += fetched.moved_bytes
                models.append(fetched.path)
            self._verify(models, manifest, codec)
            _link_base(base_model, hidden)
            hidden.rename(folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return moved_bytes

    @staticmethod
    def _verify(models: Sequence[Path], manifest: Manifest, codec: Codec) -> None:
        """Compare every tensor in the files with the manifest, and miss none."""
        missing = {entry.name: entry for entry in manifest.tensors}
        for path in models:
            for tensor in codec.decode(_mapped(path), None):
                entry = missing.pop(tensor.name, None)
                if entry is None:
                    raise ChecksumMismatch(
                        f"{path}: tensor {tensor.name} is not in the manifest of version "
                        f"{manifest.version.number}, or twice in its payload"
                    )
                tensor.verify(entry)
        if missing:
            raise ChecksumMismatch(
                f"version {manifest.version.number}: expected {len(manifest.tensors)} tensors, "
                f"{len(missing)} are missing, among them {min(missing)}"
            )


def _store_root(manifest_uri: str) -> str:
    # ROOT/RUN/NUMBER/manifest
    return manifest_uri.rsplit("/", 3)[0]


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _link_base(base_model: Path, into: Path) -> None:
    for path in base_model.absolute().iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            (into / path.name).symlink_to(path)
