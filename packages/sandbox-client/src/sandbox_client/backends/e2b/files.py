"""Files, trees, diffs and patches of one sandbox."""

import io
import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.guest import Guest
from sandbox_client.backends.e2b.tree_changes import entries_from_manifest, tree_changes
from sandbox_client.backends.e2b.trees import StoredTree
from sandbox_client.core.git_diff import FileState, file_diff
from sandbox_client.core.patch import PatchError, apply_patch
from sandbox_client.core.patch_parser import parse_patch
from sandbox_client.core.paths import PathRefusedError, normalize, relative_parts
from sandbox_client.errors import PatchRejected, SandboxUnavailable, TooLarge, WrongRequest
from sandbox_client.types import FileContent

__all__ = ["SandboxFiles"]


class SandboxFiles:
    """A sandbox's files, seen from the service.

    What changed is decided here, against the service's own copy of the environment: the sandbox is
    only asked what its files hold. Whoever rules the sandbox can thus show other files than there
    are, as it could have written them, and nothing more.
    """

    def __init__(self, guest: Guest, workdir: str, config: E2BConfig) -> None:
        self._guest = guest
        self._workdir = workdir
        self._config = config

    async def write(self, files: Sequence[FileContent]) -> None:
        """Writes files with the user's rights; see `BackendSandbox.write_files`."""
        places = [{**self._place(file.path), "mode": file.mode & 0o777} for file in files]
        archive = _tar((str(n), FileState(file.content)) for n, file in enumerate(files))
        (await self._guest.call("write", {"files": places}, archive, as_user=True)).close()

    async def read(self, path: str, max_bytes: int) -> IO[bytes]:
        """A file's content."""
        request = {**self._place(path), "max_bytes": max_bytes}
        return await self._guest.call("read", request, as_user=True)

    async def unpack(self, archive: IO[bytes], path: str) -> None:
        """Unpacks a tar into a folder."""
        _check_members(archive)
        request = {**self._place(path), "remove": []}
        (await self._guest.call("unpack", request, archive, as_user=True)).close()

    async def pack(self, path: str, out: IO[bytes]) -> None:
        """Packs a folder into a tar."""
        request = {**self._place(path), "exclude": [], "max_bytes": self._guest.limit_bytes}
        with await self._guest.call("pack", request, as_user=True) as packed:
            while chunk := packed.read(1 << 20):
                out.write(chunk)

    async def diff(self, before: StoredTree, max_bytes: int) -> bytes:
        """The work folder against the environment, in git's format."""
        exclude = self._config.diff_exclude
        request = {"path": self._workdir, "exclude": exclude, "max_bytes": max_bytes}
        with await self._guest.call("manifest", request) as packed:
            after = _manifest(packed.read(), self._guest.limit_bytes)
        changes = tree_changes(before.entries, after, exclude)
        for path in changes.present:
            if after[path].size > max_bytes:
                raise _too_large(path, max_bytes)
        states = await self._states(changes.present, max_bytes)
        parts: list[bytes] = []
        size = 0
        for path in sorted((*changes.present, *changes.gone), key=_bytes):
            if path in changes.present and path not in states:
                continue  # removed since it was listed
            part = file_diff(_bytes(path), before.state(path), states.get(path))
            size += len(part)
            if size > max_bytes:
                raise _too_large(path, max_bytes)
            parts.append(part)
        return b"".join(parts)

    async def apply(self, patch: bytes) -> list[str]:
        """Applies a git-format diff, all of it or nothing; returns the paths."""
        try:
            entries = parse_patch(patch)
            named = {path for e in entries for path in (e.old_path, e.new_path) if path}
            if not named:
                return []
            states = await self._states(sorted(named), self._guest.limit_bytes)
            changed = apply_patch(patch, states.get)
        except (PatchError, WrongRequest) as error:
            raise PatchRejected(f"the patch does not apply: {error}") from error
        remove = [path for path in changed if path in states]
        request = {"path": self._workdir, "root": "/", "remove": remove}
        archive = _tar((path, state) for path, state in changed.items() if state is not None)
        try:
            (await self._guest.call("unpack", request, archive, as_user=True)).close()
        except (WrongRequest, TooLarge) as error:
            raise PatchRejected(
                f"the patch fits but could not be written whole: {error}"
            ) from error
        return sorted(changed)

    async def _states(self, paths: Sequence[str], max_bytes: int) -> dict[str, FileState]:
        """The present states of files; those that are missing are left out."""
        if not paths:
            return {}
        listing = io.BytesIO(zlib.compress(json.dumps(list(paths)).encode()))
        request = {"path": self._workdir, "max_bytes": max_bytes}
        with await self._guest.call("states", request, listing) as packed:
            try:
                return dict(_untar(packed, set(paths)))
            except (tarfile.TarError, EOFError) as error:
                raise SandboxUnavailable(f"the sandbox answered no tar: {error}") from error

    def _place(self, path: str) -> dict[str, str]:
        """The absolute path, and the folder that its links must not leave."""
        try:
            absolute = normalize(path, base=self._workdir)
        except PathRefusedError as error:
            raise WrongRequest(str(error)) from error
        return {"path": absolute, "root": "/" if path.startswith("/") else self._workdir}


def _check_members(archive: IO[bytes]) -> None:
    """Refuses a tar that could write elsewhere before it is sent; rewinds it."""
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                relative_parts(member.name)
                if not (member.isdir() or member.isreg() or member.issym()):
                    raise WrongRequest(
                        f"entry {member.name!r} is neither a file, a folder nor a link"
                    )
    except PathRefusedError as error:
        raise WrongRequest(str(error)) from error
    except (tarfile.TarError, EOFError) as error:
        raise WrongRequest(f"not a readable tar archive: {error}") from error
    archive.seek(0)


def _tar(files: Iterable[tuple[str, FileState]]) -> IO[bytes]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, state in files:
            info = tarfile.TarInfo(path)
            if state.mode == "120000":
                info.type, info.linkname = tarfile.SYMTYPE, _text(state.content)
                tar.addfile(info)
            else:
                info.mode, info.size = int(state.mode[-3:], 8), len(state.content)
                tar.addfile(info, io.BytesIO(state.content))
    out.seek(0)
    return out


def _untar(packed: IO[bytes], wanted: set[str]) -> Iterable[tuple[str, FileState]]:
    with tarfile.open(fileobj=packed, mode="r|") as tar:
        for member in tar:
            if member.name not in wanted:
                continue
            if member.issym():
                yield member.name, FileState(_bytes(member.linkname), "120000")
            elif member.isreg() and (source := tar.extractfile(member)) is not None:
                mode = "100755" if member.mode & 0o100 else "100644"
                yield member.name, FileState(source.read(), mode)


def _manifest(packed: bytes, limit_bytes: int) -> Mapping[str, Any]:
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(packed, limit_bytes)
        if unpacker.unconsumed_tail:
            raise TooLarge(f"the work folder's listing has over {limit_bytes} bytes")
        return entries_from_manifest(json.loads(text))
    except (zlib.error, ValueError) as error:
        raise SandboxUnavailable(f"the sandbox answered no listing: {error}") from error


def _too_large(path: str, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"{path!r} makes the diff larger than {max_bytes} bytes (limits.diff_bytes, or the "
        "request's max_bytes)"
    )


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
