"""One turn of an attempt: the policy speaks, its command runs, it reads what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from service_kit.errors import Reason, ServiceError, service_error
from service_kit.telemetry import tracer

from rollout_engine.agents.base import Agent, CommandOutcome, RunCommand, Submit, Unusable
from rollout_engine.agents.template import ChatTemplate, Message
from rollout_engine.core.attempt import (
    AttemptEvent,
    AttemptState,
    LimitReached,
    Submitted,
    TurnTaken,
    transition,
)
from rollout_engine.core.limits import Usage, next_command, next_turn, remaining_text
from rollout_engine.core.progress import ProgressState
from rollout_engine.core.seeds import turn_seed
from rollout_engine.core.tokens import TokenTree
from rollout_engine.limiters import Limiter
from rollout_engine.patience import Patience
from rollout_engine.peers import Task, Workspace
from rollout_engine.policy import FinishReason, GenerateRequest, GenerateResult, PolicyEngine
from rollout_engine.types import (
    Assignment,
    AttemptId,
    AttemptLimits,
    FaultStage,
    LimitKind,
)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What holds for every attempt.

    Attributes:
        command_timeout_s: Longest that one command may run, unless its task says less.
        generate_timeout_s: Deadline of one generation, queueing at the engine included.
        unusable_turns: Turns without an action in a row that end the attempt; 0: never.
    """

    command_timeout_s: float
    generate_timeout_s: float
    unusable_turns: int


@dataclass(slots=True)
class AttemptJob:
    """One try to be made, and how far it has come, for whoever watches.

    Attributes:
        limits: Of the assignment, filled up with the engine's defaults.
        sandbox_key: Unique over all lives of all engines.
        priority: Place in the queues of limiters; the lowest first.
        queued_s: Seconds it has waited before it was started.
        on_turn: Called after each turn.
        turns, sampled_tokens: So far.
        oldest_version: Among its tokens; 0 before the first.
    """

    id: AttemptId
    assignment: Assignment
    limits: AttemptLimits
    sandbox_key: str
    priority: tuple[int, ...] = ()
    queued_s: float = 0.0
    on_turn: Callable[[AttemptJob], None] = lambda job: None
    turns: int = 0
    sampled_tokens: int = 0
    oldest_version: int = 0


@dataclass(slots=True)
class Run:
    """The moving parts of one try."""

    job: AttemptJob
    state: AttemptState = field(default_factory=AttemptState)
    stage: FaultStage = FaultStage.TASK
    tokens: TokenTree = field(default_factory=TokenTree)
    usage: Usage = field(default_factory=Usage)
    progress: ProgressState = field(default_factory=ProgressState)
    workspace: Workspace | None = None
    diff: bytes = b""
    sandbox_start_s: float = 0.0
    generate_s: float = 0.0
    grade_s: float = 0.0

    def step(self, event: AttemptEvent) -> None:
        """Take the state on."""
        self.state = transition(self.state, event)


class TurnTaker:
    """Takes turns for any attempt. Keeps nothing between them.

    Args:
        engine_requests: Limits generations at once.
        patience: For engines that restart; a generation is safe to repeat.
        clock: Monotonic seconds.

    """

    def __init__(
        self,
        *,
        policy: PolicyEngine,
        template: ChatTemplate,
        agent: Agent,
        settings: RunnerSettings,
        engine_requests: Limiter,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._template = template
        self._agent = agent
        self._settings = settings
        self._engine_requests = engine_requests
        self._patience = patience
        self._clock = clock
        self._tracer = tracer("rollout_engine")

    def open(self, run: Run, task: Task) -> None:
        """Render the task into the attempt's first context."""
        run.tokens.append_context(self._template.prompt(self._agent.opening(task.instruction)))
        run.usage = run.usage.with_context(run.tokens.context_tokens)

    def end(self, run: Run) -> None:
        """Let the engines forget the attempt."""
        self._policy.end_session(_session(run.job.id))

    async def take(
        self, run: Run, task: Task, workspace: Workspace
    ) -> Submitted | LimitReached | None:
        """Let the policy speak once, and do what it says. What ends the attempt, if anything."""
        limits = run.job.limits
        budget = next_turn(limits, run.usage)
        if isinstance(budget, LimitKind):
            return LimitReached(budget)
        result = await self._generate(run, budget.max_new_tokens)
        run.stage = FaultStage.INTERNAL
        if result.finish is FinishReason.LENGTH:
            return LimitReached(budget.binding)
        action = self._agent.action(self._template.text(result.output_ids))
        match action:
            case Submit():
                return Submitted()
            case RunCommand(command):
                message = await self._run_command(run, task, workspace, command)
                run.progress = run.progress.acted(command, limits.repeated_actions)
            case Unusable():
                message = self._agent.correction(action, self._remaining(run))
                run.progress = run.progress.failed_to_act()
        if isinstance(message, LimitReached):
            return message
        if run.progress.stuck(limits.repeated_actions, self._settings.unusable_turns):
            return LimitReached(LimitKind.NO_PROGRESS)
        return self._read(run, message)

    def _read(self, run: Run, message: Message) -> LimitReached | None:
        """Append what came back, unless no turn could follow it."""
        ids = self._template.continuation([message])
        usage = run.usage.with_context(run.usage.context_tokens + len(ids))
        following = next_turn(run.job.limits, usage)
        if isinstance(following, LimitKind):
            return LimitReached(following)
        run.tokens.append_context(ids)
        run.usage = usage
        return None

    async def _generate(self, run: Run, max_new_tokens: int) -> GenerateResult:
        job = run.job
        run.stage = FaultStage.GENERATE
        assignment = job.assignment
        turn = run.state.turns
        tries = 0

        async def generate() -> GenerateResult:
            nonlocal tries
            tries += 1
            return await self._policy.generate(
                GenerateRequest(
                    request_id=f"{job.sandbox_key}-{turn}-{tries}",
                    session=_session(job.id),
                    input_ids=run.tokens.context(),
                    max_new_tokens=max_new_tokens,
                    sampling=assignment.sampling,
                    seed=turn_seed(assignment.sampling.seed, job.id, turn),
                    stop_token_ids=self._template.stop_token_ids,
                    min_version=assignment.min_version,
                    pin_version=assignment.pin_version,
                    timeout_s=self._settings.generate_timeout_s,
                )
            )

        async with self._engine_requests.slot(job.priority):
            began_s = self._clock()
            with self._tracer.start_as_current_span("generate", record_exception=False) as span:
                result = await self._patience.call(generate, f"generation of {job.id}")
                span.set_attribute("tokens", len(result.output_ids))
                span.set_attribute("version", result.versions[-1].version)
            run.generate_s += self._clock() - began_s
        _check_versions(result, assignment)
        run.tokens.append_sampled(result.output_ids, result.logprobs, result.versions)
        run.usage = run.usage.after_turn(len(result.output_ids))
        run.step(TurnTaken())
        job.turns = run.usage.turns
        job.sampled_tokens = run.usage.sampled_tokens
        oldest = min(span.version for span in result.versions)
        job.oldest_version = min(job.oldest_version or oldest, oldest)
        job.on_turn(job)
        return result

    async def _run_command(
        self, run: Run, task: Task, workspace: Workspace, command: str
    ) -> Message | LimitReached:
        run.stage = FaultStage.COMMAND
        single_s = self._settings.command_timeout_s
        if task.command_timeout_s > 0:
            single_s = min(single_s, task.command_timeout_s)
        budget = next_command(run.job.limits, run.usage, single_s)
        if isinstance(budget, LimitKind):
            return LimitReached(budget)
        with self._tracer.start_as_current_span("tool", record_exception=False) as span:
            try:
                result = await workspace.run(
                    command,
                    timeout_s=budget.timeout_s,
                    max_output_bytes=self._agent.max_output_bytes,
                )
            except ServiceError as error:
                if error.reason is not Reason.TOO_LARGE:
                    raise
                # The policy wrote a command that no sandbox takes: it is told, nothing failed.
                return self._agent.correction(
                    Unusable("The command is too long to be run. Write a shorter one."),
                    self._remaining(run),
                )
            span.set_attribute("exit_code", result.exit_code)
        run.stage = FaultStage.INTERNAL
        run.usage = run.usage.after_command(result.wall_s)
        if result.timed_out and budget.exhausts:
            return LimitReached(LimitKind.COMMAND_TIME)
        return self._agent.observation(
            CommandOutcome(
                output=result.stdout,
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                out_of_memory=result.out_of_memory,
                timeout_s=budget.timeout_s,
                remaining=self._remaining(run),
            )
        )

    def _remaining(self, run: Run) -> str:
        return remaining_text(run.job.limits, run.usage) if self._agent.tells_remaining else ""


def _session(attempt: AttemptId) -> str:
    return str(attempt)


def _check_versions(result: GenerateResult, assignment: Assignment) -> None:
    wrong = sorted(
        {
            span.version
            for span in result.versions
            if span.version < assignment.min_version
            or (assignment.pin_version and span.version != assignment.pin_version)
        }
    )
    if wrong:
        wanted = assignment.pin_version or f">= {assignment.min_version}"
        raise service_error(
            Reason.VERSION_NOT_READY,
            f"tokens came from versions {wrong}, the group demands {wanted}; the attempt is made "
            "again",
        )


__all__ = ["AttemptJob", "Run", "RunnerSettings", "TurnTaker"]
