"""EvalService.Evaluate over real channels, against a real rollout-engine with a scripted policy."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rollout_engine.config import ConsumersConfig, RefillConfig, WorkConfig
from rollout_engine.testing import MemoryEngine, ScriptTurn, no_hook
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    Reason,
    service_error,
)
from swe_eval.config import EvaluationConfig
from tailrace.eval.v1 import eval_service_pb2 as pb
from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceStub

if TYPE_CHECKING:
    from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceAsyncStub as Stub

QUICK = WorkConfig(
    refills=RefillConfig(per_attempt=1, backoff_initial_s=0.001, backoff_max_s=0.01),
    consumers=ConsumersConfig(heartbeat_s=0.2, idle_s=60.0, progress_s=0.05),
)


def half(turn: ScriptTurn) -> str:
    """Solves the even attempts of each group."""
    index = int(turn.session.rpartition("/")[2].partition(".")[0])
    task = turn.context.split("Write ")[1].partition(".<")[0]
    answer = task if index % 2 == 0 else "wrong"
    return (f"write answer {answer}", "submit")[turn.number]


def settings(folder: Path, *addresses: str, **more: Any) -> EvaluationConfig:
    return EvaluationConfig(
        state_dir=folder,
        rollout_targets=[ChannelConfig(target=address) for address in addresses],
        heartbeat_s=0.1,
        resamples=500,
        **more,
    )


def request(**changes: Any) -> pb.EvaluateRequest:
    base: dict[str, Any] = {
        "name": "base",
        "task_set": "heldout",
        "tasks": 6,
        "attempts": 4,
        "version": 1,
    }
    return pb.EvaluateRequest(**{**base, **changes})


async def evaluate(stub: Stub, **changes: Any) -> pb.EvaluationReport:
    events = [event async for event in stub.Evaluate(request(**changes), timeout=60)]
    assert events[-1].WhichOneof("event") == "report"
    done = [e.progress.attempts_done for e in events if e.WhichOneof("event") == "progress"]
    assert done == sorted(done)
    return events[-1].report


async def test_a_policy_is_scored_at_its_pinned_version(start_eval: Any, tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path / "ledger", half, QUICK) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address))
        report = await evaluate(stub)
    assert (report.pass_at_1, report.pass_at_k) == (0.5, 1.0)
    assert (report.tasks, report.attempts) == (6, 4)
    assert (report.pass_at_1_ci95.low, report.pass_at_1_ci95.high) == (0.5, 0.5)
    assert dict(report.outcomes) == {"SOLVED": 12, "UNSOLVED": 12}
    assert list(report.versions) == [1]
    assert [(s.solved, s.attempts) for s in report.by_task] == [(2, 4)] * 6
    assert sum(s.tasks for s in report.by_kind) == 6
    assert report.task_list_digest.startswith("sha256:")
    assert [p.k for p in report.pass_at] == [1, 2, 3, 4]
    assert (report.pinned_version, list(report.stratified_by)) == (1, ["kind"])
    assert [(t.version, t.oldest_kv_version) for t in report.version_tokens] == [(1, 1)]


async def test_the_plan_comes_before_any_attempt_and_its_list_can_be_measured_again(
    start_eval: Any, tmp_path: Path
) -> None:
    async with MemoryEngine(tmp_path / "ledger", half, QUICK) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address))
        first = await anext(aiter(stub.Evaluate(request(), timeout=60)))
        plan = first.plan
        again = await evaluate(stub, name="again", tasks=0, task_ids=plan.task_ids, version=0)
    assert len(plan.task_ids) == len(plan.strata) == 6
    assert again.task_list_digest == plan.task_list_digest
    assert [s.task_id for s in again.by_task] == list(plan.task_ids)
    assert again.pinned_version == 0


async def test_trajectories_come_as_whole_files_and_from_the_one_asked_for_on(
    start_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(after: str = "") -> dict[str, bytes]:
        files: defaultdict[str, bytes] = defaultdict(bytes)
        call = stub.GetTrajectories(pb.GetTrajectoriesRequest(name="base", after=after), timeout=60)
        async for piece in call:
            assert piece.last or len(piece.chunk) == 500
            files[piece.file] += piece.chunk
        return files

    monkeypatch.setattr("swe_eval.trajectories._CHUNK_BYTES", 500)
    async with MemoryEngine(tmp_path / "ledger", half, QUICK) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address))
        await evaluate(stub, tasks=1)
        files = await fetch()
        names = list(files)
        assert len(names) == 4
        assert names == sorted(names)
        assert list(await fetch(names[2])) == names[3:]
    trajectory = json.loads(files[names[0]])
    assert trajectory["extra"]["outcome"] == "SOLVED"
    assert trajectory["extra"]["task_id"] in names[0]
    assert trajectory["schema_version"] == "ATIF-v1.8"


async def test_faults_are_refilled_reported_apart_and_never_counted(
    start_eval: Any, tmp_path: Path
) -> None:
    seen: defaultdict[str, int] = defaultdict(int)

    async def hook(kind: str, name: str) -> None:
        if kind == "grade":
            seen[name] += 1
            if seen[name] % 3 == 0:
                raise service_error(Reason.INTERNAL, "the grader is on fire")

    config = WorkConfig(
        refills=RefillConfig(per_attempt=8, backoff_initial_s=0.001, backoff_max_s=0.01),
        consumers=QUICK.consumers,
    )
    async with MemoryEngine(tmp_path / "ledger", half, config, hook) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address))
        report = await evaluate(stub)
    assert report.pass_at_1 == 0.5
    assert report.outcomes["FAULT"] >= 6
    assert report.outcomes["SOLVED"] == report.outcomes["UNSOLVED"] == 12
    assert not report.quarantined


async def test_a_task_that_keeps_faulting_is_left_out_and_named(
    start_eval: Any, tmp_path: Path
) -> None:
    broken: list[str] = []

    async def hook(kind: str, name: str) -> None:
        if kind == "grade":
            broken[:] = broken or [name]
            if name in broken:
                raise service_error(Reason.INTERNAL, "the grader is on fire")

    async with MemoryEngine(tmp_path / "ledger", half, QUICK, hook) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address, quarantine_retries=1))
        report = await evaluate(stub)
    assert (report.tasks, report.pass_at_1) == (5, 0.5)
    assert [q.task_id for q in report.quarantined] == broken
    assert "the grader is on fire" in report.quarantined[0].reason


async def test_a_caller_that_leaves_resumes_by_name_and_nothing_is_run_twice(
    start_eval: Any, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    started: list[str] = []
    graded: list[str] = []

    async def hook(kind: str, name: str) -> None:
        if kind == "create":
            started.append(name)
        if kind == "grade":
            graded.append(name)
            if name != graded[0]:
                await gate.wait()

    async with MemoryEngine(tmp_path / "ledger", half, QUICK, hook) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address, groups_in_flight=3))
        call = stub.Evaluate(request(), timeout=60)
        async for event in call:
            if event.progress.attempts_done >= 4:
                break
        call.cancel()
        gate.set()
        while True:  # the service needs a moment to notice that its caller has left
            try:
                report = await evaluate(stub)
                break
            except FailedPrecondition:
                await asyncio.sleep(0.05)
    assert (report.tasks, report.pass_at_1) == (6, 0.5)
    assert len(started) == len(set(started)) == 24


class Process:
    """`python -m swe_eval serve` as a process of its own."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.address_file = folder / "address"
        self.address_file.unlink(missing_ok=True)
        settings = [
            "server.bind=127.0.0.1:0",
            f"server.address_file={self.address_file}",
            f"evaluation.state_dir={folder / 'state'}",
            "evaluation.heartbeat_s=0.2",
            f'evaluation.rollout_targets=[{{target="{engine}"}}]',
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swe_eval", "serve", *(f"--set={s}" for s in settings)]
        )

    async def address(self) -> str:
        async with asyncio.timeout(60):
            while not self.address_file.exists():  # noqa: ASYNC110 -- another process writes it
                await asyncio.sleep(0.05)
        return self.address_file.read_text().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def test_a_killed_service_resumes_by_name_and_nothing_is_run_or_counted_twice(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()
    started: list[str] = []
    graded: list[str] = []

    async def hook(kind: str, name: str) -> None:
        if kind == "create":
            started.append(name)
        if kind == "grade":
            graded.append(name)
            if name != graded[0]:
                await gate.wait()

    async with MemoryEngine(tmp_path / "ledger", half, QUICK, hook) as engine:
        first = Process(tmp_path, engine.address)
        try:
            async with open_channel(ChannelConfig(target=await first.address())) as channel:
                done = 0
                async for event in EvalServiceStub(channel).Evaluate(request(), timeout=60):
                    done = max(done, event.progress.attempts_done)
                    if done >= 4 and len(started) == 24:
                        break
                first.kill()
                gate.set()
        finally:
            first.kill()
        second = Process(tmp_path, engine.address)
        try:
            async with open_channel(ChannelConfig(target=await second.address())) as channel:
                report = await evaluate(EvalServiceStub(channel))
        finally:
            second.kill()
    assert (report.tasks, report.pass_at_1) == (6, 0.5)
    assert len(started) == len(set(started)) == 24


async def test_two_engines_share_the_tasks(start_eval: Any, tmp_path: Path) -> None:
    async with (
        MemoryEngine(tmp_path / "one", half, QUICK) as one,
        MemoryEngine(tmp_path / "two", half, QUICK) as two,
    ):
        stub = await start_eval(
            evaluation=settings(tmp_path, one.address, two.address, groups_in_flight=1)
        )
        report = await evaluate(stub, tasks=12)
        assert report.pass_at_1 == 0.5
        assert one.workspaces.made + two.workspaces.made == 48
        assert one.workspaces.made > 0
        assert two.workspaces.made > 0


async def test_targets_of_the_request_go_before_the_configured_ones(
    start_eval: Any, tmp_path: Path
) -> None:
    async with MemoryEngine(tmp_path / "ledger", half, QUICK, no_hook) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, "127.0.0.1:9"))
        report = await evaluate(stub, rollout_targets=[engine.address])
    assert report.pass_at_1 == 0.5


async def test_heartbeats_fill_the_silence(start_eval: Any, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hook(kind: str, name: str) -> None:
        await gate.wait()

    async with MemoryEngine(tmp_path / "ledger", half, QUICK, hook) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address))
        kinds = []
        async for event in stub.Evaluate(request(), timeout=60):
            kinds.append(event.WhichOneof("event"))
            if kinds.count("heartbeat") == 2:
                gate.set()
    assert kinds[-1] == "report"


async def test_sampling_of_the_request_reaches_the_engine(start_eval: Any, tmp_path: Path) -> None:
    seeds: set[int] = set()

    def script(turn: ScriptTurn) -> str:
        seeds.add(turn.seed)
        return "submit"

    async with MemoryEngine(tmp_path / "ledger", script, QUICK) as engine:
        stub = await start_eval(evaluation=settings(tmp_path, engine.address))
        sampling = pb.EvaluationSampling(temperature=0.7, top_p=0.9, seed=11)
        report = await evaluate(stub, sampling=sampling)
        assert report.pass_at_1 == 0.0
        assert len(seeds) == 24
        with pytest.raises(AlreadyExists, match="sampling_seed is 11, not 12"):
            await evaluate(
                stub, sampling=pb.EvaluationSampling(temperature=0.7, top_p=0.9, seed=12)
            )


async def test_an_unknown_set_is_not_found(start_eval: Any, tmp_path: Path) -> None:
    stub = await start_eval(evaluation=settings(tmp_path, "127.0.0.1:9"))
    with pytest.raises(NotFound, match="train, heldout"):
        await evaluate(stub, task_set="nope")
