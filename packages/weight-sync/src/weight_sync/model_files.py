"""The safetensors files of a model folder, mapped."""

import errno
import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path

from weight_sync.codecs import Tensor, safetensors_file
from weight_sync.errors import StoreFull


def mapped(path: Path, *, writable: bool = False) -> memoryview:
    """Map a file; what is written to the memory is in the file."""
    with path.open("r+b" if writable else "rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(file.fileno(), 0, access=access))


def model_files(folder: Path) -> list[Path]:
    """Return a model folder's safetensors files, in order."""
    return sorted(folder.glob("*.safetensors"))


def tensors_in(folder: Path, *, writable: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of every safetensors file in a folder, as views into the files.

    Raises:
        PayloadCorrupt: one is no safetensors file.
    """
    for path in model_files(folder):
        yield from safetensors_file.tensors(mapped(path, writable=writable))


def copy_file(source: Path, into: Path) -> None:
    """Copy a file's bytes into a new file.

    Raises:
        StoreFull: no space is left.
    """
    try:
        shutil.copyfile(source, into)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no space left for the shadow copy at {into}") from error
        raise
