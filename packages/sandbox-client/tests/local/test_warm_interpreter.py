"""The warm interpreter of a sandbox is a process that commands can harm; results stay true."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient, SandboxLimits
from sandbox_client.testing.service import RunningService

# Only a launcher in C has an interpreter beside the first process.
BACKENDS = ("local",)

# Warm programs descend from the interpreter, which is nobody's child.
FIND = """
import os
def interpreter():
    for name in os.listdir('/proc'):
        if name.isdigit() and name != '1':
            fields = open(f'/proc/{name}/stat').read().rpartition(')')[2].split()
            if fields[1] == '0':
                return int(name)
"""
TREE = EnvironmentTree(
    {
        "find.py": FIND.encode(),
        # Not in Python: the interpreter could not tell how such a program ended.
        "strike.sh": b"for at in /proc/[0-9]*; do\nset -- $1 $(cat $at/stat 2>/dev/null)\n"
        b'[ "$2" = 1 ] || [ "$5" != 0 ] && continue\nkill -$1 $2\n'
        b"while [ $1 = KILL ] && [ -d /proc/$2 ]; do :; done\ndone\n",
        "often.sh": b"for at in $(seq 60); do\n"
        b"python -c 'import find; print(find.interpreter())'\nsh strike.sh KILL\ndone\n",
        "starve.py": b"import find, resource\n"
        b"resource.prlimit(find.interpreter(), resource.RLIMIT_NOFILE, (0, 0))\n",
        "bind.py": b"import find, os, resource\n"
        b"it = find.interpreter()\n"
        b"resource.prlimit(it, resource.RLIMIT_FSIZE, (0, 0))\n"
        b"os.setpriority(os.PRIO_PROCESS, it, 19)\n"
        b"os.sched_setscheduler(it, os.SCHED_BATCH, os.sched_param(0))\n"
        b"os.sched_setaffinity(it, {min(os.sched_getaffinity(0))})\n",
        "bounds.py": b"import os, resource\n"
        b"print(resource.getrlimit(resource.RLIMIT_FSIZE), os.getpriority(os.PRIO_PROCESS, 0))\n"
        b"print(os.sched_getscheduler(0), os.sched_getaffinity(0))\n",
        "once.py": b"import os, find\n"
        b"open('runs', 'a').write('x')\nos.kill(find.interpreter(), 9)\nprint('done')\n",
    }
)


@pytest.fixture
async def sandbox(client: SandboxClient) -> AsyncIterator[Sandbox]:
    async with await client.create(TREE) as made:
        yield made


async def test_there_is_one_for_all_programs_and_only_when_asked_for(sandbox: Sandbox) -> None:
    await sandbox.run("true")
    alone = "/bin/sh -c 'ls -d /proc/[0-9]*' | wc -l"
    before = int((await sandbox.run(alone)).stdout)
    seen = [await sandbox.run("python -c 'import find; print(find.interpreter())'") for _ in "12"]
    assert seen[0].stdout == seen[1].stdout != "None\n"
    assert int((await sandbox.run(alone)).stdout) == before + 1


async def test_the_next_program_gets_another_when_it_was_killed(sandbox: Sandbox) -> None:
    seen = "python -c 'import find; print(find.interpreter())'"
    first = await sandbox.run(seen)
    assert (await sandbox.run("sh strike.sh KILL")).exit_code == 0
    second = await sandbox.run(seen)
    assert second.exit_code == 0
    assert first.stdout != second.stdout != "None\n"


async def test_who_kills_it_all_the_time_does_without(sandbox: Sandbox) -> None:
    """Each costs the host's processors, which no sandbox's limits count."""
    result = await sandbox.run("sh often.sh", timeout_s=120)
    seen = result.stdout.split()
    assert len(seen) == 60
    assert seen[0] != "None"
    assert "None" in seen  # a fresh interpreter's answer


async def test_one_that_commands_make_fail_leaves_nothing_on_the_host(
    client: SandboxClient, service: RunningService
) -> None:
    log = service.state_dir / "run" / "forkserver.log"
    before = log.stat().st_size
    async with await client.create(TREE) as sandbox:
        for command in ("python -c 'print(1)'", "echo; python -c 'print(1)'"):
            await sandbox.run("python -c pass")
            assert (await sandbox.run("/opt/python/bin/python3 starve.py")).exit_code == 0
            assert (await sandbox.run(command)).stdout.strip() == "1"
    assert log.stat().st_size == before


@pytest.mark.parametrize("command", ["python bounds.py", "true; python bounds.py"])
async def test_its_limits_and_priority_are_not_a_commands_to_change(
    sandbox: Sandbox, command: str
) -> None:
    before = await sandbox.run(command)
    assert (await sandbox.run("/opt/python/bin/python3 bind.py")).exit_code == 0
    assert (await sandbox.run(command)).stdout == before.stdout


async def test_what_runs_keeps_its_result_when_a_command_has_changed_them(
    sandbox: Sandbox,
) -> None:
    waits = "import sys; sys.stdin.read(1); sys.exit(7)"
    steps = (
        "mkfifo go; exec 3<>go",
        f'(python -c "{waits}" <go 3<&-; echo $? >code) & running=$!',
        "/opt/python/bin/python3 bind.py 3<&-; python bounds.py 3<&-; echo >&3; wait $running",
    )
    await sandbox.run("python -c pass")
    await sandbox.run("; ".join(steps))
    assert await sandbox.read("code") == b"7\n"


async def test_it_does_not_hold_the_last_place_for_a_process(client: SandboxClient) -> None:
    async with await client.create(TREE, limits=SandboxLimits(pids=12)) as full:
        await full.run("for at in $(seq 20); do sleep 60 & done 2>/dev/null")
        await full.run("python -c pass")
        # It leaves by itself, but the host frees its place a moment later.
        for _ in range(100):
            if (seen := await full.run("echo there")).exit_code == 0:
                break
            await asyncio.sleep(0.02)
        assert seen.stdout == "there\n"


async def test_a_program_whose_interpreter_is_killed_ends_with_its_own_result(
    sandbox: Sandbox,
) -> None:
    result = await sandbox.run("python once.py")
    assert (result.stdout, result.exit_code) == ("done\n", 0)
    assert await sandbox.read("runs") == b"x"


async def test_a_program_that_a_shell_asked_for_is_not_run_twice(sandbox: Sandbox) -> None:
    await sandbox.run("true; python once.py; sleep 0.1")
    assert await sandbox.read("runs") == b"x"


async def test_a_program_that_a_stopped_interpreter_does_not_start_is_ended_in_time(
    sandbox: Sandbox,
) -> None:
    await sandbox.run("python -c pass")
    await sandbox.run("sh strike.sh STOP")
    held = await sandbox.run("python -c 'print(1)'", timeout_s=0.5)
    assert held.timed_out
    assert (await sandbox.run("python -c 'print(2)'")).stdout == "2\n"


async def test_a_stopped_interpreter_holds_no_other_command(sandbox: Sandbox) -> None:
    await sandbox.run("python -c pass")
    await sandbox.run("sh strike.sh STOP")
    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(sandbox.run("sleep 1; echo there"))
        held = tasks.create_task(sandbox.run("python -c 'print(1)'", timeout_s=0.3))
    assert held.result().timed_out
    assert other.result().stdout == "there\n"


async def test_a_timeout_ends_what_a_warm_program_has_started_and_spares_others(
    sandbox: Sandbox,
) -> None:
    starts = "import subprocess, time; subprocess.Popen(['sleep', '77']); time.sleep(9)"
    waits = "import time; time.sleep(1.5); print(3)"
    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(sandbox.run(f'true; python -c "{waits}"'))
        ended = tasks.create_task(sandbox.run(f'true; python -c "{starts}"', timeout_s=0.7))
    assert ended.result().timed_out
    assert other.result().stdout == "3\n"
    assert (await sandbox.run("pgrep -f 'sleep 77'")).stdout == ""
