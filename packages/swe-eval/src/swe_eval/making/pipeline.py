"""From candidates to task directories.

Candidates are tried several at a time and decided one after another in a fixed order; what a trial
says depends on its candidate alone. So the tasks are the same whatever the number of workers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swe_eval.errors import RepositoryError
from swe_eval.generate.failure import Failure, added_lines, stable, write_report
from swe_eval.generate.harbor import HarborFolderExistsError, write_folder
from swe_eval.generate.places import Bug
from swe_eval.generate.plan import (
    Candidate,
    Known,
    Outcome,
    Selection,
    Trial,
    behaviour_of,
    fingerprint_of,
    judge,
)
from swe_eval.generate.repository_task import RepositoryTask, SuiteSetting, repository_files
from swe_eval.generate.task import unified_patch
from swe_eval.making.box import SuiteSandbox
from swe_eval.making.copies import Span
from swe_eval.making.options import MakeOptions, Summary
from swe_eval.making.source_tree import SourceTree
from swe_eval.making.suite import Baseline, Examined, examine
from swe_eval.making.words import ChatWriter

__all__ = ["Pipeline", "Tell"]

_BATCH = 10
_REWORDED_AT_ONCE = 8
_FINGERPRINT_LENGTH = 8

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What was found out about a candidate before its turn to be decided."""

    dropped: Outcome | None = None
    bug: Bug | None = None
    fingerprint: str = ""
    runs: tuple[Examined, ...] = ()


def _endpoint_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(_REWORDED_AT_ONCE)


@dataclass(kw_only=True)
class Pipeline:
    """Tries candidates several at a time and decides about them one after another."""

    tree: SourceTree
    out: Path
    options: MakeOptions
    setting: SuiteSetting
    baseline: Baseline
    candidates: Sequence[Candidate]
    known: Mapping[str, Known]
    shown: Collection[tuple[str, Span]]
    """Functions that stand elsewhere, too, by file and lines."""
    shown_tests: Collection[str]
    """Tests of which the same is true."""
    writer: ChatWriter | None
    tell: Tell
    _next: int = 0
    _decided: int = 0
    _new: int = 0
    _pulled: set[str] = field(default_factory=set)
    _endpoint: asyncio.Semaphore = field(default_factory=_endpoint_slots)

    async def run(self, boxes: Sequence[SuiteSandbox]) -> None:
        """Decides about candidates until there are enough tasks, or no more candidates."""
        options = self.options
        self._selection = Selection(
            count=options.count,
            per_function=options.per_function,
            per_file=options.per_file,
            known=self.known,
        )
        loop = asyncio.get_running_loop()
        self._seen = [loop.create_future() for _ in self.candidates]
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work(box)) for box in boxes]
            await self._decide_all(group)
            for worker in workers:
                worker.cancel()

    def summary(self) -> Summary:
        """What became of the candidates."""
        selection = self._selection
        return Summary(
            repository=self.tree.name,
            tests=len(self.baseline.required),
            tests_left_out={k: n for k, n in self.baseline.left_out.items() if n},
            candidates=len(self.candidates),
            tried=self._decided,
            kept=selection.kept,
            new=self._new,
            outcomes={outcome.value: n for outcome, n in sorted(selection.outcomes.items())},
            kinds=dict(sorted(selection.kinds.items())),
        )

    # -- trying

    async def _work(self, box: SuiteSandbox) -> None:
        while batch := self._pull():
            bugs = [
                (self.candidates[n].path, bug.source, self.candidates[n].tests)
                for n, bug, _ in batch
            ]
            found = await examine(box, self.baseline, bugs, timeout_s=self.options.timeout_s)
            for (n, bug, fingerprint), runs in zip(batch, found, strict=True):
                self._seen[n].set_result(_Seen(bug=bug, fingerprint=fingerprint, runs=runs))

    def _pull(self) -> list[tuple[int, Bug, str]]:
        """The next candidates that have to be run."""
        batch: list[tuple[int, Bug, str]] = []
        # Towards the end in small parts, of which less is in vain.
        missing = self.options.count - self._selection.kept
        size = min(_BATCH, max(1, math.ceil(missing / self.options.jobs)))
        while len(batch) < size and self._next < len(self.candidates):
            n, candidate = self._next, self.candidates[self._next]
            self._next += 1
            if self._selection.is_capped(candidate):
                continue  # and will be when its turn comes
            if (candidate.path, candidate.span) in self.shown:
                self._seen[n].set_result(_Seen(dropped=Outcome.SHOWN))
                continue
            bug = candidate.place.make()
            if bug is None:
                self._seen[n].set_result(_Seen(dropped=Outcome.INVALID))
                continue
            fingerprint = fingerprint_of(candidate.path, bug)
            if fingerprint in self.known or fingerprint in self._pulled:
                self._seen[n].set_result(_Seen(dropped=Outcome.DUPLICATE, fingerprint=fingerprint))
            else:
                batch.append((n, bug, fingerprint))
            self._pulled.add(fingerprint)
        return batch

    # -- deciding

    async def _decide_all(self, group: asyncio.TaskGroup) -> None:
        for n, candidate in enumerate(self.candidates):
            if self._selection.complete:
                return
            self._decided += 1
            if self._selection.is_capped(candidate):
                self._selection.drop(Outcome.CAPPED)
                continue
            seen = await self._seen[n]
            task = self._decide(candidate, seen)
            if task is None:
                continue
            self._new += 1
            if self.writer is None:
                self._write(task)
            else:
                group.create_task(self._reword_and_write(task, self.writer))

    def _decide(self, candidate: Candidate, seen: _Seen) -> RepositoryTask | None:
        selection = self._selection
        known = self.known.get(seen.fingerprint)
        if known is not None and known.ours:
            selection.keep_known(candidate, seen.fingerprint)
            return None
        if seen.dropped is not None or seen.bug is None:
            selection.drop(seen.dropped or Outcome.INVALID)
            return None
        trial = judge(self.baseline.required, [examined.run for examined in seen.runs])
        if trial.outcome is not Outcome.KEPT:
            selection.drop(trial.outcome)
            return None
        task = self._task(candidate, seen, seen.bug, trial)
        beside = candidate.path in {at.partition("::")[0] for at in task.defined.values()}
        if beside or not set(trial.fail_to_pass).isdisjoint(self.shown_tests):
            selection.drop(Outcome.SHOWN)
            return None
        if not selection.keep(candidate, task.behaviour):
            return None
        self.tell(f"{selection.kept} of {selection.count}: {task.task_id} ({self._decided} tried)")
        return task

    def _task(self, candidate: Candidate, seen: _Seen, bug: Bug, trial: Trial) -> RepositoryTask:
        place, path = candidate.place, candidate.path
        patch = unified_patch(path, bug.source, self.tree.texts[path])
        failing = frozenset(trial.fail_to_pass)
        report = write_report(
            random.Random(f"{self.options.seed} {seen.fingerprint}"),  # noqa: S311 -- no secret
            function=place.function,
            failures=_failures(seen.runs, failing),
            failing=trial.fail_to_pass,
            patch=patch,
        )
        kind = place.kind.replace("_", "-")
        return RepositoryTask(
            task_id=f"{self.tree.name}-{kind}-{seen.fingerprint[:_FINGERPRINT_LENGTH]}",
            repository=self.tree.name,
            kind=place.kind,
            instruction=report,
            module=path,
            function=place.function,
            broken=bug.source,
            gold_patch=patch,
            fail_to_pass=trial.fail_to_pass,
            pass_to_pass=trial.pass_to_pass,
            defined={t: at for t, at in self.baseline.defined.items() if t in failing},
            fingerprint=seen.fingerprint,
            # The wording is drawn by the fingerprint: only what it says tells two bugs apart.
            behaviour=behaviour_of(candidate, trial, report.partition("\n\n")[2]),
            source=self.tree.short_digest,
            seed=self.options.seed,
        )

    # -- writing

    async def _reword_and_write(self, task: RepositoryTask, writer: ChatWriter) -> None:
        async with self._endpoint:
            text = await writer.reword(
                task.instruction,
                repository=task.repository,
                secret=(*added_lines(task.gold_patch), *self._held_back(task)),
                seed=task.seed,
            )
        self._write(replace(task, instruction=text))

    def _held_back(self, task: RepositoryTask) -> set[str]:
        """Lines of the tests that the agent does not see."""
        files = self._files(task)
        lines: set[str] = set()
        failing = (*task.fail_to_pass, *task.defined.values())
        for path in {test.partition("::")[0] for test in failing}:
            seen = files.get(f"environment/repo/{path}", b"").decode().splitlines()
            lines |= set(self.tree.texts[path].splitlines()) - set(seen)
        return lines

    def _files(self, task: RepositoryTask) -> dict[str, bytes]:
        return repository_files(task, self.tree.contents, self.tree.texts, self.setting)

    def _write(self, task: RepositoryTask) -> None:
        programs = {
            f"environment/repo/{path}" for path, file in self.tree.files.items() if file.executable
        }
        folder = self.out / task.task_id
        try:
            write_folder(folder, self._files(task), programs)
        except HarborFolderExistsError as error:
            raise RepositoryError(
                f"{folder} is where a task should go, but it is there already and is not that "
                "task (of one cut short, its task.toml is missing); remove it, or name another "
                "folder"
            ) from error


def _failures(runs: Sequence[Examined], failing: frozenset[str]) -> list[Failure]:
    return stable([[f for f in run.failures if f.test in failing] for run in runs])
