"""`tailrace eval` against a real EvalService and a real rollout-engine with a scripted policy."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from rollout_engine.config import ConsumersConfig, RefillConfig, WorkConfig
from rollout_engine.testing import MemoryEngine, ScriptTurn
from service_kit.channel import ChannelConfig
from service_kit.config import ConfigError
from service_kit.errors import Reason, ServiceError, service_error
from service_kit.server import ServerConfig
from swe_eval import EvalConfig, EvaluationConfig, GeneratedSetConfig, list_digest
from swe_eval.app import assemble
from tailrace_cli.cli import app
from tailrace_cli.demo.folder import FolderError
from tailrace_cli.evaluation.command import check_out, run_evaluation
from tailrace_cli.evaluation.result import (
    OPTIONS,
    RESULT,
    TASKS,
    EvaluationOptions,
    EvaluationResult,
    TaskList,
    evaluation_name,
    load,
    read_task_list,
)
from typer.testing import CliRunner

QUICK = WorkConfig(
    refills=RefillConfig(per_attempt=8, backoff_initial_s=0.001, backoff_max_s=0.01),
    consumers=ConsumersConfig(heartbeat_s=0.2, idle_s=60.0, progress_s=0.05),
)


def half(turn: ScriptTurn) -> str:
    """Solves the even attempts of each group."""
    index = int(turn.session.rpartition("/")[2].partition(".")[0])
    task = turn.context.split("Write ")[1].partition(".<")[0]
    return (f"write answer {task if index % 2 == 0 else 'wrong'}", "submit")[turn.number]


class Stack:
    """An EvalService and its engine."""

    def __init__(self) -> None:
        self.broken_gradings = 0
        self.gradings: list[str] = []
        self.free = asyncio.Event()
        self.free.set()
        self.target = ""
        self.engine = ""

    async def hook(self, kind: str, name: str) -> None:
        if kind != "grade":
            return
        if self.broken_gradings:
            self.broken_gradings -= 1
            raise service_error(Reason.INTERNAL, "the grader is on fire")
        self.gradings.append(name)
        if len(self.gradings) > 4:
            await self.free.wait()

    def options(self, **changes: Any) -> EvaluationOptions:
        base: dict[str, Any] = {
            "name": "first",
            "target": self.target,
            "task_set": "heldout",
            "tasks": 6,
            "attempts": 2,
            "pin": 1,
            "engines": (self.engine,),
        }
        return EvaluationOptions(**{**base, **changes})


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    made = Stack()
    async with AsyncExitStack() as closing:
        engine = await closing.enter_async_context(
            MemoryEngine(tmp_path / "ledger", half, QUICK, made.hook)
        )
        config = EvalConfig(
            server=ServerConfig(bind="127.0.0.1:0"),
            sandbox=ChannelConfig(target="127.0.0.1:9"),
            task_sets=[GeneratedSetConfig(name="heldout", split="heldout", count=20)],
            evaluation=EvaluationConfig(
                state_dir=tmp_path / "state", heartbeat_s=0.1, resamples=500
            ),
        )
        server = await closing.enter_async_context(await assemble(config, closing))
        made.target, made.engine = server.address, engine.address
        yield made


async def evaluated(options: EvaluationOptions, folder: Path) -> EvaluationResult:
    assert await run_evaluation(options, folder, as_json=False) == 0
    return load(folder, RESULT, EvaluationResult)


async def test_a_folder_holds_all_that_was_asked_for_and_all_that_came_of_it(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.broken_gradings = 3
    folder = tmp_path / "run"
    assert await run_evaluation(stack.options(), folder, as_json=True) == 0
    result = load(folder, RESULT, EvaluationResult)
    assert json.loads(capsys.readouterr().out) == result.model_dump(mode="json")
    assert [(p.k, p.estimate) for p in result.pass_at] == [(1, 0.5), (2, 1.0)]
    assert (result.tasks, result.listed, result.versions) == (6, 6, (1,))
    assert result.claim == "the score of policy version 1"
    assert result.faults == {"GRADE/GRADER": 3}
    assert result.outcomes == {"SOLVED": 6, "UNSOLVED": 6, "FAULT": 3}
    listed = load(folder, TASKS, TaskList)
    assert listed.digest == result.task_list_digest
    assert listed.digest == list_digest([t.task_id for t in listed.tasks])
    assert load(folder, OPTIONS, EvaluationOptions) == stack.options()
    assert len(list((folder / "trajectories").glob("*.json"))) == 12
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "GRADE/GRADER" in page
    assert listed.digest in page
    text = (folder / "report.md").read_text()
    assert "| pass@1 | 0.500 | 0.500 to 0.500 |" in text
    for name in ("pass-at-k", "strata", "tasks", "outcomes"):
        assert f"(plots/{name}.svg)" in text
        assert (folder / "plots" / f"{name}.svg").read_text().startswith("<svg")


async def test_the_list_of_one_run_is_measured_again_without_a_pin_and_says_so(
    stack: Stack, tmp_path: Path
) -> None:
    first = await evaluated(stack.options(), tmp_path / "a")
    ids = read_task_list(tmp_path / "a" / TASKS)
    options = stack.options(name="second", tasks=0, task_ids=ids, pin=0)
    second = await evaluated(options, tmp_path / "b")
    assert second.task_list_digest == first.task_list_digest
    assert second.claim.startswith("not a checkpoint's score: no version was pinned")
    assert "not a checkpoint&#39;s score" in (tmp_path / "b" / "report.html").read_text()
    assert "not a checkpoint's score" in (tmp_path / "b" / "report.md").read_text()


async def test_going_on_with_a_finished_evaluation_repeats_its_result(
    stack: Stack, tmp_path: Path
) -> None:
    first = await evaluated(stack.options(), tmp_path / "a")
    again = await evaluated(load(tmp_path / "a", OPTIONS, EvaluationOptions), tmp_path / "a")
    assert again.model_copy(update={"wall_s": first.wall_s}) == first


async def test_ctrl_c_leaves_a_folder_that_resume_finishes_and_runs_nothing_twice(
    stack: Stack, tmp_path: Path
) -> None:
    stack.free.clear()
    folder = tmp_path / "run"

    async def command(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tailrace_cli", "eval", *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip

    first = await command(
        "--tasks=6", "--attempts=2", "--pin=1", f"--out={folder}",
        f"--target={stack.target}", f"--engine={stack.engine}",
    )  # fmt: skip
    async with asyncio.timeout(60):
        while len(stack.gradings) < 12:  # noqa: ASYNC110 -- another process brings it about
            await asyncio.sleep(0.02)
    first.send_signal(signal.SIGINT)
    output, _ = await asyncio.wait_for(first.communicate(), 60)
    assert first.returncode == 130, output
    assert f"tailrace eval --resume {folder}" in output.decode()
    assert not (folder / RESULT).exists()
    stack.free.set()
    second = await command("--resume", str(folder))
    output, _ = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode == 0, output
    result = load(folder, RESULT, EvaluationResult)
    assert (result.tasks, result.pass_at[0].estimate) == (6, 0.5)
    assert len(stack.gradings) == 12


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"task_set": "nope"}, "this service has: heldout"),
        ({"tasks": 21}, r"must lie in 0\.\.20"),
        ({"stratify_by": ("colour",)}, "it has: kind, repository"),
        ({"tasks": 0, "task_ids": ("x",)}, "lacks 1 of the 1 listed tasks"),
    ],
)
async def test_what_the_service_refuses_is_bad_input_and_leaves_no_folder(
    stack: Stack, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        await run_evaluation(stack.options(**changes), tmp_path / "run", as_json=False)
    assert not (tmp_path / "run").exists()


async def test_a_service_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9"):
        await run_evaluation(
            EvaluationOptions(name="x", target="127.0.0.1:9", task_set="y"),
            tmp_path / "run",
            as_json=False,
        )
    assert not (tmp_path / "run").exists()


async def test_an_evaluation_that_scores_nothing_fails_and_says_why(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.broken_gradings = 10_000
    options = stack.options(tasks=1, attempts=1)
    assert await run_evaluation(options, tmp_path / "run", as_json=False) == 1
    result = load(tmp_path / "run", RESULT, EvaluationResult)
    assert (result.tasks, result.pass_at) == (0, ())
    assert "the grader is on fire" in result.quarantined[0].reason
    assert "left out" in capsys.readouterr().out
    assert "No task could be scored" in (tmp_path / "run" / "report.html").read_text()


def tailrace(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "200"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attempts", "0"], "attempts: Input should be greater than or equal to 1"),
        (["--top-p", "0"], "top_p: Input should be greater than 0"),
        (["--pin", "-1"], "pin: Input should be"),
        (["--engine", "nowhere"], "--engine"),
        (["--target", "nowhere"], "--target"),
        (["--list", "{here}/none"], "can't be read"),
        (["--list", "{here}/full/options.json"], "expected a tasks.json of `tailrace eval`"),
        (["--out", "{here}/full"], "exists and is not empty"),
        (["--resume", "{here}/none"], "holds no evaluation"),
        (["--resume", "{here}/full"], "options.json is damaged: name: Field required"),
        (["--resume", "{here}/full", "--tasks", "3", "--pin", "2"], "leave out --tasks, --pin"),
        (["--stack", "none.toml"], "no stack file none.toml"),
        (["compare", "{here}/full", "{here}/full"], "holds no finished evaluation"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "options.json").write_text("{}")
    code, _, message = tailrace(*(a.format(here=tmp_path) for a in arguments))
    assert code == 2
    assert expected in message
    assert "Traceback" not in message


def test_a_saved_list_that_was_changed_is_refused_and_plain_text_is_not(tmp_path: Path) -> None:
    saved = {
        "digest": list_digest(["a", "b"]),
        "stratified_by": ["kind"],
        "tasks": [{"task_id": t, "stratum": "x"} for t in ("a", "b")],
    }
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(saved))
    assert read_task_list(path) == ("a", "b")
    saved["tasks"] = saved["tasks"][:1]
    path.write_text(json.dumps(saved))
    with pytest.raises(FolderError, match="was changed"):
        read_task_list(path)
    path.write_text(" a \n\nb\n")
    assert read_task_list(path) == ("a", "b")
    path.write_text("\n")
    with pytest.raises(FolderError, match="names no task"):
        read_task_list(path)


def test_names_at_the_service_are_plain_and_never_the_same(tmp_path: Path) -> None:
    names = {evaluation_name(tmp_path / f, s) for f in ("a b/é", "c") for s in ("1", "2")}
    assert len(names) == 4
    assert all(n.replace("-", "").isalnum() and n.isascii() for n in names)


def test_a_new_evaluation_may_take_an_empty_folder_and_no_other(tmp_path: Path) -> None:
    check_out(tmp_path)
    check_out(tmp_path / "new")
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(FolderError, match="exists and is not empty"):
            check_out(taken)
