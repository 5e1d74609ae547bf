"""Weights from one process to others on a host: shared memory against a plain copy and gloo.

    memcpy   a copy into memory that is there already, once for each receiver: the least it can cost
    shm      written to the memory store with its checksum, linked and mapped by each receiver, and
             its manifest committed; the bytes are then in every receiver's address space
    verify   what a receiver adds: the checksum of every tensor
    gloo     `torch.distributed` broadcast, memory to memory, receivers in their own processes

`gb_per_s_X_N` counts delivered bytes: N receivers get N times the payload. `cpu_s_per_gb_X_N` is
CPU time of all processes for a delivered GB: compare these; wall time on a busy machine says less.
`shm_ratio_memcpy` is the lowest ratio of GB/s, over 1, 2 and 4 receivers: the median over many
pairs of rounds right after each other, which a busy machine slows down alike. What comes of GB per
CPU-second is `shm_cpu_ratio_memcpy_N`: the store's second thread counts there and does not help.
Rounds of the rivals alternate; of gloo's there are fewer. A first version is written and deleted
before: a trainer publishes again and again, and the store writes into the memory of versions that
are gone.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from weight_sync.codecs import Tensor, safetensors_file
from weight_sync.core.manifest import build_manifest
from weight_sync.model_files import mapped
from weight_sync.stores import MemoryStore
from weight_sync.transports import StoreTransport

RECEIVERS = (1, 2, 4)
TENSORS = 16
ROUNDS_TO_GLOO = 3
"""Rounds of the others for each of gloo's, which takes longer and is noisy in no ratio of ours."""
GB = 1e9


@dataclass
class Cost:
    """What moving some bytes took, round by round."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)

    def add(self, delivered_bytes: int, wall_s: float, cpu_s: float) -> None:
        """Take in a round."""
        self.gb_per_s.append(delivered_bytes / wall_s / GB)
        self.cpu_s_per_gb.append(cpu_s / (delivered_bytes / GB))


def weights(size_bytes: int) -> NDArray[np.uint16]:
    """Random bf16 bits: nothing that a file system or a CPU could shorten."""
    return np.random.default_rng(0).integers(0, 1 << 16, size_bytes // 2, dtype=np.uint16)


def copy(source: NDArray[np.uint16], targets: Sequence[NDArray[np.uint16]], cost: Cost) -> None:
    with timed(cost, source.nbytes * len(targets)):
        for target in targets:
            np.copyto(target, source)


class SharedMemory:
    """A publisher and its receivers, by the product's own store and transport."""

    def __init__(self, source: NDArray[np.uint16], folder: Path) -> None:
        bounds = np.linspace(0, source.size, TENSORS + 1, dtype=int)
        self._tensors = [
            Tensor(f"t{n:02d}", "BF16", (int(b - a),), source[a:b].view(np.uint8).data)
            for n, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        # Checksums of tensors are the publisher's cost for any transport.
        self._entries = [tensor.entry() for tensor in self._tensors]
        self._source = source
        self._store = MemoryStore(f"bench-{uuid.uuid4().hex}")
        self._transport = StoreTransport()
        self._folder = folder
        self._number = 0

    def deliver(self, receivers: int, cost: Cost, verified: Cost) -> None:
        """Publish one version to so many receivers, and delete it again."""
        self._number += 1
        number = self._number
        copies = []
        with timed(cost, self._source.nbytes * receivers):
            publication = self._store.begin("bench", number, 1)
            pieces: list[bytes | memoryview] = [safetensors_file.header(self._tensors)]
            pieces += [tensor.data for tensor in self._tensors]
            payload = publication.write("model.safetensors", pieces)
            manifest = build_manifest(
                run="bench",
                incarnation=1,
                number=number,
                step=0,
                parent=0,
                codec="dense",
                tensors=self._entries,
                payloads=[payload],
            )
            uri = publication.commit(manifest)
            for receiver in range(receivers):
                read = self._transport.read_manifest(uri)
                into = self._folder / f"{number}-{receiver}"
                self._transport.fetch(uri, read.payloads[0], into)
                copies.append(mapped(into))
        with timed(verified, self._source.nbytes * receivers):
            for copied in copies:
                found = {tensor.name: tensor for tensor in safetensors_file.tensors(copied)}
                for entry in self._entries:
                    found[entry.name].verify(entry)
        found.clear()
        copies.clear()
        del copied
        for receiver in range(receivers):
            (self._folder / f"{number}-{receiver}").unlink()
        (version,) = self._store.committed("bench")
        self._store.remove(version)

    def close(self) -> None:
        """Delete the store."""
        shutil.rmtree(self._store.root)


class Gloo:
    """One group of a sender, this process, and receivers; formed once, as trainers do."""

    def __init__(self, source: NDArray[np.uint16], receivers: int) -> None:
        import torch
        import torch.distributed as dist

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue()
        self._go = [context.Event() for _ in range(receivers)]
        self._processes = [
            context.Process(
                target=_gloo_receiver,
                args=(rank + 1, receivers + 1, port, source.nbytes, self._go[rank], self._queue),
            )
            for rank in range(receivers)
        ]
        for process in self._processes:
            process.start()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=0,
            world_size=receivers + 1,
        )
        self._dist = dist
        self._tensor = torch.from_numpy(source.view(np.uint8))
        self._receivers = receivers

    def broadcast(self, cost: Cost) -> None:
        """Broadcast once; CPU of the receivers counts too."""
        for go in self._go:
            go.set()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        self._dist.broadcast(self._tensor, src=0)
        theirs = [self._queue.get(timeout=600) for _ in range(self._receivers)]
        # The last receiver's wall time: the sender is done before it.
        wall_s = time.perf_counter() - began_s
        cpu_s = time.process_time() - cpu_s + sum(theirs)
        cost.add(self._tensor.nbytes * self._receivers, wall_s, cpu_s)

    def close(self) -> None:
        """End the group."""
        self._dist.destroy_process_group()
        for process in self._processes:
            process.terminate()
            process.join()


def _gloo_receiver(rank: int, world: int, port: int, size: int, go: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    buffer = torch.zeros(size, dtype=torch.uint8)
    while True:
        go.wait()
        go.clear()
        cpu_s = time.process_time()
        dist.broadcast(buffer, src=0)
        answers.put(time.process_time() - cpu_s)


@contextlib.contextmanager
def timed(cost: Cost, delivered_bytes: int) -> Iterator[None]:
    """Add wall and CPU time of a block, all threads."""
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    yield
    cost.add(delivered_bytes, time.perf_counter() - began_s, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare(size_bytes: int, rounds: int) -> dict[str, Cost]:
    """Measure every rival with 1, 2 and 4 receivers."""
    source = weights(size_bytes)
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        shared = SharedMemory(source, Path(scratch))
        try:
            shared.deliver(1, Cost(), Cost())  # the first version makes the pages
            for receivers in RECEIVERS:
                names = [f"{kind}_{receivers}" for kind in ("memcpy", "shm", "verify", "gloo")]
                memcpy, shm, verify, gloo = (costs.setdefault(name, Cost()) for name in names)
                targets = [np.zeros_like(source) for _ in range(receivers)]
                group = Gloo(source, receivers)
                group.broadcast(Cost())
                for index in range(ROUNDS_TO_GLOO * rounds):
                    copy(source, targets, memcpy)
                    shared.deliver(receivers, shm, verify)
                    if index % ROUNDS_TO_GLOO == 0:
                        group.broadcast(gloo)
                group.close()
        finally:
            shared.close()
    return costs


def transport_figures(rounds: int, mib: int) -> dict[str, list[float]]:
    """Measure with a payload of so many MiB; return the rounds of each figure."""
    costs = compare(mib << 20, rounds)
    figures = {f"gb_per_s_{name}": cost.gb_per_s for name, cost in costs.items()}
    figures |= {f"cpu_s_per_gb_{name}": cost.cpu_s_per_gb for name, cost in costs.items()}
    for receivers in RECEIVERS:
        ours, memcpy, gloo = (costs[f"{kind}_{receivers}"] for kind in ("shm", "memcpy", "gloo"))
        figures[f"shm_cpu_ratio_memcpy_{receivers}"] = _ratios(
            memcpy.cpu_s_per_gb, ours.cpu_s_per_gb
        )
        figures[f"shm_ratio_memcpy_{receivers}"] = _ratios(ours.gb_per_s, memcpy.gb_per_s)
        figures[f"shm_ratio_gloo_{receivers}"] = _ratios(
            ours.gb_per_s[::ROUNDS_TO_GLOO], gloo.gb_per_s
        )
    lowest = min(
        (figures[f"shm_ratio_memcpy_{receivers}"] for receivers in RECEIVERS),
        key=statistics.median,
    )
    return figures | {"shm_ratio_memcpy": lowest}


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [left / right for left, right in zip(one, other, strict=True)]
