"""What `find` says about files, as envd's `EntryInfo`. Pure."""

import datetime
import posixpath

__all__ = ["FIND_FORMAT", "EntryInfo", "parse_entries"]

EntryInfo = dict[str, object]

_FIELDS = ("%y", "%s", "%m", "%M", "%u", "%g", "%T@", "%p", "%l")
FIND_FORMAT = "".join(rf"{field}\0" for field in _FIELDS)
"""For `find -printf`: every field ends with a NUL, which no name can hold."""

_TYPES = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}


def parse_entries(output: bytes) -> list[EntryInfo]:
    """The entries of a listing in the order of their paths.

    Other than files, folders and links are left out; names that are not UTF-8 are shown with
    replacements.

    Raises:
        ValueError: the output does not have the form of `FIND_FORMAT`.
    """
    fields = output.split(b"\0")
    if fields.pop() or len(fields) % len(_FIELDS):
        raise ValueError(
            f"expected {len(_FIELDS)} fields for each file, found {len(fields)} in all"
        )
    rows = (fields[at : at + len(_FIELDS)] for at in range(0, len(fields), len(_FIELDS)))
    texts = ([field.decode("utf-8", "replace") for field in row] for row in rows)
    entries = [_entry(*row) for row in texts if row[0] in _TYPES]
    return sorted(entries, key=lambda entry: str(entry["path"]))


def _entry(
    kind: str,
    size: str,
    mode: str,
    permissions: str,
    owner: str,
    group: str,
    modified: str,
    path: str,
    target: str,
) -> EntryInfo:
    when = datetime.datetime.fromtimestamp(float(modified), datetime.UTC)
    entry: EntryInfo = {
        "name": posixpath.basename(path.rstrip("/")) or "/",
        "type": _TYPES[kind],
        "path": path,
        # 64-bit numbers travel as text in protobuf's JSON.
        "size": str(int(size)),
        "mode": int(mode, 8),
        "permissions": permissions[1:],
        "owner": owner,
        "group": group,
        "modifiedTime": when.isoformat().replace("+00:00", "Z"),
    }
    return entry | {"symlinkTarget": target} if kind == "l" else entry
