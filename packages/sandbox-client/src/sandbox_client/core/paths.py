"""Which paths a caller may name, decided from their text alone.

Symbolic links are the kernel's business: files are opened so that it refuses to leave the root.
"""

import posixpath

__all__ = ["PathRefusedError", "check_mount_point", "normalize", "relative_parts"]

_MAX_PATH_BYTES = 4096
_MAX_NAME_BYTES = 255

# A work folder or another writable folder must not cover what makes a sandbox work.
_RESERVED = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var",
)


class PathRefusedError(ValueError):
    """A path that a sandbox call must not name; the message says which rule it breaks."""


def normalize(path: str, *, base: str) -> str:
    """The absolute form of `path` (relative to `base`) within the sandbox.

    Raises:
        PathRefusedError: empty, too long, with a NUL byte, or climbing out by `..`.
    """
    _check_text(path)
    joined = path if path.startswith("/") else f"{base}/{path}"
    depth = 0
    for part in joined.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            raise PathRefusedError(f"path {path!r} leaves the sandbox's root by '..'")
    normal = posixpath.normpath(joined)
    # POSIX keeps a leading double slash; here it means the same as one.
    normal = "/" + normal.lstrip("/")
    if not path.startswith("/") and normal != base and not normal.startswith(base + "/"):
        raise PathRefusedError(f"path {path!r} leaves the work folder {base} by '..'")
    return normal


def relative_parts(path: str) -> tuple[str, ...]:
    """The components of a path inside a tree (an archive's member, a patch's file).

    Raises:
        PathRefusedError: absolute, empty, too long, or with a `..` anywhere.
    """
    _check_text(path)
    if path.startswith("/"):
        raise PathRefusedError(f"path {path!r} is absolute; paths in a tree are relative to it")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise PathRefusedError(f"path {path!r} contains '..'")
    return parts


def check_mount_point(path: str) -> str:
    """Checks that `path` can be a writable folder of its own in a sandbox; returns it.

    Raises:
        PathRefusedError: not absolute and normal, the root itself, or under a system folder.
    """
    _check_text(path)
    if not path.startswith("/") or posixpath.normpath(path) != path or path == "/":
        raise PathRefusedError(
            f"folder {path!r} must be an absolute path without '.', '..' or a trailing slash"
        )
    for reserved in _RESERVED:
        if path == reserved or path.startswith(reserved + "/"):
            raise PathRefusedError(f"folder {path!r} lies under {reserved}, which is read-only")
    if any(part.startswith(".") for part in path.split("/")):
        raise PathRefusedError(f"folder {path!r} must not have hidden components")
    return path


def _check_text(path: str) -> None:
    if not path:
        raise PathRefusedError("path is empty")
    if "\0" in path:
        raise PathRefusedError(f"path {path!r} contains a NUL byte")
    raw = path.encode("utf-8", "surrogateescape")
    if len(raw) >= _MAX_PATH_BYTES:
        raise PathRefusedError(f"path is {len(raw)} bytes long, at most {_MAX_PATH_BYTES - 1} fit")
    if any(len(part) > _MAX_NAME_BYTES for part in raw.split(b"/")):
        raise PathRefusedError(f"path {path!r} has a component of over {_MAX_NAME_BYTES} bytes")
