"""Whatever is wrong with the input is said in one line, with exit code 2, and spoils nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from tailrace_cli.stack.files import BASE_MODEL

from integration_tests.harness import needs_root, stack_document

BAD_INPUT = 2


def run(*arguments: str | Path) -> tuple[int, str]:
    """Run `python -m` to its end; returns exit code and all output."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.returncode, done.stdout


def refused(*arguments: str | Path) -> str:
    """Run a command that has to refuse its input; returns the message."""
    code, output = run(*arguments)
    assert code == BAD_INPUT, output
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert errors, output
    return output


def service(name: str, folder: Path, *settings: str) -> list[str | Path]:
    """`python -m <service> serve` with what it needs, in a folder of its own."""
    needed = {
        "sandbox_client": [f"state_dir={folder}/sandbox"],
        "swe_eval": [f"evaluation.state_dir={folder}/eval"],
        "weight_sync": [f"state_dir={folder}/weights", f"store.folder={folder}/store"],
        "rollout_engine": [f"model={BASE_MODEL}", f"ledger.folder={folder}/ledger"],
        "grpo_trainer": [f"model={BASE_MODEL}", f"run_dir={folder}/trainer"],
    }[name]
    chosen = [*needed, "server.bind=127.0.0.1:0", *settings]
    return [name, "serve", *(word for setting in chosen for word in ("--set", setting))]


SERVICES = ["sandbox_client", "swe_eval", "weight_sync", "rollout_engine", "grpo_trainer"]


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("name", SERVICES)
def test_an_unknown_key_is_named_with_the_closest_valid_one(name: str, tmp_path: Path) -> None:
    output = refused(*service(name, tmp_path, "server.bnd=1"))
    assert output.count("\n") == 1
    assert "unknown key 'server.bnd'; closest valid key: 'server.bind'" in output


@pytest.mark.parametrize("name", SERVICES)
def test_a_busy_port_is_named(name: str, tmp_path: Path, busy_port: int) -> None:
    output = refused(*service(name, tmp_path, f"server.bind=127.0.0.1:{busy_port}"))
    assert f"127.0.0.1:{busy_port}" in output
    assert "in use" in output


def test_a_stack_with_an_unknown_key_names_it(tmp_path: Path) -> None:
    document = stack_document(tmp_path / "state", engine_delay_s=0.1, scripted=True)
    document["restrat"] = {}
    file = tmp_path / "stack.toml"
    file.write_text(tomli_w.dumps(document))
    assert "restrat" in refused("tailrace_cli", "up", "--stack", file)


def test_a_stack_with_a_busy_port_names_process_and_address(tmp_path: Path, busy_port: int) -> None:
    document = stack_document(tmp_path / "state", engine_delay_s=0.1, scripted=True)
    document["variables"]["rollout"] = f"127.0.0.1:{busy_port}"
    file = tmp_path / "stack.toml"
    file.write_text(tomli_w.dumps(document))
    output = refused("tailrace_cli", "up", "--stack", file)
    assert f"rollout cannot listen on 127.0.0.1:{busy_port}" in output


def test_a_demo_with_an_unknown_service_setting_names_it(tmp_path: Path) -> None:
    output = refused(
        "tailrace_cli", "demo", "--out", tmp_path / "run", "--set", "sandbox.falts.create_rate=0.1"
    )
    assert "unknown key 'falts'" in output


def test_a_demo_that_is_not_there_cannot_be_resumed(tmp_path: Path) -> None:
    output = refused("tailrace_cli", "demo", "--resume", tmp_path / "nothing")
    assert "holds no demo run" in output


@pytest.mark.parametrize("damage", ["task.toml is no TOML", "no instruction", "no tests"])
def test_a_malformed_task_folder_is_named(damage: str, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "broken"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text("Mend it.\n")
    (task / "environment" / "Dockerfile").write_text("FROM scratch\nCOPY . /app\n")
    (task / "tests" / "test.sh").write_text("exit 0\n")
    match damage:
        case "task.toml is no TOML":
            (task / "task.toml").write_text("version = \n")
        case "no instruction":
            (task / "instruction.md").unlink()
        case "no tests":
            shutil.rmtree(task / "tests")
    code, output = run("swe_eval", "validate", task.parent)
    assert code == BAD_INPUT, output
    assert "broken" in output
    assert "0 of 1 tasks can be used" in output
    assert "Traceback" not in output


def test_a_task_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = tmp_path / "eval.toml"
    sets = [{"kind": "harbor", "name": "mine", "path": str(tmp_path / "absent")}]
    config.write_text(tomli_w.dumps({"task_sets": sets, "server": {"bind": "127.0.0.1:0"}}))
    assert str(tmp_path / "absent") in refused("swe_eval", "serve", "--config", config)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    for name in ("rollout_engine", "grpo_trainer"):
        output = refused(*service(name, tmp_path, f"model={tmp_path}/model"))
        assert str(tmp_path / "model") in output


def trained_run(folder: Path) -> Path:
    """A run whose stage has one checkpoint; returns the checkpoint's folder."""
    from grpo_trainer.registry import RunRegistry, StageRecord
    from grpo_trainer.stage import StageKind, StageState

    registry = RunRegistry(folder / "trainer", run="run", resume=True)
    recipe = 'task_set = "train"\n'
    registry.put(StageRecord("rl", StageKind.GRPO, recipe, StageState.STOPPED), started=True)
    policy = {"step": 1, "version": 2, "known_number": 2, "versions": [[1, 0], [2, 1]]}

    def save(partial: Path) -> None:
        for file in BASE_MODEL.iterdir():
            shutil.copy(file, partial / file.name)

    store = registry.checkpoints("rl")
    return store.write(1, {"policy": policy, "stage": {}}, save)


@pytest.mark.parametrize("damage", ["cut off", "changed", "file missing"])
def test_a_damaged_checkpoint_is_named_and_left_as_it_is(damage: str, tmp_path: Path) -> None:
    checkpoint = trained_run(tmp_path)
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "cut off":
            weights.write_bytes(whole[:-1])
        case "changed":
            weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "file missing":
            weights.unlink()
    before = sorted((file.name, file.stat().st_size) for file in checkpoint.iterdir())
    output = refused(*service("grpo_trainer", tmp_path))
    assert str(weights) in output
    assert "Remove this checkpoint's folder" in output, "what to do next"
    assert sorted((file.name, file.stat().st_size) for file in checkpoint.iterdir()) == before


def on_full_disk(mount: Path, *arguments: str | Path) -> tuple[int, str]:
    """Run a command that sees a full file system at `mount`; it is gone when the command ends."""
    mount.mkdir(exist_ok=True)
    script = (
        f"mount -t tmpfs -o size=256k full {mount} && "
        f"(head -c 10M /dev/zero > {mount}/ballast 2>/dev/null || true) && "
        'exec "$@"'
    )
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            "-m",
            *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
        text=True,
    )
    return done.returncode, done.stdout


@needs_root
@pytest.mark.parametrize("name", SERVICES)
def test_a_full_disk_is_named(name: str, tmp_path: Path) -> None:
    if name == "swe_eval":
        pytest.skip("writes nothing before an evaluation runs")
    code, output = on_full_disk(tmp_path / "full", *service(name, tmp_path / "full"))
    assert code == BAD_INPUT, output
    assert "Traceback" not in output
    assert "full" in output or "No space left" in output or "no space" in output, output


@needs_root
def test_a_stack_on_a_full_disk_says_so(tmp_path: Path) -> None:
    document = stack_document(tmp_path / "full" / "state", engine_delay_s=0.1, scripted=True)
    file = tmp_path / "stack.toml"
    file.write_text(tomli_w.dumps(document))
    code, output = on_full_disk(tmp_path / "full", "tailrace_cli", "up", "--stack", file)
    assert code == BAD_INPUT, output
    assert "Traceback" not in output
    assert "No space left" in output
