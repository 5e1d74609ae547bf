# ruff: noqa: ASYNC221, ASYNC240 -- the controls look at the host itself
"""What a command in a container cannot do, each with a control that shows the attempt is sound."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient, SandboxLimits, WrongRequest
from sandbox_client.testing.service import RunningService

MIB = 1024 * 1024


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = 30) -> str:
    await sandbox.write("/tmp/attempt.py", code)
    result = await sandbox.run("python /tmp/attempt.py", timeout_s=timeout_s, merge_stderr=True)
    return result.stdout


async def test_commands_are_nobody_without_any_capability(sandbox: Sandbox) -> None:
    status = (await sandbox.run("cat /proc/self/status")).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["65534"] * 4
    assert fields["Gid"].split() == ["65534"] * 4
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert int(Path("/proc/self/status").read_text().split("CapEff:\t")[1][:16], 16) != 0


async def test_nothing_but_the_named_folders_can_be_written(sandbox: Sandbox) -> None:
    attempts = (
        "/x /usr/x /etc/x /opt/x /var/tmp/x /run/x /root/x /dev/x /.tailrace/x /.tailrace/pipes/x"
    )
    for path in attempts.split():
        assert (await sandbox.run(f"echo > {path}")).exit_code != 0, path
    for path in ["/workspace/x", "/tmp/x", "/logs/x", "/tests/x", "/dev/shm/x"]:
        assert (await sandbox.run(f"echo > {path}")).exit_code == 0, path
    rooted = await sandbox.run("mount -o remount,rw /; mknod /tmp/sda b 8 0; unshare -Ur true")
    assert rooted.exit_code != 0
    assert not (await sandbox.run("ls /tmp/sda")).stdout


async def test_all_writable_folders_share_one_limit(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    limits = SandboxLimits(memory_bytes=128 * MIB, disk_bytes=16 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        fill = await sandbox.run("head -c 12000000 /dev/zero > /dev/shm/a")
        assert fill.exit_code == 0
        for path in ("/workspace/b", "/tmp/b", "/logs/b", "/tests/b"):
            assert (await sandbox.run(f"head -c 8000000 /dev/zero > {path}")).exit_code != 0
        many = await sandbox.run("i=0; while :; do i=$((i+1)); : > f$i || exit 9; done")
        assert many.exit_code in (2, 9)
        # It is full, and can still be told so.
        assert (await sandbox.run("echo told")).stdout == "told\n"


async def test_the_first_process_is_out_of_reach(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        "kill -9 1; kill -TERM 1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/} 2>/dev/null; done"
    )
    assert (result.signal, result.exit_code) == (9, 137)  # it could kill itself
    seen = await sandbox.run(
        "cat /proc/1/environ; cat /proc/1/mem; cat /.tailrace/pipes/life; ls /.tailrace/pipes"
    )
    assert seen.stdout == ""
    assert seen.stderr.count("Permission denied") == 4


async def test_the_upper_layer_the_daemon_and_the_environment_are_not_inside(
    sandbox: Sandbox, service: RunningService
) -> None:
    found = await sandbox.run("find / -xdev -name 'docker.sock' -o -name upper -o -name merged")
    assert found.stdout == ""
    assert (await sandbox.run(f"ls {service.state_dir}")).exit_code != 0
    environ = (await sandbox.run("env; cat /proc/*/environ")).stdout
    assert "hunter2" not in environ
    assert "docker" not in environ


async def test_the_hosts_loopback_and_its_abstract_sockets_are_not_reached(
    sandbox: Sandbox,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        name = f"\0tailrace-{os.getpid()}"
        local.bind(name)
        local.listen()
        code = (
            "import socket\n"
            f"for target in (('127.0.0.1', {server.getsockname()[1]}), {name!r}):\n"
            "    kind = socket.AF_INET if isinstance(target, tuple) else socket.AF_UNIX\n"
            "    s = socket.socket(kind)\n"
            "    try:\n        s.connect(target)\n        print('connected')\n"
            "    except OSError as error:\n        print('refused', error.errno)\n"
        )
        control = subprocess.run(
            ["python3", "-c", code], capture_output=True, text=True, check=True
        )
        assert control.stdout == "connected\nconnected\n"
        assert (await python(sandbox, code)).count("refused 111") == 2


async def test_a_fork_bomb_is_bounded_and_ends_with_its_time(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await client.create(repository, limits=SandboxLimits(pids=40)) as sandbox:
        code = (
            "import os, time\nwhile True:\n    try:\n        os.fork()\n"
            "    except OSError:\n        time.sleep(0.01)\n"
        )
        await sandbox.write("/tmp/bomb.py", code)
        result = await sandbox.run("python /tmp/bomb.py", timeout_s=3)
        assert result.timed_out
        left = await sandbox.run("ls -d /proc/[0-9]* | wc -l")
        assert int(left.stdout) <= 6


async def test_a_container_full_of_processes_is_no_failure_of_the_machine(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await client.create(repository, limits=SandboxLimits(pids=30)) as sandbox:
        code = (
            "import os, time\nwhile True:\n    try:\n        os.fork() or time.sleep(751)\n"
            "    except OSError:\n        time.sleep(0.01)\n"
        )
        await sandbox.write("/tmp/fill.py", code)
        # It takes every place, that of the shell which started it too. Whether the runtime's own
        # threads then find one is luck; a failure of the machine it never is.
        await sandbox.run("python /tmp/fill.py & sleep 1")
        for _ in range(4):
            result = await sandbox.run("echo room")
            if result.exit_code != 0:
                assert (result.exit_code, "pids limit" in result.stderr) == (126, True)


async def test_a_memory_bomb_is_told_as_such(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    limits = SandboxLimits(memory_bytes=96 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        await sandbox.write("bomb.py", "x = bytearray(1 << 30)\nprint('took it')")
        result = await sandbox.run("python bomb.py")
        assert (result.exit_code, result.out_of_memory, result.stdout) == (137, True, "")
        assert (await sandbox.run("echo alive")).stdout == "alive\n"


@pytest.mark.parametrize("path", ["/proc/1/root/etc/passwd", "/.tailrace/pipes/life", "/dev/null"])
async def test_file_calls_have_the_users_rights_alone(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(WrongRequest):
        await sandbox.read(path)
    with pytest.raises(WrongRequest):
        await sandbox.write(path, "x")
