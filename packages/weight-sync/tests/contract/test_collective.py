"""Broadcast over gloo between real processes: who is there gets it, who dies hangs nobody."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_kit.channel import ChannelConfig, open_channel
from weight_sync import Publisher, WeightClient
from weight_sync.config import CollectiveConfig, ReceiverConfig, StaticEngine, WeightSyncConfig
from weight_sync.core.manifest import Manifest, PayloadFile, build_manifest, digest
from weight_sync.errors import (
    ChecksumMismatch,
    NotOffered,
    PayloadMissing,
    TransportFailed,
    TransportUnavailable,
)
from weight_sync.testing import FakeEngine, root_of
from weight_sync.transports import worker
from weight_sync.transports.base import Fetched
from weight_sync.transports.collective import CollectiveSender, CollectiveTransport

DATA = bytes(range(256)) * 5000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Group:
    """A sender and receivers, each with a worker process of its own."""

    def __init__(self, folder: Path) -> None:
        # Several chunks, the last one shorter.
        self.config = CollectiveConfig(
            port=free_port(), join_s=60, timeout_s=60, chunk_bytes=300_000
        )
        self.sender = CollectiveSender(self.config, expected=2)
        self.receivers = [CollectiveTransport(self.config) for _ in range(2)]
        self.folder = folder
        self._number = 0

    def version(self, data: bytes = DATA) -> tuple[str, Manifest]:
        self._number += 1
        folder = self.folder / "run" / f"{self._number:010d}-0001"
        folder.mkdir(parents=True)
        payload = PayloadFile("model.safetensors", len(data), digest(data))
        (folder / payload.name).write_bytes(data)
        manifest = build_manifest(
            run="run",
            incarnation=1,
            number=self._number,
            step=0,
            parent=0,
            codec="dense",
            tensors=[],
            payloads=[payload],
        )
        return (folder / "manifest.json").as_uri(), manifest

    def receive(self, uri: str, manifest: Manifest, into: list[Path]) -> list[Fetched | Exception]:
        """Let each receiver fetch the payload at once; return what came of it."""
        results: list[Any] = [None] * len(into)

        def fetch(index: int) -> None:
            try:
                receiver = self.receivers[index]
                results[index] = receiver.fetch(uri, manifest.payloads[0], into[index])
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=fetch, args=(n,)) for n in range(len(into))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("store"))
    for receiver in group.receivers:
        receiver._worker.call("leave", timeout_s=60)  # it has started
    yield group
    group.close()


def test_every_receiver_gets_the_same_bytes(group: Group, tmp_path: Path) -> None:
    for round_ in range(2):  # the groups are formed anew
        uri, manifest = group.version()
        group.sender.open(uri, manifest)
        group.sender.start(uri, manifest)
        into = [tmp_path / f"{round_}-{n}" for n in range(2)]
        results = group.receive(uri, manifest, into)
        group.sender.wait(60)
        assert results == [Fetched(path, len(DATA)) for path in into]
        assert [path.read_bytes() for path in into] == [DATA, DATA]
        assert list(group.sender.delivered.values())[-1] == 2


def test_what_is_not_offered_is_missing_at_once(group: Group, tmp_path: Path) -> None:
    uri, manifest = group.version()
    with pytest.raises(PayloadMissing, match="not offered"):
        group.receivers[0].fetch(uri, manifest.payloads[0], tmp_path / "x")
    with pytest.raises(NotOffered, match="manifests are not broadcast"):
        group.receivers[0].read_manifest(uri)
    assert not (tmp_path / "x").exists()


def test_who_comes_late_is_told(group: Group, tmp_path: Path) -> None:
    uri, manifest = group.version()
    group.sender.open(uri, manifest)
    group.sender.start(uri, manifest)
    group.receive(uri, manifest, [tmp_path / "a", tmp_path / "b"])
    group.sender.wait(60)
    with pytest.raises(PayloadMissing, match="formed before"):
        group.receivers[0].fetch(uri, manifest.payloads[0], tmp_path / "c")


def test_other_bytes_than_the_manifest_names_are_refused(group: Group, tmp_path: Path) -> None:
    uri, manifest = group.version()
    payload = manifest.payloads[0]
    wrong = PayloadFile(payload.name, payload.size_bytes, digest(b"other"))
    group.sender.open(uri, manifest)
    group.sender.start(uri, manifest)
    other = build_manifest(
        run="run", incarnation=1, number=99, step=0, parent=0, codec="dense", tensors=[],
        payloads=[wrong],
    )  # fmt: skip
    results = group.receive(uri, other, [tmp_path / "a", tmp_path / "b"])
    assert [type(result) for result in results] == [ChecksumMismatch, ChecksumMismatch]
    assert list(tmp_path.iterdir()) == []
    group.sender.wait(60)


def test_a_receiver_that_dies_in_the_midst_fails_the_others_by_the_deadline(
    group: Group, tmp_path: Path
) -> None:
    # So long a payload that the kill comes before its end.
    data = DATA * 60
    uri, manifest = group.version(data)
    victim, other = group.receivers
    group.sender.open(uri, manifest)
    results: list[object] = []

    def fetch() -> None:
        try:
            results.append(other.fetch(uri, manifest.payloads[0], tmp_path / "other"))
        except TransportFailed as error:
            results.append(error)

    def die() -> None:
        process = victim._worker._process
        assert process is not None
        while not (tmp_path / "victim").exists():
            time.sleep(0.0005)
        os.kill(process.pid, signal.SIGKILL)

    threads = [threading.Thread(target=fetch), threading.Thread(target=die)]
    for thread in threads:
        thread.start()
    group.sender.start(uri, manifest)
    with pytest.raises(TransportFailed, match="a member of the group may be gone"):
        victim.fetch(uri, manifest.payloads[0], tmp_path / "victim")
    for thread in threads:
        thread.join()
    group.sender.wait(90)
    # The other one was told, or had it all; it does not hang, and nothing torn stays.
    (result,) = results
    if isinstance(result, TransportFailed):
        assert not (tmp_path / "other").exists()
    else:
        assert (tmp_path / "other").read_bytes() == data
    # The next version goes through again.
    uri, manifest = group.version()
    group.sender.open(uri, manifest)
    group.sender.start(uri, manifest)
    fetched = group.receive(uri, manifest, [tmp_path / "a", tmp_path / "b"])
    assert [type(each) for each in fetched] == [Fetched, Fetched]


async def test_a_version_is_broadcast_to_the_receivers_that_are_there(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Any
) -> None:
    group = CollectiveConfig(port=free_port(), join_s=60)
    receiver = ReceiverConfig(
        host="host",
        engines=(StaticEngine(url=engine.url),),
        transports=("collective", "grpc"),
        collective=group,
        poll_interval_s=0.02,
    )
    sender = CollectiveSender(group, expected=1)
    async with (
        run_service(config.model_copy(update={"receiver": receiver})) as service,
        open_channel(ChannelConfig(target=service.address)) as channel,
    ):
        publisher = await Publisher.acquire(channel, run="run", sender=sender)
        for seed in (1, 2):
            version = await publisher.publish(weights(seed), step=seed, timeout_s=120)
            held = await WeightClient(channel).await_version(version.number, timeout_s=120)
            assert held.engines == 1
        assert engine.root() == root_of({n: a.tobytes() for n, a in weights(2).items()})
        sender.wait(60)
    sender.close()
    assert list(sender.delivered.values()) == [1, 1]


def test_a_worker_that_hangs_is_killed_at_its_deadline(tmp_path: Path) -> None:
    # A group of two that nobody else ever joins.
    config = CollectiveConfig(port=free_port(), join_s=0.1, timeout_s=60)
    lone = worker.CollectiveWorker(config)
    lone.call("serve", timeout_s=60)
    process = lone._process
    assert process is not None
    before = worker._KILL_S
    worker._KILL_S = 0.1
    try:
        with pytest.raises(TransportFailed, match=r"no answer within|collective join"):
            lone.call("join", timeout_s=0.2, key="alone", world=2)
    finally:
        worker._KILL_S = before
    assert process.poll() is not None
    lone.close()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "find_spec", lambda name: None)
    with pytest.raises(TransportUnavailable, match=r"Install weight-sync\[collective\]"):
        CollectiveTransport(CollectiveConfig())
