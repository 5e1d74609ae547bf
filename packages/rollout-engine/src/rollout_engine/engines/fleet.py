"""The engines of this node as one: routing, limits, health, versions, retries."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Literal, Self

from pydantic import Field
from service_kit.config import Config
from service_kit.errors import DeadlineExceeded, FailedPrecondition, Reason, ServiceError

from rollout_engine.core.concurrency import LimiterStatus
from rollout_engine.core.routing import Availability, Demand, EngineState, Grant, Router
from rollout_engine.core.routing import RoutingPolicy as _Policy
from rollout_engine.engines.errors import EngineBusy, EngineError, EngineTimeout
from rollout_engine.engines.results import result_of, service_error_of, version_number
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.engines.types import EngineLoad, EngineRequest, Generation, SamplingParams
from rollout_engine.policy import EngineStatus, GenerateRequest, GenerateResult

logger = logging.getLogger(__name__)

_POLL_S = 0.1
"""Engines are asked for their version this often while somebody waits for one."""


class FleetConfig(Config):
    """Which engines there are, and how they are used."""

    urls: tuple[str, ...] = ("http://127.0.0.1:7201",)
    """Base URLs of the engines."""

    max_in_flight: int = Field(default=256, ge=0)
    """Requests at one engine at once; more wait here. 0: no limit."""

    tries: int = Field(default=4, ge=1)
    """How often a request is sent, each time to the engine that is best then, before it fails."""

    busy_wait_s: float = Field(default=0.2, gt=0)
    """Wait before a request that met a full queue is sent again; doubles each time."""

    check_interval_s: float = Field(default=2.0, gt=0)
    """Between two looks at an engine that is in use."""

    check_timeout_s: float = Field(default=10.0, gt=0)
    """A health check takes no longer; SGLang on a busy machine needs a second or two."""

    first_retry_s: float = Field(default=0.5, gt=0)
    """From the loss of an engine to the first look whether it is back; doubles each time."""

    longest_retry_s: float = Field(default=15.0, gt=0)
    """The longest time between two such looks."""

    kv_policy: Literal["recompute", "keep"] = "keep"
    """What weight updates do to KV caches of engines that don't say which versions theirs hold, as
    SGLang: after `recompute` every token attended to its own version alone; after `keep` this is
    known only of requests without a cached prefix, and version 0 stands for the unknown."""


class Fleet:
    """Fulfils `policy.PolicyEngine` over one or more engines. Use as an async context manager.

    Args:
        config: Engines and limits.
        accepts_version: Whether an engine that comes back with this version may serve. By default
            it may if it holds what `expect_version` named or what engines in use hold, or if there
            is no such engine.
        client: Makes the client of an engine.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        accepts_version: Callable[[int], bool] | None = None,
        client: Callable[[str], SglangClient] = SglangClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._accepts = accepts_version or self._is_current
        self._clients = {url.rstrip("/"): client(url) for url in config.urls}
        self._router = Router(
            tuple(self._clients),
            _Policy(
                max_in_flight=config.max_in_flight,
                check_interval_s=config.check_interval_s,
                first_retry_s=config.first_retry_s,
                longest_retry_s=config.longest_retry_s,
            ),
        )
        self._tickets = itertools.count()
        self._waiters: dict[int, asyncio.Future[str]] = {}
        self._own_in_flight = dict.fromkeys(self._clients, 0)
        self._labels = dict.fromkeys(self._clients, "")
        self._checks = dict.fromkeys(self._clients, 0)
        self._loads: dict[str, EngineLoad] = {}
        self._expected = 0
        self._watched_versions = 0
        self._changed = asyncio.Event()
        self._stack = AsyncExitStack()
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for client in self._clients.values():
            await self._stack.enter_async_context(client)
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._watches = [
            group.create_task(self._watch(url), name=f"checks of {url}") for url in self._clients
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._stack.aclose()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn; a try that fails for the engine's sake is made again elsewhere.

        Raises:
            ServiceError: `DEADLINE_EXCEEDED`: the request's time is over; `VERSION_NOT_READY`, not
                retryable: every engine has gone past `pin_version`; or what the last try met.
        """
        deadline_s = self._clock() + request.timeout_s
        demand = Demand(request.min_version, request.pin_version)
        busy_wait_s = self._config.busy_wait_s
        for left in reversed(range(self._config.tries)):
            ticket = next(self._tickets)
            url = await self._slot(ticket, request, demand, deadline_s)
            try:
                done = await self._send(url, ticket, request, deadline_s)
                return result_of(request, done, self._config.kv_policy)
            except EngineError as error:
                if error.engine_at_fault:
                    self._apply(self._router.failed(url, error.message, self._clock()))
                    logger.warning("engine dropped: %s", error)
                if isinstance(error, EngineTimeout) or not error.retryable or left == 0:
                    raise service_error_of(error) from error
                pause_s = busy_wait_s if isinstance(error, EngineBusy) else 0.0
            finally:
                self._apply(self._router.release(ticket, self._clock()))
            if pause_s:
                await asyncio.sleep(min(pause_s, max(0.0, deadline_s - self._clock())))
                busy_wait_s *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    async def await_version(self, *, minimum: int = 0, exactly: int = 0) -> None:
        """Return once an engine in use holds a version that fits; 0 means no demand.

        Raises:
            ServiceError: `VERSION_NOT_READY`, not retryable: every engine has gone past `exactly`.
        """
        demand = Demand(minimum, exactly)
        self._watched_versions += 1
        try:
            while (availability := self._router.availability(demand)) is not Availability.NOW:
                if availability is Availability.NEVER:
                    raise self._gone(exactly)
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._watched_versions -= 1

    def end_session(self, session: str) -> None:
        """Forget where the session's requests went. Unknown sessions are fine."""
        self._router.end_session(session)

    def expect_version(self, number: int) -> None:
        """Say which version engines are being brought to: one that comes back may hold it."""
        self._expected = number

    def statuses(self) -> Sequence[EngineStatus]:
        """Every engine as last seen; does no I/O."""
        statuses = []
        for view in self._router.view():
            load = self._loads.get(view.name)
            statuses.append(
                EngineStatus(
                    url=view.name,
                    healthy=view.state is EngineState.IN,
                    weight_version=self._labels[view.name],
                    running=view.in_flight,
                    waiting=view.waiting,
                    tokens_generated=load.tokens_generated if load else 0,
                )
            )
        return statuses

    def limiters(self) -> tuple[LimiterStatus, ...]:
        """The queue before each engine, and that of requests which no engine can serve now."""
        return self._router.limiters(self._clock())

    def checks_of(self, url: str) -> int:
        """How often an engine has been looked at."""
        return self._checks[url]

    async def _slot(
        self, ticket: int, request: GenerateRequest, demand: Demand, deadline_s: float
    ) -> str:
        """Wait for an engine and a slot at it."""
        if self._router.availability(demand) is Availability.NEVER:
            raise self._gone(demand.exactly)
        url = self._router.request(ticket, request.session, demand, self._clock())
        if url is not None:
            return url
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = waiter
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock())):
                return await waiter
        except TimeoutError as error:
            self._apply(self._router.release(ticket, self._clock()))
            reasons = [f"{v.name}: {v.reason or 'busy'}" for v in self._router.view()]
            raise DeadlineExceeded(
                f"no engine took request {request.request_id} within {request.timeout_s:g} s: "
                + "; ".join(reasons)
            ) from error
        except BaseException:
            self._apply(self._router.release(ticket, self._clock()))
            raise
        finally:
            del self._waiters[ticket]

    async def _send(
        self, url: str, ticket: int, request: GenerateRequest, deadline_s: float
    ) -> Generation:
        sampling = request.sampling
        params = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop_token_ids=request.stop_token_ids,
            sampling_seed=request.seed,
        )
        # A later try must not be taken for an earlier one that its engine still works at.
        rid = f"{request.request_id}~{ticket}"
        self._own_in_flight[url] += 1
        try:
            done = await self._clients[url].generate(
                EngineRequest(rid=rid, input_ids=request.input_ids.tolist(), sampling=params),
                timeout_s=max(0.0, deadline_s - self._clock()),
            )
        finally:
            self._own_in_flight[url] -= 1
        self._saw(url, done.weight_version)
        return done

    def _gone(self, number: int) -> ServiceError:
        return FailedPrecondition(
            f"version {number} was asked for, but engines hold {sorted(self._router.versions())}: "
            "it will not come back",
            reason=Reason.VERSION_NOT_READY,
            retryable=False,
        )

    def _apply(self, grants: Sequence[Grant]) -> None:
        """Tell the waiting what the router decided."""
        for grant in grants:
            waiter = self._waiters.get(grant.ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(grant.engine)
        for ticket in self._router.unservable():
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._gone(self._router.demand_of(ticket).exactly))

    def _saw(self, url: str, label: str) -> None:
        if label != self._labels[url]:
            self._labels[url] = label
            self._apply(self._router.saw_version(url, version_number(label), self._clock()))
            self._changed.set()

    def _is_current(self, version: int) -> bool:
        held = self._router.versions()
        return not held or version in held or version >= self._expected > 0

    async def _watch(self, url: str) -> None:
        """Check an engine whenever that is due, for ever."""
        while True:
            now_s = self._clock()
            if self._watched_versions:
                self._router.expedite(now_s + _POLL_S)
            pause_s = self._router.next_check_s(url) - now_s
            if pause_s > 0:
                await asyncio.sleep(min(pause_s, _POLL_S))
                continue
            await self._check(url)
            self._checks[url] += 1
            self._changed.set()

    async def _check(self, url: str) -> None:
        client, timeout_s = self._clients[url], self._config.check_timeout_s
        was_in = {v.name for v in self._router.view() if v.state is EngineState.IN}
        try:
            await client.check_health(timeout_s=timeout_s)
            info = await client.model_info(timeout_s=timeout_s)
            load = await client.load(timeout_s=timeout_s)
        except EngineError as error:
            if url in was_in:
                logger.warning("engine dropped: %s", error)
            self._apply(self._router.failed(url, error.message, self._clock()))
            return
        version = version_number(info.weight_version)
        if url not in was_in and not self._accepts(version):
            reason = f"it holds version {info.weight_version!r}, which is not served now"
            self._apply(self._router.failed(url, reason, self._clock()))
            return
        if url not in was_in:
            logger.info("engine in use: %s with version %r", url, info.weight_version)
        self._loads[url] = load
        self._labels[url] = info.weight_version
        elsewhere = max(0, load.running + load.waiting - self._own_in_flight[url])
        now_s = self._clock()
        self._apply(self._router.checked(url, version, now_s, elsewhere=elsewhere))


__all__ = ["Fleet", "FleetConfig"]
