"""`python -m grpo_trainer serve` as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grpo_trainer.testing.models import write_model
from service_kit.channel import ChannelConfig, open_channel
from tailrace.trainer.v1 import trainer_service_pb2 as pb
from tailrace.trainer.v1 import trainer_service_pb2_grpc as pb_grpc

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*settings: str) -> list[str]:
    options = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "grpo_trainer", "serve", *options]


def refused(*settings: str) -> str:
    done = subprocess.run(
        command(*settings),
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_settings_that_are_wrong_end_with_code_2_and_one_message(tmp_path: Path) -> None:
    stderr = refused("run_dirr=x", f"model={tmp_path}")
    assert "unknown key 'run_dirr'; closest valid key: 'run_dir'" in stderr


def test_a_model_that_is_missing_ends_with_code_2(tmp_path: Path) -> None:
    stderr = refused(f"run_dir={tmp_path}/run", f"model={tmp_path}/none")
    assert "none/config.json: cannot be read" in stderr


def test_a_damaged_run_ends_with_code_2(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    stderr = refused(f"run_dir={tmp_path}/run", f"model={tmp_path}")
    assert "run.json: not the record of a run" in stderr


@pytest.mark.timeout(180)
async def test_it_serves_until_told_to_stop(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    address_file = tmp_path / "address"
    settings = (
        f"run_dir={tmp_path}/run",
        f"model={model}",
        "server.bind=127.0.0.1:0",
        f"server.address_file={address_file}",
    )
    process = subprocess.Popen(command(*settings), env=ENVIRONMENT, stderr=subprocess.PIPE)  # noqa: ASYNC220
    try:
        deadline_s = time.monotonic() + 120
        while not address_file.is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)  # noqa: ASYNC251
        address = address_file.read_text().strip()
        async with open_channel(ChannelConfig(target=address)) as channel:
            stub = pb_grpc.TrainerServiceStub(channel)
            status = await stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        assert (status.run, list(status.stages)) == ("run", [])
        port = int(address.rpartition(":")[2])
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) == 0
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
