# ruff: noqa: PTH123 -- works on descriptors and walks large trees
"""File access to a living sandbox from outside it, with the rights of its own user.

Every path is opened by `openat2`, so the kernel keeps the walk inside the sandbox whatever links
the sandbox makes meanwhile, and this thread takes the sandbox user's identity for the access, so
nothing can be read or written that a command could not read or write itself. /proc is refused: part
of it shows who asks, and that is the service. Calls block.
"""

import contextlib
import errno
import os
import stat
import tarfile
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
    """The files of one sandbox. `close` releases the descriptors.

    Args:
        root_fd: the sandbox's root.
        workdir: its work folder.
        uid: its user, as the service sees it.
        gid: the same of its group.
        max_patched_bytes: largest file that a patch may change.
    """

    def __init__(
        self,
        root_fd: int,
        workdir: str,
        *,
        uid: int,
        gid: int,
        max_patched_bytes: int,
    ) -> None:
        self._root_fd = root_fd
        self._workdir = workdir
        self._uid = uid
        self._gid = gid
        self._max_patched_bytes = max_patched_bytes
        self._groups = os.getgroups()
        self._work_fd = kernel.openat2(root_fd, workdir, _DIRECTORY, resolve=_IN_ROOT)
        self._proc_device = os.stat("proc", dir_fd=root_fd, follow_symlinks=False).st_dev

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
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
            try:
                fd = kernel.openat2(base, relative, flags, mode=0o644, resolve=resolve)
            except FileNotFoundError:
                self._make_parents(base, relative, resolve)
                fd = kernel.openat2(base, relative, flags, mode=0o644, resolve=resolve)
            with os.fdopen(fd, "wb") as file:
                self._require_file(fd, path)
                os.ftruncate(fd, 0)
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
                self._require_file(fd, path)
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
        with self._translated(path):
            with self._as_user():
                top = self._open_folder(path, create=False)
                try:
                    flags = os.O_RDONLY | os.O_DIRECTORY
                    readable = kernel.openat2(top, ".", flags, resolve=_STRICT)
                finally:
                    os.close(top)
            # The archive itself is written with the service's own rights: it may go to its disk.
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
            OSError: it lies behind a link, is neither a file nor a link, or is too large.
        """
        with self._as_user():
            try:
                parent, name = self._parent(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    return FileState(os.fsencode(os.readlink(name, dir_fd=parent)), "120000")
                if not stat.S_ISREG(mode):
                    raise OSError(errno.EINVAL, "not a plain file")
                file = open(self._open_strict(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115
            except FileNotFoundError:
                return None
            finally:
                os.close(parent)
        with file:
            # It may be a sparse file larger than any memory.
            content = file.read(self._max_patched_bytes + 1)
        if len(content) > self._max_patched_bytes:
            found = f"{path!r} has more than {self._max_patched_bytes} bytes (limits.diff_bytes)"
            raise OSError(errno.EFBIG, found)
        return FileState(content, "100755" if mode & 0o100 else "100644")

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
        try:
            os.unlink(name, dir_fd=parent)
        finally:
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
        fd = kernel.openat2(base, relative, _DIRECTORY, resolve=resolve)
        if os.fstat(fd).st_dev == self._proc_device:
            os.close(fd)
            raise _kernels_own(path)
        return fd

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
        try:
            if depth > _MAX_DEPTH:
                raise PathRefusedError(f"folder {prefix!r} is nested over {_MAX_DEPTH} levels deep")
            for name in sorted(os.listdir(folder)):
                try:
                    with self._as_user():
                        found = self._entry(folder, name, f"{prefix}{name}")
                except FileNotFoundError:
                    continue  # a command has removed it meanwhile
                if found is None:
                    continue
                info, fd = found
                if info.isreg():
                    with open(fd, "rb") as file:
                        tar.addfile(info, _Sized(file, info.size))  # type: ignore[arg-type]
                    continue
                tar.addfile(info)
                if info.isdir():
                    self._pack(tar, fd, f"{info.name}/", depth + 1)
        finally:
            os.close(folder)

    def _entry(self, folder: int, name: str, path: str) -> tuple[tarfile.TarInfo, int] | None:
        """An entry's header, with a descriptor unless it is a link; None if it does not count."""
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        info = tarfile.TarInfo(path)
        if stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
            fd = -1
        elif stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
            flags = os.O_RDONLY | os.O_NONBLOCK
            fd = kernel.openat2(folder, name, flags, resolve=_STRICT)
            found = os.fstat(fd)  # what was opened is what counts
            if stat.S_ISDIR(found.st_mode):
                info.type = tarfile.DIRTYPE
            else:
                info.size = found.st_size
        else:
            return None
        if found.st_dev == self._proc_device:
            os.close(fd)
            return None
        info.mode = stat.S_IMODE(found.st_mode)
        info.mtime = int(found.st_mtime)
        return info, fd

    def _require_file(self, fd: int, path: str) -> None:
        found = os.fstat(fd)
        if found.st_dev == self._proc_device:
            raise _kernels_own(path)
        if not stat.S_ISREG(found.st_mode):
            raise WrongRequest(f"{path!r} is not a plain file")

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        tie = kernel.take_identity(self._uid, self._gid)
        try:
            yield
        finally:
            kernel.leave_identity(self._uid, self._groups, tie)

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


class _Sized:
    """A file of which exactly `size` bytes are read, whatever a command does to it meanwhile."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size

    def read(self, count: int) -> bytes:
        count = min(count, self._left)
        data = self._file.read(count)
        self._left -= count
        return data + bytes(count - len(data))


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _kernels_own(path: str) -> WrongRequest:
    return WrongRequest(f"{path!r} lies in /proc; a command can look at that, file calls cannot")


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
