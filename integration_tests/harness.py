"""A real stack for tests: `tailrace up` over the shipped stack file, with the scripted engine.

Everything is a process of its own and is reached as a user would reach it: by gRPC, by the ledger's
file, by the files of the trainer's run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from sandbox_client.client import SandboxClient
from service_kit.channel import ChannelConfig
from tailrace.weight_sync.v1 import weight_service_pb2 as weights_pb
from tailrace_cli.demo.services import (
    Services,
    StageEnd,
    StageEvent,
    StageNote,
    StageStep,
    StageVersion,
    connect,
)
from tailrace_cli.stack import tether
from tailrace_cli.stack.files import BASE_MODEL, LOCAL_STACK
from tailrace_cli.stack.health import free_ports, is_serving
from tailrace_cli.stack.spec import StackSpec, apply_setting, load_stack

from integration_tests.processes import parents
from integration_tests.records import LedgerAttempt, LedgerView, read_ledger

SERVICES = ("sandbox", "eval", "weights", "rollout", "trainer")
START_S = 120.0
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="sandboxes and mounts need root; run the tests as root"
)
STAGE = "rl"

Recipe = dict[str, Any]


def grpo_recipe(steps: int, **changes: Any) -> Recipe:
    """Few, small steps; every checkpoint stays, so that a run's whole history can be read."""
    recipe: Recipe = {
        "task_set": "train",
        "max_tasks": 60,
        "steps": steps,
        "batch_groups": 3,
        "group_size": 4,
        "minibatches": 1,
        "limits": {"turns": 8, "turn_tokens": 40, "context_tokens": 420},
        "admission": {"staleness_bound": 2},
        "optimizer": {"learning_rate": 1e-5},
        "checkpoint": {"every_steps": 1, "keep": 1000},
    }
    return recipe | changes


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for something that is going to happen.

    Raises:
        AssertionError: It did not.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """A file system of this size at `folder`, for this process and its children alone.

    In a mount namespace of its own: nothing is left, even when the tests are killed.
    """
    clone_newns = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newns) != 0:
        pytest.skip(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "small", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class Witness:
    """Looks at the ledger again and again, and remembers what it ever held as finished."""

    folder: Callable[[], Path]
    attempts: dict[tuple[str, int, int], LedgerAttempt] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    looks: int = 0

    def look(self) -> LedgerView | None:
        """Read the ledger, and compare it with what was seen before; None before its birth."""
        try:
            view = read_ledger(self.folder())
        except sqlite3.OperationalError:
            return None
        self.looks += 1
        for key, seen in self.attempts.items():
            group = view.groups.get(key[:2])
            if group is None:
                self.losses.append(f"group {key[:2]} is gone")
            elif group.state not in ("COMMITTED", "WITHDRAWN") and view.attempts.get(key) != seen:
                self.losses.append(f"{seen} became {view.attempts.get(key)}")
        self.attempts |= view.attempts
        return view

    async def run(self) -> None:
        """Look ten times a second."""
        while True:
            self.look()
            await asyncio.sleep(0.1)


# The stack


class Stack:
    """`tailrace up` as a process, and its services.

    Args:
        folder: For the stack's file, its state and its output.
        settings: `process.dotted.key=value`.
        engine_delay_s: Longest wait of the scripted engine before an answer.
        scripted: Use the scripted engine instead of the embedded one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Sequence[str] = (),
        engine_delay_s: float = 0.1,
        scripted: bool = True,
    ) -> None:
        self.folder = folder
        self.file = folder / "stack.toml"
        self.state = folder / "state"
        self.output = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        document = stack_document(self.state, engine_delay_s=engine_delay_s, scripted=scripted)
        tables = {process["name"]: process["config"] for process in document["processes"]}
        for setting in settings:
            apply_setting(tables, setting)
        self.file.write_text(tomli_w.dumps(document))
        self.spec: StackSpec = load_stack(self.file)

    @property
    def targets(self) -> dict[str, str]:
        """host:port of every process."""
        return {process.name: process.target for process in self.spec.processes}

    @property
    def supervisor_pid(self) -> int:
        """Process id of `tailrace up`."""
        assert self._process is not None
        return self._process.pid

    @property
    def ledger(self) -> Path:
        """The ledger's folder."""
        return Path(self._config("rollout")["ledger"]["folder"])

    @property
    def stage_folder(self) -> Path:
        """What the trainer keeps of the stage."""
        return Path(self._config("trainer")["run_dir"]) / "stages" / STAGE

    def _config(self, name: str) -> Mapping[str, Any]:
        return next(process.config for process in self.spec.processes if process.name == name)

    async def start(self) -> None:
        """Start it, and wait until every process serves."""
        self.spawn()
        deadline = time.monotonic() + START_S
        for process in self.spec.processes:
            while not await is_serving(process):
                assert self._process is not None
                assert self._process.poll() is None, (
                    f"the stack ended with {self._process.returncode}:\n{self.output.read_text()}"
                )
                assert time.monotonic() < deadline, f"{process.name} does not serve"
                await asyncio.sleep(0.1)

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start `tailrace up`."""
        command = [sys.executable, "-m", "tailrace_cli", "up", "--stack", str(self.file)]
        with self.output.open("ab") as output:
            # Tests that are killed leave no stack behind.
            tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]
            self._process = subprocess.Popen(tethered, stdout=output, stderr=output)
        return self._process

    def pids(self) -> dict[str, int]:
        """Process ids of the services that are there now, by name."""
        found = {}
        for pid, parent in parents().items():
            if parent == self.supervisor_pid:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if b"--config" in words:
                        config = Path(words[words.index(b"--config") + 1].decode())
                        found[config.stem] = pid
        return found

    async def kill(self, name: str) -> int:
        """SIGKILL one process; returns once its successor serves, with that one's id."""
        old = self.pids()[name]
        os.kill(old, signal.SIGKILL)
        await until(lambda: self.pids().get(name, old) != old, f"{name} is started again", START_S)
        [process] = [p for p in self.spec.processes if p.name == name]
        deadline = time.monotonic() + START_S
        while not await is_serving(process):
            assert time.monotonic() < deadline, f"{name} does not serve after its restart"
            await asyncio.sleep(0.05)
        return self.pids()[name]

    def kill_everything(self) -> None:
        """SIGKILL the supervisor and every service, at once."""
        pids = [self.supervisor_pid, *self.pids().values()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM to the supervisor; returns its exit code."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill_everything()
        return process.returncode

    def log(self, name: str) -> str:
        """What a process has printed, over all its lives."""
        return (self.state / "logs" / f"{name}.log").read_text(errors="replace")

    async def sandboxes(self) -> list[str]:
        """Ids of the sandboxes that exist, whoever made them."""
        target = ChannelConfig(target=self.targets["sandbox"])
        async with SandboxClient(target) as client:
            return [info.sandbox_id for info in await client.list()]


def stack_document(state: Path, *, engine_delay_s: float, scripted: bool) -> dict[str, Any]:
    """The shipped stack file with free ports and, if asked for, the scripted engine."""
    document = tomllib.loads(LOCAL_STACK.read_text())
    *ports, engine_port = free_ports(len(SERVICES) + 1)
    document["state_dir"] = str(state)
    document["variables"] |= {
        name: f"127.0.0.1:{port}" for name, port in zip(SERVICES, ports, strict=True)
    } | {"engine_port": str(engine_port), "run": "test"}
    document["restart"] = {"backoff_s": 0.2, "backoff_max_s": 1.0}
    if scripted:
        [engine] = [p for p in document["processes"] if p["name"] == "engine"]
        engine["module"] = "scripted_engine"
        engine["environment"] = {"PYTHONPATH": str(Path(__file__).parent)}
        engine["config"] = {
            "model": str(BASE_MODEL),
            "port": engine["config"]["port"],
            "delay_s": engine_delay_s,
        }
    return document


@contextlib.asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[Services]:
    """A started stack and calls to it; nothing of it is left afterwards."""
    try:
        await stack.start()
        async with connect(stack.targets) as services:
            yield services
    finally:
        stack.stop()


# Runs


@dataclass
class StageRun:
    """A stage and what was heard of it."""

    events: list[StageEvent] = field(default_factory=list)

    @property
    def steps(self) -> list[StageStep]:
        """Steps in the order in which they were told."""
        return [event for event in self.events if isinstance(event, StageStep)]

    @property
    def versions(self) -> list[StageVersion]:
        """Published versions."""
        return [event for event in self.events if isinstance(event, StageVersion)]

    @property
    def notes(self) -> list[str]:
        """Notes."""
        return [event.text for event in self.events if isinstance(event, StageNote)]

    @property
    def ended(self) -> StageEnd | None:
        """How it ended."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, StageEnd) else None

    @property
    def newest_step(self) -> int:
        """The last step that was told."""
        return self.steps[-1].step if self.steps else 0

    def counts(self) -> Counter[str]:
        """Counts of all steps together."""
        total: Counter[str] = Counter()
        for step in self.steps:
            total.update(step.counts)
        return total

    async def follow(self, services: Services, recipe: Recipe) -> None:
        """Start the stage and listen to its end, whatever dies meanwhile."""
        async for event in services.follow_stage(STAGE, tomli_w.dumps(recipe), "rl"):
            self.events.append(event)


async def announced_versions(services: Services, run: str = "test") -> list[Any]:
    """What WeightService holds of a run, oldest first."""
    reply = await services.weights.ListVersions(weights_pb.ListVersionsRequest(run=run), timeout=10)
    return [announced.version for announced in reply.versions]
