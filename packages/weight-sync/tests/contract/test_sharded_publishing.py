"""Ranks in processes of their own publish one version; it reaches an engine, or nobody."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_kit.channel import ChannelConfig, open_channel
from weight_sync import (
    PublishConfig,
    Publisher,
    ShardTicket,
    ShardWriter,
    WeightClient,
    assign_owners,
)
from weight_sync.config import ReceiverConfig, StaticEngine, WeightSyncConfig
from weight_sync.errors import AnchorRequired, ShardMissing
from weight_sync.testing import FakeEngine, root_of

Weights = Callable[[int], dict[str, Any]]
RANKS = 2
RANK = """
import os, signal, sys
import numpy as np
from weight_sync import ShardTicket, ShardWriter

ticket, rank, tensors, dies = sys.argv[1:]
if dies == "True":
    os.kill(os.getpid(), signal.SIGKILL)
ShardWriter(int(rank)).write(ShardTicket.from_json(ticket), dict(np.load(tensors)))
"""


async def written(
    folder: Path, ticket: ShardTicket, weights: dict[str, Any], dead: int | None = None
) -> None:
    """Let each rank write the tensors that it owns."""
    owners = assign_owners({name: array.nbytes for name, array in weights.items()}, RANKS)
    ranks = []
    for rank in range(RANKS):
        tensors = folder / f"{rank}.npz"
        own = {name: array for name, array in weights.items() if owners[name] == rank}
        np.savez(tensors, **own)
        words = ["-c", RANK, ticket.to_json(), str(rank), str(tensors), str(rank == dead)]
        ranks.append(await asyncio.create_subprocess_exec(sys.executable, *words))
    ended = [await rank.wait() for rank in ranks]
    assert ended == [-signal.SIGKILL if rank == dead else 0 for rank in range(RANKS)]


async def test_a_version_of_several_ranks_reaches_the_engine_or_nobody(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights, tmp_path: Path
) -> None:
    receiver = ReceiverConfig(
        host="host", engines=(StaticEngine(url=engine.url),), poll_interval_s=0.02
    )
    async with (
        run_service(config.model_copy(update={"receiver": receiver})) as service,
        open_channel(ChannelConfig(target=service.address)) as channel,
    ):
        client = WeightClient(channel)
        publisher = await Publisher.acquire(channel, run="run")

        ticket = await publisher.begin_shards(shards=RANKS, step=1)
        await written(tmp_path, ticket, weights(1))
        version = await publisher.commit_shards(ticket)
        assert (await client.await_version(version.number, timeout_s=20)).engines == 1
        assert engine.root() == root_of({n: a.tobytes() for n, a in weights(1).items()})
        (update,) = [body for path, body in engine.calls if "update" in path]
        index = Path(update["model_path"]) / "model.safetensors.index.json"
        assert json.loads(index.read_text())["weight_map"].keys() == weights(1).keys()

        # A rank dies: the version is given up, and its number is not used again.
        ticket = await publisher.begin_shards(shards=RANKS, step=2)
        await written(tmp_path, ticket, weights(2), dead=1)
        with pytest.raises(ShardMissing, match=r"no shard from ranks \[1\]"):
            await publisher.commit_shards(ticket, timeout_s=0.2)
        listed = await client.list_versions(timeout_s=5)
        assert [v.version.number for v in listed.versions] == [1]
        assert engine.label == "1"

        last = await publisher.publish({"w": np.zeros(2, np.float32)}, step=3)
        assert (last.number, last.parent) == (3, 1)


async def test_several_ranks_send_what_changed_and_an_anchor_after_one_was_lost(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    receiver = ReceiverConfig(
        host="host", engines=(StaticEngine(url=engine.url),), poll_interval_s=0.02
    )
    async with (
        run_service(config.model_copy(update={"receiver": receiver})) as service,
        open_channel(ChannelConfig(target=service.address)) as channel,
    ):
        client = WeightClient(channel)
        deltas = PublishConfig(codec="ulp-gap", anchor_every=4)
        publisher = await Publisher.acquire(channel, run="run", config=deltas)
        owners = assign_owners({name: array.nbytes for name, array in weights(0).items()}, RANKS)
        ranks = [ShardWriter(rank) for rank in range(RANKS + 1)]  # the last one owns nothing

        async def publish(step: int) -> None:
            ticket = await publisher.begin_shards(shards=len(ranks), step=step)
            for rank, writer in enumerate(ranks):
                own = {name: a for name, a in weights(step).items() if owners[name] == rank}
                writer.write(ShardTicket.from_json(ticket.to_json()), own)
            version = await publisher.commit_shards(ticket, timeout_s=0.2)
            assert (await client.await_version(version.number, timeout_s=10)).engines == 1
            assert engine.root() == root_of({n: a.tobytes() for n, a in weights(step).items()})

        for step in range(3):
            await publish(step)
        ranks[1] = ShardWriter(1)  # started again, it knows of no version
        with pytest.raises(AnchorRequired, match=r"rank 1 .* version 3, and holds no version"):
            await publish(3)
        for step in range(3, 9):
            await publish(step)
        listed = (await client.list_versions(timeout_s=5)).versions
        assert [(v.version.number, v.base) for v in listed] == [
            (1, 0), (2, 1), (3, 2), (5, 0), (6, 5), (7, 6), (8, 7), (9, 0), (10, 9),
        ]  # fmt: skip
