"""`tailrace tasks selftest`: which tasks can be trusted, before anything is trained on them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text
from sandbox_client import SandboxClient
from service_kit.channel import ChannelConfig
from service_kit.config import ConfigError
from swe_eval import EvalConfig, Grader, MalformedTaskError, ServiceHost, Task, TaskSetError
from swe_eval.core.selftest import Outcome
from swe_eval.selftest import SelfTest, untested
from swe_eval.tasks.digest import task_digest
from swe_eval.tasks.harbor import EnvironmentMode, HarborOptions
from swe_eval.tasks.selftest_file import Record, SelfTestFile
from swe_eval.tasks.sets import open_task_sets
from swe_eval.tasks.sources import twin
from swe_eval.tasks.validate import validate

from tailrace_cli.sandbox_service import sandbox_service
from tailrace_cli.shell import BAD_INPUT, INTERRUPTED
from tailrace_cli.signals import unless_interrupted
from tailrace_cli.stack import StackSpec
from tailrace_cli.tasks.validation import as_row

_WHY_COLUMNS = 60
_ONE_LINE = 100_000
_WORDS = {
    Outcome.KEPT: "kept",
    Outcome.QUARANTINED: "quarantined",
    Outcome.FAULT: "not known for faults",
}


@dataclass(frozen=True, kw_only=True)
class SelfTestOptions:
    """What to test, and how."""

    paths: Sequence[Path] = ()
    """Task directories, files of rows, folders of either."""
    environment: EnvironmentMode = EnvironmentMode.AUTO
    """How the Dockerfiles of Harbor tasks at the paths become environments."""
    task_set: str = ""
    """Instead: a set of the stack's EvalService, with its limits."""
    out: Path
    """File of the records; gone on with if it is there."""
    repeat: int = 2
    """How often to grade the reference, and no change."""
    jobs: int = 8
    """Tasks at once."""
    sandbox: str | None = None
    """Address of a sandbox service; None: one is started as the stack says."""


@dataclass
class Found:
    """What came of a self-test."""

    problems: list[MalformedTaskError] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def of(self, outcome: Outcome) -> list[Record]:
        """The records with this outcome, by task."""
        found = (record for record in self.records if record.decision.outcome is outcome)
        return sorted(found, key=lambda record: record.task_id)

    @property
    def exit_code(self) -> int:
        """0 only if every task was kept; 2 if one could not be read."""
        if self.problems:
            return BAD_INPUT
        return 0 if len(self.of(Outcome.KEPT)) == len(self.records) else 1

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "tasks": len(self.records),
            "kept": [record.task_id for record in self.of(Outcome.KEPT)],
            "quarantined": [record.to_json() for record in self.of(Outcome.QUARANTINED)],
            "faults": [record.to_json() for record in self.of(Outcome.FAULT)],
            "problems": [as_row(problem) for problem in self.problems],
        }


async def run_selftest(options: SelfTestOptions, stack: StackSpec, *, as_json: bool) -> int:
    """Tests the tasks, or those that the file does not hold yet; the exit code.

    Raises:
        ConfigError: there are no such tasks, or the file is no self-test's.
        ServiceError, StackError: there is no sandbox service to be had.
    """
    console = Console(stderr=as_json)
    config = _eval_config(stack)
    found = Found()
    try:
        tasks = list(read_tasks(options, config, found.problems))
        file = SelfTestFile(options.out)
    except TaskSetError as error:
        raise ConfigError(str(error)) from error
    for problem in found.problems:
        text = f"{type(problem).__name__.removesuffix('Error')}: {problem}"
        console.print(Text(text), soft_wrap=True)

    todo, found.records = untested(tasks, file, repeat=options.repeat)

    async def work() -> None:
        if not todo:
            return
        async with sandbox_service(options.sandbox, stack) as target:
            await _test(todo, file, target, options, config, found, console)

    with contextlib.closing(file):
        if not await unless_interrupted(work(), lambda: None):
            note = (
                f"stopped after {len(found.records)} of {len(tasks)} tasks; run it again to go on"
            )
            console.print(note, highlight=False, soft_wrap=True)
            return INTERRUPTED
    show(found, options.out, console)
    if as_json:
        print(json.dumps(found.as_dict()))
    return found.exit_code


async def _test(
    todo: Sequence[Task],
    file: SelfTestFile,
    target: str,
    options: SelfTestOptions,
    config: EvalConfig,
    found: Found,
    console: Console,
) -> None:
    grading = config.grading.model_copy(update={"concurrency": options.jobs})
    channel = ChannelConfig(target=target)
    async with SandboxClient(
        channel, owner="selftest", call_timeout_s=grading.call_timeout_s
    ) as client:
        await client.status()  # one that was never there is told at once, not by fault after fault
        host = ServiceHost(client, start_timeout_s=grading.start_timeout_s)
        test = SelfTest(Grader(host, grading), file, repeat=options.repeat)
        with _bar(console) as bar:
            line = bar.add_task("", total=len(todo) + len(found.records))
            async for record in test.run(todo):
                found.records.append(record)
                bad = len(found.records) - len(found.of(Outcome.KEPT))
                bar.update(line, completed=len(found.records), description=f"{bad} not kept")


def read_tasks(
    options: SelfTestOptions, config: EvalConfig, problems: list[MalformedTaskError]
) -> Iterator[Task]:
    """The tasks to test, each once; those that can't be used go to `problems`.

    Raises:
        ConfigError: the stack has no such set.
        TaskSetError: there are no tasks at a path.
    """
    if not options.task_set:
        harbor = HarborOptions(environment=options.environment)
        taken: dict[str, Task] = {}
        for found in validate(options.paths, harbor):
            if isinstance(found, MalformedTaskError):
                problems.append(found)
                continue
            # Within one path `validate` tells twins; the very same task in another is none.
            first = taken.setdefault(found.task.task_id, found.task)
            if first is found.task:
                yield first
            elif task_digest(first) != task_digest(found.task):
                problems.append(twin(found))
        return
    chosen = [c for c in config.task_sets if c.name == options.task_set]
    if not chosen:
        known = ", ".join(c.name for c in config.task_sets)
        raise ConfigError(f"--task-set: no set {options.task_set!r}; the stack has: {known}")
    # What it leaves out so far is tested again: it may have been mended.
    (task_set,) = open_task_sets([chosen[0].model_copy(update={"quarantine": None})]).task_sets
    problems += task_set.problems
    for ref in task_set.refs(0, len(task_set)):
        task = task_set.find(ref.task_id)
        assert task is not None
        yield task


def _eval_config(stack: StackSpec) -> EvalConfig:
    """Settings of the stack's EvalService: limits of grading, and task sets."""
    for process in stack.processes:
        if process.module == "swe_eval":
            try:
                return EvalConfig.model_validate(process.config)
            except ValidationError as error:
                wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
                raise ConfigError(f"process {process.name!r}: {'; '.join(wrong)}") from error
    return EvalConfig()


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks, {task.description}"),
        console=console,
        transient=True,
    )


def show(found: Found, out: Path, console: Console) -> None:
    """Each task that was not kept, and why."""
    table = Table(Column("task", no_wrap=True), Column("outcome", no_wrap=True), "why", box=None)
    for record in found.of(Outcome.QUARANTINED):
        for finding in record.decision.findings:
            table.add_row(*map(Text, (record.task_id, "quarantined", str(finding))))
    for record in found.of(Outcome.FAULT):
        fault = record.decision.fault
        assert fault is not None
        why = " ".join(filter(None, (fault.cause, fault.stage))) + f": {fault.message}"
        table.add_row(*map(Text, (record.task_id, "fault", why)))
    if table.row_count:
        # Room for each id as it is; in a pipe a line for each reason.
        wide = console.options.update_width(_ONE_LINE)
        table.width = Measurement.get(console, wide, table).maximum
        if console.is_terminal:
            ids = max(cell_len(record.task_id) for record in found.records)
            table.width = min(table.width, max(console.width, ids + _WHY_COLUMNS))
        console.print(table, crop=False)
    counts = [f"{len(found.of(outcome))} {words}" for outcome, words in _WORDS.items()]
    total = f"{len(found.records)} tasks: {', '.join(counts)}; {out}"
    console.print(total, highlight=False, soft_wrap=True)
