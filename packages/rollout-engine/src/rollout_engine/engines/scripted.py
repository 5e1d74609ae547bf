"""An engine without a model, for tests: the same HTTP API, answers from a function.

    async with scripted_engine(lambda request: [1, 2, 3]) as (url, engine):
        ...  # any client of SGLang's API, at `url`

As a process: `python -m rollout_engine.engines.scripted --policy module:function --port 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import importlib
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from rollout_engine.engines.api import engine_app
from rollout_engine.engines.api_generate import GenerateEndpoint
from rollout_engine.engines.backend import Report, WeightUpdate
from rollout_engine.engines.cpu.prefix import PrefixIndex
from rollout_engine.engines.errors import InvalidRequest
from rollout_engine.engines.http_server import listen, running, until_signal, url_of
from rollout_engine.engines.types import (
    EngineLoad,
    EngineRequest,
    Finish,
    FinishKind,
    Generation,
    LabelSpan,
    ModelInfo,
    PauseMode,
    WeightsChecksum,
)
from rollout_engine.engines.wire import Json

_KEPT_TOKENS = 1 << 16
_LOGPROB = -0.25


class Fault(enum.StrEnum):
    """How a scripted engine fails a request."""

    ERROR = "error"
    """Status 500."""
    BUSY = "busy"
    """Status 503, as when the queue is full."""
    HANG = "hang"
    """No answer, until the client goes away or aborts."""
    DISCONNECT = "disconnect"
    """The connection closes in the middle of the reply."""
    GARBAGE = "garbage"
    """Status 200 with a body that is not the API's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """What to answer.

    Attributes:
        output_ids: Cut off after the first stop token, and at `max_new_tokens`.
        logprobs: Of these tokens; a constant if empty.
        delay_s: Before the answer, seconds. If the weights change meanwhile, the first half of the
            tokens belongs to the old version and the rest to the new one.
        fault: Fail instead.
    """

    output_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    delay_s: float = 0.0
    fault: Fault | None = None


Policy = Callable[[EngineRequest], ScriptedReply | Sequence[int]]


class _Disconnected(Exception):  # noqa: N818 -- never seen outside
    pass


class _Garbled(Exception):  # noqa: N818 -- never seen outside
    pass


@dataclass(slots=True, eq=False)
class _Running:
    request: EngineRequest
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """Answers from a policy; everything may be set and read by a test.

    Args:
        policy: Called once for each sample, in the order of arrival.
        weight_version: Its label at the start.
        context_tokens: Longest prompt and output together.
        sleep: Replaces the clock.

    Attributes:
        requests: Every request that came in.
        updates: Every weight update that was asked for.
        sick: If not empty, health checks and requests fail with this reason.
        fail_updates: If not empty, weight updates fail with this reason.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        weight_version: str = "default",
        context_tokens: int = 1 << 16,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.policy = policy
        self.label = weight_version
        self.requests: list[EngineRequest] = []
        self.updates: list[WeightUpdate] = []
        self.sick = ""
        self.fail_updates = ""
        self.tokens_generated = 0
        self._context_tokens = context_tokens
        self._sleep = sleep
        self._model_path = "scripted"
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count()
        self._prefixes = PrefixIndex(_KEPT_TOKENS)

    async def generate(
        self, request: EngineRequest, sample_index: int, report: Report | None
    ) -> Generation:
        """Answer one sample as the policy says."""
        self.requests.append(request)
        if len(request.input_ids) >= self._context_tokens:
            raise InvalidRequest(
                f"The input ({len(request.input_ids)} tokens) is longer than the model's context "
                f"length ({self._context_tokens} tokens)."
            )
        reply = self.policy(request)
        if not isinstance(reply, ScriptedReply):
            reply = ScriptedReply(output_ids=reply)
        number = next(self._numbers)
        entry = self._running[number] = _Running(request)
        try:
            return await self._answer(entry, reply, report)
        finally:
            del self._running[number]

    async def _answer(
        self, entry: _Running, reply: ScriptedReply, report: Report | None
    ) -> Generation:
        request, began = entry.request, self.label
        cached = min(
            self._prefixes.match(list(request.input_ids)).length, len(request.input_ids) - 1
        )
        if reply.fault is Fault.HANG:
            await entry.aborted.wait()
        elif reply.delay_s > 0 or not self._unpaused.is_set():
            await _first(self._wait(reply.delay_s), entry.aborted.wait())
        output, finish = _cut(request, reply.output_ids)
        if self.sick:
            finish = Finish(FinishKind.ABORT, message=self.sick, status_code=503)
        elif entry.aborted.is_set():
            output, finish = (), Finish(FinishKind.ABORT, message="Aborted")
        elif reply.fault is not None:
            finish = _fault(reply.fault)
        self.tokens_generated += len(output)
        self._prefixes.insert([*request.input_ids, *output], 0)
        half = len(output) // 2 if began != self.label else 0
        spans = (LabelSpan(began, 0, half), LabelSpan(self.label, half, len(output)))
        logprobs = tuple(reply.logprobs)[: len(output)] or (_LOGPROB,) * len(output)
        done = Generation(
            rid=request.rid,
            output_ids=output,
            finish=finish,
            prompt_tokens=len(request.input_ids),
            weight_version=self.label,
            logprobs=logprobs if request.return_logprob else (),
            version_spans=tuple(span for span in spans if span.start < span.end),
            kv_spans=(LabelSpan(began, 0, len(output)),) if output else (),
            cached_tokens=cached,
            engine_s=reply.delay_s,
        )
        if report is not None:
            for count in range(1, len(output)):
                report(_part(done, count))
        return done

    async def _wait(self, delay_s: float) -> None:
        if delay_s > 0:
            await self._sleep(delay_s)
        await self._unpaused.wait()

    def abort(self, rid: str | None) -> None:
        """End requests without output."""
        for entry in self._running.values():
            if rid is None or entry.request.rid == rid:
                entry.aborted.set()

    def pause(self, mode: PauseMode) -> None:
        """Hold answers back until `resume`."""
        self._unpaused.clear()
        if mode is PauseMode.ABORT:
            self.abort(None)

    def resume(self) -> None:
        """Let answers go."""
        self._unpaused.set()

    @property
    def paused(self) -> bool:
        """Whether answers are held back."""
        return not self._unpaused.is_set()

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take the new label, unless `fail_updates` is set."""
        self.updates.append(update)
        if self.fail_updates:
            raise InvalidRequest(self.fail_updates)
        if update.abort_all:
            self.abort(None)
        if update.flush_cache:
            self._prefixes.clear()
        self._model_path = update.model_path
        self.label = self.label if update.label is None else update.label
        return len(self._running) if self.paused else 0

    def relabel(self, label: str) -> None:
        """Take another label."""
        self.label = label

    def flush(self) -> bool:
        """Forget what was cached."""
        if self._running:
            return False
        self._prefixes.clear()
        return True

    def ailment(self) -> str:
        """Return `sick`."""
        return self.sick

    def model_info(self) -> ModelInfo:
        """Return the label."""
        return ModelInfo(
            model_path=self._model_path,
            served_name="scripted",
            weight_version=self.label,
            model_type="scripted",
        )

    def load(self) -> EngineLoad:
        """Return how many requests are unanswered."""
        return EngineLoad(
            running=len(self._running),
            waiting=0,
            used_tokens=0,
            max_tokens=_KEPT_TOKENS,
            max_running=_KEPT_TOKENS,
            tokens_generated=self.tokens_generated,
        )

    def server_info(self) -> Json:
        """Return limits."""
        return {
            "engine": "scripted",
            "version": "0",
            "context_length": self._context_tokens,
            "max_req_input_len": self._context_tokens - 1,
        }

    async def checksum(self) -> WeightsChecksum:
        """Return a value that follows the label."""
        return WeightsChecksum(root_hash=f"{self.label:>032}", tensors={})


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def _cut(request: EngineRequest, output_ids: Sequence[int]) -> tuple[tuple[int, ...], Finish]:
    sampling = request.sampling
    for index, token in enumerate(output_ids[: sampling.max_new_tokens]):
        if token in sampling.stop_token_ids:
            return tuple(output_ids[: index + 1]), Finish(FinishKind.STOP, matched=token)
    return tuple(output_ids[: sampling.max_new_tokens]), Finish(FinishKind.LENGTH)


def _fault(fault: Fault) -> Finish:
    if fault is Fault.DISCONNECT:
        raise _Disconnected
    if fault is Fault.GARBAGE:
        raise _Garbled
    if fault is Fault.BUSY:
        return Finish(FinishKind.ABORT, message="The request queue is full.", status_code=503)
    return Finish(FinishKind.ABORT, message="scripted fault", status_code=500)


def _part(done: Generation, count: int) -> Generation:
    return Generation(
        rid=done.rid,
        output_ids=done.output_ids[:count],
        finish=None,
        prompt_tokens=done.prompt_tokens,
        weight_version=done.weight_version,
        logprobs=done.logprobs[:count],
        cached_tokens=done.cached_tokens,
    )


class _FaultyGenerate(GenerateEndpoint):
    """The usual endpoint, but for faults that are no replies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except (_Disconnected, _Garbled) as fault:
            body = b'{"output_ids": "none"}'
            whole = len(body) if isinstance(fault, _Garbled) else 2 * len(body)
            headers = [(b"content-length", str(whole).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            more = isinstance(fault, _Disconnected)
            # uvicorn closes the connection when the application ends before its reply does.
            await send({"type": "http.response.body", "body": body, "more_body": more})


def scripted_app(engine: ScriptedEngine) -> Starlette:
    """Make the HTTP application of a scripted engine."""
    return engine_app(engine, _FaultyGenerate(engine))


@contextlib.asynccontextmanager
async def scripted_engine(
    policy: Policy, *, weight_version: str = "default", port: int = 0
) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    """Serve a scripted engine on loopback; yields its base URL and the engine."""
    engine = ScriptedEngine(policy, weight_version=weight_version)
    sock = listen("127.0.0.1", port)
    url = url_of(sock)
    async with running(scripted_app(engine), sock):
        yield url, engine


async def _main(arguments: argparse.Namespace) -> None:
    module, _, name = arguments.policy.partition(":")
    policy: Policy = getattr(importlib.import_module(module), name)
    engine = ScriptedEngine(policy, weight_version=arguments.weight_version)
    sock = listen("127.0.0.1", arguments.port)
    async with running(scripted_app(engine), sock) as stopped:
        sys.stdout.write(f"scripted engine at {url_of(sock)}\n")
        sys.stdout.flush()
        await until_signal(stopped)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A scripted engine for tests.")
    parser.add_argument("--policy", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--port", type=int, default=7201)
    parser.add_argument("--weight-version", default="default")
    asyncio.run(_main(parser.parse_args()))


__all__ = ["Fault", "Policy", "ScriptedEngine", "ScriptedReply", "scripted_app", "scripted_engine"]
