"""Configuration of the evaluation service; each field documents its unit and default."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt
from service_kit.channel import ChannelConfig
from service_kit.config import Config
from service_kit.server import ServerConfig
from service_kit.telemetry import TelemetryConfig

MIB = 1024 * 1024
INDEXES_PER_SEED = 1_000_000
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class _NamedSetConfig(Config):
    """What every set of tasks has."""

    name: str
    """Name that clients ask for; lower case letters, digits, `.`, `_` and `-`."""
    quarantine: Path | None = None
    """A file that `tailrace tasks selftest` wrote: tasks that it quarantines are not served."""


class GeneratedSetConfig(_NamedSetConfig):
    """Tasks made on demand by the generator."""

    kind: Literal["generated"] = "generated"
    split: Literal["pretrain", "train", "heldout"] = "train"
    """Splits share no repository, function name or bug."""
    count: Annotated[int, Field(ge=1, le=INDEXES_PER_SEED)] = 1000
    """How many tasks the set has."""
    first: Annotated[int, Field(ge=0)] = 0
    """Number of its first task within the split."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Another seed gives other tasks: their numbers start at seed * 1,000,000 + first."""
    test_wall_s: PositiveFloat = 20.0
    """Longest time the hidden tests may take."""
    test_cpu_s: PositiveInt = 2
    """Processor time the hidden tests may take; a bug can loop for ever."""
    command_timeout_s: PositiveFloat = 10.0
    """Longest time one command of an agent may take."""
    cached_tasks: PositiveInt = 512
    """Tasks kept in memory; others are made again."""


class HarborSetConfig(_NamedSetConfig):
    """Tasks in Harbor directories."""

    kind: Literal["harbor"] = "harbor"
    path: Path
    """A folder of task directories, at any depth, or a single one."""
    environment: Literal["auto", "tree", "image"] = "auto"
    """How a Dockerfile becomes an environment. `auto`: a folder tree where it only copies files,
    else an image. `tree`: always a folder tree over the host's root; RUN lines are left out.
    `image`: always an image."""
    keep_history: bool = False
    """Leave git's history where agents see it: for tasks about it. Else repositories start with one
    commit of what is there, for others may hold the solution."""
    max_task_bytes: PositiveInt = 64 * MIB
    """Largest task directory."""
    command_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """Longest time one command of an agent may take; 0: no limit of the task's own."""


class RowSetConfig(_NamedSetConfig):
    """Tasks in the rows of a data set."""

    kind: Literal["swebench", "swesmith"]
    """Whose columns the rows have."""
    location: str
    """A `.json`, `.jsonl` or `.parquet` file, a folder of them, or `hf:OWNER/NAME[@REVISION]`, a
    data set of the Hugging Face hub."""
    split: str = ""
    """Split to take of a data set's files; empty: all."""
    profiles: Path | None = None
    """For `swesmith`: a JSON list of objects with `mirror` and `test_cmd`, for repositories whose
    tests are not run by the usual command."""
    test_wall_s: PositiveFloat = 1800.0
    """Longest time the tests may take."""
    command_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """Longest time one command of an agent may take; 0: no limit of the task's own."""


ReadSetConfig = HarborSetConfig | RowSetConfig
"""Sets that are read, as a whole, when the service starts."""
TaskSetConfig = Annotated[GeneratedSetConfig | ReadSetConfig, Field(discriminator="kind")]


class DecontaminationConfig(Config):
    """What sets to train on must not share with sets to evaluate on."""

    evaluation_sets: tuple[str, ...] = ()
    """Names of task sets for evaluation alone. Every other set that was read is compared with those
    of them that were read; generated splits are disjoint by construction."""
    on_overlap: Literal["refuse", "leave_out", "allow"] = "refuse"
    """`refuse`: the service does not start, so that no training does. `leave_out`: it starts
    without the tasks of the other sets that overlap. `allow`: with them. All are logged."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Repositories by other names of theirs (`{"old/name" = "new/name"}`): renamed or forked."""
    text_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a problem statement's runs of six words in another that makes the two equal."""
    patch_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a reference patch's changed lines in another that makes the two equal."""


class FaultInjection(Config):
    """Faults on purpose, for tests of whoever calls `Grade`."""

    grade_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of attempts whose grading fails with INJECTED_FAULT, chosen by seed and attempt."""
    seed: int = 0
    """Another seed chooses other attempts."""


class GradingConfig(Config):
    """How diffs are graded."""

    concurrency: PositiveInt = 8
    """Gradings at once; others wait in line."""
    max_waiting: PositiveInt = 4096
    """Longest line; beyond it `Grade` fails with QUOTA_EXHAUSTED and may be repeated."""
    max_diff_bytes: PositiveInt = MIB
    """A larger diff is UNSOLVED with reason diff_too_large."""
    log_bytes: PositiveInt = 4096
    """Bytes of the tests' output kept, from its end."""
    python: str = "python3"
    """Interpreter of test runs inside the sandbox; 3.9 or newer."""
    controls: bool = True
    """Whether a run in which all tests passed is followed by one with altered tests, in another
    sandbox, that only a right program fails. It doubles what a solved attempt costs."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a grading begins anew because its sandbox was lost, before that is a fault."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest time for a sandbox to start."""
    call_timeout_s: PositiveFloat = 60.0
    """Deadline of every other call to the sandbox service, on top of the tests' own time."""
    faults: FaultInjection = FaultInjection()
    """Faults on purpose; off by default."""


class EvaluationConfig(Config):
    """How policies are evaluated."""

    state_dir: Path = Path("swe-eval-state")
    """Where evaluations keep what they have scored, to resume by name."""
    rollout_targets: list[ChannelConfig] = Field(
        default_factory=lambda: [ChannelConfig(target="127.0.0.1:7104")]
    )
    """rollout-engine services that run attempts, unless a request names its own."""
    groups_in_flight: PositiveInt = 64
    """Tasks assigned to one rollout-engine at a time, within the credits that it gives."""
    quarantine_retries: Annotated[int, Field(ge=0)] = 1
    """How often a task whose attempts kept faulting is assigned again before it is left out."""
    reassign_s: PositiveFloat = 120.0
    """With several engines: one that is away for longer loses its tasks to the others."""
    heartbeat_s: PositiveFloat = 5.0
    """Longest silence on the event stream."""
    idle_s: PositiveFloat = 600.0
    """An evaluation none of whose engines can be reached for this long fails; it can be resumed."""
    resamples: PositiveInt = 10_000
    """Bootstrap resamples of the confidence interval."""
    trajectories: bool = True
    """Keep the trajectory of every attempt that counts as ATIF JSON, in state_dir."""
    tokenizer: Path | None = None
    """Model folder whose tokenizer and chat template turn trajectories into text; without one they
    hold token ids alone."""


def _default_task_sets() -> list[GeneratedSetConfig | ReadSetConfig]:
    return [
        GeneratedSetConfig(name="train", split="train", count=2000),
        GeneratedSetConfig(name="heldout", split="heldout", count=200),
    ]


class EvalConfig(Config):
    """The whole configuration of `python -m swe_eval serve`."""

    server: ServerConfig = ServerConfig(bind="127.0.0.1:7102")
    telemetry: TelemetryConfig = TelemetryConfig()
    sandbox: ChannelConfig = ChannelConfig(target="127.0.0.1:7101")
    """The sandbox service that grading uses."""
    task_sets: list[TaskSetConfig] = Field(default_factory=_default_task_sets)
    """The sets that clients can list and draw from."""
    decontamination: DecontaminationConfig = DecontaminationConfig()
    grading: GradingConfig = GradingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @pydantic.model_validator(mode="after")
    def _names_are_plain_and_unique(self) -> Self:
        seen: set[str] = set()
        for task_set in self.task_sets:
            if not _NAME.fullmatch(task_set.name):
                raise ValueError(
                    f"task set name {task_set.name!r}: use a-z, 0-9, '.', '_' and '-' only"
                )
            if task_set.name in seen:
                raise ValueError(f"two task sets are named {task_set.name!r}; names must be unique")
            seen.add(task_set.name)
        unknown = sorted(set(self.decontamination.evaluation_sets) - seen)
        if unknown:
            raise ValueError(
                f"decontamination.evaluation_sets names {unknown}; the task sets are {sorted(seen)}"
            )
        return self
