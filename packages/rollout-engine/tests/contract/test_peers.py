"""The adapters over real channels: EvalService and SandboxService as an attempt sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from rollout_engine.core.retry import Backoff
from rollout_engine.evaluation import EvalPeer
from rollout_engine.patience import Patience
from rollout_engine.peers import EnvironmentRecipe, Grade, Task
from rollout_engine.types import AttemptId, GroupKey
from rollout_engine.workspaces import SandboxWorkspaces
from sandbox_client.client import SandboxClient
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import Internal, NotFound, Reason, ServiceError, Unavailable, service_error
from service_kit.server import Server, ServerConfig, Service
from tailrace.common.v1 import outcome_pb2
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace.eval.v1 import eval_service_pb2_grpc as eval_grpc
from tailrace.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from tailrace.sandbox.v1 import sandbox_service_pb2_grpc as sandbox_grpc

ATTEMPT = AttemptId(GroupKey("g", 2), 3, 1)


async def no_sleep(_: float) -> None:
    await asyncio.sleep(0)


def patience(seconds: float = 60.0) -> Patience:
    return Patience(seconds, Backoff(0.001, 2.0, 0.002), sleep=no_sleep)


@asynccontextmanager
async def serving(name: str, register: Any) -> AsyncIterator[ChannelConfig]:
    async with Server(ServerConfig(drain_grace_s=0.5), [Service(name, register)]) as server:
        yield ChannelConfig(target=server.address)


# The stubs declare every method abstract; at run time those left out are UNIMPLEMENTED.
EvalBase: Any = eval_grpc.EvalServiceServicer
SandboxBase: Any = sandbox_grpc.SandboxServiceServicer


class FakeEval(EvalBase):  # type: ignore[misc]
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failures: list[Exception] = []
        self.diffs: list[bytes] = []
        self.header: eval_pb.GradeHeader | None = None
        self.verdict = outcome_pb2.VERDICT_UNSOLVED
        self.knows_environments = True

    def restart(self) -> None:
        """An environment is at hand only once its task has been asked for."""
        self.knows_environments = False

    def count(self, name: str) -> None:
        self.calls[name] += 1
        if self.failures:
            raise self.failures.pop(0)

    async def GetTask(self, request: eval_pb.GetTaskRequest, context: Any) -> Any:
        self.count("task")
        if request.task_id == "unknown":
            raise NotFound("no such task")
        self.knows_environments = True
        recipe = eval_pb.EnvironmentRecipe(
            digest="d" * 8,
            tree=eval_pb.FolderTree(bytes=9),
            workdir="/app",
            env={"A": "b"},
            memory_bytes=5,
            cpus=0.5,
        )
        return eval_pb.GetTaskResponse(
            task=eval_pb.Task(
                task_id=request.task_id,
                instruction="Fix it.",
                environment=recipe,
                command_timeout_s=7.0,
            )
        )

    async def GetEnvironment(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.count("environment")
        if not self.knows_environments:
            raise NotFound("no such environment is at hand; call GetTask for its task first")
        for chunk in (b"tar ", b"of ", request.digest.encode()):
            yield eval_pb.GetEnvironmentResponse(tar_chunk=chunk)

    async def Grade(self, request_iterator: Any, context: Any) -> Any:
        self.count("grade")
        diff = b""
        async for request in request_iterator:
            if request.WhichOneof("part") == "header":
                self.header = request.header
            else:
                assert len(request.diff_chunk) <= 512 * 1024
                diff += request.diff_chunk
        self.diffs.append(diff)
        return eval_pb.GradeResponse(verdict=self.verdict, reason="tests_failed")


@asynccontextmanager
async def eval_peer(fake: FakeEval, seconds: float = 60.0) -> AsyncIterator[EvalPeer]:
    register = partial(eval_grpc.add_EvalServiceServicer_to_server, fake)
    async with (
        serving("tailrace.eval.v1.EvalService", register) as config,
        open_channel(config) as channel,
    ):
        yield EvalPeer(channel, patience=patience(seconds), task_timeout_s=10, grade_timeout_s=10)


async def test_a_task_is_fetched_once_however_many_attempts_ask() -> None:
    fake = FakeEval()
    async with eval_peer(fake) as peer:
        tasks = await asyncio.gather(*(peer.get("t-1") for _ in range(8)))
        assert fake.calls["task"] == 1
    recipe = EnvironmentRecipe(
        digest="d" * 8, workdir="/app", env={"A": "b"}, memory_bytes=5, cpus=0.5
    )
    assert set(map(repr, tasks)) == {repr(Task("t-1", "Fix it.", recipe, 7.0))}


async def test_a_task_that_is_unknown_stays_an_error_and_is_asked_for_again() -> None:
    fake = FakeEval()
    async with eval_peer(fake) as peer:
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                await peer.get("unknown")
            assert caught.value.reason is Reason.NOT_FOUND
    assert fake.calls["task"] == 2


async def test_a_diff_is_graded_in_pieces_with_its_attempts_id() -> None:
    fake = FakeEval()
    diff = b"x" * (1200 * 1024)
    async with eval_peer(fake) as peer:
        assert await peer.grade("t", ATTEMPT, diff) == Grade(False, "tests_failed")
        fake.verdict = outcome_pb2.VERDICT_SOLVED
        assert (await peer.grade("t", ATTEMPT, b"d")).solved
    assert fake.diffs == [diff, b"d"]
    assert fake.header is not None
    assert (fake.header.task_id, fake.header.attempt.index) == ("t", 3)


async def test_an_evaluator_that_restarts_is_waited_for_and_its_verdict_is_never_made_up() -> None:
    fake = FakeEval()
    async with eval_peer(fake) as peer:
        fake.failures = [Unavailable("down"), Unavailable("down")]
        assert (await peer.grade("t", ATTEMPT, b"d")).reason == "tests_failed"
        fake.failures = [Internal("the grader broke")]
        with pytest.raises(ServiceError, match="the grader broke"):
            await peer.grade("t", ATTEMPT, b"d")
        fake.verdict = outcome_pb2.VERDICT_UNSPECIFIED
        with pytest.raises(Internal, match="verdict 0"):
            await peer.grade("t", ATTEMPT, b"d")


async def test_an_environment_that_a_restarted_evaluator_forgot_is_had_by_asking_for_its_task() -> (
    None
):
    fake = FakeEval()
    async with eval_peer(fake) as peer:
        task = await peer.get("t-1")
        fake.restart()
        assert await peer.environment(task.environment.digest) == b"tar of dddddddd"
        assert fake.calls == {"task": 2, "environment": 2}
        fake.restart()
        with pytest.raises(NotFound):
            await peer.environment("of no task")


async def test_patience_ends() -> None:
    fake = FakeEval()
    fake.failures = [Unavailable("down")] * 3
    async with eval_peer(fake, seconds=0) as peer:
        with pytest.raises(Unavailable):
            await peer.get("t")
    assert fake.calls["task"] == 1


class FakeSandboxes(SandboxBase):  # type: ignore[misc]
    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.created: dict[str, sandbox_pb.CreateSandboxRequest] = {}
        self.destroyed: list[str] = []
        self.puts = 0
        self.failures: list[Exception] = []

    async def MissingEnvironments(self, request: Any, context: Any) -> Any:
        missing = [digest for digest in request.digests if digest not in self.stored]
        return sandbox_pb.MissingEnvironmentsResponse(digests=missing)

    async def PutEnvironment(self, request_iterator: Any, context: Any) -> Any:
        self.puts += 1
        digest, archive = "", b""
        async for request in request_iterator:
            if request.WhichOneof("part") == "digest":
                digest = request.digest
            else:
                archive += request.tar_chunk
        self.stored[digest] = archive
        return sandbox_pb.PutEnvironmentResponse(stored=True)

    async def CreateSandbox(self, request: Any, context: Any) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        digest = request.environment.tree_digest
        if digest and digest not in self.stored:
            raise service_error(Reason.ENVIRONMENT_UNKNOWN, "put it first")
        self.created[request.idempotency_key] = request
        return sandbox_pb.CreateSandboxResponse(
            sandbox_id=request.idempotency_key, lease_s=request.lease_s, workdir="/app"
        )

    async def Run(self, request: Any, context: Any) -> Any:
        command = request.command
        assert command.merge_stderr
        return sandbox_pb.RunResponse(
            stdout=f"{command.shell} in {command.timeout_s:g} s".encode(),
            ended=sandbox_pb.ExecEnded(wall_s=0.25, exit_code=3),
        )

    async def Diff(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield sandbox_pb.DiffResponse(chunk=b"a ")
        yield sandbox_pb.DiffResponse(chunk=b"diff")

    async def DestroySandbox(self, request: Any, context: Any) -> Any:
        self.destroyed.append(request.sandbox_id)
        if self.failures:
            raise self.failures.pop(0)
        return sandbox_pb.DestroySandboxResponse(existed=True)

    async def ListSandboxes(self, request: Any, context: Any) -> Any:
        assert request.owner == "engine"
        return sandbox_pb.ListSandboxesResponse(
            sandboxes=[
                sandbox_pb.SandboxInfo(sandbox_id="old", labels={"life": "1"}),
                sandbox_pb.SandboxInfo(sandbox_id="mine", labels={"life": "2"}),
            ]
        )


class Environments:
    """Gives tars of environments, and counts."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    async def get(self, task_id: str) -> Task:
        raise NotImplementedError

    async def environment(self, digest: str) -> bytes:
        self.fetched.append(digest)
        await asyncio.sleep(0)
        return b"tar of " + digest.encode()


def task(**recipe: Any) -> Task:
    return Task("t", "Fix it.", EnvironmentRecipe(**{"digest": "d1", **recipe}))


@asynccontextmanager
async def sandboxes(
    fake: FakeSandboxes, environments: Environments
) -> AsyncIterator[SandboxWorkspaces]:
    register = partial(sandbox_grpc.add_SandboxServiceServicer_to_server, fake)
    async with (
        serving("tailrace.sandbox.v1.SandboxService", register) as config,
        SandboxClient(config, owner="engine") as client,
    ):
        yield SandboxWorkspaces(
            client,
            environments,
            patience=patience(),
            start_timeout_s=10,
            destroy_timeout_s=10,
            life="2",
        )


async def test_a_sandbox_that_keeps_its_history_though_it_should_not_is_given_to_no_agent() -> None:
    fake = FakeSandboxes()  # every command of it fails
    async with sandboxes(fake, Environments()) as workspaces:
        with pytest.raises(ServiceError, match="history could not be taken out"):
            await workspaces.create(task(forget_history=True), "k")
    assert fake.destroyed == ["k"]


async def test_an_environment_is_put_once_and_a_sandbox_made_of_it() -> None:
    fake, environments = FakeSandboxes(), Environments()
    recipe = {"workdir": "/app", "env": {"A": "b"}, "memory_bytes": 7, "cpus": 2.0}
    async with sandboxes(fake, environments) as workspaces:
        made = await asyncio.gather(*(workspaces.create(task(**recipe), f"k{i}") for i in range(4)))
        result = await made[0].run("ls", timeout_s=5, max_output_bytes=100)
        assert (result.stdout, result.exit_code, result.wall_s) == ("ls in 5 s", 3, 0.25)
        assert await made[0].diff() == b"a diff"
        for workspace in made:
            await workspace.destroy()
            await workspace.destroy()
    assert fake.stored == {"d1": b"tar of d1"}
    assert (fake.puts, environments.fetched) == (1, ["d1"])
    assert sorted(fake.destroyed) == ["k0", "k1", "k2", "k3"]
    request = fake.created["k0"]
    assert dict(request.labels) == {"task": "t", "life": "2"}
    assert request.environment.workdir == "/app"
    assert dict(request.environment.env) == {"A": "b"}
    assert (request.limits.memory_bytes, request.limits.cpus) == (7, 2.0)


async def test_a_service_that_lost_its_store_gets_the_environment_again() -> None:
    fake, environments = FakeSandboxes(), Environments()
    async with sandboxes(fake, environments) as workspaces:
        await workspaces.create(task(), "k0")
        fake.stored.clear()
        await workspaces.create(task(), "k1")
    assert fake.puts == 2


async def test_a_service_that_restarts_is_waited_for_and_other_failures_are_not() -> None:
    fake, environments = FakeSandboxes(), Environments()
    async with sandboxes(fake, environments) as workspaces:
        fake.failures = [Unavailable("down", retry_after_s=0.001)] * 9
        await workspaces.create(task(), "k0")
        fake.failures = [ServiceError("injected", reason=Reason.INJECTED_FAULT)]
        with pytest.raises(ServiceError) as caught:
            await workspaces.create(task(), "k1")
        assert caught.value.reason is Reason.INJECTED_FAULT


async def test_images_need_no_environment_and_dockerfiles_are_refused() -> None:
    fake, environments = FakeSandboxes(), Environments()
    async with sandboxes(fake, environments) as workspaces:
        await workspaces.create(task(image="python:3.11"), "k0")
        assert fake.created["k0"].environment.image == "python:3.11"
        with pytest.raises(ServiceError, match="Dockerfile"):
            await workspaces.create(task(dockerfile="FROM scratch"), "k1")
    assert fake.puts == 0


async def test_a_sandbox_that_cannot_be_destroyed_is_left_to_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake, environments = FakeSandboxes(), Environments()
    async with sandboxes(fake, environments) as workspaces:
        workspace = await workspaces.create(task(), "k0")
        fake.failures = [Internal("broken")]
        await workspace.destroy()
    assert "its lease will end it" in caplog.text


async def test_leftovers_of_an_earlier_life_are_destroyed() -> None:
    fake, environments = FakeSandboxes(), Environments()
    async with sandboxes(fake, environments) as workspaces:
        assert await workspaces.destroy_leftovers() == 1
    assert fake.destroyed == ["old"]
