# ruff: noqa: PTH101, PTH103, PTH106, PTH108, PTH112, PTH114, PTH115, PTH116, PTH118, PTH120
# ruff: noqa: PTH123, PTH208, PTH211, B905 -- for any Python from 3.7 on, over large trees
"""Works on a sandbox's files: writes, unpacks, packs, reads, and lists what there is.

Started by `python3 -c CODE REQUEST [DATA]`, both base64 (JSON, a tar). What it answers are lines:
`d` with data, then one `x` with a JSON object, `error` in it if something was refused.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fnmatch
import hashlib
import io
import json
import os
import pwd
import stat
import sys
import tarfile
import zlib
from typing import IO, Any, Callable, Dict, Iterator, Sequence, cast  # noqa: UP035 -- as above

_Request = Dict[str, Any]  # noqa: UP006 -- as above

_CHUNK_BYTES = 1048576
_LINE_BYTES = 49152
_MAX_DEPTH = 128


class RefusedError(Exception):
    """What is asked is not done: `kind` is "refused", "full" or "too_large"."""

    def __init__(self, kind: str, message: str, *, named: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.named = named


class Answer:
    """Data to hand back: in lines if it is small, else in a file to be fetched."""

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._held = io.BytesIO()
        self._file: IO[bytes] | None = None
        self._size = 0

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file is not None:
            self._file.close()
            if kind is not None:
                os.unlink(self._request["spool"])

    def write(self, data: bytes) -> int:
        """Adds data."""
        self._size += len(data)
        limit = self._request["limit_bytes"]
        if self._size > limit:
            raise RefusedError("too_large", f"it has over {limit} bytes, the most that is taken")
        if self._file is None and self._size > self._request["inline_bytes"]:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._file = os.fdopen(os.open(self._request["spool"], flags, 0o600), "wb")
            self._file.write(self._held.getvalue())
        (self._file or self._held).write(data)
        return len(data)

    def fields(self) -> dict[str, object]:
        """Hands it over; returns what the answer says of it."""
        if self._file is not None:
            self._file.close()
            return {"spooled": self._request["spool"]}
        data = self._held.getvalue()
        for at in range(0, len(data), _LINE_BYTES):
            _line("d", base64.b64encode(data[at : at + _LINE_BYTES]).decode())
        return {}


# -- what can be asked; each takes the request and the data, and returns the answer's fields


def op_write(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Writes the tar's members, in turn, to the paths of `files`, each within its `root`."""
    with tarfile.open(fileobj=data, mode="r|") as tar:
        for member, given in zip(tar, request["files"]):
            with _naming(given["path"]):
                target = _followed(given["path"], given["root"])
                os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
                fd = os.open(target, flags, 0o644)
                with os.fdopen(fd, "wb") as out:
                    _require_plain(fd)
                    os.fchmod(fd, given["mode"] or 0o644)
                    _copy(cast("IO[bytes]", tar.extractfile(member)), out)
    return {}


def op_unpack(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Removes what is named, then unpacks a tar; nothing on the way may be a link."""
    root = _followed(request["path"], request["root"])
    os.makedirs(root, mode=0o755, exist_ok=True)
    for path in request["remove"]:
        with _naming(path):
            _remove(root, path)
    with tarfile.open(fileobj=data, mode="r|") as tar:
        for member in tar:
            with _naming(member.name):
                _unpack_one(tar, member, _strict(root, member.name))
    return {}


def op_read(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Hands back a plain file's content."""
    path = _followed(request["path"], request["root"])
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        _require_plain(file.fileno())
        size, most = os.fstat(file.fileno()).st_size, request["max_bytes"]
        if size > most:
            message = f"it has {size} bytes, at most {most} may be read"
            raise RefusedError("too_large", message)
        with Answer(request) as answer:
            _copy(file, answer)
            return answer.fields()


def op_pack(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Hands back a folder as a tar: files, links and folders."""
    root = _followed(request["path"], request["root"])
    if not os.path.isdir(root):
        raise RefusedError("refused", "it is not a folder")
    with Answer(request) as answer, _writing(answer) as tar:
        for path, found in _walk(root, request["exclude"]):
            _add(tar, root, path, found, request["max_bytes"])
        tar.close()
        return answer.fields()


def op_manifest(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Hands back what is in a folder: path, kind, whether executable, size, hash or target."""
    root, entries = request["path"], []
    for path, found in _walk(root, request["exclude"]):
        full = os.path.join(root, path)
        # A command that still runs may have removed it.
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(found.st_mode):
                entries.append([path, "link", False, 0, os.readlink(full)])
            elif stat.S_ISREG(found.st_mode):
                # Nothing over the bound can be in a diff: not worth reading.
                digest = _sha256(full) if found.st_size <= request["max_bytes"] else ""
                executable = bool(found.st_mode & 0o100)
                entries.append([path, "file", executable, found.st_size, digest])
    with Answer(request) as answer:
        answer.write(zlib.compress(json.dumps(entries).encode()))
        return answer.fields()


def op_states(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Hands back the files that the data names as a tar, without those that are missing."""
    root, paths = request["path"], json.loads(zlib.decompress(data.read()).decode())
    with Answer(request) as answer, _writing(answer) as tar:
        for path in paths:
            with _naming(path), contextlib.ExitStack() as lending:
                try:
                    _lend_way(lending, root, path)
                    found = os.lstat(_strict(root, path))
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if stat.S_ISDIR(found.st_mode):
                    raise RefusedError("refused", "it is a folder")
                _add(tar, root, path, found, request["max_bytes"])
        tar.close()
        return answer.fields()


def op_prepare(request: _Request, data: IO[bytes]) -> dict[str, object]:
    """Makes folders and gives them to their user, as far as they are not there."""
    for path in request["folders"]:
        with _naming(path):
            if not os.path.isdir(path):
                os.makedirs(path, mode=0o755)
                if os.geteuid() == 0:
                    user = pwd.getpwnam(request["user"])
                    os.chown(path, user.pw_uid, user.pw_gid)
    return {}


_OPERATIONS: dict[str, Callable[[_Request, IO[bytes]], dict[str, object]]] = {
    "write": op_write,
    "unpack": op_unpack,
    "read": op_read,
    "pack": op_pack,
    "manifest": op_manifest,
    "states": op_states,
    "prepare": op_prepare,
}


# -- where a path leads


def _followed(path: str, root: str) -> str:
    """Where `path` leads, links followed; refused if that is outside `root`."""
    real, top = os.path.realpath(path), os.path.realpath(root)
    if top != "/" and real != top and not real.startswith(f"{top}/"):
        raise RefusedError("refused", "it leaves its folder through a link")
    return real


def _strict(root: str, path: str) -> str:
    """`root/path`; refused if a folder on the way is a link."""
    at = root
    for part in path.split("/")[:-1]:
        at = f"{at}/{part}"
        if os.path.islink(at):
            raise RefusedError("refused", "it leads through links that are not followed")
    return f"{root}/{path}"


# -- single files


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
    if member.isdir():
        if os.path.islink(target):
            raise RefusedError("refused", "it leads through links that are not followed")
        os.makedirs(target, mode=0o755, exist_ok=True)
        return
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    if member.issym():
        os.symlink(member.linkname, target)
        return
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(fd, "wb") as out:
        os.fchmod(fd, member.mode & 0o755 | 0o600)
        _copy(cast("IO[bytes]", tar.extractfile(member)), out)


def _remove(root: str, path: str) -> None:
    """Removes a file, and the folders above it that are left empty."""
    os.unlink(_strict(root, path))
    parent = os.path.dirname(path)
    with contextlib.suppress(OSError):  # one is not empty
        while parent:
            os.rmdir(f"{root}/{parent}")
            parent = os.path.dirname(parent)


def _add(tar: tarfile.TarFile, root: str, path: str, found: os.stat_result, max_bytes: int) -> None:
    """Adds one entry to a tar; other than files, links and folders are left out."""
    full, info = os.path.join(root, path), tarfile.TarInfo(path)
    info.mode = stat.S_IMODE(found.st_mode)
    info.mtime = int(found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(full)
        tar.addfile(info)
    elif stat.S_ISREG(found.st_mode):
        with _open_as_owner(full) as file, _naming(path):
            info.size = os.fstat(file.fileno()).st_size
            if info.size > max_bytes:
                message = f"it has {info.size} bytes, at most {max_bytes} are taken"
                raise RefusedError("too_large", message)
            tar.addfile(info, file)


def _sha256(path: str) -> str:
    hashed = hashlib.sha256()
    with _open_as_owner(path) as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            hashed.update(chunk)
    return hashed.hexdigest()


def _open_as_owner(path: str) -> IO[bytes]:
    with _lent(path, 0o400):
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb")


@contextlib.contextmanager
def _lent(path: str, bits: int) -> Iterator[None]:
    """Lends the owner the rights that a command has taken from a file or folder."""
    found = os.stat(path)
    mode = stat.S_IMODE(found.st_mode)
    lend = mode & bits != bits and found.st_uid == os.geteuid() != 0
    if lend:
        os.chmod(path, mode | bits)
    try:
        yield
    finally:
        if lend:
            os.chmod(path, mode)


def _lend_way(lending: contextlib.ExitStack, root: str, path: str) -> None:
    """Lends the rights to pass the folders that lead to `root/path`."""
    at = root
    for part in ("", *path.split("/")[:-1]):
        at = os.path.join(at, part)
        if os.path.islink(at) and part:
            return
        lending.enter_context(_lent(at, 0o500))


# -- shared


def _walk(
    root: str, exclude: Sequence[str], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, os.stat_result]]:
    """All that is below a folder, by its path from there; links are not followed."""
    if depth > _MAX_DEPTH:
        message = f"folder {prefix!r} is nested over {_MAX_DEPTH} levels deep"
        raise RefusedError("too_large", message, named=True)
    folder = os.path.join(root, prefix)
    with _lent(folder, 0o500):
        for name in sorted(os.listdir(folder)):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
                continue
            try:
                found = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue  # a command that still runs has removed it
            yield prefix + name, found
            if stat.S_ISDIR(found.st_mode):
                yield from _walk(root, exclude, f"{prefix}{name}/", depth + 1)


def _writing(answer: Answer) -> tarfile.TarFile:
    out = cast("IO[bytes]", answer)
    return tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT)


def _copy(source: IO[bytes], out: IO[bytes] | Answer) -> None:
    for chunk in iter(lambda: source.read(_CHUNK_BYTES), b""):
        out.write(chunk)


def _require_plain(fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise RefusedError("refused", "it is not a plain file")


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Tells with which path something went wrong."""
    try:
        yield
    except (OSError, RefusedError) as error:
        raise _named(path, error) from error


def _named(path: str, error: OSError | RefusedError) -> RefusedError:
    if isinstance(error, RefusedError):
        if error.named:
            return error
        return RefusedError(error.kind, f"{path!r}: {error.message}", named=True)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RefusedError("full", f"{path!r}: no space is left", named=True)
    causes = {
        errno.EACCES: "the sandbox's user may not",
        errno.EROFS: "it is not in a writable place",
        errno.ELOOP: "it leads through links that are not followed",
        errno.ENXIO: "it is not a plain file",
        errno.EISDIR: "it is not a plain file",
    }
    text = causes.get(error.errno or 0, error.strerror or str(error))
    return RefusedError("refused", f"{path!r}: {text}", named=True)


def _become(name: str) -> None:
    """Takes a user's identity for what is done on its behalf, if this is not that user already."""
    entry = pwd.getpwnam(name)
    if os.geteuid() != entry.pw_uid:
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)


def _data(request: _Request) -> IO[bytes]:
    if "data" in request:
        file = open(request["data"], "rb")  # noqa: SIM115 -- lives as long as this program
        os.unlink(request["data"])
        return file
    return io.BytesIO(base64.b64decode(sys.argv[2]) if len(sys.argv) > 2 else b"")


def _line(letter: str, text: str) -> None:
    sys.stdout.write(f"{letter} {text}\n")


def _answer(request: _Request) -> dict[str, object]:
    try:
        data = _data(request)
        if request["as_user"]:
            _become(request["as_user"])
        return _OPERATIONS[request["op"]](request, data)
    except (tarfile.TarError, EOFError) as error:
        return {"error": "refused", "message": f"not a readable tar archive: {error}"}
    except (OSError, RefusedError) as error:
        named = _named(request.get("path", ""), error)
        return {"error": named.kind, "message": named.message}


if __name__ == "__main__":
    _line("x", json.dumps(_answer(json.loads(base64.b64decode(sys.argv[1]).decode()))))
