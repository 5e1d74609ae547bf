# ruff: noqa: ASYNC220, ASYNC240, PTH208 -- the controls look at the host itself
"""What a command cannot do, each with a control that shows the attempt itself is sound.

The commands run in a sandbox of a real service; the controls run the same attempt where the wall is
not, on the host or against something allowed.
"""

import asyncio
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient, SandboxLimits

MIB = 1024 * 1024


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = 20) -> str:
    """Runs Python inside; gives its output and errors."""
    await sandbox.write("/tmp/attempt.py", code)
    result = await sandbox.run("python /tmp/attempt.py", timeout_s=timeout_s, merge_stderr=True)
    return result.stdout


def host_python(code: str) -> str:
    done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


# -- identity and privileges


async def test_commands_are_nobody_without_any_capability(sandbox: Sandbox) -> None:
    status = (await sandbox.run("cat /proc/self/status")).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["65534"] * 4
    assert fields["Gid"].split() == ["65534"] * 4
    assert fields["Groups"].strip() == ""
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert int(Path("/proc/self/status").read_text().split("CapEff:\t")[1][:16], 16) != 0


async def test_warm_python_has_the_same_bounds_as_any_command(sandbox: Sandbox) -> None:
    code = "print(open('/proc/self/status').read())"
    warm = await python(sandbox, code)
    assert "CapBnd:\t0000000000000000" in warm
    assert "Seccomp:\t2" in warm
    assert "Uid:\t65534\t65534\t65534\t65534" in warm


async def test_setuid_programs_give_nothing(sandbox: Sandbox) -> None:
    mounts = (await sandbox.run("cat /proc/mounts")).stdout.splitlines()
    assert len(mounts) > 5
    for mount in mounts:
        assert "nosuid" in mount.split()[3].split(","), mount
    copied = await sandbox.run("cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id && /tmp/id -u")
    assert copied.stdout == "65534\n"


async def test_the_environment_is_clean(sandbox: Sandbox) -> None:
    environ = (await sandbox.run("env; cat /proc/1/environ 2>&1; cat /proc/*/environ")).stdout
    assert "hunter2" not in environ
    assert "SECRET" not in environ
    assert "/root" not in environ


# -- files


PRIVATE = (
    "/etc/shadow",
    "/root/.bashrc",
    "/proc/1/environ",
    "/proc/1/mem",
    "/proc/1/root/etc/passwd",
    "/proc/1/cwd/etc/passwd",
    "/.tailrace/settings.json",
    "/.environments/x",
    "/proc/kcore",
    "/proc/kmsg",
)


async def test_private_things_cannot_be_read(sandbox: Sandbox) -> None:
    for path in PRIVATE:
        result = await sandbox.run(f"head -c 1 {path}")
        assert (result.stdout_bytes, result.exit_code) == (b"", 1), path
    assert (await sandbox.run("head -c 1 /etc/passwd")).stdout == "r"  # the control
    assert (await sandbox.run("ls -A /home /work /etc/ssl /boot /mnt /srv")).stdout == ""


async def test_the_services_own_folders_are_hidden(sandbox: Sandbox, service: Any) -> None:
    import sandbox_client

    for folder in (service.state_dir, Path(sandbox_client.__file__).parent, Path.cwd()):
        assert folder.is_dir()
        assert (await sandbox.run(f"ls -A {folder}")).stdout == ""
    everywhere = await sandbox.run("find / -name 'sandbox_client*' -not -path '/proc/*'")
    assert everywhere.stdout == ""


async def test_only_named_folders_of_the_host_are_there(sandbox: Sandbox) -> None:
    top = set((await sandbox.run("ls /")).stdout.split())
    allowed = "bin dev etc lib lib32 lib64 libx32 logs opt proc root run sbin sys tests tmp usr var"
    # The root is shared: it has an empty folder for every work folder that was ever asked for.
    assert top <= {*allowed.split(), "workspace", "testbed"}
    assert (await sandbox.run("find /run /sys /var /root -type f -o -type s")).stdout == ""
    assert Path("/sys/kernel").exists()  # the control: the host does have something there


async def test_the_hosts_files_cannot_be_written(sandbox: Sandbox) -> None:
    attempts = (
        "touch /usr/bin/evil; echo x >> /etc/passwd; rm -f /usr/bin/env; mkdir /new; "
        "touch /opt/python/evil; echo x > /dev/sda; ln -s x /bin/evil; mv /usr /gone; "
        "chmod 777 /; touch /proc/sys/kernel/x; echo c > /proc/sysrq-trigger"
    )
    await sandbox.run(attempts)
    assert not Path("/usr/bin/evil").exists()
    assert Path("/usr/bin/env").exists()
    check = await sandbox.run(
        "ls -d /new /opt/python/evil /bin/evil; cat /etc/passwd; stat -c %a /"
    )
    assert check.stdout.splitlines()[-1] == "755"
    assert "x" not in check.stdout.splitlines()


async def test_mounts_cannot_be_changed(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        "mount -o remount,rw /usr; mount -t tmpfs x /tmp; umount /proc; unshare -m true;"
        "unshare -U true; unshare -Ur mount -o bind,rw /usr /usr; nsenter -t 1 -m true"
    )
    assert result.exit_code != 0
    assert "rw" not in (await sandbox.run("grep ' /usr ' /proc/mounts")).stdout.split()[3].split(
        ","
    )


async def test_new_namespaces_are_closed(sandbox: Sandbox) -> None:
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n" + "".join(
        f"print(libc.unshare({flag:#x}), os.strerror(ctypes.get_errno()))\n"
        for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000)
    )
    assert (await python(sandbox, code)).split("\n")[:4] == ["-1 Operation not permitted"] * 4


SYSCALLS = {
    "ptrace": 101, "mount": 165, "bpf": 321, "io_uring_setup": 425, "keyctl": 250, "add_key": 248,
    "kexec_load": 246, "init_module": 175, "perf_event_open": 298, "userfaultfd": 323, "setns": 308,
    "pivot_root": 155, "open_by_handle_at": 304, "reboot": 169, "process_vm_readv": 310,
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
async def test_dangerous_system_calls_are_closed(sandbox: Sandbox) -> None:
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "".join(
        f"ctypes.set_errno(0); print('{name}', libc.syscall({number}, -1, -1, -1, -1, -1),"
        " ctypes.get_errno())\n"
        for name, number in SYSCALLS.items()
    )
    code += "print('getpid', libc.syscall(39) > 0, 0)\n"  # the control
    lines = (await python(sandbox, code)).splitlines()
    assert lines == [f"{name} -1 1" for name in SYSCALLS] + ["getpid True 0"]


async def test_odd_socket_families_are_closed(sandbox: Sandbox) -> None:
    code = (
        "import socket\nfor family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET, 44):\n"
        "  try: socket.socket(family, socket.SOCK_DGRAM); print('open')\n"
        "  except OSError as error: print(error.errno)\n"
        "print(socket.socket(socket.AF_INET).family.name)"
    )
    assert (await python(sandbox, code)).split() == ["97", "97", "97", "97", "AF_INET"]


# -- processes


async def test_no_process_of_the_host_is_visible(sandbox: Sandbox) -> None:
    listing = (await sandbox.run("ps -eo pid,comm --no-headers")).stdout.split("\n")
    assert len([line for line in listing if line]) <= 4
    assert not (await sandbox.run(f"ls -d /proc/{os.getpid()}")).stdout
    assert len([n for n in os.listdir("/proc") if n.isdigit()]) > 4


async def test_signals_do_not_reach_the_first_process_or_the_host(sandbox: Sandbox) -> None:
    victim = subprocess.Popen(["sleep", "30"])
    try:
        for name in ("KILL", "TERM", "INT", "STOP", "CHLD", "HUP", "USR1", "SEGV", "ABRT"):
            await sandbox.run(f"kill -{name} 1; kill -{name} {victim.pid}")
        await sandbox.run("kill -9 -1")
        assert victim.poll() is None
        assert (await sandbox.run("echo alive")).stdout == "alive\n"
    finally:
        victim.kill()
        victim.wait()


async def test_the_first_process_cannot_be_looked_into(sandbox: Sandbox) -> None:
    result = await sandbox.run("ls /proc/1/fd /proc/1/map_files; cat /proc/1/maps /proc/1/stack")
    assert result.stdout.replace("/proc/1/fd:", "").replace("/proc/1/map_files:", "").strip() == ""
    own = await sandbox.run("cat /proc/self/maps | head -1")
    assert own.stdout  # the control


async def test_foreign_messages_do_not_end_the_first_process(sandbox: Sandbox) -> None:
    code = r"""
import os, socket
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
    await python(sandbox, code)
    assert (await sandbox.run("python -c 'print(1)'; echo alive")).stdout == "1\nalive\n"


async def test_commands_inherit_nothing_but_their_streams(sandbox: Sandbox) -> None:
    """An inherited channel of the first process would let a command forge its own result."""
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
    with_input = await sandbox.run("ls /proc/self/fd", stdin=b"x")
    assert with_input.stdout.split() == ["0", "1", "2", "3"]


# -- network and sockets


async def test_the_hosts_loopback_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt = (
            f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 3); print('in')\n"
            "except OSError as error: print(error.errno)"
        )
        assert host_python(attempt) == "in\n"
        assert await python(sandbox, attempt) == "111\n"


async def test_a_sandboxs_own_loopback_works(sandbox: Sandbox) -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname()); print('connected')"
    )
    assert await python(sandbox, code) == "connected\n"


async def test_there_is_no_way_out_to_a_network(sandbox: Sandbox) -> None:
    code = (
        "import socket\nfor address in (('1.1.1.1', 53), ('169.254.169.254', 80)):\n"
        "  try: socket.create_connection(address, 3); print('in')\n"
        "  except OSError as error: print(error.errno)\n"
        "print(sorted(name for _, name in socket.if_nameindex()))"
    )
    lines = (await python(sandbox, code)).splitlines()
    assert lines[:2] == ["101", "101"]
    assert "lo" in lines[2]
    assert "eth0" not in lines[2]


async def test_unix_sockets_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        named.bind(f"{folder}/host.sock")
        named.listen()
        abstract.bind("\0host-abstract")
        abstract.listen()
        attempt = (
            "import socket\nfor name in ('FOLDER/host.sock', '\\0host-abstract'):\n"
            "  try: socket.socket(socket.AF_UNIX).connect(name); print('in')\n"
            "  except OSError as error: print(error.errno)"
        ).replace("FOLDER", folder)
        assert host_python(attempt) == "in\nin\n"
        assert await python(sandbox, attempt) == "2\n111\n"


async def test_sandboxes_cannot_reach_each_other(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    listener = (
        "python -c \"import socket, time; s = socket.create_server(('127.0.0.1', 4321)); "
        "a = socket.socket(socket.AF_UNIX); a.bind(chr(0) + 'pair'); a.listen(); "
        "open('up', 'w'); time.sleep(60)\" &"
    )
    await sandbox.run(listener)
    for _ in range(100):
        if (await sandbox.run("ls up")).exit_code == 0:
            break
        await asyncio.sleep(0.05)
    attempt = (
        "import socket\nfor target in (('127.0.0.1', 4321), '\\0pair'):\n"
        "  family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET\n"
        "  try: socket.socket(family).connect(target); print('in')\n"
        "  except OSError as error: print(error.errno)"
    )
    assert await python(sandbox, attempt) == "in\nin\n"
    async with await client.create(repository) as other:
        assert await python(other, attempt) == "111\n111\n"
        seen = await other.run("ps -e --no-headers | wc -l; ls up; ipcs -m | wc -l")
        assert int(seen.stdout.split()[0]) <= 5


# -- exhaustion


async def test_a_fork_bomb_stays_in_its_sandbox(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await client.create(repository, limits=SandboxLimits(pids=40)) as sandbox:
        bomb = await sandbox.run("b() { b | b & }; b; sleep 30", timeout_s=2)
        assert bomb.exit_code != 0 or bomb.timed_out
        assert len([n for n in os.listdir("/proc") if n.isdigit()]) < 2000
        count = await sandbox.run(
            "python - <<'E'\nimport os, time\nn = 0\ntry:\n  for _ in range(200):\n"
            "    if os.fork() == 0: time.sleep(3); os._exit(0)\n    n += 1\n"
            "except OSError: pass\nprint(n)\nE",
            timeout_s=20,
        )
        assert 10 < int(count.stdout) < 40


async def test_a_memory_hog_is_stopped_and_reported(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    limits = SandboxLimits(memory_bytes=96 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        hog = "python -c \"x = bytearray(500_000_000); print('has it')\""
        result = await sandbox.run(hog, timeout_s=30)
        assert (result.exit_code, result.out_of_memory, result.stdout) == (137, True, "")
        through_shell = await sandbox.run(f"echo; {hog}", timeout_s=30)
        assert through_shell.out_of_memory
        small = await sandbox.run("python -c \"x = bytearray(10_000_000); print('has it')\"")
        assert (small.stdout, small.out_of_memory) == ("has it\n", False)


async def test_files_cannot_use_up_the_hosts_memory(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    limits = SandboxLimits(memory_bytes=128 * MIB, disk_bytes=16 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        for place in ("big", "/tmp/big", "/dev/shm/big", "/logs/big"):
            result = await sandbox.run(f"head -c 100000000 /dev/zero > {place}; stat -c %s {place}")
            assert 0 <= int(result.stdout or 0) <= 16 * MIB
            assert "No space left" in result.stderr
        await sandbox.run("rm -f big /tmp/big /logs/big")
        many = await sandbox.run(
            "python -c \"\nfor n in range(200_000): open(f'/tmp/f{n}', 'w').close()\"", timeout_s=60
        )
        assert "No space left" in many.stderr
        assert (await sandbox.run("rm -rf /tmp/f*; find /tmp -delete; echo alive")).stdout


async def test_descriptors_and_core_files_are_bounded(sandbox: Sandbox) -> None:
    code = (
        "import os\nn = 0\ntry:\n  while True: os.open('/dev/null', 0); n += 1\n"
        "except OSError as error: print(error.errno, n < 1100)"
    )
    assert await python(sandbox, code) == "24 True\n"
    await sandbox.run("sh -c 'kill -ABRT $$'")
    assert (await sandbox.run("ls core*")).exit_code != 0


async def test_a_name_full_of_newlines_fools_nobody(sandbox: Sandbox) -> None:
    name = "x\n+++ b/etc/passwd\n@@ -0,0 +1 @@\n+root\n"
    await sandbox.write("/tmp/make.py", f"open({name!r}.replace('/', '|'), 'w').write('y')")
    await sandbox.run("python /tmp/make.py")
    diff = (await sandbox.diff()).decode()
    assert "\n+root\n" not in diff
    assert diff.count("diff --git") == 1
