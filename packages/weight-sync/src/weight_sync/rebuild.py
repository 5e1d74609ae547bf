"""A version made from an older one's files by deltas, and the proof that it is that version."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path

from weight_sync.codecs import Delta, Tensor
from weight_sync.core.manifest import Manifest, TensorEntry
from weight_sync.errors import ChecksumMismatch
from weight_sync.model_files import mapped, tensors_in


class Rebuild:
    """Model files on their way from one version to another, and what is proven of their tensors."""

    def __init__(self, folder: Path, start: Manifest, pool: Executor, *, proven: bool) -> None:
        """Take over the model files in a folder.

        Args:
            folder: nobody else's; its files are written to.
            start: the version that they hold.
            pool: threads to decode and hash on.
            proven: whether every tensor has been verified.

        Raises:
            PayloadCorrupt: they are not model files.
        """
        self._tensors = {tensor.name: tensor for tensor in tensors_in(folder, writable=True)}
        self._proven = {entry.name: entry for entry in start.tensors} if proven else {}
        self._pool = pool

    def apply(self, path: Path, codec: Delta) -> None:
        """Apply one payload file, proven to be the manifest's, of the delta that comes next.

        Raises:
            PayloadCorrupt: it makes no sense.
        """
        for name in codec.apply(mapped(path), self._tensors, self._pool):
            self._proven.pop(name, None)

    def verify(self, manifest: Manifest) -> None:
        """Compare with a version each tensor that was written to, or that is another's in it.

        Raises:
            ChecksumMismatch: a tensor is missing, or not the version's.
        """
        verify(self._tensors.values(), manifest, self._pool, proven=self._proven)


def verify(
    tensors: Iterable[Tensor],
    manifest: Manifest,
    pool: Executor,
    *,
    proven: Mapping[str, TensorEntry] | None = None,
) -> None:
    """Compare a model with a version, and miss no tensor; so its root hash is the version's too.

    Args:
        tensors: all of the model.
        manifest: the version's.
        pool: threads to hash on.
        proven: tensors whose bytes need not be hashed again.

    Raises:
        ChecksumMismatch: a tensor is missing, too many, or not the version's.
    """
    missing = {entry.name: entry for entry in manifest.tensors}
    doubtful: list[tuple[Tensor, TensorEntry]] = []
    for tensor in tensors:
        entry = missing.pop(tensor.name, None)
        if entry is None:
            raise ChecksumMismatch(
                f"tensor {tensor.name} is not in the manifest of version "
                f"{manifest.version.number}, or twice in its payload"
            )
        if proven is None or proven.get(tensor.name) != entry:
            doubtful.append((tensor, entry))
    if missing:
        raise ChecksumMismatch(
            f"version {manifest.version.number}: expected {len(manifest.tensors)} tensors, "
            f"{len(missing)} are missing, among them {min(missing)}"
        )
    for _ in pool.map(lambda pair: pair[0].verify(pair[1]), doubtful):
        pass
