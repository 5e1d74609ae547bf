"""The task sets of a service: where tasks are listed, found by id, and their files by digest."""

import logging
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from swe_eval.config import (
    INDEXES_PER_SEED,
    DecontaminationConfig,
    GeneratedSetConfig,
    ReadSetConfig,
)
from swe_eval.core.decontaminate import TaskFacts, contamination
from swe_eval.core.selftest import Outcome
from swe_eval.errors import MalformedTaskError, TaskSetError
from swe_eval.generate import make_task
from swe_eval.grading.identity import judge_digest
from swe_eval.tasks.digest import task_digest
from swe_eval.tasks.generated import from_generated
from swe_eval.tasks.selftest_file import read_records
from swe_eval.tasks.sources import source_of, without_twins
from swe_eval.tasks.task import Environment, Task

logger = logging.getLogger(__name__)

_GENERATED_ID = re.compile(r"([a-z]+)-(\d+)-[a-z-]+")
_REMEMBERED_DIGESTS = 100_000


@dataclass(frozen=True, slots=True)
class TaskRef:
    """A task in a listing."""

    task_id: str
    repository: str
    kind: str
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, str]:
        """What its stratum can be made of, by name."""
        return {**self.more, "repository": self.repository, "kind": self.kind}


class TaskSet(Protocol):
    """An ordered collection of tasks."""

    @property
    def name(self) -> str:
        """What clients ask for."""
        ...

    @property
    def generated(self) -> bool:
        """Whether tasks are made on demand."""
        ...

    @property
    def stratify_by(self) -> tuple[str, ...]:
        """Columns that make a stratum unless a caller names others."""
        ...

    @property
    def problems(self) -> Sequence[MalformedTaskError]:
        """Tasks that were left out, with the reason."""
        ...

    def __len__(self) -> int: ...

    def refs(self, start: int, count: int) -> list[TaskRef]:
        """Up to `count` tasks from position `start` on."""
        ...

    def find(self, task_id: str) -> Task | None:
        """The task with this id, or None if it is not of this set."""
        ...

    def leave_out(self, task_ids: Collection[str]) -> None:
        """Drops tasks."""
        ...


class GeneratedSet:
    """Tasks that the generator makes when they are asked for; the most recent ones are kept."""

    generated = True
    stratify_by = ("kind",)
    """Each task has a repository of its own."""
    problems: Sequence[MalformedTaskError] = ()

    def __init__(self, config: GeneratedSetConfig) -> None:
        self.name = config.name
        self._config = config
        first = config.seed * INDEXES_PER_SEED + config.first
        self._numbers: Sequence[int] = range(first, first + config.count)
        self._cache: OrderedDict[int, Task] = OrderedDict()
        self._refs: dict[int, TaskRef] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def refs(self, start: int, count: int) -> list[TaskRef]:
        """Up to `count` tasks from position `start` on."""
        return [self._ref(number) for number in self._numbers[start : start + count]]

    def _ref(self, number: int) -> TaskRef:
        # Kept, for they are small, and making a task takes milliseconds.
        ref = self._refs.get(number)
        if ref is None:
            made = make_task(self._config.split, number)
            ref = self._refs[number] = TaskRef(made.task_id, made.repository, made.kind)
        return ref

    def find(self, task_id: str) -> Task | None:
        """The task with this id, or None if it is not of this set."""
        match = _GENERATED_ID.fullmatch(task_id)
        if match is None or match[1] != self._config.split:
            return None
        number = int(match[2])
        if not _holds(self._numbers, number):
            return None
        task = self._task(number)
        return task if task.task_id == task_id else None

    def leave_out(self, task_ids: Collection[str]) -> None:
        """Drops tasks."""
        found = map(_GENERATED_ID.fullmatch, task_ids)
        dropped = {int(match[2]) for match in found if match and match[1] == self._config.split}
        self._numbers = [number for number in self._numbers if number not in dropped]

    def _task(self, number: int) -> Task:
        task = self._cache.get(number)
        if task is None:
            config = self._config
            task = from_generated(
                make_task(config.split, number),
                wall_s=config.test_wall_s,
                cpu_s=config.test_cpu_s,
                command_timeout_s=config.command_timeout_s,
            )
            self._cache[number] = task
            if len(self._cache) > config.cached_tasks:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(number)
        return task


def _holds(numbers: Sequence[int], number: int) -> bool:
    """Whether it is in a rising sequence, which may be long."""
    at = bisect_left(numbers, number)
    return at < len(numbers) and numbers[at] == number


class ReadSet:
    """Tasks read once from a source; those that can't be read are problems, not the end."""

    generated = False
    stratify_by = ("repository", "difficulty")

    def __init__(self, config: ReadSetConfig) -> None:
        """Reads all tasks.

        Raises:
            TaskSetError: the source is not there, or holds no task that can be used.
        """
        self.name = config.name
        self._tasks: dict[str, Task] = {}
        problems: list[MalformedTaskError] = []
        try:
            for found in without_twins(source_of(config)):
                if isinstance(found, MalformedTaskError):
                    logger.warning("task set %s leaves out a task: %s", config.name, found)
                    problems.append(found)
                else:
                    self._tasks[found.task.task_id] = replace(
                        found.task, command_timeout_s=config.command_timeout_s
                    )
        except TaskSetError as error:
            raise TaskSetError(f"task set {config.name!r}: {error}") from error
        if not self._tasks:
            raise TaskSetError(
                f"task set {config.name!r}: none of the {len(problems)} tasks can be used, the "
                f"first because: {problems[0] if problems else 'there is none'}"
            )
        self.problems: Sequence[MalformedTaskError] = tuple(problems)
        self._order = list(self._tasks.values())

    def __len__(self) -> int:
        return len(self._order)

    def refs(self, start: int, count: int) -> list[TaskRef]:
        """Up to `count` tasks from position `start` on."""
        return [
            TaskRef(task.task_id, task.repository, task.kind, task.columns)
            for task in self._order[start : start + count]
        ]

    def find(self, task_id: str) -> Task | None:
        """The task with this id, or None if it is not of this set."""
        return self._tasks.get(task_id)

    def facts(self) -> list[TaskFacts]:
        """What each task can be known by, in the set's order."""
        return [task.facts for task in self._order]

    def leave_out(self, task_ids: Collection[str]) -> None:
        """Drops tasks."""
        self._tasks = {name: t for name, t in self._tasks.items() if name not in task_ids}
        self._order = list(self._tasks.values())


class Catalog:
    """All task sets of a service."""

    def __init__(self, task_sets: Sequence[TaskSet]) -> None:
        self._sets = {task_set.name: task_set for task_set in task_sets}
        self._by_digest: OrderedDict[str, str] = OrderedDict()

    @property
    def task_sets(self) -> Sequence[TaskSet]:
        """The sets in the order of the configuration."""
        return tuple(self._sets.values())

    def task_set(self, name: str) -> TaskSet | None:
        """The set with this name."""
        return self._sets.get(name)

    def find(self, task_id: str) -> Task | None:
        """The task with this id in the first set that has it."""
        for task_set in self._sets.values():
            task = task_set.find(task_id)
            if task is not None:
                self._remember(task)
                return task
        return None

    def environment(self, digest: str) -> Environment | None:
        """The environment with this digest, if a task that was asked for lately has it."""
        task_id = self._by_digest.get(digest)
        task = None if task_id is None else self.find(task_id)
        return None if task is None else task.environment

    def _remember(self, task: Task) -> None:
        digest = task.environment.digest
        self._by_digest[digest] = task.task_id
        self._by_digest.move_to_end(digest)
        if len(self._by_digest) > _REMEMBERED_DIGESTS:
            self._by_digest.popitem(last=False)


def open_task_sets(
    configs: Sequence[GeneratedSetConfig | ReadSetConfig],
    decontamination: DecontaminationConfig | None = None,
) -> Catalog:
    """Opens the configured sets.

    Raises:
        TaskSetError: a set can't be used at all, or shares tasks with an evaluation set. Single
            malformed tasks are logged and left out.
    """
    task_sets = [
        GeneratedSet(config) if isinstance(config, GeneratedSetConfig) else ReadSet(config)
        for config in configs
    ]
    for task_set, config in zip(task_sets, configs, strict=True):
        if config.quarantine is not None:
            leave_out_quarantined(task_set, config.quarantine)
    decontaminate(task_sets, decontamination or DecontaminationConfig())
    return Catalog(task_sets)


def leave_out_quarantined(task_set: TaskSet, path: Path) -> None:
    """Drops what a self-test has quarantined, unless it was another task by the same name.

    Raises:
        TaskSetError: the file can't be used, or quarantines every task.
    """
    try:
        records = read_records(path)
    except TaskSetError as error:
        raise TaskSetError(f"task set {task_set.name!r}, quarantine: {error}") from error
    bad: dict[str, str] = {}
    older = 0
    for task_id, record in records.items():
        task = task_set.find(task_id)
        if task is None or record.decision.outcome is not Outcome.QUARANTINED:
            continue
        if task_digest(task) != record.digest:
            logger.warning(
                "task set %s: task %s or its limits have changed since %s quarantined it; it is "
                "served, test it again",
                task_set.name,
                task_id,
                path,
            )
            continue
        older += record.judge != judge_digest()
        bad[task_id] = "; ".join(map(str, record.decision.findings))
        logger.warning("task set %s leaves out %s: %s", task_set.name, task_id, bad[task_id])
    if older:
        logger.warning(
            "task set %s: %d of these were quarantined by another version of the grader; a "
            "self-test with %s tests them again",
            task_set.name,
            older,
            path,
        )
    if len(bad) == len(task_set):
        raise TaskSetError(f"task set {task_set.name!r}: {path} quarantines every task of it")
    task_set.leave_out(bad)


def decontaminate(task_sets: Sequence[TaskSet], config: DecontaminationConfig) -> None:
    """Does to tasks that an evaluation set has too as the configuration says.

    Raises:
        TaskSetError: there are some, and that is to be refused.
    """
    read = [task_set for task_set in task_sets if isinstance(task_set, ReadSet)]
    heldout = [f for s in read if s.name in config.evaluation_sets for f in s.facts()]
    for task_set in read:
        if task_set.name in config.evaluation_sets or not heldout:
            continue
        found = contamination(
            task_set.facts(),
            heldout,
            aliases=config.aliases,
            text_share=config.text_share,
            patch_share=config.patch_share,
        )
        for overlap in found:
            logger.warning("task set %s is contaminated: %s", task_set.name, overlap)
        bad = dict.fromkeys(overlap.training_task for overlap in found)
        if bad and config.on_overlap == "refuse":
            raise TaskSetError(
                f"task set {task_set.name!r}: {len(bad)} of {len(task_set)} tasks are in an "
                f"evaluation set too, the first because: {found[0]}; the log names all. Choose "
                "decontamination.on_overlap = 'leave_out', or 'allow' if you mean to train on them"
            )
        if len(bad) == len(task_set) and config.on_overlap == "leave_out":
            raise TaskSetError(
                f"task set {task_set.name!r}: every task is in an evaluation set too, the first "
                f"because: {found[0]}"
            )
        if config.on_overlap == "leave_out":
            task_set.leave_out(bad)
