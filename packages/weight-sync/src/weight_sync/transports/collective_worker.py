"""The process that runs collectives: the only module here that imports torch.

A collective that lost a member may hang for good, and no thread can be taken out of it. So it runs
in a process of its own, started by `transports.worker.CollectiveWorker`, which kills it at a
deadline. It reads one JSON command a line and answers each with one line.

    serve      host the store at which members meet
    open       say that a file will be offered, before its version is announced
    offer      wait for receivers, form a group with those who came, broadcast the file
    receive    join the group for a file, receive it, acknowledge its checksum
    join       join a group that another program forms, such as SGLang's update group
    send       broadcast a file's tensors to that group, in order
    leave      leave it

Members meet at a TCPStore: a receiver counts itself in under the file's key and learns its rank;
the sender closes the door by adding `_CLOSED` to the count, so a later one knows that it is late.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper

_CLOSED = 1 << 20
_POLL_S = 0.005

Command = Mapping[str, Any]
Bytes = NDArray[np.uint8]


class Late(Exception):  # noqa: N818 -- a word to the other side, not a fault
    """The group was formed without this receiver, or the file is not offered at all."""


class Member:
    """This process as a member of groups. One at a time."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._group: Any = None
        self._device = "cpu"

    def serve(self, command: Command) -> dict[str, object]:
        """Host the store."""
        if self._store is None:
            self._store = _tcp_store(command, serves=True)
        return {}

    def open(self, command: Command) -> dict[str, object]:
        """Announce that a file will be offered."""
        self._met().set(f"{command['key']}/open", "1")
        return {}

    def offer(self, command: Command) -> dict[str, object]:
        """Broadcast a file to whoever joins, and return how many have it whole."""
        store, key = self._met(), command["key"]
        ends_s = time.monotonic() + command["join_s"]
        while store.add(f"{key}/joined", 0) < command["expected"] and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        joined = store.add(f"{key}/joined", _CLOSED) - _CLOSED
        store.set(f"{key}/world", str(joined + 1))
        if joined == 0:
            return {"joined": 0, "delivered": 0}
        path = Path(command["path"])
        checksum = xxhash.xxh3_128()
        with self._grouped(command, rank=0, world=joined + 1), _mapped(path, 0) as data:
            for part in _parts(data, command["chunk_bytes"]):
                checksum.update(part.data)
                self._send(part)
            acks = _acks(store, key, joined, command["timeout_s"])
        whole = sum(ack == checksum.hexdigest() for ack in acks)
        return {"joined": joined, "delivered": whole}

    def receive(self, command: Command) -> dict[str, object]:
        """Receive an offered file and return its checksum."""
        if self._store is None:
            self._store = _tcp_store(command, serves=False)
        store, key = self._store, command["key"]
        if not store.check([f"{key}/open"]):
            raise Late(f"{key} is not offered")
        rank = store.add(f"{key}/joined", 1)
        if rank > _CLOSED:
            raise Late(f"the group for {key} was formed before")
        store.wait([f"{key}/world"], timedelta(seconds=command["timeout_s"]))
        world = int(store.get(f"{key}/world"))
        checksum = xxhash.xxh3_128()
        with (
            self._grouped(command, rank=rank, world=world),
            _mapped(Path(command["path"]), command["size_bytes"]) as data,
        ):
            for part in _parts(data, command["chunk_bytes"]):
                self._receive(part)
                checksum.update(part.data)
            store.set(f"{key}/ack/{rank}", checksum.hexdigest())
        return {"checksum": checksum.hexdigest()}

    def join(self, command: Command) -> dict[str, object]:
        """Join a group of another program as its rank 0."""
        name = command["key"]
        self._form(command, PrefixStore(name, self._met()), name, 0, command["world"])
        return {}

    def send(self, command: Command) -> dict[str, object]:
        """Broadcast parts of a file, each as a tensor of its own dtype and shape."""
        with _mapped(Path(command["path"]), 0) as data:
            for offset, size_bytes in command["parts"]:
                self._send(data[offset : offset + size_bytes])
        return {}

    def leave(self, _command: Command) -> dict[str, object]:
        """Leave the group."""
        self._dissolve()
        return {}

    def _met(self) -> Store:
        if self._store is None:
            raise RuntimeError("serve comes first")
        return self._store

    @contextmanager
    def _grouped(self, command: Command, *, rank: int, world: int) -> Iterator[None]:
        key = command["key"]
        self._form(command, PrefixStore(key, self._met()), key, rank, world)
        try:
            yield
        finally:
            self._dissolve()

    def _form(self, command: Command, store: Store, name: str, rank: int, world: int) -> None:
        backend = command["backend"]
        self._device = "cpu" if backend == "gloo" else "cuda"
        # The same call as SGLang's own for its side; torch has no public one for a group that is
        # neither the default one nor a part of it.
        self._group, _ = _new_process_group_helper(
            world,
            rank,
            [],
            dist.Backend(backend),
            store,
            group_name=GroupName(name),
            timeout=timedelta(seconds=command["timeout_s"]),
        )
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {n: n for n in range(world)}

    def _send(self, part: Bytes) -> None:
        dist.broadcast(torch.from_numpy(part).to(self._device), src=0, group=self._group)

    def _receive(self, part: Bytes) -> None:
        here = torch.from_numpy(part)
        there = here if self._device == "cpu" else here.to(self._device)
        dist.broadcast(there, src=0, group=self._group)
        if there is not here:
            here.copy_(there)

    def _dissolve(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)


def _tcp_store(command: Command, *, serves: bool) -> TCPStore:
    timeout = timedelta(seconds=command["timeout_s"])
    return TCPStore(command["host"], command["port"], None, serves, timeout, wait_for_workers=False)


def _acks(store: Store, key: str, joined: int, timeout_s: float) -> list[str]:
    keys = [f"{key}/ack/{rank}" for rank in range(1, joined + 1)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [store.get(ack).decode() for ack in keys]


@contextmanager
def _mapped(path: Path, size_bytes: int) -> Iterator[Bytes]:
    """Map a file: to read it (size 0), or a new one of that size to fill it."""
    # Private when read: torch wants memory that it could write to.
    access = mmap.ACCESS_WRITE if size_bytes else mmap.ACCESS_COPY
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL if size_bytes else os.O_RDONLY)
    try:
        if size_bytes:
            # Reserved now, or a full file system would kill this process at some later store.
            os.posix_fallocate(descriptor, 0, size_bytes)
        yield np.frombuffer(mmap.mmap(descriptor, 0, access=access), np.uint8)
    finally:
        os.close(descriptor)


def _parts(data: Bytes, chunk_bytes: int) -> Iterator[Bytes]:
    for start in range(0, data.size, chunk_bytes):
        yield data[start : start + chunk_bytes]


def main() -> None:
    """Answer commands until standard input ends."""
    member = Member()
    actions: Mapping[str, Callable[[Command], dict[str, object]]] = {
        action.__name__: action
        for action in (
            member.serve,
            member.open,
            member.offer,
            member.receive,
            member.join,
            member.send,
            member.leave,
        )
    }
    # Libraries print to standard output; the answers go where it was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = actions[command["op"]](command) | {"ok": True}
        except Exception as error:
            # All of it is the parent's to judge.
            late = isinstance(error, Late)
            answer = {"ok": False, "late": late, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
