r"""A whole engine in memory for tests of consumers: its own ledger, stream and loop, fake peers.

Tasks are files in a dictionary, commands are `cat FILE`, `write FILE TEXT` and `sleep SECONDS`
(which counts as run time and takes none), the policy is a function of the conversation::

    def policy(turn: ScriptTurn) -> str:
        return "write answer 42" if turn.number == 0 else "submit"

    async with MemoryEngine(folder, policy) as engine, engine.channel() as channel:
        consumer = GroupConsumer(channel, consumer_id="me", purpose=Purpose.TRAINING, incarnation=1)
        ...

A task `t` is solved by `write answer t`. Hooks fail or delay whatever they are called for.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from sandbox_client.types import ExecResult
from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.errors import Reason, service_error
from service_kit.server import Server, ServerConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout_engine.agents.bash import BashAgent, BashAgentConfig
from rollout_engine.agents.template import ChatTemplate
from rollout_engine.config import LedgerConfig, WorkConfig
from rollout_engine.engine import RolloutEngine
from rollout_engine.ledger.store import Ledger
from rollout_engine.peers import EnvironmentRecipe, Grade, Task
from rollout_engine.policy import (
    EngineStatus,
    FinishReason,
    GenerateRequest,
    GenerateResult,
)
from rollout_engine.types import AttemptId, VersionSpan

_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Hook = Callable[[str, str], Awaitable[None]]
"""Called before anything happens, with its kind (`task`, `create`, `generate`, `run`, `diff`,
`grade`, `destroy`) and its name; may wait, or raise what the thing shall fail with."""


async def no_hook(kind: str, name: str) -> None:
    """Let everything happen."""


def byte_template() -> ChatTemplate:
    """Make a chat template over single bytes, without a model folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return ChatTemplate(tokenizer, _CHAT)


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """What a scripted policy knows when it speaks.

    Attributes:
        session: Names group, epoch, attempt and try, as `g-1@0/3.0`.
        number: Of the turn, from 0.
        context: The conversation as text, special tokens included.
        seed: Of this generation.
        version: Of the weights that speak.
    """

    session: str
    number: int
    context: str
    seed: int
    version: int


class ScriptedPolicy:
    """Fulfils `policy.PolicyEngine` with a function.

    Attributes:
        version: The weights' number; change it with `update`.
    """

    def __init__(
        self,
        script: Callable[[ScriptTurn], str],
        template: ChatTemplate,
        *,
        version: int = 1,
        hook: Hook = no_hook,
    ) -> None:
        self.version = version
        self._script = script
        self._template = template
        self._hook = hook
        self._turns: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self.aborted: list[str] = []

    async def update(self, version: int) -> None:
        """Switch to other weights."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Say what the script says."""
        session = request.session
        number = self._turns.get(session, 0)
        try:
            await self._hook("generate", f"{session}#{number}")
        except asyncio.CancelledError:
            self.aborted.append(session)
            raise
        self._turns[session] = number + 1
        context = self._template.text(request.input_ids)
        said = self._script(ScriptTurn(session, number, context, request.seed, self.version))
        ids = self._template.assistant(said)
        finish = FinishReason.STOP if len(ids) <= request.max_new_tokens else FinishReason.LENGTH
        ids = ids[: request.max_new_tokens]
        return GenerateResult(
            output_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            finish=finish,
            versions=(VersionSpan(0, len(ids), self.version, self.version),),
        )

    async def await_version(self, *, minimum: int = 0, exactly: int = 0) -> None:
        """Wait for the version demanded; a pinned one that has passed never comes again."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.version >= minimum and self.version >= exactly
            )
        if exactly and self.version != exactly:
            raise service_error(
                Reason.VERSION_NOT_READY,
                f"the policy holds version {self.version}, past {exactly}",
                retryable=False,
            )

    def end_session(self, session: str) -> None:
        """Forget a session."""
        self._turns.pop(session, None)

    def statuses(self) -> Sequence[EngineStatus]:
        """Tell one engine."""
        return [EngineStatus("memory://policy", healthy=True, weight_version=str(self.version))]


class MemoryWorkspace:
    """One attempt's files."""

    def __init__(self, owner: MemoryWorkspaces, key: str, task: Task) -> None:
        self._owner = owner
        self._key = key
        self._files = {"task": task.task_id}
        self._changed: dict[str, str] = {}

    async def run(self, command: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run `cat FILE`, `write FILE TEXT` or `sleep SECONDS`."""
        await self._owner.hook("run", command)
        self._alive()
        words = shlex.split(command)
        if words[:1] == ["sleep"]:
            wanted_s = float(words[1])
            timed_out = wanted_s > timeout_s
            return ExecResult(
                exit_code=137 if timed_out else 0,
                timed_out=timed_out,
                wall_s=min(wanted_s, timeout_s),
                max_output_bytes=max_output_bytes,
            )
        if words[:1] == ["write"]:
            self._changed[words[1]] = words[2]
            return ExecResult(0, wall_s=0.01, max_output_bytes=max_output_bytes)
        if words[:1] == ["cat"]:
            text = (self._files | self._changed).get(words[1])
            output = b"no such file\n" if text is None else text.encode() + b"\n"
            return ExecResult(
                int(text is None), output, wall_s=0.01, max_output_bytes=max_output_bytes
            )
        return ExecResult(127, b"not found\n", wall_s=0.01, max_output_bytes=max_output_bytes)

    async def diff(self) -> bytes:
        """Tell the files written."""
        await self._owner.hook("diff", self._key)
        self._alive()
        return "".join(f"{name}={text}\n" for name, text in sorted(self._changed.items())).encode()

    async def destroy(self) -> None:
        """End it."""
        if self._key in self._owner.living:
            await self._owner.hook("destroy", self._key)
            self._owner.living.discard(self._key)

    def _alive(self) -> None:
        if self._key not in self._owner.living:
            raise service_error(Reason.SANDBOX_GONE, f"sandbox {self._key} is gone")


class MemoryWorkspaces:
    """Fulfils `peers.Workspaces`.

    Attributes:
        living: Keys of the workspaces that are not destroyed.
        made: How many were made.
    """

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.living: set[str] = set()
        self.made = 0

    async def create(self, task: Task, key: str) -> MemoryWorkspace:
        """Make a workspace that holds one file, `task`."""
        await self.hook("create", key)
        self.living.add(key)
        self.made += 1
        return MemoryWorkspace(self, key, task)


class MemoryEvaluator:
    """Fulfils `peers.Tasks` and `peers.Grader`: every id is a task.

    Attributes:
        graded: Attempts graded, with their diffs.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.graded: list[tuple[AttemptId, bytes]] = []

    async def get(self, task_id: str) -> Task:
        """Make up a task."""
        await self._hook("task", task_id)
        return Task(task_id, f"Write {task_id}.", EnvironmentRecipe(digest=f"digest-of-{task_id}"))

    async def environment(self, digest: str) -> bytes:
        """Give no files."""
        return b""

    async def grade(self, task_id: str, attempt: AttemptId, diff: bytes) -> Grade:
        """Judge whether `answer` holds the task's id."""
        await self._hook("grade", task_id)
        self.graded.append((attempt, diff))
        solved = f"answer={task_id}\n".encode() in diff
        return Grade(solved, "" if solved else "tests_failed")


@dataclass
class MemoryEngine:
    """An engine with a ledger in `folder`, serving on a free port of loopback.

    Attributes:
        script: What the policy says.
        config: Limits, concurrency and so on. The agent's format is `plain` whatever it says.
        hook: Called before everything that the peers do.
        version: Of the policy's weights.
        bind: Where to serve; port 0 takes a free one.
    """

    folder: Path
    script: Callable[[ScriptTurn], str]
    config: WorkConfig = field(default_factory=WorkConfig)
    hook: Hook = no_hook
    version: int = 1
    bind: str = "127.0.0.1:0"

    async def __aenter__(self) -> Self:
        config = self.config.model_copy(
            update={
                "agent": BashAgentConfig(action_format="plain", tell_remaining=False),
                "ledger": LedgerConfig(folder=self.folder),
            }
        )
        template = byte_template()
        self.ledger = await Ledger.open(self.folder)
        self.policy = ScriptedPolicy(self.script, template, version=self.version, hook=self.hook)
        self.workspaces = MemoryWorkspaces(self.hook)
        self.evaluator = MemoryEvaluator(self.hook)
        self.engine = RolloutEngine(
            config,
            ledger=self.ledger,
            tasks=self.evaluator,
            workspaces=self.workspaces,
            grader=self.evaluator,
            policy=self.policy,
            template=template,
            agent=BashAgent(config.agent),
        )
        self._running = asyncio.create_task(self.engine.run())
        self._server = Server(
            ServerConfig(bind=self.bind, drain_grace_s=1.0), [self.engine.service]
        )
        await self._server.start()
        self.address = self._server.address
        return self

    async def stop(self) -> None:
        """End it as a terminated process does: what runs is cut off, what is finished stays."""
        await self.__aexit__(None, None, None)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._running.done():
            return
        await self._server.drain()
        self._running.cancel()
        (failure,) = await asyncio.gather(self._running, return_exceptions=True)
        await self.ledger.close()
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure

    def channel(self) -> Channel:
        """Open a channel to it."""
        return open_channel(ChannelConfig(target=self.address))


__all__ = [
    "Hook",
    "MemoryEngine",
    "MemoryEvaluator",
    "MemoryWorkspace",
    "MemoryWorkspaces",
    "ScriptTurn",
    "ScriptedPolicy",
    "byte_template",
    "no_hook",
]
