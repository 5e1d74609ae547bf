"""The endpoint as an ASGI application: routes, keys and errors."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from service_kit.errors import ServiceError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.e2b_api.connect import STREAM_TYPE, stream_failure
from sandbox_client.e2b_api.envd_files import FileService
from sandbox_client.e2b_api.envd_processes import ProcessService
from sandbox_client.e2b_api.errors import ApiError, EnvdError, api_error, envd_error
from sandbox_client.e2b_api.guests import Guest, addressed, admit
from sandbox_client.e2b_api.http import reply
from sandbox_client.e2b_api.rest import RestApi
from sandbox_client.e2b_api.sandboxes import Sandboxes
from sandbox_client.e2b_api.templates import TemplateApi
from sandbox_client.manager import SandboxManager

__all__ = ["Endpoint", "make_endpoint"]

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
GuestHandler = Callable[[Request, Guest], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """An application, and what is left to do when nobody calls it any more."""

    app: Starlette
    beside: Callable[[], Coroutine[Any, Any, None]]
    """Has to run beside it, until it is cancelled."""
    close: Callable[[], Awaitable[None]]
    limiters: Callable[[], list[LimiterStatus]]


def make_endpoint(
    manager: SandboxManager, config: SandboxServiceConfig, api_key: str | None
) -> Endpoint:
    """E2B's REST API and envd over one manager's sandboxes.

    Args:
        manager: Makes, holds and ends the sandboxes.
        config: The service's settings.
        api_key: What callers must send; None takes any key.
    """
    sandboxes = Sandboxes(manager, config)
    rest, templates = RestApi(sandboxes, config), TemplateApi(manager, sandboxes, config)
    processes, files = ProcessService(manager, config), FileService(config, manager.spool)

    def api(method: str, path: str, handler: Handler) -> Route:
        return Route(path, _keyed(handler, api_key), methods=[method])

    def envd(method: str, path: str, handler: GuestHandler) -> Route:
        async def endpoint(request: Request) -> Response:
            return await handler(request, admit(request, sandboxes, config.e2b_api))

        return Route(path, endpoint, methods=[method])

    async def health(request: Request) -> Response:
        sandboxes.running(addressed(request))
        return Response(status_code=204)

    one = "/sandboxes/{sandbox_id}"
    build = "/v2/templates/{template_id}/builds/{build_id}"
    process, filesystem = "/process.Process", "/filesystem.Filesystem"
    routes = [
        api("POST", "/v2/sandboxes", rest.create),
        api("GET", "/v2/sandboxes", rest.list),
        api("GET", one, rest.get),
        api("DELETE", one, rest.kill),
        api("POST", f"{one}/timeout", rest.set_timeout),
        api("POST", f"{one}/pause", rest.pause),
        api("POST", f"/v2{one}/connect", rest.connect),
        api("POST", f"{one}/snapshots", rest.snapshot),
        api("POST", f"{one}/fork", rest.fork),
        api("GET", f"{one}/metrics", rest.metrics),
        api("PUT", f"{one}/network", rest.update_network),
        api("GET", "/snapshots", rest.list_snapshots),
        api("POST", "/v3/templates", templates.request),
        api("GET", "/templates/aliases/{name:path}", templates.alias),
        api("GET", "/templates/{template_id}/files/{files_hash}", templates.upload_link),
        api("POST", build, templates.start),
        api("GET", build.removeprefix("/v2") + "/status", templates.status),
        api("DELETE", "/templates/{template_id:path}", templates.delete),
        # The link itself is the permission: whoever uploads sends no key.
        Route("/uploads/{token}/{files_hash}", templates.upload, methods=["PUT"]),
        Route("/health", health, methods=["GET"]),
        envd("GET", "/files", files.download),
        envd("POST", "/files", files.upload),
        envd("POST", f"{process}/Start", processes.start),
        envd("POST", f"{process}/Connect", processes.connect),
        envd("POST", f"{process}/List", processes.list),
        envd("POST", f"{process}/SendSignal", processes.send_signal),
        envd("POST", f"{process}/SendInput", processes.send_input),
        envd("POST", f"{process}/StreamInput", processes.stream_input),
        envd("POST", f"{process}/CloseStdin", processes.close_stdin),
        envd("POST", f"{process}/Update", processes.update),
        envd("POST", f"{filesystem}/Stat", files.stat),
        envd("POST", f"{filesystem}/ListDir", files.list_dir),
        envd("POST", f"{filesystem}/MakeDir", files.make_dir),
        envd("POST", f"{filesystem}/Move", files.move),
        envd("POST", f"{filesystem}/Remove", files.remove),
        envd("POST", f"{filesystem}/WatchDir", files.watch),
        envd("POST", f"{filesystem}/CreateWatcher", files.watch),
    ]
    handlers = {
        ApiError: _on_api_error,
        EnvdError: _on_envd_error,
        ServiceError: _on_service_error,
        404: _on_unknown,
        405: _on_unknown,
        Exception: _on_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)

    async def close() -> None:
        await templates.close()
        await sandboxes.close()

    return Endpoint(app, sandboxes.keep_snapshots_forever, close, templates.limiters)


def _keyed(handler: Handler, api_key: str | None) -> Handler:
    async def endpoint(request: Request) -> Response:
        given = request.headers.get("x-api-key", "")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(401, "X-API-KEY is missing or wrong; set E2B_API_KEY to this endpoint's")
        return await handler(request)

    return endpoint


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return reply(error.body, error.status, error.headers)


async def _on_envd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EnvdError)
    if request.headers.get("content-type", "").startswith(STREAM_TYPE):
        return stream_failure(error)
    if _is_connect(request):
        return reply(error.body, error.status)
    return reply({"code": error.status, "message": error.message}, error.status)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    if _is_connect(request):
        return await _on_envd_error(request, envd_error(error))
    return await _on_api_error(request, api_error(error))


async def _on_unknown(request: Request, _error: Exception) -> Response:
    what = f"{request.method} {request.url.path}"
    logger.info("%s is not part of this endpoint", what)
    if _is_connect(request):
        return reply({"code": "unimplemented", "message": f"{what} is not offered"}, 501)
    return reply({"code": 404, "message": f"{what} is not part of this endpoint"}, 404)


async def _on_bug(_request: Request, error: Exception) -> Response:
    # Starlette raises it again, so the server logs the traceback.
    return reply({"code": 500, "message": f"a bug of the endpoint: {type(error).__name__}"}, 500)


def _is_connect(request: Request) -> bool:
    return request.url.path.startswith(("/process.", "/filesystem."))
