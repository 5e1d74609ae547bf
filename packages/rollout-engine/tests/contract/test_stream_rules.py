"""What a consumer that breaks the protocol is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from rollout_engine.config import ConsumersConfig, WorkConfig
from rollout_engine.testing import MemoryEngine
from service_kit.errors import Reason, ServiceError
from tailrace.rollout.v1 import rollout_service_pb2 as pb
from tailrace.rollout.v1 import rollout_service_pb2_grpc as pb_grpc

Request = pb.RunGroupsRequest


def hello(**changes: object) -> Request:
    fields: dict[str, object] = {
        "consumer_id": "me",
        "purpose": pb.PURPOSE_TRAINING,
        "incarnation": 1,
        **changes,
    }
    return Request(hello=pb.Hello(**fields))  # type: ignore[arg-type]


async def talk(engine: MemoryEngine, requests: Sequence[Request]) -> list[pb.RunGroupsResponse]:
    """Send these, then nothing; gives what came until the engine ends the stream."""

    async def sending() -> AsyncIterator[Request]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    async with engine.channel() as channel, asyncio.timeout(10):
        call = pb_grpc.RolloutServiceStub(channel).RunGroups(sending())
        return [response async for response in call]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([Request(heartbeat=pb.Heartbeat())], "must be a Hello"),
        ([hello(consumer_id="")], "consumer_id has 0"),
        ([hello(purpose=pb.PURPOSE_UNSPECIFIED)], "Purpose is unset"),
        ([hello(cursor=-1)], "cursor is -1"),
        ([hello(), hello()], "Hello came twice"),
        ([hello(), Request(commit=pb.Commit(group_id="g"))], "Decision is unset"),
        ([hello(), Request(withdraw=pb.Withdraw(group_id=""))], "group_id has 0"),
    ],
)
async def test_a_broken_message_ends_the_stream_with_a_reason(
    tmp_path: Path, requests: list[Request], words: str
) -> None:
    async with MemoryEngine(tmp_path, lambda turn: "submit") as engine:
        with pytest.raises(ServiceError, match=words) as caught:
            await talk(engine, requests)
        assert caught.value.reason is Reason.INVALID_ARGUMENT


async def test_a_silent_consumer_is_disconnected(tmp_path: Path) -> None:
    config = WorkConfig(consumers=ConsumersConfig(idle_s=0.2))
    async with MemoryEngine(tmp_path, lambda turn: "submit", config) as engine:
        with pytest.raises(ServiceError, match=r"silent for 0\.2 s") as caught:
            await talk(engine, [hello()])
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED


async def test_a_malformed_assignment_is_rejected_and_the_stream_goes_on(tmp_path: Path) -> None:
    config = WorkConfig(consumers=ConsumersConfig(idle_s=0.3))
    bad = Request(assign=pb.Assign(group_id="g", task_id="t", attempts=0))
    good = Request(assign=pb.Assign(group_id="h", task_id="t", attempts=1))
    responses: list[pb.RunGroupsResponse] = []

    async def sending() -> AsyncIterator[Request]:
        for request in (hello(), bad, good):
            yield request
        await asyncio.Event().wait()

    async with (
        MemoryEngine(tmp_path, lambda turn: "submit", config) as engine,
        engine.channel() as channel,
        asyncio.timeout(10),
    ):
        call = pb_grpc.RolloutServiceStub(channel).RunGroups(sending())
        async for response in call:
            responses.append(response)
            if response.WhichOneof("message") == "group_finished":
                break
        call.cancel()
    kinds = [r.WhichOneof("message") for r in responses]
    assert kinds[0] == "welcome"
    (rejected,) = (r.rejected for r in responses if r.WhichOneof("message") == "rejected")
    assert (rejected.group_id, rejected.reason) == ("g", "INVALID_ARGUMENT")
    assert kinds.index("accepted") < kinds.index("attempt_chunk") < kinds.index("group_finished")
