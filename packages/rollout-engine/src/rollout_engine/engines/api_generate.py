"""`POST /generate`: one prompt or many, one reply or a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from service_kit.errors import leaf_errors
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_engine.engines import wire
from rollout_engine.engines.backend import EngineBackend
from rollout_engine.engines.errors import EngineError, InvalidRequest
from rollout_engine.engines.http_json import encoded, error_reply, parsed, reply, status_of
from rollout_engine.engines.types import EngineRequest, FinishKind, Generation

_WATCH_AFTER_S = 1.0
"""A request that takes longer is aborted when its client goes away. Watching costs a task, which a
short request doesn't need."""


class GenerateEndpoint:
    """`POST /generate`. Plain ASGI, since it is called for every turn of every agent."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        try:
            requests, as_list = wire.requests_from_json(parsed(await _body(receive)))
            if requests[0].stream:
                response: ASGIApp = await self._stream(requests, as_list)
            else:
                response = await self._answer(requests, as_list, receive)
        except EngineError as error:
            response = error_reply(error.message, status_of(error))
        await response(scope, receive, send)

    async def _answer(
        self, requests: list[EngineRequest], as_list: bool, receive: Receive
    ) -> Response:
        with _watched(receive, lambda: self._abort(requests)):
            if as_list:
                done = await self._all(requests)
            else:
                done = [await self._backend.generate(requests[0], 0, None)]
        for generation in done:
            finish = generation.finish
            if finish is not None and finish.kind is FinishKind.ABORT and finish.status_code:
                return error_reply(finish.message, finish.status_code)
        bodies = [
            wire.generation_to_json(request, generation)
            for request, generation in zip(_samples(requests), done, strict=True)
        ]
        return reply(bodies if as_list else bodies[0])

    def _abort(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self._backend.abort(request.rid)

    async def _all(self, requests: list[EngineRequest]) -> list[Generation]:
        """Generate every sample of every request. If one is refused, so are all."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._backend.generate(request, index, None))
                    for request in requests
                    for index in range(request.sampling.n)
                ]
        except BaseExceptionGroup as errors:
            raise next(leaf_errors(errors)) from None
        return [task.result() for task in tasks]

    async def _stream(self, requests: list[EngineRequest], as_list: bool) -> Response:
        if as_list:
            raise InvalidRequest("A stream is served for one prompt and one sample at a time.")
        request = requests[0]
        news: asyncio.Queue[Generation | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._backend.generate(request, 0, news.put_nowait))
        task.add_done_callback(lambda _: news.put_nowait(None))
        # A refusal is known at once; then the status can still tell it.
        await asyncio.sleep(0)
        if task.done():
            await task

        async def events() -> AsyncIterator[bytes]:
            try:
                while (part := await news.get()) is not None:
                    yield _event(wire.generation_to_json(request, part))
                yield _event(wire.generation_to_json(request, await task))
                yield b"data: [DONE]\n\n"
            finally:
                if not task.done():
                    self._backend.abort(request.rid)
                    await task

        return StreamingResponse(events(), media_type="text/event-stream")


def _event(body: wire.Json) -> bytes:
    return b"data: " + encoded(body) + b"\n\n"


def _samples(requests: list[EngineRequest]) -> list[EngineRequest]:
    return [request for request in requests for _ in range(request.sampling.n)]


async def _body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body", False):
        message = await receive()
        body += message.get("body", b"")
    return body


@contextlib.contextmanager
def _watched(receive: Receive, abort: Callable[[], None]) -> Iterator[None]:
    """Call `abort` if the client goes away while the body of the `with` takes long."""
    watch: asyncio.Task[None] | None = None

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        abort()

    def start() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(until_gone())

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, start)
    try:
        yield
    finally:
        timer.cancel()
        if watch is not None:
            watch.cancel()


__all__ = ["GenerateEndpoint"]
