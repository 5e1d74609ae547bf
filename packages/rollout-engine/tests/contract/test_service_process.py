"""The service as a process: real HTTP to an engine, real gRPC to its peers, real SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rollout_engine.client import ConsumerConfig, GroupConsumer
from rollout_engine.engines.scripted import ScriptedEngine, scripted_engine
from rollout_engine.engines.types import EngineRequest
from rollout_engine.testing import byte_template
from rollout_engine.types import Assignment, Decision, GroupKey, Outcome, Purpose
from service_kit.channel import ChannelConfig, open_channel
from service_kit.server import Server, ServerConfig, Service
from tailrace.common.v1 import outcome_pb2
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace.eval.v1 import eval_service_pb2_grpc as eval_grpc
from tailrace.rollout.v1 import rollout_service_pb2 as rollout_pb
from tailrace.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from tailrace.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from tailrace.sandbox.v1 import sandbox_service_pb2_grpc as sandbox_grpc
from tailrace.weight_sync.v1 import weight_service_pb2 as weight_pb
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as weight_grpc

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The stubs declare every method abstract; at run time those left out are UNIMPLEMENTED.
EvalBase: Any = eval_grpc.EvalServiceServicer
SandboxBase: Any = sandbox_grpc.SandboxServiceServicer
WeightBase: Any = weight_grpc.WeightServiceServicer


class Evaluator(EvalBase):  # type: ignore[misc]
    """Every task wants its own id as the diff."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.graded = 0

    async def GetTask(self, request: Any, context: Any) -> Any:
        recipe = eval_pb.EnvironmentRecipe(digest="d", tree=eval_pb.FolderTree(bytes=3))
        task = eval_pb.Task(task_id=request.task_id, instruction="Fix.", environment=recipe)
        return eval_pb.GetTaskResponse(task=task)

    async def GetEnvironment(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield eval_pb.GetEnvironmentResponse(tar_chunk=b"tar")

    async def Grade(self, request_iterator: Any, context: Any) -> Any:
        task, diff, index = "", b"", -1
        async for request in request_iterator:
            if request.WhichOneof("part") == "header":
                task, index = request.header.task_id, request.header.attempt.index
            else:
                diff += request.diff_chunk
        if index == 1:
            await self.gate.wait()
        self.graded += 1
        solved = diff.decode() == task
        return eval_pb.GradeResponse(
            verdict=outcome_pb2.VERDICT_SOLVED if solved else outcome_pb2.VERDICT_UNSOLVED
        )


class Sandboxes(SandboxBase):  # type: ignore[misc]
    """A command `set TEXT` makes TEXT the diff."""

    def __init__(self) -> None:
        self.diffs: dict[str, str] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.known: set[str] = set()

    async def MissingEnvironments(self, request: Any, context: Any) -> Any:
        missing = [digest for digest in request.digests if digest not in self.known]
        return sandbox_pb.MissingEnvironmentsResponse(digests=missing)

    async def PutEnvironment(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            if request.WhichOneof("part") == "digest":
                self.known.add(request.digest)
        return sandbox_pb.PutEnvironmentResponse(stored=True)

    async def CreateSandbox(self, request: Any, context: Any) -> Any:
        name = request.idempotency_key
        assert name not in self.diffs, "a key of an earlier life came again"
        self.diffs[name] = ""
        self.labels[name] = dict(request.labels)
        return sandbox_pb.CreateSandboxResponse(sandbox_id=name, lease_s=60, workdir="/w")

    async def RenewLeases(self, request: Any, context: Any) -> Any:
        return sandbox_pb.RenewLeasesResponse()

    async def Run(self, request: Any, context: Any) -> Any:
        command = request.command
        self.diffs[command.sandbox_id] = command.shell.removeprefix("set ")
        return sandbox_pb.RunResponse(stdout=b"ok\n", ended=sandbox_pb.ExecEnded(wall_s=0.01))

    async def Diff(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield sandbox_pb.DiffResponse(chunk=self.diffs[request.sandbox_id].encode())

    async def DestroySandbox(self, request: Any, context: Any) -> Any:
        existed = self.diffs.pop(request.sandbox_id, None) is not None
        return sandbox_pb.DestroySandboxResponse(existed=existed)

    async def ListSandboxes(self, request: Any, context: Any) -> Any:
        infos = [
            sandbox_pb.SandboxInfo(sandbox_id=name, labels=self.labels[name]) for name in self.diffs
        ]
        return sandbox_pb.ListSandboxesResponse(sandboxes=infos)


class Weights(WeightBase):  # type: ignore[misc]
    def __init__(self) -> None:
        self.nodes: list[weight_pb.RegisterNodeRequest] = []

    async def RegisterNode(self, request: Any, context: Any) -> Any:
        self.nodes.append(request)
        return weight_pb.RegisterNodeResponse(lease_s=request.lease_s)


class World:
    """The peers of one service under test, and its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.evaluator, self.sandboxes, self.weights = Evaluator(), Sandboxes(), Weights()
        self.peers = ""
        self.engine_url = ""
        self.engine: ScriptedEngine | None = None
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, port: int = 0) -> str:
        """Start the service; gives its address."""
        address_file = self.folder / f"address-{len(self.processes)}"
        config = self.folder / "config.toml"
        config.write_text(
            f"""
            model = "{self.folder / "model"}"
            [server]
            bind = "127.0.0.1:{port}"
            address_file = "{address_file}"
            drain_grace_s = 1.0
            [sandbox]
            target = "{self.peers}"
            [evaluation]
            target = "{self.peers}"
            [weights]
            target = "{self.peers}"
            [engines]
            urls = ["{self.engine_url}"]
            check_interval_s = 0.2
            [agent]
            action_format = "plain"
            [ledger]
            folder = "{self.folder / "ledger"}"
            """
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rollout_engine", "serve", "--config", str(config)
        )
        self.processes.append(process)
        await until(lambda: address_file.exists() or process.returncode is not None)
        assert process.returncode is None
        return address_file.read_text().strip()

    async def stop(self, number: signal.Signals) -> int:
        process = self.processes[-1]
        process.send_signal(number)
        async with asyncio.timeout(20):
            return await process.wait()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- what it waits for tells nobody
            await asyncio.sleep(0.01)


def policy(request: EngineRequest) -> list[int]:
    template = byte_template()
    first = len(request.input_ids) < 60
    return [int(i) for i in template.assistant("set task" if first else "submit")]


@asynccontextmanager
async def world_of(folder: Path) -> AsyncIterator[World]:
    (folder / "model").mkdir()
    byte_template()._tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    world = World(folder)
    services = [
        Service(
            "tailrace.eval.v1.EvalService",
            partial(eval_grpc.add_EvalServiceServicer_to_server, world.evaluator),
        ),
        Service(
            "tailrace.sandbox.v1.SandboxService",
            partial(sandbox_grpc.add_SandboxServiceServicer_to_server, world.sandboxes),
        ),
        Service(
            "tailrace.weight_sync.v1.WeightService",
            partial(weight_grpc.add_WeightServiceServicer_to_server, world.weights),
        ),
    ]
    async with (
        Server(ServerConfig(drain_grace_s=0.5), services) as server,
        scripted_engine(policy, weight_version="4") as (url, engine),
    ):
        world.peers, world.engine_url, world.engine = server.address, url, engine
        try:
            yield world
        finally:
            for process in world.processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


@asynccontextmanager
async def consuming(address: str) -> AsyncIterator[GroupConsumer]:
    config = ConsumerConfig(reconnect_initial_s=0.05, reconnect_max_s=0.1)
    async with open_channel(ChannelConfig(target=address)) as channel:
        consumer = GroupConsumer(
            channel, consumer_id="me", purpose=Purpose.TRAINING, incarnation=1, config=config
        )
        connection = asyncio.create_task(consumer.run())
        try:
            yield consumer
        finally:
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)


async def status_of(address: str) -> rollout_pb.GetStatusResponse:
    async with open_channel(ChannelConfig(target=address)) as channel:
        stub = rollout_grpc.RolloutServiceStub(channel)
        return await stub.GetStatus(rollout_pb.GetStatusRequest(), timeout=10)


async def test_a_killed_service_loses_no_finished_attempt_and_goes_on(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        address = await world.start()
        await until(lambda: world.weights.nodes)
        node = world.weights.nodes[0]
        assert node.rollout_target == address
        assert [(e.url, e.kind) for e in node.engines] == [(world.engine_url, "embedded")]

        async with consuming(address) as consumer:
            world.evaluator.gate.clear()
            await consumer.assign(Assignment(GroupKey("g", 0), "task", 3, pin_version=4))
            await until(lambda: world.evaluator.graded == 2)
            status = await status_of(address)
            assert status.engines[0].weight_version == "4"
            assert status.groups == {"RUNNING": 1}
            assert list(status.consumers) == ["me"]
            names = [limiter.name for limiter in status.limiters]
            assert names[:4] == ["attempts", "engine_requests", "sandbox_starts", "graders"]
            assert await world.stop(signal.SIGKILL) == -signal.SIGKILL

            world.evaluator.gate.set()
            again = await world.start(port=int(address.rpartition(":")[2]))
            assert again == address
            async with asyncio.timeout(30):
                finished = await consumer.next_finished()
            assert [a.outcome for a in finished.attempts] == [Outcome.SOLVED] * 3
            assert [a.id.try_number for a in finished.attempts][1] == 1
            assert {a.policy_versions for a in finished.attempts} == {(4,)}
            await consumer.receive(finished.cursor)
            await consumer.commit(finished.key, Decision.TRAINED, 1)
            await consumer.settled()
        await until(lambda: not world.sandboxes.diffs)
        assert await world.stop(signal.SIGTERM) == 0

        done = await run_command("ledger", "inspect", str(tmp_path / "ledger"))
        assert done.returncode == 0
        found = json.loads(done.stdout)
        assert found["boots"] == 2
        assert found["consumers"][0]["groups"] == {"COMMITTED": 1}
        assert found["tries"] == {}


async def test_a_service_that_is_told_to_stop_cuts_off_what_runs_and_leaves_no_sandbox(
    tmp_path: Path,
) -> None:
    async with world_of(tmp_path) as world:
        address = await world.start()
        assert world.engine is not None
        world.engine.pause(scripted_pause())
        async with consuming(address) as consumer:
            await consumer.assign(Assignment(GroupKey("g", 0), "task", 2))
            await until(lambda: len(world.sandboxes.diffs) == 2)
            assert await world.stop(signal.SIGTERM) == 0
            assert world.sandboxes.diffs == {}
            await until(lambda: not consumer.connected)
            world.engine.resume()
            await world.start(port=int(address.rpartition(":")[2]))
            async with asyncio.timeout(30):
                assert len((await consumer.next_finished()).valid_attempts) == 2


def scripted_pause() -> Any:
    from rollout_engine.engines.types import PauseMode

    return PauseMode.IN_PLACE


async def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-P", "-m", "rollout_engine", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model=/nonexistent"], "tokenizer.json does not exist"),
        (["model=.", "limits.turnz=3"], "turnz"),
        ([], "model"),
    ],
)
async def test_what_an_operator_can_mend_is_one_message_and_exit_code_2(
    tmp_path: Path, settings: list[str], words: str
) -> None:
    sets = [part for text in settings for part in ("--set", text)]
    done = await run_command("serve", *sets, "--set", f"ledger.folder={tmp_path / 'ledger'}")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_ledger_in_use_and_a_busy_port_are_told(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        address = await world.start()
        common = ["--set", f"model={tmp_path / 'model'}", "--set", f"server.bind={address}"]
        done = await run_command("serve", *common, "--set", f"ledger.folder={tmp_path / 'ledger'}")
        assert done.returncode == 2
        assert "open in another process" in done.stderr
        done = await run_command("serve", *common, "--set", f"ledger.folder={tmp_path / 'other'}")
        assert done.returncode == 2
        assert f"cannot listen on {address}" in done.stderr
        with contextlib.suppress(ProcessLookupError):
            await world.stop(signal.SIGTERM)
