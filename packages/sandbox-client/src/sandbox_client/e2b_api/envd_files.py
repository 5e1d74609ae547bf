"""envd's files: uploads and downloads over plain HTTP, and `filesystem.Filesystem` over Connect.

What no back-end offers as a call of its own (listing, moving, removing) is done by a program in the
sandbox, with its user's rights.
"""

import gzip
import io
import posixpath
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator
from typing import IO

from service_kit.errors import Reason, ServiceError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sandbox_client.config import SandboxServiceConfig
from sandbox_client.e2b_api import messages
from sandbox_client.e2b_api.connect import unary_message
from sandbox_client.e2b_api.entries import FIND_FORMAT, EntryInfo, parse_entries
from sandbox_client.e2b_api.errors import ApiError, EnvdError
from sandbox_client.e2b_api.guests import Guest
from sandbox_client.e2b_api.http import body_chunks, reply
from sandbox_client.errors import WrongRequest
from sandbox_client.spool import SPOOL_BYTES, Spool
from sandbox_client.types import ExecResult, FileContent

__all__ = ["FileService"]

_CHUNK_BYTES = 256 * 1024
_MAX_FILES = 1000
# What the helpers below say by their exit code.
_IS_FOLDER, _IS_FILE, _IS_MISSING = 70, 71, 72
_MAKE_FOLDER = f'[ -d "$1" ] && exit {_IS_FOLDER}; [ -e "$1" ] && exit {_IS_FILE}; mkdir -p -- "$1"'
_MOVE = (
    f'[ -e "$1" ] || [ -L "$1" ] || exit {_IS_MISSING}; '
    'mkdir -p -- "$(dirname -- "$2")" && mv -fT -- "$1" "$2"'
)


class FileService:
    """The calls of `/files` and `filesystem.Filesystem`."""

    def __init__(self, config: SandboxServiceConfig, spool: Spool) -> None:
        self._config = config
        self._spool = spool
        self._settings = config.e2b_api

    # -- /files

    async def download(self, request: Request, guest: Guest) -> Response:
        """A file's content."""
        path = guest.resolve(request.query_params.get("path", ""))
        access = guest.sandboxes.access(guest.sandbox)
        try:
            file = await access.read_file(path, self._config.limits.upload_bytes)
        except WrongRequest as error:
            raise await _explained(guest, path, error) from None
        return StreamingResponse(_content(file), media_type="application/octet-stream")

    async def upload(self, request: Request, guest: Guest) -> Response:
        """Writes the files of a form, or the body as one file."""
        if any(name.startswith("x-metadata-") for name in request.headers):
            raise ApiError(400, "this endpoint keeps no metadata of files")
        path = request.query_params.get("path", "")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/octet-stream":
            return await self._upload_raw(request, guest, path)
        if kind == "multipart/form-data":
            return await self._upload_form(request, guest, path)
        raise ApiError(
            400, f"expected multipart/form-data or application/octet-stream, found {kind!r}"
        )

    async def _upload_raw(self, request: Request, guest: Guest, path: str) -> Response:
        if not path:
            raise ApiError(400, "the query parameter path is missing")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", "gzip"):
            raise ApiError(400, f"unknown Content-Encoding {encoding!r}; expected gzip or none")
        async with self._spool.collected(self._chunks(request)) as body:
            if encoding == "identity":
                return reply([await self._write(guest, guest.resolve(path), body)])
            async with self._spool.collected(self._unzipped(body)) as file:
                return reply([await self._write(guest, guest.resolve(path), file)])

    async def _unzipped(self, packed: IO[bytes]) -> AsyncIterator[bytes]:
        size, limit = 0, self._settings.upload_bytes
        try:
            with gzip.GzipFile(fileobj=packed, mode="rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    size += len(chunk)
                    if size > limit:
                        raise ApiError(413, f"the file has over {limit} bytes unpacked")
                    yield chunk
        except (OSError, EOFError) as error:
            raise ApiError(400, f"the body is not gzip: {error}") from None

    async def _upload_form(self, request: Request, guest: Guest, path: str) -> Response:
        with self._spool.counted(self._chunks(request)) as chunks:
            return await self._write_form(request, guest, path, chunks)

    async def _write_form(
        self, request: Request, guest: Guest, path: str, chunks: AsyncGenerator[bytes, None]
    ) -> Response:
        parser = MultiPartParser(request.headers, chunks, max_files=_MAX_FILES)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise ApiError(400, f"the form is unreadable: {error.message}") from None
        try:
            parts = [part for part in form.getlist("file") if isinstance(part, UploadFile)]
            named = [(guest.resolve(path or part.filename or ""), part.file) for part in parts]
            targets = [target for target, _ in named]
            if len(set(targets)) < len(targets):
                raise ApiError(400, "one upload names the same path twice")
            return reply([await self._write(guest, target, file) for target, file in named])
        finally:
            await form.close()

    def _chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        return body_chunks(request, self._settings.upload_bytes, self._settings.idle_timeout_s)

    async def _write(self, guest: Guest, path: str, file: IO[bytes]) -> dict[str, object]:
        access = guest.sandboxes.access(guest.sandbox)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        folder, name = posixpath.split(path)
        try:
            if size <= SPOOL_BYTES:
                await access.write_files([FileContent(path, file.read())])
            else:
                async with self._spool.collected(_as_archive(name, size, file)) as tar:
                    await access.upload_tree(tar, folder)
        except ServiceError as error:
            if error.reason is Reason.TOO_LARGE:
                raise ApiError(507, error.message) from None
            raise
        return {"name": name, "type": "file", "path": path}

    # -- filesystem.Filesystem

    async def stat(self, request: Request, guest: Guest) -> Response:
        """What there is at a path."""
        body = await unary_message(messages.PathRequest, request, self._settings)
        return reply({"entry": await _entry(guest, guest.resolve(body.path))})

    async def list_dir(self, request: Request, guest: Guest) -> Response:
        """The entries of a folder, down to a depth."""
        body = await unary_message(messages.ListDir, request, self._settings)
        path = guest.resolve(body.path)
        depth = str(body.depth or 1)
        entries = await _find(guest, path, "-mindepth", "1", "-maxdepth", depth)
        if not entries and not await _is_folder(guest, path):
            raise EnvdError("invalid_argument", f"path is not a directory: {path}")
        return reply({"entries": entries})

    async def make_dir(self, request: Request, guest: Guest) -> Response:
        """Makes a folder and those above it."""
        body = await unary_message(messages.PathRequest, request, self._settings)
        path = guest.resolve(body.path)
        result = await guest.run("/bin/sh", "-c", _MAKE_FOLDER, "sh", path)
        if result.exit_code == _IS_FOLDER:
            raise EnvdError("already_exists", f"directory already exists: {path}")
        if result.exit_code == _IS_FILE:
            raise EnvdError("invalid_argument", f"path already exists but is no directory: {path}")
        _require_done(result, path)
        return reply({"entry": await _entry(guest, path)})

    async def move(self, request: Request, guest: Guest) -> Response:
        """Renames a file or folder; what was at the destination is replaced."""
        body = await unary_message(messages.Move, request, self._settings)
        source, target = guest.resolve(body.source), guest.resolve(body.destination)
        result = await guest.run("/bin/sh", "-c", _MOVE, "sh", source, target)
        if result.exit_code == _IS_MISSING:
            raise EnvdError("not_found", f"source file not found: {source}")
        _require_done(result, target)
        return reply({"entry": await _entry(guest, target)})

    async def remove(self, request: Request, guest: Guest) -> Response:
        """Removes a file or a whole folder; nothing there is no error."""
        body = await unary_message(messages.PathRequest, request, self._settings)
        path = guest.resolve(body.path)
        _require_done(await guest.run("rm", "-rf", "--", path), path)
        return reply({})

    async def watch(self, request: Request, guest: Guest) -> Response:
        """Watching folders, which is not offered."""
        raise EnvdError("unimplemented", "this endpoint does not watch folders")


async def _content(file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


async def _as_archive(name: str, size: int, file: IO[bytes]) -> AsyncIterator[bytes]:
    """A tar of one file, in pieces."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    yield info.tobuf(tarfile.PAX_FORMAT)
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
    yield bytes(-size % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


async def _find(guest: Guest, path: str, *options: str) -> list[EntryInfo]:
    # -H: a link that the caller names is followed, those below it are not.
    result = await guest.run("find", "-H", path, *options, "-printf", FIND_FORMAT)
    if not result.stdout_bytes:
        _require_done(result, path)
    # Folders that its user may not enter are left out, as far as there is anything to show.
    return parse_entries(result.stdout_bytes)


async def _entry(guest: Guest, path: str) -> EntryInfo:
    result = await guest.run("find", path, "-maxdepth", "0", "-printf", FIND_FORMAT)
    _require_done(result, path)
    entries = parse_entries(result.stdout_bytes)
    if not entries:
        raise EnvdError("invalid_argument", f"path is no file, folder or link: {path}")
    return entries[0]


async def _is_folder(guest: Guest, path: str) -> bool:
    return (await guest.run("test", "-d", path)).exit_code == 0


def _require_done(result: ExecResult, path: str) -> None:
    if result.exit_code == 0:
        return
    text = result.stderr_bytes.decode("utf-8", "replace").strip()
    codes = {
        "No such file or directory": "not_found",
        "Not a directory": "not_found",
        "Permission denied": "permission_denied",
        "Read-only file system": "permission_denied",
        "No space left on device": "resource_exhausted",
    }
    code = next((code for words, code in codes.items() if words in text), "internal")
    raise EnvdError(code, f"{path}: {text or f'exit status {result.exit_code}'}")


async def _explained(guest: Guest, path: str, error: WrongRequest) -> ApiError:
    """Which of envd's answers a refused file call is: back-ends do not tell the causes apart."""
    try:
        entry = await _entry(guest, path)
    except EnvdError as found:
        if found.code == "not_found":
            return ApiError(404, f"path '{path}' does not exist")
        return ApiError(400, error.message)
    if entry["type"] == "FILE_TYPE_DIRECTORY":
        return ApiError(400, f"path '{path}' is a directory")
    return ApiError(400, error.message)
