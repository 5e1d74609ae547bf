"""The service as its operators run it: a process that may be killed at any moment."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service_kit.channel import ChannelConfig, open_channel
from weight_sync import PublishConfig, Publisher, WeightClient
from weight_sync.testing import FakeEngine, Fault, root_of

Weights = Callable[[int], dict[str, Any]]


class Process:
    """`python -m weight_sync serve` with everything in one folder."""

    def __init__(self, folder: Path, engine: FakeEngine, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        settings = {
            "server.bind": self.address,
            "state_dir": folder / "state",
            "store.folder": folder / "store",
            "receiver.engines": json.dumps([{"url": engine.url}]).replace(":", "=", 1),
            "receiver.poll_interval_s": 0.05,
            "receiver.report_interval_s": 0.2,
        }
        self.command = [sys.executable, "-m", "weight_sync", "serve"]
        for key, value in settings.items():
            self.command += ["--set", f"{key}={value}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self.command)

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(timeout=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("codec", ["dense", "ulp-gap"])
async def test_a_killed_service_goes_on_where_it_was(
    tmp_path: Path, engine: FakeEngine, weights: Weights, codec: Any
) -> None:
    process = Process(tmp_path, engine, free_port())
    channel_config = ChannelConfig(
        target=process.address, wait_for_ready=True, max_reconnect_backoff_s=0.2
    )
    process.start()
    try:
        async with open_channel(channel_config) as channel:
            client = WeightClient(channel)
            config = PublishConfig(codec=codec)
            publisher = await Publisher.acquire(channel, run="run", config=config)
            numbers = []
            for seed in (1, 2):
                version = await publisher.publish(weights(seed), step=seed)
                found = await client.await_version(version.number, timeout_s=20)
                assert found.engines == 1
                assert engine.root() == root_of({n: a.tobytes() for n, a in weights(seed).items()})
                numbers.append(version.number)
                assert process.end(signal.SIGKILL) == -signal.SIGKILL
                process.start()
            assert (await client.await_version(2, timeout_s=20)).engines == 1
            loads = [path for path, _ in engine.calls if path == "/update_weights_from_disk"]
            assert len(loads) == 2  # none because of a restart
            # Killed in the midst of an activation: the engine stays paused until it is whole again.
            engine.faults.append(Fault.HANG)
            numbers.append((await publisher.publish(weights(3), step=3)).number)
            async with asyncio.timeout(20):
                while engine.faults:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert process.end(signal.SIGKILL) == -signal.SIGKILL
            assert engine.served[-1][0] == "2"
            process.start()
            assert (await client.await_version(3, timeout_s=20)).engines == 1
            # The publisher of before might go on; a new one fences it off, with higher numbers.
            resumed = await Publisher.acquire(channel, run="run", config=config)
            numbers.append((await resumed.publish(weights(4), step=4, parent=3)).number)
            assert numbers == [1, 2, 3, 4]
            assert (await client.await_version(4, timeout_s=20)).engines == 1
            bases = [v.base for v in (await client.list_versions(timeout_s=20)).versions]
            # Killed receivers began again at the anchor; the resumed run has one of its own.
            assert bases == ([0, 0, 0, 0] if codec == "dense" else [0, 1, 2, 0])
            assert engine.served[-1][0] == "4"
            assert engine.unpaused_loads == 0
    finally:
        code = await asyncio.to_thread(process.end, signal.SIGTERM)
    assert code == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("receiver.verfy=label", "receiver.verify"),
        ("receiver.only=true", "receiver.only needs receiver.service"),
    ],
)
def test_a_bad_setting_is_one_clear_message_and_exit_code_2(
    tmp_path: Path, setting: str, message: str
) -> None:
    command = [sys.executable, "-m", "weight_sync", "serve"]
    for each in ("server.bind=127.0.0.1:0", f"state_dir={tmp_path}", setting):
        command += ["--set", each]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_busy_port_is_one_clear_message_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "weight_sync", "serve"]
        for each in (f"server.bind=127.0.0.1:{port}", f"state_dir={tmp_path}"):
            command += ["--set", each]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_the_readme_s_example_runs(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    command = [sys.executable, "-m", "weight_sync", "serve"]
    address = f"127.0.0.1:{free_port()}"
    for each in (f"server.bind={address}", f"state_dir={tmp_path}", f"store.folder={tmp_path}/s"):
        command += ["--set", each]
    # Until the service listens, calls wait for it.
    patient = f'target="{address}", wait_for_ready=True'
    code = example.replace('target="127.0.0.1:7103"', patient)
    assert code != example
    with subprocess.Popen(command) as service:
        try:
            ended = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        finally:
            service.terminate()
    lines = ended.stdout.splitlines()
    assert len(lines) == 2
    assert "number=1, step=1, parent=0" in lines[0]
    assert "number=2, step=2, parent=1" in lines[1]
