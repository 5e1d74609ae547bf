"""What the processes of a chaos test do, each until it is told to stop, or killed at a step.

They are forked from one process that has imported everything, so a life costs milliseconds.
"""

from __future__ import annotations

import asyncio
import functools
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import weight_sync.app
from numpy.typing import NDArray
from service_kit.channel import ChannelConfig, open_channel
from weight_sync import FolderStore, PublishConfig, Publisher
from weight_sync.codecs import delta
from weight_sync.config import WeightSyncConfig
from weight_sync.core.manifest import Manifest, digest
from weight_sync.drivers.http_engine import HttpEngine
from weight_sync.shadow import ShadowFolder
from weight_sync.stores import folder as folder_store
from weight_sync.testing import FakeEngine

Weights = dict[str, NDArray[np.float32]]
NEVER = -1
_LOOK_S = 0.004


def weights_of(step: int, lineage: int = 0) -> Weights:
    """The weights after so many steps, of which each moves some elements by an ulp."""
    rng = np.random.default_rng(lineage)
    weights = {
        f"layer.{n}": rng.standard_normal(400, np.float32) for n in range(4)
    }  # of 1600 bytes each
    for at in range(1, step + 1):
        rng = np.random.default_rng((lineage, at))
        for array in weights.values():
            array.view(np.uint32)[...] += rng.random(array.shape) < 0.1
    return weights


def checksums_of(weights: Mapping[str, NDArray[np.float32]]) -> dict[str, str]:
    return {name: digest(array.data) for name, array in weights.items()}


class Kill:
    """Ends the process, or has it sleep, just before the step of this number."""

    def __init__(
        self, at: int, number: signal.Signals = signal.SIGKILL, *, once: Path | None = None
    ) -> None:
        """Count steps from 0; with `once`, from when this file is there."""
        self._left = at
        self._number = number
        self._once = once

    def __call__(self, step: str) -> None:
        if self._once is not None and not self._once.exists():
            return
        if self._left == 0:
            print(f"{self._number.name} before: {step}", flush=True)
            os.kill(os.getpid(), self._number)
        self._left -= 1


def begin(log: str, clock: str = "") -> None:
    """Write to a file from here on, and read the time from a clock that others may set."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    # Many small blocks and writes instead of one: more instants to die at.
    delta.SMALL_BYTES = 1
    folder_store._PIECE_BYTES = 512
    if clock:
        # What weight-sync goes by; gRPC alone asks the wall clock, for deadlines in its core.
        file = mmap.mmap(os.open(clock, os.O_RDONLY), 8, access=mmap.ACCESS_READ)
        monotonic = time.monotonic
        time.monotonic = lambda: monotonic() + struct.unpack_from("d", file)[0]


def run_host(config: WeightSyncConfig, log: str, step: Kill, clock: str = "") -> None:
    """Run the service, a receiver, or both."""
    begin(log, clock)
    weight_sync.app.ShadowFolder = functools.partial(ShadowFolder, on_step=step)  # type: ignore
    call, block = HttpEngine.call, delta.Delta._apply_block

    async def called(
        self: HttpEngine, method: str, path: str, body: Any, timeout_s: float
    ) -> Mapping[str, Any]:
        if method == "GET":
            return await call(self, method, path, body, timeout_s)
        step(f"call {path}")
        answer = await call(self, method, path, body, timeout_s)
        step(f"answer of {path}")
        return answer

    def applied(self: delta.Delta, *arguments: Any) -> None:
        step("apply block")
        block(self, *arguments)

    HttpEngine.call, delta.Delta._apply_block = called, applied  # type: ignore
    asyncio.run(weight_sync.app.serve(config))


def run_engine(model: Path, port: int, log: str, kill_at: int) -> None:
    """Run an engine that says in its log by which weights it generates, whenever they change."""
    begin(log)
    asyncio.run(_generate(model, port, kill_at))


async def _generate(model: Path, port: int, kill_at: int) -> None:
    last = ""
    async with FakeEngine(model, port=port, on_step=Kill(kill_at)) as engine:
        while True:
            if not engine.paused:
                checksums = {name: digest(data) for name, data in engine.tensors.items()}
                line = json.dumps({"label": engine.label, "checksums": checksums})
                if line != last:
                    print(line, flush=True)
                last = line
            await asyncio.sleep(_LOOK_S)


class Journal:
    """A sender that sends nothing: it writes down what a version holds before it is announced."""

    def __init__(self, path: Path, step: Callable[[str], None] = lambda step: None) -> None:
        self._path = path
        self._step = step
        self.weights: Weights = {}

    def open(self, manifest_uri: str, manifest: Manifest) -> None:
        version = manifest.version
        line = json.dumps(
            {
                "label": version.label,
                "incarnation": version.incarnation,
                "checksums": checksums_of(self.weights),
            }
        )
        with self._path.open("a") as file:
            file.write(line + "\n")
        self._step("announce")

    def start(self, manifest_uri: str, manifest: Manifest) -> None:
        self._step("announced")


def run_publisher(
    target: str,
    store: Path,
    journal: Path,
    log: str,
    steps: Sequence[int],
    config: PublishConfig,
    lineage: int = 0,
    kill: Kill | None = None,
    pause_s: float = 0.0,
) -> None:
    """Publish these steps; the last one is done under `kill`."""
    begin(log)
    kill = kill or Kill(NEVER)
    asyncio.run(_publish(target, store, journal, steps, config, lineage, kill, pause_s))


async def _publish(
    target: str,
    root: Path,
    journal: Path,
    steps: Sequence[int],
    config: PublishConfig,
    lineage: int,
    kill: Kill,
    pause_s: float,
) -> None:
    now = steps[0]

    def step(name: str) -> None:
        if now == steps[-1]:
            kill(name)

    sender = Journal(journal, step)
    store = FolderStore(root, on_step=step)
    async with open_channel(ChannelConfig(target=target, wait_for_ready=True)) as channel:
        publisher = await Publisher.acquire(
            channel, run="run", store=store, config=config, keep_latest=1, sender=sender
        )
        for now in steps:
            sender.weights = weights_of(now, lineage)
            await publisher.publish(sender.weights, step=now)
            await asyncio.sleep(pause_s)
