# ruff: noqa: ASYNC221 -- the controls are programs of this host, bounded in time
"""What a command cannot use up: processes, memory, disk, descriptors, and the service's patience.

Every bomb is a small one: the limits are lowered to what goes off within seconds.
"""

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, PatchRejected, Sandbox, SandboxClient, SandboxLimits
from sandbox_client.errors import TooLarge, WrongRequest
from sandbox_client.testing.attempts import inside, plainly, without
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.service import RunningService

MIB = 1024 * 1024

FORKS = """\
count = 0
try:
    while count < 60:
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""


async def test_processes(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    """Protection: the pids cgroup, or a limit counted for the sandbox's own user namespace."""
    assert plainly(FORKS) == "60"
    async with await client.create(repository, limits=SandboxLimits(pids=40)) as small:
        assert 20 < int(await inside(small, FORKS)) < 40
        bomb = await small.run("b() { b | b & }; b; sleep 30", timeout_s=1)
        assert bomb.exit_code != 0 or bomb.timed_out
        # One that has gone off leaves the others what is theirs.
        assert int(await inside(sandbox, FORKS)) == 60
        assert (await small.run("echo alive")).stdout == "alive\n"


async def test_memory(
    client: SandboxClient, repository: EnvironmentTree, backend: BackendUnderTest
) -> None:
    """Protection: the memory cgroup, or a limit for each process."""
    hog = "x = bytearray(200_000_000); print('has it')"
    assert plainly(hog) == "has it"
    limits = SandboxLimits(memory_bytes=96 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        for command in (f'python -c "{hog}"', f'echo; python -c "{hog}"'):
            result = await sandbox.run(command, timeout_s=30)
            assert "has it" not in result.stdout
            if backend.user is None:
                assert (result.exit_code, result.out_of_memory) == (137, True)
            else:
                assert "MemoryError" in result.stderr
        small = await sandbox.run("python -c \"x = bytearray(10_000_000); print('has it')\"")
        assert (small.stdout, small.out_of_memory) == ("has it\n", False)


# A connection's two buffers hold some megabytes; 64 MiB in all are asked for.
BUFFERS = """\
listener = socket.create_server(("127.0.0.1", 0))
kept, total = [], 0
try:
    for _ in range(100):
        if total > 64 << 20:
            break
        a = socket.socket()
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        a.connect(listener.getsockname())
        b, _ = listener.accept()
        a.setblocking(False)
        kept += [a, b]
        try:
            while total <= 64 << 20:
                total += a.send(bytes(65536))
        except BlockingIOError:
            pass
except OSError:
    pass
print(total >> 20)
"""


async def test_memory_that_waits_in_sockets(
    client: SandboxClient, repository: EnvironmentTree, backend: BackendUnderTest
) -> None:
    """Protection: the memory cgroup; version 1 counts sockets apart.

    An ordinary user has none, and the service says so.
    """
    assert int(plainly(BUFFERS)) >= 64
    if backend.user is not None:
        missing = (await client.status()).missing_protections
        assert any("no cgroup limit for memory" in text for text in missing)
        return
    limits = SandboxLimits(memory_bytes=64 * MIB, disk_bytes=8 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        held = await inside(sandbox, BUFFERS)
        assert not held or int(held) < 48  # version 2 kills it, version 1 lets it wait


FILL = """\
def attempt():
    with open(PLACE, "wb", buffering=0) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
tell(attempt)
"""
MANY = """\
def attempt():
    os.mkdir("/tmp/many")
    for number in range(17_000):
        os.close(os.open(f"/tmp/many/{number}", os.O_CREAT))
tell(attempt)
"""


async def test_disk(client: SandboxClient, repository: EnvironmentTree) -> None:
    """Protection: a tmpfs of fixed size and number of files. The control's has neither."""
    limits = SandboxLimits(memory_bytes=128 * MIB, disk_bytes=16 * MIB)
    async with await client.create(repository, limits=limits) as sandbox:
        for place in ("big", "/tmp/big", "/dev/shm/big", "/logs/big"):
            assert await inside(sandbox, FILL.replace("PLACE", repr(place))) == "ENOSPC"
            await sandbox.run(f"rm {place}")
        assert without(program=FILL.replace("PLACE", "'/tmp/big'")) == "in"
        assert await inside(sandbox, MANY, timeout_s=60) == "ENOSPC"
        assert without(program=MANY) == "in"
        assert (await sandbox.run("rm -rf /tmp/many; echo alive")).stdout == "alive\n"


DESCRIPTORS = """\
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
tell(lambda: [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)])
"""


async def test_descriptors(sandbox: Sandbox) -> None:
    """Protection: a limit for each process."""
    assert plainly(DESCRIPTORS) == "in"
    assert await inside(sandbox, DESCRIPTORS) == "EMFILE"


# A user's descriptors that wait in sockets are counted together, and all sandboxes have one user.
UNDER_WAY = """\
kept = []
def attempt():
    for _ in range(20):
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        kept[-1][0].setblocking(False)
        try:
            while True:
                socket.send_fds(kept[-1][0], [b"x"], [0] * 200)
        except BlockingIOError:
            pass
tell(attempt)
sys.stdout.flush()
if os.fork() == 0:
    time.sleep(60)
"""


async def test_descriptors_under_way(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    """Protection: a sandbox sends its own before it has that user, or that user's limit.

    The control is a command of the other sandbox, which can send none.
    """
    assert await inside(sandbox, UNDER_WAY) == "ETOOMANYREFS"
    async with await client.create(repository) as other:
        assert await inside(other, UNDER_WAY) == "ETOOMANYREFS"
        assert (await other.run("echo alive; python -c 'print(1)'")).stdout == "alive\n1\n"
        assert (await other.run("python -c 'print(2)'")).stdout == "2\n"


async def test_core_files(sandbox: Sandbox) -> None:
    """Protection: a limit of 0 bytes, and a host's core_pattern out of reach.

    No control: where a core file goes is the host's setting.
    """
    assert (await sandbox.run("ulimit -Hc")).stdout == "0\n"
    await sandbox.run("sh -c 'kill -ABRT $$'")
    assert (await sandbox.run("ls core*")).exit_code != 0


def resident_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no such line")


async def test_output(sandbox: Sandbox, service: RunningService) -> None:
    """Protection: head and tail are kept, the rest is counted. The control keeps it all."""
    before = resident_mib(service.pid)
    result = await sandbox.run("head -c 1000000000 /dev/zero", timeout_s=120)
    assert result.exit_code == 0
    assert len(result.stdout_bytes) + result.stdout_omitted_bytes == 1_000_000_000
    assert len(result.stdout_bytes) <= 10_000
    assert resident_mib(service.pid) - before < 64
    kept = subprocess.run(["head", "-c", "20000000", "/dev/zero"], capture_output=True, check=True)
    assert len(kept.stdout) == 20_000_000


async def test_a_file_of_a_terabyte_of_nothing(
    start_service: Callable[..., RunningService], repository: EnvironmentTree, tmp_path: Path
) -> None:
    """Protection: bounds on what the service reads. Such a file takes nothing of any disk.

    The control packs one of 20 MB, and has to read and to write it all.
    """
    small = tmp_path / "sparse"
    with small.open("wb") as file:
        file.truncate(20_000_000)
    assert small.stat().st_blocks == 0
    with tarfile.open(tmp_path / "packed.tar", "w") as tar:
        tar.add(small)
    assert (tmp_path / "packed.tar").stat().st_size > 20_000_000

    running = start_service(f"limits.upload_bytes={2 * MIB}")
    async with running.client() as client:
        sandbox = await client.create(repository)
        await sandbox.run("truncate -s 1000G giant shop.py")
        before = resident_mib(running.pid)
        for call in (
            sandbox.read("giant"),
            sandbox.download("."),
            sandbox.diff(),
            sandbox.snapshot(),
        ):
            with pytest.raises(TooLarge):
                await call
        patch = b"--- a/shop.py\n+++ b/shop.py\n@@ -1 +1 @@\n-x\n+y\n"
        with pytest.raises(PatchRejected, match="more than 4194304 bytes"):
            await sandbox.apply_patch(patch)
        assert resident_mib(running.pid) - before < 64
        # The others' calls have not waited for any of it.
        assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_folders_without_an_end(sandbox: Sandbox) -> None:
    """Protection: a bound on depth. The control is a folder of ordinary depth."""
    await sandbox.run("mkdir -p a/b/c $(printf 'd/%.0s' $(seq 1 300))")
    assert await sandbox.download("a")
    with pytest.raises(WrongRequest, match="nested over"):
        await sandbox.download("d")
    with pytest.raises(TooLarge, match="nested over"):
        await sandbox.diff()
