"""SIGKILL at every step: of publisher, receiver and engine, one after the other.

A step is a write, a rename, a block of a delta, a call to an engine or its answer. Each test goes
on until a life has come to its end without reaching the step it was to die at: all were tried then.
"""

from __future__ import annotations

import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from weight_sync import PublishConfig

from integration_tests.harness import until
from integration_tests.weight_chaos.processes import WAIT_S, Processes, world
from integration_tests.weight_chaos.roles import Kill

CODECS = (pytest.param("dense", marks=pytest.mark.slow), "ulp-gap")


def config(codec: str, anchor_every: int = 100) -> PublishConfig:
    return PublishConfig(codec=codec, anchor_every=anchor_every, threads=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS)
async def test_a_publisher_killed_at_any_step(tmp_path: Path, codec: str) -> None:
    killed = 0
    async with world(tmp_path) as processes:
        while True:
            # An anchor, and then the version that it dies in.
            steps = (2 * killed + 1, 2 * killed + 2)
            life = processes.start_publisher(steps, config(codec), kill=Kill(killed))
            if await processes.ended(life) == 0:
                break
            assert life.exitcode == -signal.SIGKILL
            await processes.reached(await processes.newest())
            killed += 1
        await processes.reached(await processes.newest())
    payload = ".model.safetensors.part" if codec == "dense" else ".delta.bin.part"
    expected = {"mkdir", "announce", "announced", "sync folder version", "sync folder run"}
    for file in (payload, ".manifest.part"):
        expected |= {f"{step} {file}" for step in ("open", "write", "sync", "rename")}
    assert processes.deaths("publisher") >= expected


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("when", ["following", pytest.param("joining", marks=pytest.mark.slow)])
async def test_a_receiver_killed_at_any_step(
    tmp_path: Path, codec: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it follows, on a shadow of its own; or while it gets to where the others are."""
    monkeypatch.setattr("weight_sync.codecs.delta.SMALL_BYTES", 1)  # a block for each tensor
    killed = 0
    begun = tmp_path / "begun"
    async with world(tmp_path) as processes:
        (host,) = processes.names
        shadows = processes.folder / f"shadow-{host}"
        publisher = await processes.publisher(config(codec, anchor_every=2))
        for _ in range(2):
            await processes.reached(await processes.publish(publisher, 0))
        processes.kill(host)
        while True:
            anchor = await processes.publish(publisher, 2 * killed + 1)
            if when == "following":
                life = processes.start_receiver(host, Kill(killed, once=begun))
                await processes.reached(anchor)
                # Older ones are deleted when the engines hold it: then it has nothing left to do.
                await until(lambda: len(list(shadows.glob("0*"))) == 1, "the others are deleted")
                begun.touch()
                number = await processes.publish(publisher, 2 * killed + 2)
            else:
                number = await processes.publish(publisher, 2 * killed + 2)
                life = processes.start_receiver(host, Kill(killed))
            if not await died_or_reached(processes, life, number):
                break
            killed += 1
            begun.unlink(missing_ok=True)
            processes.start_receiver(host)
            await processes.reached(number)
            processes.kill(host)
        await processes.reached(number)
    expected = {"mkdir", "fetch payload", "link base model", "rename"}
    for call in ("pause_generation", "update_weights_from_disk", "weights_checker"):
        expected |= {f"call /{call}", f"answer of /{call}"}
    expected.add("call /continue_generation")
    if codec != "dense":
        source = "copy shadow" if when == "following" else "copy anchor"
        expected |= {source, "apply delta", "apply block", "remove delta"}
    assert processes.deaths(host) >= expected


async def test_an_engine_killed_at_any_step(tmp_path: Path) -> None:
    killed = 0
    async with world(tmp_path) as processes:
        ((port,),) = processes.engines.values()
        publisher = await processes.publisher(config("ulp-gap"))
        await processes.reached(await processes.publish(publisher, 0))
        while True:
            processes.kill(f"engine-{port}")
            life = processes.start_engine(port, kill_at=killed)
            number = await processes.publish(publisher, killed + 1)
            if not await died_or_reached(processes, life, number):
                break
            killed += 1
            processes.start_engine(port)
            await processes.reached(number)
        await processes.reached(number)
    assert processes.deaths(f"engine-{port}") == {f"load layer.{n}" for n in range(4)} | {"label"}


async def died_or_reached(processes: Processes, life: BaseProcess, number: int) -> bool:
    """Wait until a process was killed, or has got to a version alive."""
    ends_s = time.monotonic() + WAIT_S
    while life.exitcode is None:
        if time.monotonic() > ends_s:
            await processes.reached(number)  # says what the others have come to
        if await processes.waited(number, within_s=0.5) and life.exitcode is None:
            # What is left to do after the engines were switched is done soon, or never.
            return await processes.ended(life, within_s=0.3) is not None
    assert life.exitcode == -signal.SIGKILL
    return True
