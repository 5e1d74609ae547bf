"""The one form of a task, whatever it was read from.

A task has an open side (instruction, environment) that agents see, and a hidden side (grader,
reference) that leaves this service only into a grading sandbox. `wire.py` sends the open side
alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from sandbox_client.environments import EnvironmentTree

from swe_eval.core.decontaminate import TaskFacts

DEFAULT_WORKDIR = "/workspace"
MAX_TESTS = 20_000
"""Most required tests of a task: their results have to fit into one command's bounded output."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file of a folder tree."""

    content: bytes
    executable: bool = False


FileTree = Mapping[str, TreeFile]
"""Files by relative path with forward slashes."""


class EnvironmentSource(StrEnum):
    """What a sandbox is made from."""

    TREE = "tree"
    """A folder tree over the host's root."""
    IMAGE = "image"
    """An image reference."""
    DOCKERFILE = "dockerfile"
    """A Dockerfile whose context is the folder tree."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The world an agent starts in: content-addressed files, or an image, and its limits."""

    files: FileTree = field(default_factory=dict)
    """The tree itself, or a Dockerfile's context."""
    image: str = ""
    dockerfile: str = ""
    workdir: str = DEFAULT_WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    """0: the sandbox service's default, as for `cpus`."""
    cpus: float = 0.0
    network: bool = False
    forget_history: bool = False
    """Whether the work folder loses its git history at the start: it may hold the repair."""

    @property
    def source(self) -> EnvironmentSource:
        """What a sandbox is made from: the Dockerfile, else the image, else the tree."""
        if self.dockerfile:
            return EnvironmentSource.DOCKERFILE
        return EnvironmentSource.IMAGE if self.image else EnvironmentSource.TREE

    @cached_property
    def digest(self) -> str:
        """The sandbox service's digest of the files."""
        return self.tree.digest

    @property
    def tree(self) -> EnvironmentTree:
        """The files in the sandbox service's form."""
        return EnvironmentTree(
            files={path: file.content for path, file in self.files.items()},
            executable=frozenset(path for path, file in self.files.items() if file.executable),
        )

    @property
    def size_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(len(file.content) for file in self.files.values())

    def tar(self) -> bytes:
        """The files as a tar archive; the same files give the same bytes everywhere."""
        return self.tree.tar_bytes()


class TestRunner(StrEnum):
    """Who runs a grader's test files."""

    __test__ = False

    FUNCTIONS = "functions"
    """Plain `def test_x():` functions, without pytest: cheap, and no plug-in to patch."""
    PYTEST = "pytest"


@dataclass(frozen=True, kw_only=True, slots=True)
class TestGrader:
    """Hidden test files, and the tests in them that must pass."""

    __test__ = False

    runner: TestRunner
    files: Mapping[str, str]
    """Relative path to source text; put into the work folder after the diff."""
    fail_to_pass: tuple[str, ...]
    """Ids (`path::test`) that fail before the repair."""
    pass_to_pass: tuple[str, ...] = ()
    wall_s: float = 60.0
    cpu_s: int = 30

    @property
    def required(self) -> tuple[str, ...]:
        """All tests that a solution must pass, in order, each once."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptGrader:
    """A Harbor tests/ folder: `test.sh` judges and writes a reward to /logs/verifier."""

    files: FileTree
    """Placed at /tests."""
    env: Mapping[str, str] = field(default_factory=dict)
    wall_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogGrader:
    """A script that runs the repository's own tests, judged by what its log says of each.

    Weaker than a `TestGrader`: the tested code can write to the log (`grading.parsers`).
    """

    script: str
    """Run by bash. Prints the markers of `grading.parsers.log` around the tests' output."""
    parser: str
    """Name in `grading.parsers.PARSERS`."""
    fail_to_pass: tuple[str, ...]
    """Tests, by the names in the log, that fail before the repair."""
    pass_to_pass: tuple[str, ...] = ()
    protected: frozenset[str] = frozenset()
    """Files that the script puts in place; changes to them are dropped from a diff."""
    wall_s: float = 1800.0

    @property
    def required(self) -> tuple[str, ...]:
        """All tests that a solution must pass, in order, each once."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))


Grader = TestGrader | ScriptGrader | LogGrader


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A known solution: a patch, or a Harbor solution/ folder with `solve.sh`."""

    patch: bytes = b""
    files: FileTree = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem, its world, and how a solution is judged."""

    task_id: str
    repository: str
    instruction: str
    environment: Environment
    grader: Grader
    kind: str = ""
    """Kind of bug, or another stratum; may be empty."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """More to stratify by, such as `difficulty`."""
    reference: Reference | None = None
    command_timeout_s: float = 0.0
    """Longest a single command of the agent may run; 0: no limit of the task's own."""

    @property
    def facts(self) -> TaskFacts:
        """What it can be known by in another set."""
        return TaskFacts(
            task_id=self.task_id,
            repository=self.repository,
            text=self.instruction,
            patch=self.reference.patch.decode("utf-8", "replace") if self.reference else "",
        )
