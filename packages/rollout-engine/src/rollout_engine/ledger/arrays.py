"""Append-only files for attempts' arrays: checksummed records, synced before a row names them.

A record is a header (magic, length, xxh3-64) and the payload. What stands after the last record
that a row names was never promised to anybody: it is cut off when the files are opened.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rollout_engine.errors import LedgerCorruptError

_HEADER = struct.Struct("<4sQQ")
_MAGIC = b"TRA1"
_NAME = re.compile(r"(\d{8})\.arrays")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record is.

    Attributes:
        offset: Of its header.
        length: Of its payload, in bytes.
        checksum: xxh3-64 of its payload.
    """

    file: int
    offset: int
    length: int
    checksum: int

    @property
    def end(self) -> int:
        """Offset behind the record."""
        return self.offset + _HEADER.size + self.length


class ArrayFiles:
    """The files of one folder; only the newest is written to. Not safe for several threads.

    Args:
        folder: Made if it does not exist.
        file_bytes: A file that has reached this size is closed, and another begun.

    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        folder.mkdir(parents=True, exist_ok=True)
        numbers = self.numbers()
        self._number = max(numbers, default=1)
        self._descriptor = self._open(self._number)
        self._end = os.fstat(self._descriptor).st_size
        self._unsynced = False

    @property
    def active(self) -> int:
        """Number of the file that is written to."""
        return self._number

    @property
    def position(self) -> tuple[int, int]:
        """File and offset of the next record; what `rollback` takes."""
        return self._number, self._end

    def numbers(self) -> list[int]:
        """Numbers of all files, rising."""
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def cut_tails(self, committed: Mapping[int, int]) -> int:
        """Cut what no row names; call once, before anything is written.

        Args:
            committed: End of the last named record, by file.

        Returns:
            Bytes cut off or deleted.

        """
        lost = 0
        for number in self.numbers():
            path = self._path(number)
            size, end = path.stat().st_size, committed.get(number, 0)
            if number != self._number and end == 0:
                path.unlink()
                lost += size
            elif size > end:
                os.truncate(path, end)
                lost += size - end
        self._end = os.fstat(self._descriptor).st_size
        return lost

    def append(self, payload: bytes) -> Location:
        """Write a record; it is safe after the next `sync`."""
        if self._end >= self._file_bytes:
            self._rotate()
        checksum = xxhash.xxh3_64_intdigest(payload)
        record = _HEADER.pack(_MAGIC, len(payload), checksum) + payload
        start = self._end
        written = 0
        self._unsynced = True
        while written < len(record):
            written += os.pwrite(self._descriptor, memoryview(record)[written:], start + written)
        self._end = start + len(record)
        return Location(self._number, start, len(payload), checksum)

    def sync(self) -> None:
        """Make everything appended survive a loss of power."""
        if self._unsynced:
            os.fdatasync(self._descriptor)
            self._unsynced = False

    def rollback(self, position: tuple[int, int]) -> None:
        """Take back what was appended since `position`, so that its space is free again."""
        number, end = position
        while self._number > number:
            os.close(self._descriptor)
            self._path(self._number).unlink()
            self._number -= 1
            self._descriptor = self._open(self._number)
        os.ftruncate(self._descriptor, end)
        self._end = end

    def read(self, location: Location) -> bytes:
        """Read a payload back.

        Raises:
            LedgerCorruptError: The file is gone or too short, or the bytes are not those written.

        """
        path = self._path(location.file)
        where = f"record at {location.offset} of {path}"
        try:
            with path.open("rb") as file:
                file.seek(location.offset)
                header = file.read(_HEADER.size)
                payload = file.read(location.length)
        except FileNotFoundError as error:
            raise LedgerCorruptError(f"{where} is gone: the file does not exist") from error
        if len(header) < _HEADER.size or len(payload) < location.length:
            raise LedgerCorruptError(
                f"{where} is torn: {len(payload)} of {location.length} bytes are there"
            )
        expected = (_MAGIC, location.length, location.checksum)
        if _HEADER.unpack(header) != expected:
            raise LedgerCorruptError(f"{where} has another header than the database says")
        if xxhash.xxh3_64_intdigest(payload) != location.checksum:
            raise LedgerCorruptError(f"{where} does not match its checksum")
        return payload

    def delete(self, number: int) -> None:
        """Remove a file of which nothing is needed any more; the active one is emptied."""
        if number == self._number:
            os.ftruncate(self._descriptor, 0)
            self._end = 0
        else:
            self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        os.close(self._descriptor)

    def _rotate(self) -> None:
        self.sync()
        descriptor = self._open(self._number + 1)
        os.close(self._descriptor)
        self._number += 1
        self._descriptor = descriptor
        self._end = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.arrays"

    def _open(self, number: int) -> int:
        path = self._path(number)
        existed = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not existed:
            # The name of a new file has to survive as well as its bytes.
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return descriptor


__all__ = ["ArrayFiles", "Location"]
