"""Applying git-format diffs to file contents.

Applying is strict, as with `git apply`: context must match exactly, though a hunk may have moved.
"""

from collections.abc import Callable, Sequence

from sandbox_client.core.git_delta import apply_delta
from sandbox_client.core.git_diff import FileState
from sandbox_client.core.patch_parser import (
    BinaryPart,
    FilePatch,
    Hunk,
    PatchError,
    parse_patch,
    split_lines,
)

__all__ = ["PatchError", "apply_patch"]


def apply_patch(
    patch: bytes, read: Callable[[str], FileState | None]
) -> dict[str, FileState | None]:
    """The new state of every file that `patch` changes; None means deleted. Nothing is written.

    Args:
        patch: the diff; several entries may concern one file.
        read: gives the present state of a file, None if it does not exist.

    Raises:
        PatchError: the diff cannot be read or does not apply; the message names file and line.
    """
    entries = parse_patch(patch)
    written: dict[str, FileState] = {}
    removed: set[str] = set()
    vacated = {entry.old_path for entry in entries if _removes_old(entry)}

    def current(path: str) -> FileState | None:
        if path in written:
            return written[path]
        return None if path in removed else read(path)

    for entry in entries:
        moves = entry.old_path is not None and entry.new_path not in (None, entry.old_path)
        old = None
        if entry.old_path is not None:
            # Git's renames and copies speak of the state before the whole diff, in any order.
            old = read(entry.old_path) if moves else current(entry.old_path)
            if old is None:
                raise PatchError(f"{entry.old_path}: the diff changes it, but it does not exist")
        new = _patched(entry, old)
        if _removes_old(entry) and entry.old_path is not None:
            removed.add(entry.old_path)
            if not moves:
                written.pop(entry.old_path, None)
        if entry.new_path is None or new is None:
            continue
        if entry.new_path != entry.old_path and entry.new_path not in vacated:
            _require_absent(entry.new_path, current)
        written[entry.new_path] = new
    gone = {path: None for path in removed if path not in written and read(path) is not None}
    return {**gone, **written}


def _removes_old(entry: FilePatch) -> bool:
    return entry.old_path is not None and entry.new_path != entry.old_path and not entry.keeps_old


def _require_absent(path: str, current: Callable[[str], FileState | None]) -> None:
    if current(path) is not None:
        raise PatchError(f"{path}: the diff creates it, but it exists already")


def _patched(entry: FilePatch, old: FileState | None) -> FileState | None:
    name = entry.new_path or entry.old_path or "?"
    if old is not None and entry.old_mode and entry.old_mode[:3] != old.mode[:3]:
        raise PatchError(f"{name}: the diff expects mode {entry.old_mode}, found {old.mode}")
    content = old.content if old is not None else b""
    if entry.binary is not None:
        content = _apply_binary(entry.binary, content, name)
    elif entry.hunks:
        content = _apply_hunks(entry.hunks, content, name)
    if entry.new_path is None:
        if content:
            raise PatchError(f"{name}: the diff deletes it, but lines would remain")
        return None
    mode = entry.new_mode or (old.mode if old is not None else "100644")
    return FileState(content, mode)


def _apply_hunks(hunks: Sequence[Hunk], content: bytes, name: str) -> bytes:
    lines = split_lines(content)
    out: list[bytes] = []
    done = 0
    shift = 0
    for number, hunk in enumerate(hunks, 1):
        at = _find(lines, hunk.old, hunk.old_start + shift, done)
        if at is None:
            raise PatchError(
                f"{name}: hunk {number} of {len(hunks)} (line {hunk.old_start + 1}) does not match"
            )
        shift = at - hunk.old_start
        out += lines[done:at]
        out += hunk.new
        done = at + len(hunk.old)
    out += lines[done:]
    if any(not line.endswith(b"\n") for line in out[:-1]):
        raise PatchError(f"{name}: text would follow a line that has no newline at its end")
    return b"".join(out)


def _find(lines: Sequence[bytes], wanted: Sequence[bytes], expected: int, first: int) -> int | None:
    """Where `wanted` stands at or after `first`, nearest to `expected`."""
    last = len(lines) - len(wanted)
    size = len(wanted)
    target = list(wanted)
    for distance in range(max(abs(expected - first), abs(last - expected)) + 1):
        for at in {expected - distance, expected + distance}:
            if first <= at <= last and list(lines[at : at + size]) == target:
                return at
    return None


def _apply_binary(part: BinaryPart, old: bytes, name: str) -> bytes:
    if part.kind == "literal":
        return part.data
    try:
        return apply_delta(part.data, old)
    except ValueError as error:
        raise PatchError(f"{name}: {error}") from None
