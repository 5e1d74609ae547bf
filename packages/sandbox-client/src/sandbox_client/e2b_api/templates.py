"""E2B's REST API for templates: requesting, uploading, building, and finding them by name."""

import asyncio
import contextlib
import io
import secrets
from dataclasses import dataclass, field
from typing import IO

from starlette.requests import Request
from starlette.responses import Response

from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.e2b_api import messages
from sandbox_client.e2b_api.builder import BuildError, TemplateBuilder
from sandbox_client.e2b_api.catalog import EMPTY_TREE, Template
from sandbox_client.e2b_api.errors import ApiError
from sandbox_client.e2b_api.http import body_chunks, read_body, reply
from sandbox_client.e2b_api.messages import BuildStart, api_body
from sandbox_client.e2b_api.rest_views import timestamp
from sandbox_client.e2b_api.sandboxes import Sandboxes
from sandbox_client.manager import SandboxManager
from sandbox_client.types import EnvironmentRef, SandboxLimits

__all__ = ["TemplateApi"]

_MIB = 1 << 20
_MAX_LOG_LINES = 10_000
_LOG_PAGE = 100
_MAX_FILES = 1000


@dataclass
class _Build:
    """One build, from its request to its end."""

    wanted: Template
    status: str = "waiting"
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Who knows it may upload files."""
    files: dict[str, IO[bytes]] = field(default_factory=dict)
    held: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    """Those files' places in the spool."""
    log: list[dict[str, str]] = field(default_factory=list)
    size_bytes: int = 0
    reason: dict[str, str] | None = None
    task: asyncio.Task[None] | None = None

    async def forget_files(self) -> None:
        self.files.clear()
        self.size_bytes = 0
        await self.held.aclose()


class TemplateApi:
    """The calls on templates."""

    def __init__(
        self, manager: SandboxManager, sandboxes: Sandboxes, config: SandboxServiceConfig
    ) -> None:
        self._sandboxes = sandboxes
        self._spool = manager.spool
        self._builder = TemplateBuilder(manager, sandboxes, config)
        self._config = config
        self._settings = config.e2b_api
        self._builds: dict[str, _Build] = {}

    async def request(self, request: Request) -> Response:
        """Announces a build."""
        body = api_body(messages.NewTemplate, await self._body(request))
        if len(self._builds) >= self._settings.builds:
            await self._forget_ended()
        if len(self._builds) >= self._settings.builds:
            raise ApiError(429, f"e2b_api.builds allows {self._settings.builds} builds at once")
        stem = body.name.partition(":")[0]
        names = (body.name.removesuffix(":default"), *(f"{stem}:{tag}" for tag in body.tags))
        limits = SandboxLimits(
            memory_bytes=(body.memoryMB or 0) * _MIB, cpus=float(body.cpuCount or 0)
        )
        template_id = f"tp-{secrets.token_hex(8)}"
        wanted = Template(template_id, EnvironmentRef(EMPTY_TREE.digest), names, limits)
        build_id = secrets.token_hex(10)
        self._builds[build_id] = _Build(wanted)
        view = {
            "templateID": template_id,
            "buildID": build_id,
            "public": False,
            "names": list(names),
            "aliases": list(names),
            "tags": body.tags or ["default"],
        }
        return reply(view, 202)

    async def upload_link(self, request: Request) -> Response:
        """Where to put the files of one step."""
        template_id, files_hash = (
            request.path_params[name] for name in ("template_id", "files_hash")
        )
        for build in self._builds.values():
            if build.wanted.template_id == template_id and build.status == "waiting":
                path = f"/uploads/{build.token}/{files_hash}"
                url = str(request.url.replace(path=path, query=""))
                return reply({"present": files_hash in build.files, "url": url}, 201)
        raise ApiError(404, f"template {template_id} has no build that waits for files")

    async def upload(self, request: Request) -> Response:
        """Takes the files of one step."""
        token, files_hash = (request.path_params[name] for name in ("token", "files_hash"))
        build = next((b for b in self._builds.values() if b.token == token), None)
        if build is None:
            raise ApiError(404, "no upload is awaited here")
        chunks = body_chunks(request, self._settings.upload_bytes, self._settings.idle_timeout_s)
        async with contextlib.AsyncExitStack() as stack:
            file = await stack.enter_async_context(self._spool.collected(chunks))
            if build.status == "waiting" and files_hash not in build.files:
                self._take(build, files_hash, file)
                build.held.push_async_callback(stack.pop_all().aclose)
        return Response(status_code=200)

    def _take(self, build: _Build, files_hash: str, file: IO[bytes]) -> None:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        limit = self._config.limits.upload_bytes
        waiting = sum(other.size_bytes for other in self._builds.values())
        if waiting + size > limit or len(build.files) >= _MAX_FILES:
            raise ApiError(
                429,
                f"the files of all waiting builds may have {limit} bytes (limits.upload_bytes), "
                f"those of one may be {_MAX_FILES}; start them first",
            )
        build.size_bytes += size
        build.files[files_hash] = file

    async def start(self, request: Request) -> Response:
        """Begins a build."""
        body = api_body(BuildStart, await self._body(request))
        build = self._build(request)
        if build.status != "waiting":
            raise ApiError(409, f"the build is {build.status} already")
        build.status = "building"
        build.task = asyncio.get_running_loop().create_task(self._run(build, body))
        return Response(status_code=202)

    async def status(self, request: Request) -> Response:
        """How far a build is, with the next of its log."""
        build = self._build(request)
        offset = request.query_params.get("logsOffset", "0")
        first = int(offset) if offset.isdecimal() else 0
        entries = build.log[first : first + _LOG_PAGE]
        view = {
            "templateID": build.wanted.template_id,
            "buildID": request.path_params["build_id"],
            "status": build.status,
            "logs": [entry["message"] for entry in entries],
            "logEntries": entries,
        }
        return reply(view | ({"reason": build.reason} if build.reason else {}))

    async def alias(self, request: Request) -> Response:
        """The template of a name."""
        template = self._sandboxes.catalog.get(request.path_params["name"])
        return reply({"templateID": template.template_id, "public": False})

    async def delete(self, request: Request) -> Response:
        """Forgets a built template or a snapshot; sandboxes that started from it live on."""
        name = request.path_params["template_id"]
        made = self._sandboxes.catalog.made(name)
        if not made:
            raise ApiError(404, f"no template or snapshot '{name}' was made here")
        for template in made:
            await self._sandboxes.forget(template)
        return Response(status_code=204)

    def limiters(self) -> list[LimiterStatus]:
        """How many builds are remembered."""
        return [LimiterStatus("e2b_api.builds", self._settings.builds, len(self._builds))]

    async def close(self) -> None:
        """Gives up what is being built."""
        tasks = [build.task for build in self._builds.values() if build.task is not None]
        for task in tasks:
            task.cancel()
        # How they end is nobody's concern any more.
        await asyncio.gather(*tasks, return_exceptions=True)
        for build in self._builds.values():
            await build.forget_files()

    async def _run(self, build: _Build, body: BuildStart) -> None:
        def log(text: str) -> None:
            if len(build.log) < _MAX_LOG_LINES:
                now = timestamp(self._sandboxes.now())
                build.log.append({"timestamp": now, "level": "info", "message": text})

        try:
            template = await self._builder.build(build.wanted, body, build.files, log)
        except BuildError as error:
            build.reason = {"message": str(error)}
            if error.step is not None:
                # The SDK counts from 1.
                build.reason["step"] = str(error.step + 1)
            build.status = "error"
        except BaseException:
            build.reason = {"message": "the build was given up by a bug of the endpoint"}
            build.status = "error"
            raise
        else:
            self._sandboxes.catalog.add(template)
            build.status = "ready"
        finally:
            await build.forget_files()

    def _build(self, request: Request) -> _Build:
        build = self._builds.get(request.path_params["build_id"])
        if build is None or build.wanted.template_id != request.path_params["template_id"]:
            raise ApiError(404, "no such build")
        return build

    async def _forget_ended(self) -> None:
        """Makes room: builds that have ended, and those that nobody ever started."""
        gone = [key for key, build in self._builds.items() if build.status != "building"]
        for build in [self._builds.pop(key) for key in gone]:
            build.status = "forgotten"
            await build.forget_files()

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.message_bytes, self._settings.idle_timeout_s)
