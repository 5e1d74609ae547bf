"""The engine as one thing: limiters, runner, supervisor and servicer over given peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from service_kit.server import Service
from tailrace.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server

from rollout_engine.agents.base import Agent
from rollout_engine.agents.template import ChatTemplate
from rollout_engine.config import WorkConfig
from rollout_engine.core.concurrency import LimiterStatus
from rollout_engine.core.group import RefillPolicy
from rollout_engine.core.retry import Backoff
from rollout_engine.ledger.store import Ledger
from rollout_engine.limiters import Limiter
from rollout_engine.patience import Patience
from rollout_engine.peers import Grader, Tasks, Workspaces
from rollout_engine.policy import PolicyEngine
from rollout_engine.runner import AttemptRunner
from rollout_engine.service import SERVICE_NAME, RolloutServicer
from rollout_engine.session import SessionSettings
from rollout_engine.supervisor import Supervisor, SupervisorSettings
from rollout_engine.turn import RunnerSettings, TurnTaker
from rollout_engine.types import AttemptLimits


class RolloutEngine:
    """Puts the parts together; `run` and a server with `service` make it work.

    Args:
        ledger: Open; the caller closes it after `run` has ended.
        model_context_tokens: Longest context that the model takes; 0: unknown.
        more_limiters: Figures of limiters that the peers have, for the status.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        sleep: For tests.

    """

    def __init__(
        self,
        config: WorkConfig,
        *,
        ledger: Ledger,
        tasks: Tasks,
        workspaces: Workspaces,
        grader: Grader,
        policy: PolicyEngine,
        template: ChatTemplate,
        agent: Agent,
        model_context_tokens: int = 0,
        more_limiters: Callable[[], Sequence[LimiterStatus]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.ledger = ledger
        limits, deadlines, refills = config.limits, config.deadlines, config.refills
        concurrency, consumers = config.concurrency, config.consumers
        attempts = Limiter("attempts", concurrency.attempts, clock)
        engine_requests = Limiter("engine_requests", concurrency.engine_requests, clock)
        sandbox_starts = Limiter("sandbox_starts", concurrency.sandbox_starts, clock)
        graders = Limiter("graders", concurrency.graders, clock)
        self._more_limiters = more_limiters
        self._limiters = (attempts, engine_requests, sandbox_starts, graders)
        turns = TurnTaker(
            policy=policy,
            template=template,
            agent=agent,
            settings=RunnerSettings(
                command_timeout_s=deadlines.command_s,
                generate_timeout_s=deadlines.generate_s,
                unusable_turns=limits.unusable_turns,
            ),
            engine_requests=engine_requests,
            patience=Patience(deadlines.patience_s, clock=clock, sleep=sleep),
            clock=clock,
        )
        runner = AttemptRunner(
            tasks=tasks,
            workspaces=workspaces,
            grader=grader,
            turns=turns,
            sandbox_starts=sandbox_starts,
            graders=graders,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.supervisor = Supervisor(
            ledger=ledger,
            runner=runner,
            policy=policy,
            settings=SupervisorSettings(
                limits=AttemptLimits(
                    turns=limits.turns,
                    turn_tokens=limits.turn_tokens,
                    total_tokens=limits.total_tokens,
                    context_tokens=limits.context_tokens,
                    command_time_s=limits.command_time_s,
                    repeated_actions=limits.repeated_actions,
                ),
                refill=RefillPolicy(refills.per_attempt, refills.per_group),
                refill_backoff=Backoff(refills.backoff_initial_s, 2.0, refills.backoff_max_s),
                model_context_tokens=model_context_tokens,
            ),
            attempts=attempts,
            clock=clock,
            wall_clock=wall_clock,
            sleep=sleep,
        )
        self._servicer = RolloutServicer(
            engine_id=ledger.ledger_id,
            ledger=ledger,
            supervisor=self.supervisor,
            settings=SessionSettings(
                credits=consumers.credits,
                max_attempts=consumers.max_attempts,
                heartbeat_s=consumers.heartbeat_s,
                progress_s=consumers.progress_s,
                chunk_bytes=consumers.chunk_bytes,
            ),
            idle_s=consumers.idle_s,
            limiters=self.limiters,
            engines=policy.statuses,
        )

    @property
    def service(self) -> Service:
        """What a `service_kit.server.Server` serves."""
        register = partial(add_RolloutServiceServicer_to_server, self._servicer)
        return Service(SERVICE_NAME, register, on_drain=self._servicer.drain)

    def limiters(self) -> list[LimiterStatus]:
        """Give the figures of every limiter."""
        return [*(limiter.status() for limiter in self._limiters), *self._more_limiters()]

    async def run(self) -> None:
        """Run groups until cancelled. Streams that come before wait for it."""
        await self.supervisor.run()


__all__ = ["RolloutEngine"]
