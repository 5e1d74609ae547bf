"""What an agent could read in a file: its text, and what is packed or written otherwise in it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import html
import io
import json
import logging
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Reader", "View"]

logger = logging.getLogger(__name__)

MAX_BYTES = 128 * 1024 * 1024
_MAX_DEPTH = 3
_BAD = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # encrypted
    NotImplementedError,  # packed oddly
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
_TAG = re.compile(r"<[^<>]*>")
_TAR_MAGIC = slice(257, 262)
_PAGES = (".html", ".htm", ".xhtml", ".xml")
_COMPILED = (".pyc", ".pyo")


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class View:
    """One way to read a file, or a member of one."""

    file: str
    """Path of the repository's file."""
    path: str
    """The same, and that of the member within it."""
    text: str = ""
    compiled: bool = False
    """Whether it is a compiled module, which is no text but can be read."""


class Reader:
    """Looks into files; what is unpacked has a limit for all of them together.

    Args:
        max_bytes: Most bytes to unpack. What is beyond is logged and not looked into.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._left = max_bytes

    def views(self, file: str, content: bytes) -> Iterator[View]:
        """All ways to read a file; an archive that can't be read has the text it is."""
        yield from self._look(file, file, content, _MAX_DEPTH)

    def _look(self, file: str, path: str, content: bytes, depth: int) -> Iterator[View]:
        if path.endswith(_COMPILED):
            yield View(file=file, path=path, compiled=True)
            return
        text = _decoded(content)
        yield View(file=file, path=path, text=text)
        if path.endswith(".ipynb"):
            yield View(file=file, path=path, text=_cells(text))
        elif path.endswith(_PAGES):
            yield View(file=file, path=path, text=html.unescape(_TAG.sub("", text)))
        for name, member in self._members(path, content) if depth else ():
            inner = f"{path}/{name}" if name else path.removesuffix(".gz")
            yield from self._look(file, inner, member, depth - 1)

    def _members(self, path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
        with contextlib.suppress(*_BAD):
            if (stream := _unpacked(content)) is not None:
                yield "", self._take(stream, path)
            elif content[_TAR_MAGIC] == b"ustar":
                yield from self._tar(path, content)
            elif zipfile.is_zipfile(io.BytesIO(content)):
                yield from self._zip(path, content)

    def _tar(self, path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member)
                if stream is not None:
                    yield member.name, self._take(stream, path)

    def _zip(self, path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                with contextlib.suppress(*_BAD):
                    yield info.filename, self._take(archive.open(info), path)

    def _take(self, stream: _Stream, path: str) -> bytes:
        """Reads as much as the limit leaves."""
        data = stream.read(self._left + 1)
        if len(data) > self._left:
            logger.warning("%s: not all that is packed in it is looked into, it is too much", path)
            data = data[: self._left]
        self._left -= len(data)
        return data


def _unpacked(content: bytes) -> _Stream | None:
    """What is packed as a single stream."""
    packed = io.BytesIO(content)
    if content.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=packed)
    if content.startswith(b"BZh"):
        return bz2.BZ2File(packed)
    if content.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(packed)
    return None


def _decoded(content: bytes) -> str:
    """The text, with line feeds between lines, and in binary files what stands in them as text."""
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = content.decode("utf-16" if wide else "utf-8-sig", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\n")


def _cells(text: str) -> str:
    """The sources of a notebook's cells; nothing if it is none."""
    try:
        cells = json.loads(text)["cells"]
        sources = [cell["source"] for cell in cells]
        return "\n".join(s if isinstance(s, str) else "".join(s) for s in sources)
    except (ValueError, KeyError, TypeError):
        return ""
