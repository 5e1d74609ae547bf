# ruff: noqa: PTH123 -- works on descriptors and walks large trees
"""File access to a living sandbox from outside it, with the rights of its own user.

Every path is opened by `openat2`, so the kernel keeps the walk inside the sandbox whatever links
the sandbox makes meanwhile, and this thread takes the sandbox user's identity for the access, so
nothing can be read or written that a command could not read or write itself. Calls block.
"""

import contextlib
import errno
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from typing import IO

from sandbox_client.backends.local.jail import kernel
from sandbox_client.core.git_diff import FileState
from sandbox_client.core.paths import PathRefusedError, normalize, relative_parts
from sandbox_client.errors import ServiceError, TooLarge, WrongRequest

__all__ = ["SandboxFiles"]

_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_IN_ROOT = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_BENEATH = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_MAGICLINKS
_STRICT = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS
_MAX_DEPTH = 128
_CHUNK_BYTES = 1 << 20


class SandboxFiles:
    """The files of one sandbox. `close` releases the descriptors."""

    def __init__(self, root_fd: int, workdir: str, *, uid: int, gid: int) -> None:
        self._root_fd = root_fd
        self._workdir = workdir
        self._uid = uid
        self._gid = gid
        self._work_fd = kernel.openat2(root_fd, workdir, _DIRECTORY, resolve=_IN_ROOT)

    def close(self) -> None:
        """Lets go of the sandbox's file systems."""
        for fd in (self._work_fd, self._root_fd):
            os.close(fd)

    @property
    def work_device(self) -> int:
        """Which file system the work folder is."""
        return os.fstat(self._work_fd).st_dev

    def write(self, path: str, content: bytes, mode: int) -> None:
        """Writes one file, making folders above it as needed.

        Raises:
            WrongRequest: the path leaves the root, is no plain file, or is not writable.
            TooLarge: the sandbox's disk limit is reached.
        """
        with self._translated(path), self._as_user():
            base, relative, resolve = self._place(path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
            try:
                fd = kernel.openat2(base, relative, flags, mode=0o644, resolve=resolve)
            except FileNotFoundError:
                self._make_parents(base, relative, resolve)
                fd = kernel.openat2(base, relative, flags, mode=0o644, resolve=resolve)
            with os.fdopen(fd, "wb") as file:
                _require_regular(fd, path)
                os.fchmod(fd, (mode or 0o644) & 0o777)
                file.write(content)

    def open_for_reading(self, path: str) -> IO[bytes]:
        """Opens a plain file; the caller closes it.

        Raises:
            WrongRequest: the path leaves the root, or there is no readable plain file.
        """
        with self._translated(path), self._as_user():
            base, relative, resolve = self._place(path)
            fd = kernel.openat2(base, relative, os.O_RDONLY | os.O_NONBLOCK, resolve=resolve)
            try:
                _require_regular(fd, path)
            except BaseException:
                os.close(fd)
                raise
            return os.fdopen(fd, "rb", buffering=0)

    def extract(self, archive: IO[bytes], path: str) -> None:
        """Unpacks a tar into a folder; entries may not leave it nor pass through a link.

        Raises:
            WrongRequest: no readable tar, or an entry that breaks the rule.
        """
        with self._translated(path), self._as_user():
            target = self._open_folder(path, create=True)
            try:
                with tarfile.open(fileobj=archive, mode="r|") as tar:
                    for member in tar:
                        parts = relative_parts(member.name)
                        if parts:
                            self._extract_one(tar, member, target, "/".join(parts))
            finally:
                os.close(target)

    def archive(self, path: str, out: IO[bytes]) -> None:
        """Packs a folder into a tar: files, links and folders; other things are left out."""
        if isinstance(out, tempfile.SpooledTemporaryFile):
            out.rollover()  # while this is still the service's user: the sandbox's may not make it
        with self._translated(path), self._as_user():
            top = self._open_folder(path, create=False)
            try:
                readable = kernel.openat2(top, ".", os.O_RDONLY | os.O_DIRECTORY, resolve=_STRICT)
            finally:
                os.close(top)
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                self._pack(tar, readable, "", 0)

    def folder_fd(self, path: str) -> int:
        """Opens a folder that the back-end itself has made, with root's rights."""
        return kernel.openat2(
            self._root_fd, path[1:], os.O_RDONLY | os.O_DIRECTORY, resolve=kernel.RESOLVE_IN_ROOT
        )

    # -- the work folder, for patches

    def state(self, path: str) -> FileState | None:
        """A file of the work folder as git sees it; None if there is none.

        Raises:
            OSError: it lies behind a link, or is neither a file nor a link.
        """
        with self._as_user():
            try:
                fd = kernel.openat2(
                    self._work_fd, path, os.O_PATH | os.O_NOFOLLOW, resolve=kernel.RESOLVE_BENEATH
                )
                parent, name = self._parent(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                mode = os.fstat(fd).st_mode
                if stat.S_ISLNK(mode):
                    return FileState(os.fsencode(os.readlink(name, dir_fd=parent)), "120000")
                if not stat.S_ISREG(mode):
                    raise OSError(errno.EINVAL, "not a plain file")
                with open(self._open_strict(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                    return FileState(file.read(), "100755" if mode & 0o100 else "100644")
            finally:
                os.close(fd)
                os.close(parent)

    def set_state(self, path: str, new: FileState | None) -> None:
        """Makes a file of the work folder be like `new`; None removes it and folders left empty."""
        with self._as_user():
            if new is None:
                self._remove(path)
                return
            self._make_parents(self._work_fd, path, _STRICT)
            parent, name = self._parent(path)
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=parent)
                if new.mode == "120000":
                    os.symlink(new.content, os.fsencode(name), dir_fd=parent)
                    return
            finally:
                os.close(parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(self._open_strict(path, flags, 0o644), "wb") as file:
                os.fchmod(file.fileno(), 0o755 if new.mode == "100755" else 0o644)
                file.write(new.content)

    def _remove(self, path: str) -> None:
        parts = path.split("/")
        parent, name = self._parent(path)
        os.unlink(name, dir_fd=parent)
        os.close(parent)
        for depth in range(len(parts) - 1, 0, -1):
            parent, name = self._parent("/".join(parts[:depth]))
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError:
                return  # not empty
            finally:
                os.close(parent)

    def _parent(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._open_strict(folder or ".", _DIRECTORY), name

    def _open_strict(self, path: str, flags: int, mode: int = 0) -> int:
        return kernel.openat2(self._work_fd, path, flags, mode=mode, resolve=_STRICT)

    # -- shared

    def _place(self, path: str) -> tuple[int, str, int]:
        """Where to start, the path from there, and what the walk may do."""
        absolute = normalize(path, base=self._workdir)
        if path.startswith("/"):
            return self._root_fd, absolute[1:] or ".", _IN_ROOT
        return self._work_fd, absolute[len(self._workdir) + 1 :] or ".", _BENEATH

    def _open_folder(self, path: str, *, create: bool) -> int:
        base, relative, resolve = self._place(path)
        if create:
            self._make_parents(base, f"{relative}/.", resolve)
        return kernel.openat2(base, relative, _DIRECTORY, resolve=resolve)

    def _make_parents(self, base: int, relative: str, resolve: int) -> None:
        parts = relative.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            above = "/".join(parts[: depth - 1]) or "."
            parent = kernel.openat2(base, above, _DIRECTORY, resolve=resolve)
            try:
                os.mkdir(parts[depth - 1], 0o755, dir_fd=parent)
            except OSError as error:
                # A folder of a read-only file system may be there already as well.
                if not _exists(parts[depth - 1], parent):
                    raise error from None
            finally:
                os.close(parent)

    def _extract_one(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, target: int, path: str
    ) -> None:
        if not (member.isdir() or member.isreg() or member.issym()):
            raise PathRefusedError(f"entry {path!r} is neither a file, a folder nor a link")
        self._make_parents(target, f"{path}/." if member.isdir() else path, _STRICT)
        if member.isdir():
            return
        folder, _, name = path.rpartition("/")
        parent = kernel.openat2(target, folder or ".", _DIRECTORY, resolve=_STRICT)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            if member.issym():
                os.symlink(member.linkname, name, dir_fd=parent)
                return
        finally:
            os.close(parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(kernel.openat2(target, path, flags, mode=0o644, resolve=_STRICT), "wb") as out:
            os.fchmod(out.fileno(), member.mode & 0o755 | 0o600)
            source = tar.extractfile(member)
            assert source is not None
            while chunk := source.read(_CHUNK_BYTES):
                out.write(chunk)

    def _pack(self, tar: tarfile.TarFile, folder: int, prefix: str, depth: int) -> None:
        """Adds a folder's entries; closes `folder`."""
        if depth > _MAX_DEPTH:
            os.close(folder)
            raise PathRefusedError(f"folder {prefix!r} is nested over {_MAX_DEPTH} levels deep")
        try:
            for name in sorted(os.listdir(folder)):
                path = f"{prefix}{name}"
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                info = tarfile.TarInfo(path)
                info.mode = stat.S_IMODE(found.st_mode)
                info.mtime = int(found.st_mtime)
                if stat.S_ISDIR(found.st_mode):
                    info.type = tarfile.DIRTYPE
                    tar.addfile(info)
                    flags = os.O_RDONLY | os.O_DIRECTORY
                    inner = kernel.openat2(folder, name, flags, resolve=_STRICT)
                    self._pack(tar, inner, f"{path}/", depth + 1)
                elif stat.S_ISLNK(found.st_mode):
                    info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
                    tar.addfile(info)
                elif stat.S_ISREG(found.st_mode):
                    fd = kernel.openat2(folder, name, os.O_RDONLY | os.O_NONBLOCK, resolve=_STRICT)
                    with open(fd, "rb") as file:
                        info.size = os.fstat(fd).st_size
                        tar.addfile(info, file)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        kernel.fs_identity(self._uid, self._gid)
        try:
            yield
        finally:
            kernel.fs_identity(0, 0)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except PathRefusedError as error:
            raise WrongRequest(str(error)) from error
        except (tarfile.TarError, EOFError) as error:
            raise WrongRequest(f"not a readable tar archive: {error}") from error
        except OSError as error:
            raise _explained(path, error) from error


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _require_regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise WrongRequest(f"{path!r} is not a plain file")


def _explained(path: str, error: OSError) -> ServiceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TooLarge(
            f"{path!r}: the sandbox's disk limit is reached; delete files or ask for more"
        )
    causes = {
        errno.EXDEV: "it leaves its folder through a link",
        errno.ELOOP: "it leads through links that are not followed",
        errno.EROFS: "it is not in a writable place",
        errno.EACCES: "the sandbox's user may not",
        errno.ENXIO: "it is not a plain file",
    }
    text = causes.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    return WrongRequest(f"{path!r}: {text}")
