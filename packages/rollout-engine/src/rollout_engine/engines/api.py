"""SGLang's HTTP API, the subset that is used here, over anything that can generate.

The embedded engine and the scripted one of the tests share it, so that they can't differ in shapes.
"""

from __future__ import annotations

import datetime

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rollout_engine.engines import status_wire, wire
from rollout_engine.engines.api_generate import GenerateEndpoint
from rollout_engine.engines.backend import EngineBackend, WeightUpdate
from rollout_engine.engines.errors import EngineError, InvalidRequest
from rollout_engine.engines.http_json import error_reply, parsed, reply, status_of
from rollout_engine.engines.types import PauseMode


def engine_app(backend: EngineBackend, generate: ASGIApp | None = None) -> Starlette:
    """Make the HTTP application of an engine.

    Args:
        backend: The engine.
        generate: Serves `/generate` in place of the usual `GenerateEndpoint`.
    """
    api = _Api(backend)
    get, post, both = ["GET"], ["POST"], ["GET", "POST"]
    routes = [
        Route("/generate", generate or GenerateEndpoint(backend), methods=post),
        Route("/health", api.health, methods=get),
        Route("/health_generate", api.health, methods=get),
        Route("/model_info", api.model_info, methods=get),
        Route("/get_model_info", api.model_info, methods=get),
        Route("/server_info", api.server_info, methods=get),
        Route("/get_server_info", api.server_info, methods=get),
        Route("/v1/models", api.models, methods=get),
        Route("/v1/loads", api.loads, methods=get),
        Route("/abort_request", api.abort, methods=post),
        Route("/pause_generation", api.pause, methods=post),
        Route("/continue_generation", api.resume, methods=post),
        Route("/update_weights_from_disk", api.update_weights, methods=post),
        Route("/update_weight_version", api.relabel, methods=post),
        Route("/flush_cache", api.flush, methods=both),
        Route("/weights_checker", api.checksum, methods=post),
    ]
    return Starlette(routes=routes, exception_handlers={404: _not_found, EngineError: _failed})


async def _not_found(_request: Request, _error: Exception) -> Response:
    return reply({"detail": "Not Found"}, 404)


async def _failed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return error_reply(error.message, status_of(error))


class _Api:
    """Every call but `/generate`."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def health(self, _request: Request) -> Response:
        ailment = self._backend.ailment()
        return PlainTextResponse(ailment, 503) if ailment else Response(status_code=200)

    async def model_info(self, _request: Request) -> Response:
        return reply(status_wire.model_info_to_json(self._backend.model_info()))

    async def server_info(self, _request: Request) -> Response:
        ailment = self._backend.ailment()
        return reply(self._backend.server_info() | {"status": ailment or "ready"})

    async def models(self, _request: Request) -> Response:
        name = self._backend.model_info().served_name
        longest = self._backend.server_info()["context_length"]
        model: wire.Json = {"id": name, "object": "model", "owned_by": "tailrace", "root": name}
        model |= {"parent": None, "max_model_len": longest}
        return reply({"object": "list", "data": [model]})

    async def loads(self, _request: Request) -> Response:
        now = datetime.datetime.now(datetime.UTC)
        version = self._backend.server_info()["version"]
        body = status_wire.load_to_json(
            self._backend.load(),
            timestamp=now.isoformat(),
            timestamp_s=now.timestamp(),
            version=version,
        )
        return reply(body)

    async def abort(self, request: Request) -> Response:
        body = parsed(await request.body())
        if body.get("abort_all"):
            self._backend.abort(None)
        elif isinstance(body.get("rid"), str) and body["rid"]:
            self._backend.abort(body["rid"])
        else:
            raise InvalidRequest("Give the rid of a request, or abort_all: true.")
        return Response(status_code=200)

    async def pause(self, request: Request) -> Response:
        mode = parsed(await request.body()).get("mode", PauseMode.ABORT)
        if mode not in list(PauseMode):
            raise InvalidRequest(f"mode must be one of {[*PauseMode]}, found {mode!r}.")
        self._backend.pause(PauseMode(mode))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _request: Request) -> Response:
        self._backend.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        try:
            update = _update(parsed(await request.body()))
            paused = await self._backend.update_weights(update)
        except EngineError as error:
            failure = {"success": False, "message": error.message, "num_paused_requests": 0}
            return reply(failure, status_of(error))
        message = "Succeeded to update model weights."
        if update.label is not None:
            message += f" Weight version updated to {update.label}."
        return reply({"success": True, "message": message, "num_paused_requests": paused})

    async def relabel(self, request: Request) -> Response:
        body = parsed(await request.body())
        label = body.get("new_version")
        if not isinstance(label, str) or not label:
            raise InvalidRequest(f"new_version must be a text, found {label!r}.")
        # SGLang's default, which a caller that wants its requests to go on must override.
        if body.get("abort_all_requests", True):
            self._backend.abort(None)
        self._backend.relabel(label)
        message = f"Weight version updated to {label}"
        return reply({"success": True, "message": message, "new_version": label})

    async def flush(self, _request: Request) -> Response:
        flushed = self._backend.flush()
        text = (
            "Cache flushed.\nPlease check backend logs for more details. (When there are running "
            "or waiting requests, the operation will not be performed.)\n"
        )
        return PlainTextResponse(text, 200 if flushed else 400)

    async def checksum(self, request: Request) -> Response:
        action = parsed(await request.body()).get("action")
        if action != "checksum":
            raise InvalidRequest(f"action must be 'checksum', found {action!r}.")
        return reply(status_wire.checksum_to_json(await self._backend.checksum()))


def _update(body: wire.Json) -> WeightUpdate:
    kinds: dict[str, type] = {
        "model_path": str,
        "weight_version": str,
        "root_hash": str,
        "flush_cache": bool,
        "abort_all_requests": bool,
    }
    for key, kind in kinds.items():
        value = body.get(key)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{key} must be of type {kind.__name__}, found {value!r}.")
    if not body.get("model_path"):
        raise InvalidRequest("model_path is missing: give the folder of the new weights.")
    return WeightUpdate(
        model_path=body["model_path"],
        label=body.get("weight_version") or None,
        flush_cache=body.get("flush_cache", True),
        abort_all=body.get("abort_all_requests", False),
        root_hash=body.get("root_hash"),
    )


__all__ = ["engine_app"]
