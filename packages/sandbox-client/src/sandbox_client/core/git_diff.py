"""Writing a git-format diff between two states of single files.

The output is what `git apply` takes. It is minimal where that is cheap: lines in common at both
ends are found first, and only what lies between is compared, as long as the effort lasts.
"""

import base64
import difflib
import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Effort", "FileState", "file_diff", "is_binary", "quote_path"]

_CONTEXT = 3
_NULL_ID = "0" * 40


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as git sees it. For a symbolic link `content` is the target and `mode` "120000"."""

    content: bytes
    mode: str = "100644"


@dataclass
class Effort:
    """What comparing may still cost, for all files of a diff together.

    Lines in common that are repeated many times make a comparison's cost grow with the cube of
    their number; a hostile file would stop the service for minutes. Once the effort is spent, what
    differs is replaced as a whole: a longer diff, not a wrong one.
    """

    steps: int = 2_000_000
    """Pairs of equal lines that may be looked at; a million take a tenth of a second or two."""


def file_diff(
    path: bytes, old: FileState | None, new: FileState | None, effort: Effort | None = None
) -> bytes:
    """The diff of one file; None stands for a file that is not there. Empty if nothing differs."""
    if old == new:
        return b""
    if old is not None and new is not None and old.mode[:3] != new.mode[:3]:
        # A file became a link or the reverse: git writes that as two changes.
        return file_diff(path, old, None) + file_diff(path, None, new)
    old_name, new_name = quote_path(b"a/" + path), quote_path(b"b/" + path)
    out = [b"diff --git %s %s\n" % (old_name, new_name)]
    if old is None and new is not None:
        out.append(b"new file mode %s\n" % new.mode.encode())
    elif new is None and old is not None:
        out.append(b"deleted file mode %s\n" % old.mode.encode())
    elif old is not None and new is not None and old.mode != new.mode:
        out.append(b"old mode %s\nnew mode %s\n" % (old.mode.encode(), new.mode.encode()))
    before = old.content if old is not None else b""
    after = new.content if new is not None else b""
    if old is not None and new is not None and before == after:
        return b"".join(out)
    index = f"index {_blob_id(old)}..{_blob_id(new)}"
    if old is not None and new is not None and old.mode == new.mode:
        index += f" {old.mode}"
    out.append(index.encode() + b"\n")
    if is_binary(before) or is_binary(after):
        out.append(_binary_patch(before, after))
    elif before != after:
        # A tab ends a name that contains white space, as git does, so that no reader splits it.
        old_end = b"\t\n" if b" " in old_name else b"\n"
        new_end = b"\t\n" if b" " in new_name else b"\n"
        out.append(b"--- " + (old_name + old_end if old is not None else b"/dev/null\n"))
        out.append(b"+++ " + (new_name + new_end if new is not None else b"/dev/null\n"))
        out.append(_hunks(_lines(before), _lines(after), effort or Effort()))
    return b"".join(out)


def is_binary(content: bytes) -> bool:
    """Git's own rule: a NUL byte among the first 8,000."""
    return b"\0" in content[:8000]


def quote_path(path: bytes) -> bytes:
    """A path as git writes it in a header: quoted like a C string where it has odd bytes."""
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in path):
        return path
    named = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r"}
    named |= {ord('"'): b'\\"', ord("\\"): b"\\\\"}
    out = bytearray(b'"')
    for byte in path:
        if byte in named:
            out += named[byte]
        elif 0x20 <= byte < 0x7F:
            out.append(byte)
        else:
            out += b"\\%03o" % byte
    return bytes(out + b'"')


def _blob_id(state: FileState | None) -> str:
    if state is None:
        return _NULL_ID
    # Git names blobs by SHA-1; nothing here relies on it for security.
    header = f"blob {len(state.content)}\0".encode()
    return hashlib.sha1(header + state.content, usedforsecurity=False).hexdigest()


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    last = lines.pop()
    whole = [line + b"\n" for line in lines]
    return [*whole, last] if last else whole


def _hunks(old: Sequence[bytes], new: Sequence[bytes], effort: Effort) -> bytes:
    out: list[bytes] = []
    for group in _groups(_changes(old, new, effort)):
        old_from = max(0, group[0][0] - _CONTEXT)
        old_to = min(len(old), group[-1][1] + _CONTEXT)
        new_from = group[0][2] - (group[0][0] - old_from)
        new_to = group[-1][3] + (old_to - group[-1][1])
        out.append(
            b"@@ -%s +%s @@\n"
            % (_range(old_from, old_to - old_from), _range(new_from, new_to - new_from))
        )
        at = old_from
        for old_start, old_end, new_start, new_end in group:
            out.extend(_marked(b" ", old[at:old_start]))
            out.extend(_marked(b"-", old[old_start:old_end]))
            out.extend(_marked(b"+", new[new_start:new_end]))
            at = old_end
        out.extend(_marked(b" ", old[at:old_to]))
    return b"".join(out)


def _marked(mark: bytes, lines: Sequence[bytes]) -> list[bytes]:
    return [
        mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"
        for line in lines
    ]


def _range(start: int, count: int) -> bytes:
    # Lines count from 1; an empty range names the line before it.
    first = start + 1 if count else start
    return b"%d" % first if count == 1 else b"%d,%d" % (first, count)


_Change = tuple[int, int, int, int]


class _Spent(Exception):  # noqa: N818 -- a signal, caught where it is raised for
    """The effort is used up."""


class _Matcher(difflib.SequenceMatcher[bytes]):
    """Finds lines in common as long as the effort lasts."""

    def __init__(self, old: Sequence[bytes], new: Sequence[bytes], effort: Effort) -> None:
        super().__init__(None, old, new, autojunk=False)
        # Looking for a match visits every line of a range, and every place where its like stands.
        places = Counter(new)
        costs = (1 + places[line] for line in old)
        self._cost_before = [0, *accumulate(costs)]
        self._effort = effort

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        """As the base class, or raises `_Spent`."""
        end = len(self._cost_before) - 1 if ahi is None else ahi
        self._effort.steps -= self._cost_before[end] - self._cost_before[alo]
        if self._effort.steps < 0:
            raise _Spent
        return super().find_longest_match(alo, ahi, blo, bhi)


def _changes(old: Sequence[bytes], new: Sequence[bytes], effort: Effort) -> list[_Change]:
    """Differing stretches as (old start, old end, new start, new end), in order."""
    head = 0
    shorter = min(len(old), len(new))
    while head < shorter and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    old_mid, new_mid = old[head : len(old) - tail], new[head : len(new) - tail]
    whole = [(head, len(old) - tail, head, len(new) - tail)]
    if not old_mid or not new_mid:
        return whole
    try:
        steps = _Matcher(old_mid, new_mid, effort).get_opcodes()
    except _Spent:
        return whole
    return [
        (head + i1, head + i2, head + j1, head + j2)
        for tag, i1, i2, j1, j2 in steps
        if tag != "equal"
    ]


def _groups(changes: Sequence[_Change]) -> list[list[_Change]]:
    """Changes whose context lines touch share a hunk."""
    groups: list[list[_Change]] = []
    for change in changes:
        if groups and change[0] - groups[-1][-1][1] <= 2 * _CONTEXT:
            groups[-1].append(change)
        else:
            groups.append([change])
    return groups


def _binary_patch(old: bytes, new: bytes) -> bytes:
    return b"GIT binary patch\n" + _literal(new) + b"\n" + _literal(old) + b"\n"


def _literal(content: bytes) -> bytes:
    out = [b"literal %d\n" % len(content)]
    packed = zlib.compress(content)
    for at in range(0, len(packed), 52):
        part = packed[at : at + 52]
        # One letter gives the number of bytes in the line: A is 1, Z is 26, a is 27, z is 52.
        size = len(part)
        letter = bytes([ord("A") + size - 1 if size <= 26 else ord("a") + size - 27])
        out.append(letter + base64.b85encode(part, pad=True) + b"\n")
    return b"".join(out)
