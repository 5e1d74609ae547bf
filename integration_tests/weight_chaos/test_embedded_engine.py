"""The embedded engine itself, killed at any instant of an update: it never holds what it denies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest
import safetensors.numpy
from tailrace_cli.stack.files import BASE_MODEL
from weight_sync import PublishConfig, RawTensor
from weight_sync.core.manifest import digest

from integration_tests.weight_chaos.processes import Processes, world

NEW_TOKENS = 40


@contextmanager
def embedded(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run an engine with the demo's model."""
    command = [sys.executable, "-m", "rollout_engine", "engine"]
    command += ["--set", f"model={BASE_MODEL}", "--set", f"port={port}"]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def generated(url: str) -> Any:
    """Generate; None: the engine is not there, or died meanwhile."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    with suppress(aiohttp.ClientError, OSError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
            session.post(
                f"{url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling}
            ) as reply,
        ):
            return await reply.json()
    return None


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=[pytest.mark.slow])])
async def test_the_engine_killed_in_the_midst_of_updates(tmp_path: Path, kills: int) -> None:
    rng = Random(0)
    weights = safetensors.numpy.load_file(BASE_MODEL / "model.safetensors")
    async with world(tmp_path, served=BASE_MODEL) as processes:
        ((port,),) = processes.engines.values()
        url = processes.url(port)
        processes.kill(f"engine-{port}")
        publisher = await processes.publisher(PublishConfig(codec="ulp-gap", anchor_every=4))

        async def publish() -> int:
            for array in weights.values():
                words = array.reshape(-1).view(f"u{array.itemsize}")
                words[:: rng.randint(20, 60)] ^= 1
            tensors = {
                name: RawTensor(a.reshape(-1).view(np.uint8).data, DTYPES[a.dtype.name], a.shape)
                for name, a in weights.items()
            }
            known = {name: digest(a.data) for name, a in weights.items()}
            processes.checker.published(str(publisher._next), known)
            return (await publisher.publish(tensors, step=1)).number

        async def watch() -> None:
            """It labels itself in the same critical section, so at any instant the two agree."""
            while True:
                held = await processes.ask(url)
                if held is not None:
                    processes.checker.looked("engine", *held)
                await asyncio.sleep(0.01)

        publisher._sender = None
        watching = asyncio.create_task(watch())
        for _ in range(kills):
            with embedded(port) as engine:
                for _ in range(4):
                    await reached(processes, await publish())
                told = asyncio.create_task(generated(url))
                await publish()
                await asyncio.sleep(rng.random() * 0.08)
                engine.kill()
                await told
        with embedded(port):
            await reached(processes, await publish())
            number = await publish()
            await reached(processes, number)
            reply = await generated(url)
            assert reply["meta_info"]["weight_version"] == str(number)
        assert not watching.done(), watching
        watching.cancel()
        assert not processes.checker.violations, processes.checker.violations


DTYPES = {"float32": "F32", "float16": "F16"}


async def reached(processes: Processes, number: int) -> None:
    """Wait until the engine, once it has started, holds a version; and compare its own weights."""
    assert await processes.waited(number, within_s=60)
    ((port,),) = processes.engines.values()
    held = await processes.ask(processes.url(port))
    assert held is not None
    assert held[0] == str(number)
    processes.checker.looked("engine", *held)
