"""Reading git-format (and plain unified) diffs."""

import base64
import re
import zlib
from dataclasses import dataclass, field

from sandbox_client.core.paths import PathRefusedError, relative_parts

__all__ = ["BinaryPart", "FilePatch", "Hunk", "PatchError", "parse_patch", "split_lines"]

_MAX_BINARY_BYTES = 64 * 1024 * 1024


class PatchError(ValueError):
    """A diff that cannot be read, or that does not fit the files it names."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines to find and lines to put there. `old_start` counts from 0."""

    old_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BinaryPart:
    """A binary change: the whole new content, or a delta against the old one."""

    kind: str
    data: bytes


@dataclass
class FilePatch:
    """What a diff says about one file; a path is None on a side where there is no file."""

    old_path: str | None = None
    new_path: str | None = None
    old_mode: str | None = None
    new_mode: str | None = None
    keeps_old: bool = False
    hunks: list[Hunk] = field(default_factory=list)
    binary: BinaryPart | None = None


def split_lines(content: bytes) -> list[bytes]:
    r"""Lines with their ends. Only "\\n" ends a line; splitlines() also cuts at a lone "\\r"."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def parse_patch(patch: bytes) -> list[FilePatch]:
    """The files that a diff speaks of, in order. Text around the diffs is ignored.

    Raises:
        PatchError: a hunk is cut short or a path leaves the tree.
    """
    return _Parser(split_lines(patch)).files()


_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}


class _Parser:
    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines
        self._at = 0

    def files(self) -> list[FilePatch]:
        found = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith(b"diff --git "):
                found.append(self._git_file())
            elif line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                entry = FilePatch()
                self._names(entry)
                self._hunks(entry)
                found.append(entry)
            else:
                self._at += 1
        return found

    def _peek(self, ahead: int = 0) -> bytes:
        at = self._at + ahead
        return self._lines[at] if at < len(self._lines) else b""

    def _git_file(self) -> FilePatch:
        entry = FilePatch()
        header = self._lines[self._at][len(b"diff --git ") :].rstrip(b"\r\n")
        entry.old_path, entry.new_path = _header_paths(header)
        self._at += 1
        facts = self._extended_header()
        entry.old_mode = facts.get("deleted file mode", facts.get("old mode"))
        entry.new_mode = facts.get("new file mode", facts.get("new mode"))
        for kind in ("rename", "copy"):
            if f"{kind} from" in facts and f"{kind} to" in facts:
                entry.old_path = _tree_path(_raw(facts[f"{kind} from"]), strip=False)
                entry.new_path = _tree_path(_raw(facts[f"{kind} to"]), strip=False)
                entry.keeps_old = kind == "copy"
        if self._peek().startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
            self._names(entry)
        elif self._peek().startswith(b"GIT binary patch"):
            self._at += 1
            entry.binary = self._binary()
            if self._peek().startswith((b"literal ", b"delta ")):
                self._binary()  # the way back, which nobody asked for
        elif self._peek().startswith(b"Binary files "):
            raise PatchError(
                f"{entry.new_path or entry.old_path}: the diff has no content for a binary file; "
                "make it with `git diff --binary`"
            )
        if "new file mode" in facts:
            entry.old_path = None
        if "deleted file mode" in facts:
            entry.new_path = None
        self._hunks(entry)
        return entry

    def _extended_header(self) -> dict[str, str]:
        """The lines of facts that git puts between `diff --git` and the content."""
        facts: dict[str, str] = {}
        while True:
            line = self._peek().rstrip(b"\r\n").decode("utf-8", "surrogateescape")
            key = next((key for key in _EXTENDED if line.startswith(key + " ")), None)
            if key is None:
                return facts
            facts[key] = line[len(key) + 1 :]
            self._at += 1

    def _names(self, entry: FilePatch) -> None:
        for mark in (b"--- ", b"+++ "):
            raw = self._peek()[len(mark) :].rstrip(b"\r\n")
            if not raw.startswith(b'"'):
                raw = raw.split(b"\t")[0]  # what follows a tab is a date
            name = _unquote(raw)
            path = None if name == b"/dev/null" else _tree_path(name, strip=True)
            if mark == b"--- ":
                entry.old_path = path
            else:
                entry.new_path = path
            self._at += 1
        if entry.old_path is None and entry.new_path is None:
            raise PatchError(f"line {self._at}: both sides of the diff are /dev/null")

    def _hunks(self, entry: FilePatch) -> None:
        while (match := _HUNK.match(self._peek())) is not None:
            self._at += 1
            old_count = int(match[2]) if match[2] is not None else 1
            new_count = int(match[4]) if match[4] is not None else 1
            start = int(match[1]) if old_count == 0 else max(0, int(match[1]) - 1)
            old, new = self._hunk_lines(old_count, new_count)
            entry.hunks.append(Hunk(start, tuple(old), tuple(new)))

    def _hunk_lines(self, old_count: int, new_count: int) -> tuple[list[bytes], list[bytes]]:
        old: list[bytes] = []
        new: list[bytes] = []
        while len(old) < old_count or len(new) < new_count:
            if self._at >= len(self._lines):
                raise PatchError(
                    f"the diff ends in the middle of a hunk: {old_count} old and {new_count} new "
                    f"lines announced, {len(old)} and {len(new)} found"
                )
            line = self._lines[self._at]
            self._at += 1
            mark, text = line[:1], line[1:]
            if mark in (b"\n", b"\r"):  # an editor took the blank away
                mark, text = b" ", line
            if mark not in (b" ", b"-", b"+"):
                raise PatchError(f"line {self._at} of the diff is not a hunk's line: {line[:80]!r}")
            if self._peek().startswith(b"\\"):
                text = text.removesuffix(b"\n")
                self._at += 1
            if mark != b"+":
                old.append(text)
            if mark != b"-":
                new.append(text)
        return old, new

    def _binary(self) -> BinaryPart:
        kind, _, size = self._peek().strip().partition(b" ")
        if kind not in (b"literal", b"delta") or not size.isdigit():
            raise PatchError(f"line {self._at + 1} of the diff is not a binary patch's header")
        self._at += 1
        packed = bytearray()
        while (line := self._peek().strip()) != b"":
            letter = line[0]
            count = letter - ord("A") + 1 if letter <= ord("Z") else letter - ord("a") + 27
            try:
                packed += base64.b85decode(line[1:])[:count]
            except ValueError as error:
                raise PatchError(f"line {self._at + 1} of the diff: {error}") from None
            self._at += 1
        self._at += 1
        return BinaryPart(kind.decode(), _inflate(bytes(packed), int(size)))


def _inflate(packed: bytes, size: int) -> bytes:
    if size > _MAX_BINARY_BYTES:
        raise PatchError(f"a binary part of {size} bytes is larger than {_MAX_BINARY_BYTES}")
    # Bounded, so that a small diff cannot unpack into gigabytes.
    try:
        data = zlib.decompressobj().decompress(packed, size + 1)
    except zlib.error as error:
        raise PatchError(f"a binary part cannot be unpacked: {error}") from None
    if len(data) != size:
        raise PatchError(f"a binary part has {len(data)} bytes, announced were {size}")
    return data


_EXTENDED = (
    "new file mode",
    "deleted file mode",
    "old mode",
    "new mode",
    "rename from",
    "rename to",
    "copy from",
    "copy to",
    "similarity index",
    "dissimilarity index",
    "index",
)


def _raw(text: str) -> bytes:
    return _unquote(text.encode("utf-8", "surrogateescape"))


def _header_paths(header: bytes) -> tuple[str | None, str | None]:
    """Both paths of a `diff --git` line; needed where no other line names the file."""
    if header.startswith(b'"'):
        match = _QUOTED.match(header)
        if match is None:
            raise PatchError(f"cannot read the paths in {header[:200]!r}")
        old, new = _unquote(match[0]), _unquote(header[match.end() :].strip())
        return _tree_path(old, strip=True), _tree_path(new, strip=True)
    if header.endswith(b'"'):
        at = header.index(b' "')
        return (
            _tree_path(header[:at], strip=True),
            _tree_path(_unquote(header[at + 1 :]), strip=True),
        )
    # Both halves name the same file, so the middle is known even if names contain blanks.
    middle = len(header) // 2
    old, new = header[:middle], header[middle + 1 :]
    if header[middle : middle + 1] == b" " and old.partition(b"/")[2] == new.partition(b"/")[2]:
        return _tree_path(old, strip=True), _tree_path(new, strip=True)
    old, _, new = header.partition(b" ")
    return _tree_path(old, strip=True), _tree_path(new, strip=True)


def _unquote(name: bytes) -> bytes:
    if not name.startswith(b'"'):
        return name
    match = _QUOTED.match(name)
    if match is None:
        raise PatchError(f"cannot read the quoted path {name[:200]!r}")

    def value(escape: re.Match[bytes]) -> bytes:
        text = escape[1]
        return (
            bytes([int(text, 8) & 0xFF]) if text.isdigit() else bytes([_ESCAPES.get(text, text[0])])
        )

    return re.sub(rb"\\([0-7]{1,3}|.)", value, match[0][1:-1])


def _tree_path(name: bytes, *, strip: bool) -> str:
    """A path of the diff without its a/ or b/, checked to stay inside the tree."""
    text = name.decode("utf-8", "surrogateescape")
    if strip:
        first, slash, rest = text.partition("/")
        text = rest if slash and first in ("a", "b", "c", "i", "o", "w") else text
    try:
        parts = relative_parts(text)
    except PathRefusedError as error:
        raise PatchError(str(error)) from None
    if ".git" in parts or not parts:
        raise PatchError(f"the diff names {text!r}, which no diff of a work folder may change")
    return "/".join(parts)
