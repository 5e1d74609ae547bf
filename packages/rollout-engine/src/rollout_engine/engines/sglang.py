"""The one HTTP client of SGLang's API, for the embedded engine and for SGLang itself."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Self

import aiohttp

from rollout_engine.engines import status_wire, wire
from rollout_engine.engines.errors import (
    BadReply,
    EngineBusy,
    EngineError,
    EnginePoisoned,
    EngineTimeout,
    EngineUnavailable,
    GenerationAborted,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.types import (
    EngineLoad,
    EngineRequest,
    FinishKind,
    Generation,
    ModelInfo,
    PauseMode,
    WeightsChecksum,
)

_JSON = {"content-type": "application/json"}
_ABORT_TIMEOUT_S = 2.0
_ERROR_TEXT = 500


class SglangClient:
    """One engine behind a base URL. Use as an async context manager.

    Every call has a deadline, in seconds, and raises `EngineError`. A `generate` that is cancelled
    or runs out of time is aborted at the engine before the error goes on.

    Args:
        url: Base URL, as `http://127.0.0.1:7201`.
        max_connections: Requests on the wire at once; 0: no limit.
    """

    def __init__(self, url: str, *, max_connections: int = 0) -> None:
        self.url = url.rstrip("/")
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=60)
        # Deadlines are ours: aiohttp's own timeout would end a long generation after 5 minutes.
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: EngineRequest, *, timeout_s: float) -> Generation:
        """Continue one prompt by one sample.

        Raises:
            InvalidRequest: the engine will never accept it.
            EngineBusy: its queue is full.
            EngineTimeout: the deadline passed.
            GenerationAborted: somebody else ended it.
            EngineUnavailable, EnginePoisoned, BadReply: the engine is not well.
        """
        if request.stream or request.sampling.n != 1:
            raise InvalidRequest("generate serves one sample, not streamed", engine=self.url)
        try:
            body = await self._call("POST", "/generate", wire.request_to_json(request), timeout_s)
        except (EngineTimeout, asyncio.CancelledError):
            await self._abort_quietly(request.rid)
            raise
        done = wire.generation_from_json(body, self.url)
        finish = done.finish
        if finish is None:
            raise BadReply("/generate answered without a finish_reason", engine=self.url)
        if finish.kind is FinishKind.ABORT:
            raise GenerationAborted(
                f"request {done.rid} was aborted after {len(done.output_ids)} tokens: "
                f"{finish.message or 'no reason given'}",
                engine=self.url,
            )
        return done

    async def abort(self, rid: str | None, *, timeout_s: float) -> None:
        """End one request, or all if `rid` is None; ending one that is over is fine."""
        body: wire.Json = {"rid": "", "abort_all": True} if rid is None else {"rid": rid}
        await self._call("POST", "/abort_request", body, timeout_s, empty=True)

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Stop generating until `resume`."""
        await self._call("POST", "/pause_generation", {"mode": str(mode)}, timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Go on generating."""
        await self._call("POST", "/continue_generation", {}, timeout_s)

    async def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str,
        *,
        timeout_s: float,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> int:
        """Load other weights; return how many paused requests will go on with them.

        Raises:
            WeightUpdateFailed: they were refused; the old ones still serve.
            EnginePoisoned: the update failed half way.
        """
        body: wire.Json = {
            "model_path": model_path,
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
        }
        try:
            reply = await self._call("POST", "/update_weights_from_disk", body, timeout_s)
        except InvalidRequest as error:
            raise WeightUpdateFailed(error.message, engine=self.url) from error
        if not reply.get("success"):
            raise WeightUpdateFailed(str(reply.get("message")), engine=self.url)
        return int(reply.get("num_paused_requests") or 0)

    async def set_weight_version(self, label: str, *, timeout_s: float) -> None:
        """Give the present weights another label, without ending any request."""
        body: wire.Json = {"new_version": label, "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body, timeout_s)

    async def flush_cache(self, *, timeout_s: float) -> bool:
        """Drop kept prefixes; return False if the engine was not idle and kept them."""
        try:
            await self._call("POST", "/flush_cache", None, timeout_s, empty=True)
        except InvalidRequest:
            return False
        return True

    async def check_health(self, *, timeout_s: float) -> None:
        """Return if the engine is well.

        Raises:
            EngineUnavailable, EnginePoisoned, EngineTimeout: it is not.
        """
        await self._call("GET", "/health", None, timeout_s, empty=True)

    async def model_info(self, *, timeout_s: float) -> ModelInfo:
        """Ask what is served, under which version."""
        body = await self._call("GET", "/model_info", None, timeout_s)
        return status_wire.model_info_from_json(body, self.url)

    async def load(self, *, timeout_s: float) -> EngineLoad:
        """Ask how busy the engine is."""
        body = await self._call("GET", "/v1/loads", None, timeout_s)
        return status_wire.load_from_json(body, self.url)

    async def server_info(self, *, timeout_s: float) -> wire.Json:
        """Ask for settings and limits, as the engine has them."""
        return await self._call("GET", "/server_info", None, timeout_s)

    async def weights_checksum(self, *, timeout_s: float) -> WeightsChecksum:
        """Ask for the checksums of the weights in memory."""
        body = await self._call("POST", "/weights_checker", {"action": "checksum"}, timeout_s)
        return status_wire.checksum_from_json(body, self.url)

    async def _abort_quietly(self, rid: str) -> None:
        """Abort on the way out of an error that matters more than whether this succeeds.

        If it doesn't, the engine aborts by itself when it sees the connection closed.
        """
        try:
            await self.abort(rid, timeout_s=_ABORT_TIMEOUT_S)
        except EngineError:
            return

    async def _call(
        self,
        method: str,
        path: str,
        body: wire.Json | None,
        timeout_s: float,
        *,
        empty: bool = False,
    ) -> wire.Json:
        assert self._session is not None, "use `async with SglangClient(...)`"
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self.url + path, data=data, headers=None if data is None else _JSON
                ) as reply,
            ):
                text = await reply.read()
                status = reply.status
        except TimeoutError as error:
            raise EngineTimeout(
                f"{path}: no answer within {timeout_s:g} s", engine=self.url
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(
                f"{path}: {type(error).__name__}: {error}", engine=self.url
            ) from error
        if status != 200:
            raise _failure(path, status, text, self.url)
        if empty:
            return {}
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise BadReply(f"{path}: not JSON: {text[:200]!r}", engine=self.url) from error
        if not isinstance(parsed, dict):
            kind = type(parsed).__name__
            raise BadReply(f"{path}: expected an object, found {kind}", engine=self.url)
        return parsed


def _failure(path: str, status: int, text: bytes, url: str) -> EngineError:
    words = text.decode(errors="replace")[:_ERROR_TEXT]
    message = f"{path}: status {status}: {_message(text) or words or 'no reason given'}"
    if status == 503:
        lowered = words.lower()
        if "poisoned" in lowered or "full load" in lowered:
            return EnginePoisoned(message, engine=url)
        if "queue is full" in lowered:
            return EngineBusy(message, engine=url)
        return EngineUnavailable(message, engine=url)
    if status == 429:
        return EngineBusy(message, engine=url)
    if status >= 500 or status in (408, 499):
        return EngineUnavailable(message, engine=url)
    return InvalidRequest(message, engine=url)


def _message(text: bytes) -> str:
    """Find the words in one of the forms that SGLang's errors have."""
    try:
        body = json.loads(text)
        found = body.get("message") or body.get("detail") or body["error"]["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        return ""
    return str(found)[:_ERROR_TEXT]


__all__ = ["SglangClient"]
