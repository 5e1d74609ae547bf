"""Commands behind the E2B endpoint: who hears what, who waits for whom, how an end is told."""

import asyncio
import base64
from collections.abc import Callable

import pytest
from sandbox_client.backends.base import ExecHooks
from sandbox_client.e2b_api.errors import EnvdError
from sandbox_client.e2b_api.messages import ProcessConfig, Selector, StartProcess
from sandbox_client.e2b_api.processes import Event, Listener, Process, Processes, end_event
from sandbox_client.errors import SandboxGone, WrongRequest
from sandbox_client.types import ExecResult


class Command:
    """Stands for a back-end's command: the test decides what it writes and when it ends."""

    def __init__(self) -> None:
        self.hooks: ExecHooks | None = None
        self.started = asyncio.Event()
        self.outcome: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()

    async def run(self, hooks: ExecHooks) -> ExecResult:
        self.hooks = hooks
        self.started.set()
        return await self.outcome

    def writes(self, data: bytes, stream: str = "stdout") -> None:
        assert self.hooks is not None
        assert self.hooks.on_output is not None
        self.hooks.on_output(stream, data)

    def may_write(self) -> bool:
        assert self.hooks is not None
        assert self.hooks.room is not None
        return self.hooks.room.is_set()


def request(**options: object) -> StartProcess:
    return StartProcess(process=ProcessConfig(cmd="x"), **options)  # type: ignore[arg-type]


async def started(**options: object) -> tuple[Processes, Process, Command]:
    processes, command = Processes(limit=2, backlog_bytes=10), Command()
    process = processes.start(request(**options), command.run)
    await command.started.wait()
    return processes, process, command


async def heard(listener: Listener) -> list[Event]:
    return [event async for event in listener]


def output(event: Event) -> dict[str, bytes]:
    data = event["event"]["data"]  # type: ignore[index]
    return {stream: base64.b64decode(text) for stream, text in data.items()}


async def test_every_listener_hears_from_when_it_came() -> None:
    _, process, command = await started()
    first = process.listen()
    command.writes(b"one")
    second = process.listen()
    command.writes(b"two", "stderr")
    command.outcome.set_result(ExecResult(0))
    events = await heard(first)
    assert [output(event) for event in events[:2]] == [{"stdout": b"one"}, {"stderr": b"two"}]
    assert events[2] == end_event(ExecResult(0))
    assert [output(event) for event in (await heard(second))[:1]] == [{"stderr": b"two"}]


async def test_the_command_waits_for_the_slowest_listener_only_while_it_listens() -> None:
    _, process, command = await started()
    slow, quick = process.listen(), process.listen()
    command.writes(b"0123456789")
    assert not command.may_write()
    quick_events = aiter(quick)
    await anext(quick_events)
    assert not command.may_write()
    process.leave(slow)
    assert command.may_write()
    # Nobody listens: output is dropped and holds nothing up.
    process.leave(quick)
    for _ in range(100):
        command.writes(b"0123456789")
    assert command.may_write()


async def test_a_listener_that_keeps_up_lets_the_command_go_on() -> None:
    _, process, command = await started()
    listener = process.listen()
    command.writes(b"0123456789")
    assert not command.may_write()
    await anext(aiter(listener))
    assert command.may_write()


async def test_an_ended_command_is_neither_listed_nor_found() -> None:
    processes, process, command = await started(tag="mine")
    assert processes.find(Selector(pid=process.pid)) is process
    assert processes.find(Selector(tag="mine")) is process
    command.outcome.set_result(ExecResult(0))
    await process.ended.wait()
    assert processes.running() == []
    with pytest.raises(EnvdError) as caught:
        processes.find(Selector(pid=process.pid))
    assert caught.value.code == "not_found"


async def test_too_many_commands_are_refused() -> None:
    processes, _, _ = await started()
    processes.start(request(), Command().run)
    with pytest.raises(EnvdError, match=r"e2b_api\.processes allows 2") as caught:
        processes.start(request(), Command().run)
    assert caught.value.code == "resource_exhausted"


async def test_input_waits_until_the_command_takes_it_or_ends() -> None:
    _, process, command = await started(stdin=True)
    for _ in range(4):
        await process.send(b"x")
    waiting = asyncio.create_task(process.send(b"y"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert command.hooks is not None
    assert command.hooks.stdin is not None
    assert await anext(aiter(command.hooks.stdin)) == b"x"
    await waiting
    blocked = asyncio.create_task(process.send(b"z"))
    await asyncio.sleep(0)
    command.outcome.set_result(ExecResult(0))
    await blocked


async def test_closed_input_takes_nothing_more() -> None:
    _, process, command = await started(stdin=True)
    await process.send(b"last")
    await process.send(None)
    assert command.hooks is not None
    assert command.hooks.stdin is not None
    assert [part async for part in command.hooks.stdin] == [b"last"]
    for closed in (process, (await started(stdin=False))[1]):
        with pytest.raises(EnvdError, match="closed"):
            await closed.send(b"x")


async def test_killing_is_passed_on_once() -> None:
    _, process, command = await started()
    process.kill()
    process.kill()
    assert command.hooks is not None
    assert command.hooks.killed is not None
    await command.hooks.killed


@pytest.mark.parametrize(
    ("fail", "code"),
    [
        (lambda: SandboxGone("destroyed"), "unavailable"),
        (lambda: WrongRequest("no"), "invalid_argument"),
    ],
)
async def test_an_error_ends_the_stream_with_its_code(
    fail: Callable[[], Exception], code: str
) -> None:
    processes, process, command = await started()
    listener = process.listen()
    command.outcome.set_exception(fail())
    with pytest.raises(EnvdError) as caught:
        await heard(listener)
    assert caught.value.code == code
    assert processes.running() == []


async def test_an_interruption_ends_the_listeners_and_not_the_command() -> None:
    processes, process, command = await started()
    listener = process.listen()
    processes.interrupt(EnvdError("unavailable", "paused"))
    with pytest.raises(EnvdError, match="paused"):
        await heard(listener)
    assert processes.running() == [process]
    assert command.may_write()


def test_an_end_is_told_as_gos_process_state_has_it() -> None:
    assert end_event(ExecResult(3)) == {
        "event": {
            "end": {
                "exitCode": 3,
                "exited": True,
                "status": "exit status 3",
                "error": "exit status 3",
            }
        }
    }
    assert end_event(ExecResult(139, signal=11)) == {
        "event": {
            "end": {
                "exitCode": -1,
                "status": "signal: segmentation fault",
                "error": "signal: segmentation fault",
            }
        }
    }
    timeout = end_event(ExecResult(137, signal=9, timed_out=True))
    assert isinstance(timeout, EnvdError)
    assert timeout.code == "deadline_exceeded"
