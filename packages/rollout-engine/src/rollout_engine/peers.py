"""What an attempt asks of other services, besides the policy. Adapters fulfil it over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sandbox_client.types import ExecResult

from rollout_engine.types import AttemptId


@dataclass(frozen=True, slots=True)
class EnvironmentRecipe:
    """What an attempt's sandbox starts from.

    Attributes:
        digest: Of the recipe; of the folder tree, if `image` is empty.
        image: Container image; empty for a folder tree.
        dockerfile: Builds an image with the tree as its context; empty for none.
        forget_history: Whether git's history in the work folder goes before the agent comes.
    """

    digest: str
    image: str = ""
    dockerfile: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    cpus: float = 0.0
    network: bool = False
    forget_history: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent may know of a task.

    Attributes:
        command_timeout_s: Longest that one command may run; 0: the engine's default.
    """

    task_id: str
    instruction: str
    environment: EnvironmentRecipe
    command_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's verdict. A grader that fails raises instead."""

    solved: bool
    reason: str = ""


class Tasks(Protocol):
    """The holder of tasks."""

    async def get(self, task_id: str) -> Task:
        """Fetch what an agent may know of a task."""
        ...

    async def environment(self, digest: str) -> bytes:
        """Fetch the tar of a folder tree."""
        ...


class Grader(Protocol):
    """Judges diffs."""

    async def grade(self, task_id: str, attempt: AttemptId, diff: bytes) -> Grade:
        """Run the task's tests on a diff."""
        ...


class Workspace(Protocol):
    """One attempt's sandbox."""

    async def run(self, command: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run a shell command; standard error goes where standard output goes."""
        ...

    async def diff(self) -> bytes:
        """Compare the work folder with its environment."""
        ...

    async def destroy(self) -> None:
        """End it. Repeatable."""
        ...


class Workspaces(Protocol):
    """Makes sandboxes."""

    async def create(self, task: Task, key: str) -> Workspace:
        """Make a sandbox of the task's environment; the same key gives the same sandbox."""
        ...


__all__ = [
    "EnvironmentRecipe",
    "Grade",
    "Grader",
    "Task",
    "Tasks",
    "Workspace",
    "Workspaces",
]
