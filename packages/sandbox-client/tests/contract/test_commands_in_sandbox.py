"""What a caller can rely on when it runs commands, over a real channel in real sandboxes."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sandbox_client import (
    Command,
    EnvironmentTree,
    ExecResult,
    OutputEvent,
    Sandbox,
    SandboxClient,
    TooLarge,
    WrongRequest,
)


async def test_a_command_gives_output_exit_code_and_times(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert result.wall_s > 0
    assert result.cpu_s > 0
    assert not result.timed_out


async def test_a_shell_has_its_usual_features(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        "cd pkg && for f in *.txt; do wc -l < $f; done | sort | tr '\\n' ' '"
    )
    assert result.stdout == "1 3 "


async def test_errors_of_the_command_line_are_results(sandbox: Sandbox) -> None:
    missing = await sandbox.run("nosuchprogram --x")
    assert (missing.exit_code, "nosuchprogram: not found" in missing.stderr) == (127, True)
    missing = await sandbox.run(Command(argv=("nosuchprogram",)))
    assert missing.exit_code == 127
    closed = await sandbox.run(Command(argv=("./shop.py",)))
    assert (closed.exit_code, "Permission denied" in closed.stderr) == (126, True)
    syntax = await sandbox.run("if then")
    assert syntax.exit_code == 2


async def test_a_script_without_an_interpreter_line_runs_as_in_a_shell(sandbox: Sandbox) -> None:
    await sandbox.write("plain", "echo from script\n", mode=0o755)
    assert (await sandbox.run("./plain")).stdout == "from script\n"


async def test_environment_and_folder_are_the_callers_choice(sandbox: Sandbox) -> None:
    result = await sandbox.run("pwd; echo $GREETING", cwd="pkg", env={"GREETING": "hi there"})
    assert result.stdout == "/workspace/pkg\nhi there\n"
    missing = await sandbox.run("pwd", cwd="nowhere")
    assert (missing.exit_code, "nowhere" in missing.stderr) == (126, True)
    with pytest.raises(WrongRequest, match="leaves"):
        await sandbox.run("pwd", cwd="../..")


async def test_input_reaches_the_command(sandbox: Sandbox) -> None:
    assert (await sandbox.run("cat", stdin=b"a\0b")).stdout_bytes == b"a\0b"
    assert (await sandbox.run("cat")).stdout == ""
    large = b"x" * 1_000_000
    assert (await sandbox.run("wc -c", stdin=large)).stdout == "1000000\n"
    # Not reading it is no error either.
    assert (await sandbox.run("true", stdin=large)).exit_code == 0


async def test_signals_are_reported_as_a_shell_would(sandbox: Sandbox) -> None:
    result = await sandbox.run(Command(argv=("sh", "-c", "kill -SEGV $$")))
    assert (result.signal, result.exit_code) == (11, 139)
    inner = await sandbox.run("sh -c 'kill -TERM $$'; echo $?")
    assert inner.stdout.strip().endswith("143")


async def test_output_is_cut_in_the_middle_and_counted(sandbox: Sandbox) -> None:
    result = await sandbox.run("seq 1 1000000", max_output_bytes=1000)
    assert len(result.stdout_bytes) == 1000
    assert result.stdout_omitted_bytes == 6_888_896 - 1000
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("1000000\n")
    assert "[6887896 bytes omitted]" in result.stdout


async def test_a_flood_is_drained_without_filling_memory(sandbox: Sandbox) -> None:
    result = await sandbox.run("head -c 300000000 /dev/zero", timeout_s=60)
    assert result.exit_code == 0
    assert result.stdout_omitted_bytes == 300_000_000 - 10_000


async def test_invalid_utf8_is_replaced_and_the_raw_bytes_are_there(sandbox: Sandbox) -> None:
    result = await sandbox.run("printf 'caf\\351'")
    assert (result.stdout, result.stdout_bytes) == ("caf�", b"caf\xe9")


async def test_merged_streams_keep_their_order(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo 1; echo 2 >&2; echo 3", merge_stderr=True)
    assert (result.stdout, result.stderr) == ("1\n2\n3\n", "")


async def test_a_timeout_kills_and_returns_the_output_so_far(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo started; sleep 600", timeout_s=0.3)
    assert result.timed_out
    assert (result.signal, result.stdout) == (9, "started\n")
    assert 0 < result.wall_s < 30


async def test_a_timeout_ends_everything_the_command_has_started(sandbox: Sandbox) -> None:
    command = (
        "(setsid sh -c 'sleep 611 & sleep 612' >/dev/null 2>&1 &)"
        "; python -c 'import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  time.sleep(613)\n os._exit(0)\ntime.sleep(614)'"
    )
    result = await sandbox.run(command, timeout_s=1.0)
    assert result.timed_out
    assert await living(sandbox) == ""


async def living(sandbox: Sandbox) -> str:
    """The command lines of what runs beside the first process and this look itself."""
    found = await sandbox.run(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done"
        " | grep -e sleep -e '613' -e '614' | grep -v grep"
    )
    return found.stdout


async def test_a_timeout_spares_background_processes_of_earlier_commands(sandbox: Sandbox) -> None:
    await sandbox.run("sleep 621 &")
    result = await sandbox.run("sleep 622 & sleep 623", timeout_s=0.3)
    assert result.timed_out
    assert (await living(sandbox)).split() == ["sleep", "621"]


async def test_a_timeout_spares_what_other_commands_run(sandbox: Sandbox) -> None:
    other = asyncio.create_task(sandbox.run("sleep 1.5; echo survived", timeout_s=30))
    await asyncio.sleep(0.3)
    assert (await sandbox.run("sleep 631 & sleep 632", timeout_s=0.3)).timed_out
    assert (await other).stdout == "survived\n"
    assert "sleep 63" not in await living(sandbox)


async def test_a_background_process_does_not_hold_the_call(sandbox: Sandbox) -> None:
    result = await sandbox.run("sleep 641 & echo done", timeout_s=20)
    assert (result.stdout, result.timed_out) == ("done\n", False)
    assert result.wall_s < 10


async def test_a_background_process_can_go_on_writing(sandbox: Sandbox) -> None:
    await sandbox.run(
        "(for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.05; done; touch ended) &"
    )
    for _ in range(100):
        if (await sandbox.run("ls ended")).exit_code == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the background process was stopped by its closed output")


async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    await sandbox.run("mkfifo pipe")
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(sandbox.run("cat pipe", timeout_s=20))
        group.create_task(sandbox.run("echo through > pipe", timeout_s=20))
    assert reader.result().stdout == "through\n"


async def test_a_stream_gives_output_as_it_comes_then_the_result(sandbox: Sandbox) -> None:
    # The command ends only after its first line has been seen here.
    async def answer() -> AsyncIterator[bytes]:
        await seen.wait()
        yield b"go\n"

    seen = asyncio.Event()
    events = []
    command = Command(shell="echo first; read x; echo got $x", timeout_s=30)
    async for event in sandbox.stream(command, stdin=answer()):
        events.append(event)
        seen.set()
    assert events[0] == OutputEvent("stdout", b"first\n")
    result = events[-1]
    assert isinstance(result, ExecResult)
    assert result.stdout == "first\ngot go\n"


async def test_a_streams_pieces_make_up_the_kept_output(sandbox: Sandbox) -> None:
    pieces = b""
    async for event in sandbox.stream(Command(shell="seq 1 100000", max_output_bytes=2000)):
        if isinstance(event, OutputEvent):
            pieces += event.data
        else:
            assert event.stdout_bytes == pieces
            assert event.stdout_omitted_bytes == 588_895 - 2000


async def test_leaving_a_stream_kills_its_command(sandbox: Sandbox) -> None:
    stream = sandbox.stream("echo up; sleep 651")
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    for _ in range(100):
        if not await living(sandbox):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the command outlived its caller")


async def test_a_cancelled_call_kills_its_command(sandbox: Sandbox) -> None:
    call = asyncio.create_task(sandbox.run("sleep 661"))
    for _ in range(100):
        if "661" in await living(sandbox):
            break
        await asyncio.sleep(0.02)
    call.cancel()
    for _ in range(100):
        if not await living(sandbox):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the command outlived its caller")


async def test_requests_that_break_a_rule_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(WrongRequest, match="shell"):
        await sandbox.run(Command())
    with pytest.raises(WrongRequest, match="max_timeout_s"):
        await sandbox.run("true", timeout_s=1e6)
    with pytest.raises(WrongRequest, match="output_bytes_limit"):
        await sandbox.run("true", max_output_bytes=1 << 30)
    with pytest.raises(WrongRequest, match="NUL"):
        await sandbox.run("a\0b")
    with pytest.raises(TooLarge):
        await sandbox.run("true", env={"BIG": "x" * 300_000})


async def test_processor_time_counts_the_children_of_a_shell(sandbox: Sandbox) -> None:
    # From its own start: what started it may have used the same process before.
    burn = "python -c 'from time import process_time as t\ns = t()\nwhile t() - s < 0.3: pass'"
    direct = await sandbox.run(burn, timeout_s=30)
    inside_shell = await sandbox.run(f"true; {burn}; true", timeout_s=30)
    for result in (direct, inside_shell):
        assert 0.29 <= result.cpu_s < 5


async def test_sandboxes_of_one_environment_do_not_see_each_others_files(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    async with await client.create(repository.digest) as other:
        await other.run("echo secret > mine.txt; echo secret > /tmp/mine.txt")
        assert (await sandbox.run("cat mine.txt /tmp/mine.txt")).exit_code != 0
        assert (await other.run("cat mine.txt /tmp/mine.txt")).exit_code == 0
