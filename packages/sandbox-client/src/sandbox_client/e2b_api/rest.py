"""E2B's REST API: sandboxes, snapshots, forks and metrics."""

from starlette.requests import Request
from starlette.responses import Response

from sandbox_client.config import SandboxServiceConfig
from sandbox_client.e2b_api import messages
from sandbox_client.e2b_api.errors import ApiError
from sandbox_client.e2b_api.http import read_body, reply
from sandbox_client.e2b_api.messages import api_body
from sandbox_client.e2b_api.metrics import USAGE_SCRIPT, parse_usage
from sandbox_client.e2b_api.rest_views import (
    created_view,
    detail_view,
    listed_view,
    select_sandboxes,
    select_snapshots,
    snapshot_view,
    timestamp,
)
from sandbox_client.e2b_api.sandboxes import ApiSandbox, Sandboxes

__all__ = ["RestApi"]

_MAX_KEY = 255


class RestApi:
    """The calls on sandboxes."""

    def __init__(self, sandboxes: Sandboxes, config: SandboxServiceConfig) -> None:
        self._sandboxes = sandboxes
        self._settings = config.e2b_api

    async def create(self, request: Request) -> Response:
        """Makes a sandbox; with an `Idempotency-Key` it makes one only once."""
        body = api_body(messages.NewSandbox, await self._body(request))
        key = request.headers.get("idempotency-key", "")
        if len(key) > _MAX_KEY:
            raise ApiError(400, f"Idempotency-Key has over {_MAX_KEY} characters")
        return reply(created_view(await self._sandboxes.create(body, key)), 201)

    async def list(self, request: Request) -> Response:
        """A page of the living sandboxes."""
        found, cursor = select_sandboxes(self._sandboxes.living(), request.query_params)
        views = [listed_view(sandbox, self._sandboxes.limits_of(sandbox)) for sandbox in found]
        return reply(views, headers={"x-next-token": cursor} if cursor else {})

    async def get(self, request: Request) -> Response:
        """One sandbox."""
        sandbox = self._sandbox(request)
        return reply(detail_view(sandbox, self._sandboxes.limits_of(sandbox)))

    async def kill(self, request: Request) -> Response:
        """Ends a sandbox."""
        await self._sandboxes.kill(_sandbox_id(request))
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        """Sets when a sandbox ends."""
        body = api_body(messages.SetTimeout, await self._body(request))
        await self._sandboxes.set_timeout(_sandbox_id(request), body.timeout)
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        """Pauses a sandbox."""
        body = api_body(messages.PauseSandbox, await self._body(request))
        await self._sandboxes.pause(_sandbox_id(request), memory=body.memory)
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        """Access to a sandbox, which is resumed if it was paused."""
        body = api_body(messages.ConnectSandbox, await self._body(request))
        sandbox, resumed = await self._sandboxes.connect(_sandbox_id(request), body)
        return reply(created_view(sandbox), 201 if resumed else 200)

    async def snapshot(self, request: Request) -> Response:
        """Keeps a sandbox's files."""
        body = api_body(messages.NewSnapshot, await self._body(request))
        return reply(snapshot_view(await self._sandboxes.snapshot(_sandbox_id(request), body)), 201)

    async def list_snapshots(self, request: Request) -> Response:
        """A page of the snapshots."""
        query = request.query_params
        kept = self._sandboxes.catalog.snapshots(
            source=query.get("sandboxID", ""), name=query.get("name", "")
        )
        found, cursor = select_snapshots(kept, query)
        headers = {"x-next-token": cursor} if cursor else {}
        return reply([snapshot_view(snapshot) for snapshot in found], headers=headers)

    async def fork(self, request: Request) -> Response:
        """New sandboxes from the files of one."""
        body = api_body(messages.ForkSandbox, await self._body(request))
        made = await self._sandboxes.fork(_sandbox_id(request), body)
        return reply(
            [
                {"error": fork.body}
                if isinstance(fork, ApiError)
                else {"sandbox": created_view(fork)}
                for fork in made
            ],
            201,
        )

    async def metrics(self, request: Request) -> Response:
        """What a sandbox uses at the moment; there is no history."""
        sandbox = self._sandbox(request)
        if sandbox.paused:
            return reply([])
        result = await self._sandboxes.run(
            sandbox, ("/bin/sh", "-c", USAGE_SCRIPT, "sh", sandbox.workdir)
        )
        usage = parse_usage(result.stdout_bytes.decode("utf-8", "replace"))
        limits = self._sandboxes.limits_of(sandbox)
        now = self._sandboxes.now()
        view = {
            "timestamp": timestamp(now),
            "timestampUnix": int(now),
            "cpuCount": max(1, round(limits.cpus)),
            "cpuUsedPct": round(100 * usage.cpus / limits.cpus, 2),
            "memTotal": limits.memory_bytes,
            "memUsed": usage.memory_bytes,
            "memCache": 0,
            "diskTotal": limits.disk_bytes,
            "diskUsed": usage.disk_bytes,
        }
        return reply([view])

    async def update_network(self, request: Request) -> Response:
        """Changing a living sandbox's network, which no back-end can."""
        self._sandbox(request)
        raise ApiError(400, "this endpoint does not change the network of a living sandbox")

    def _sandbox(self, request: Request) -> ApiSandbox:
        return self._sandboxes.find(_sandbox_id(request))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.message_bytes, self._settings.idle_timeout_s)


def _sandbox_id(request: Request) -> str:
    return str(request.path_params["sandbox_id"])
