# ruff: noqa: ASYNC220 -- starts processes for a moment, and waits for none of them
"""What a command cannot see, signal, keep alive or inherit: processes, and the first one of all."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from sandbox_client import EnvironmentTree, Sandbox
from sandbox_client.testing.attempts import inside, sleeping, wait_until, without
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.service import RunningService


def marker(number: int) -> str:
    """Seconds that nobody else sleeps for."""
    return f"76543.{os.getpid()}{number}"


# -- identity


IDENTITY = """\
status = dict(line.split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
for name in "Uid Gid CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp".split():
    print(name, *sorted(set(status[name].split())))
"""


async def test_every_command_is_nobody_without_rights(sandbox: Sandbox) -> None:
    """Protections: an unprivileged user, no capabilities, no_new_privs, seccomp."""
    none = "0" * 16
    sets = "".join(f"Cap{name} {none}\n" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    held = f"Uid 65534\nGid 65534\n{sets}NoNewPrivs 1\nSeccomp 2"
    assert await inside(sandbox, IDENTITY) == held  # in the warm interpreter
    fresh = await sandbox.run("/opt/python/bin/python3 /tmp/attempt.py")
    assert fresh.stdout.strip() == held
    assert without(program=IDENTITY) == held
    bare = without("user", "capabilities", "no_new_privs", "seccomp", program=IDENTITY)
    assert not {"Uid 65534", "NoNewPrivs 1", "Seccomp 2"} & set(bare.splitlines())
    assert f"CapEff {none}" not in bare


async def test_every_mount_refuses_setuid_programs(sandbox: Sandbox) -> None:
    """Protection: nosuid. That it matters is shown by the attempt to become root through su."""
    mounts = (await sandbox.run("cat /proc/mounts", max_output_bytes=100_000)).stdout.splitlines()
    assert len(mounts) > 5
    for mount in mounts:
        assert "nosuid" in mount.split()[3].split(","), mount
    copied = await sandbox.run("cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id && /tmp/id -u")
    assert copied.stdout == "65534\n"


# -- seeing


async def test_the_hosts_processes_are_invisible(sandbox: Sandbox) -> None:
    """Protection: a pid namespace."""
    program = f"print(os.path.exists('/proc/{os.getpid()}'))"
    assert without("pid", program=program) == "True"
    assert await inside(sandbox, program) == "False"
    assert (
        len((await inside(sandbox, "print(*filter(str.isdigit, os.listdir('/proc')))")).split())
        <= 4
    )


ENVIRONMENTS = """\
text = repr(dict(os.environ))
for name in os.listdir('/proc'):
    try: text += open(f'/proc/{name}/environ').read()
    except OSError: pass
print('hunter' + '2' in text)
"""


async def test_the_services_environment_is_not_inherited(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection: a cleared environment. The service has SECRET_TOKEN=hunter2 in its own."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert without("environment", program=ENVIRONMENTS) == "True"
    assert await inside(sandbox, ENVIRONMENTS) == "False"


async def test_the_first_process_cannot_be_looked_into(sandbox: Sandbox) -> None:
    """Protection: it is not dumpable. The control is a command's own process."""
    look = "readlink /proc/PID/fd/*; ls /proc/PID/map_files; cat /proc/PID/maps /proc/PID/environ"
    assert (await sandbox.run(look.replace("PID", "1"))).stdout == ""
    own = await sandbox.run(look.replace("PID", "self"), max_output_bytes=200_000)
    assert "/usr/" in own.stdout


async def test_commands_inherit_nothing_but_their_streams(sandbox: Sandbox) -> None:
    """An inherited channel of the first process would let a command forge its own result.

    Protection: descriptors are closed. The control is an input, which is passed on.
    """
    look = (
        "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
    )
    await sandbox.write("/tmp/look.py", look)
    for command in (
        "ls -l /proc/self/fd",
        "true; ls -l /proc/self/fd",
        "python /tmp/look.py",
        "true; python /tmp/look.py",
        "/opt/python/bin/python3 /tmp/look.py",
    ):
        result = await sandbox.run(command, merge_stderr=True)
        assert "socket:" not in result.stdout, command
        assert result.stdout.count("pipe:") <= 2, command
        assert result.stdout.count("/dev/null") <= 1, command
    with_input = await sandbox.run("ls /proc/self/fd; readlink /proc/self/fd/0", stdin=b"x")
    assert with_input.stdout.split()[:4] == ["0", "1", "2", "3"]
    assert "pipe:" in with_input.stdout


# -- signals


async def test_signals_do_not_reach_the_host(sandbox: Sandbox, backend: BackendUnderTest) -> None:
    """Protection: a pid namespace. The victims have the very users that the programs have."""
    program = "for n in (19, 15, 9): tell(lambda: os.kill({}, n))"
    victim = subprocess.Popen(["sleep", "60"], user=backend.commands_uid)
    try:
        assert (await inside(sandbox, program.format(victim.pid))).split() == ["ESRCH"] * 3
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    control = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        assert without("pid", program=program.format(control.pid)).split()[0] == "in"
        assert control.wait(10) in (-signal.SIGTERM, -signal.SIGKILL)
    finally:
        control.kill()
        control.wait()


async def test_signals_do_not_end_the_first_process(sandbox: Sandbox) -> None:
    """Protection: it is the first one of a pid namespace. The control is a process beside it."""
    names = "KILL TERM INT STOP CHLD HUP USR1 SEGV ABRT"
    await sandbox.run(f"for n in {names}; do kill -$n 1; done; kill -9 -1")
    control = await sandbox.run("sleep 60 & kill -TERM $!; wait $!; echo $?; echo alive")
    assert control.stdout == "143\nalive\n"


FOREIGN = r"""
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect("\0tailrace-python")
    return s
for raw in (b"", b"0\0/\0", b"x", b"-5\0/\0python\0", b"99999999999\0/\0python\0a.py\0",
            b"\xff" * 5000, b"1\0/nowhere\0python\0PYTHONHASHSEED=0\0", b"2\0/\0python\0-c"):
    for fds in ([], [0, 1, 2], [0] * 3):
        s = connect(); socket.send_fds(s, [raw], fds); s.close()
many = []
try:
    for _ in range(2000): many.append(connect())
except OSError: pass
"""


async def test_foreign_messages_do_not_end_the_first_process(sandbox: Sandbox) -> None:
    """Protection: what comes to the address of the Python stand-in may be nonsense.

    The control is the stand-in itself, whose messages are served.
    """
    await inside(sandbox, FOREIGN)
    assert (await sandbox.run("python -c 'print(1)'; echo alive")).stdout == "1\nalive\n"


# -- surviving


DAEMON = """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "MARKER"])
    os._exit(0)
os.wait()
print("away", flush=True)
"""
HANGS = DAEMON + "time.sleep(60)\n"


async def test_nothing_survives_a_timeout(sandbox: Sandbox) -> None:
    """Protection: all that a command has started is killed, also what has left its group.

    The control kills the group alone, as most tools do, and the daemon stays.
    """
    command = [sys.executable, "-c", HANGS.replace("MARKER", marker(1))]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as tool:
        assert tool.stdout is not None
        tool.stdout.readline()
        os.killpg(tool.pid, signal.SIGKILL)
    await wait_until(lambda: sleeping(marker(1)))
    (survivor,) = sleeping(marker(1))
    os.kill(survivor, signal.SIGKILL)

    assert await inside(sandbox, HANGS.replace("MARKER", marker(2)), timeout_s=1) == "away"
    await wait_until(lambda: not sleeping(marker(2)))


async def test_a_daemon_cannot_hide_behind_another_command(sandbox: Sandbox) -> None:
    """Protection: what has cut every tie ends with the first command that is killed.

    The control is the other command, which goes on.
    """
    other = asyncio.create_task(sandbox.run("sleep 2; echo done", timeout_s=30))
    assert await inside(sandbox, HANGS.replace("MARKER", marker(3)), timeout_s=1) == "away"
    await wait_until(lambda: not sleeping(marker(3)))
    assert (await other).stdout == "done\n"


ASK_FOR = """\
def ask_for(program):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect("\\0tailrace-python")
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    raw = "\\0".join(["3", "/", "python", "-c", program, *variables, ""]).encode()
    # It holds the connection of whoever has asked for it.
    null = os.open("/dev/null", os.O_RDWR)
    socket.send_fds(s, [raw], [s.fileno(), null, null])
SLEEPS = "import os; os.execvp('sleep', ['sleep', 'MARKER'])"
"""
HIDES = (
    ASK_FOR
    + """if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ask_for(SLEEPS)
    else:
        os._exit(0)
    time.sleep(60)
print("away", flush=True)
time.sleep(60)
"""
)
# A stopped process beside the first one answers only when another has taken its place.
WAITS = (
    ASK_FOR
    + """for name in os.listdir("/proc"):
    if name.isdigit() and name != "1":
        if open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1] == "0":
            os.kill(int(name), 19)
ask_for(SLEEPS)
print("away", flush=True)
time.sleep(60)
"""
)


async def test_a_program_of_the_interpreter_cannot_hide_behind_another_command(
    sandbox: Sandbox,
) -> None:
    """Protection: a program is known by whose process has asked for it.

    The control is the same program while its command runs.
    """
    other = asyncio.create_task(sandbox.run("sleep 3; echo done", timeout_s=30))
    hiding = asyncio.create_task(inside(sandbox, HIDES.replace("MARKER", marker(6)), timeout_s=2))
    await wait_until(lambda: sleeping(marker(6)))
    assert await hiding == "away"
    await wait_until(lambda: not sleeping(marker(6)))
    assert (await other).stdout == "done\n"


async def test_a_program_does_not_begin_after_its_command_was_killed(sandbox: Sandbox) -> None:
    """Protection: what the dead have asked for is dropped. The control asks while it lives."""
    asks = ASK_FOR + "ask_for(SLEEPS)\ntime.sleep(60)\n"
    asking = asyncio.create_task(inside(sandbox, asks.replace("MARKER", marker(7)), timeout_s=1))
    await wait_until(lambda: sleeping(marker(7)))
    await asking
    assert await inside(sandbox, WAITS.replace("MARKER", marker(8)), timeout_s=1) == "away"
    # By now whoever has taken its place has seen what was left for it.
    assert (await sandbox.run("true; python -c 'print(1)'")).stdout == "1\n"
    assert not sleeping(marker(8))


async def test_nothing_survives_the_lease(
    service: RunningService, repository: EnvironmentTree
) -> None:
    """Protection: the reaper ends the first process, and with it ends every other.

    The control is the same daemon while the lease is renewed.
    """
    async with service.client(lease_s=1.0) as client:
        sandbox = await client.create(repository)
        assert await inside(sandbox, DAEMON.replace("MARKER", marker(4))) == "away"
        await asyncio.sleep(1.5)
        assert sleeping(marker(4))
        assert client._renewing is not None
        client._renewing.cancel()
        await wait_until(lambda: not sleeping(marker(4)))


async def test_nothing_survives_the_service(
    start_service: Callable[..., RunningService], repository: EnvironmentTree
) -> None:
    """Protection: every process dies with its parent, up to the service.

    The control is the same daemon before the service is killed.
    """
    running = start_service()
    async with running.client() as client:
        sandbox = await client.create(repository)
        assert await inside(sandbox, DAEMON.replace("MARKER", marker(5))) == "away"
        await wait_until(lambda: sleeping(marker(5)))
        running.kill()
        await wait_until(lambda: not sleeping(marker(5)))
