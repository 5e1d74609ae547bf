"""What a command cannot reach: networks, the host's sockets, other sandboxes' sockets."""

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient
from sandbox_client.testing.attempts import inside, without

CONNECT = """\
def attempt():
    s = socket.socket({family})
    s.settimeout(5)
    s.connect({address!r})
tell(attempt)
"""


def connect(address: str | tuple[str, int]) -> str:
    family = "socket.AF_UNIX" if isinstance(address, str) else "socket.AF_INET"
    return CONNECT.format(family=family, address=address)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter, where nobody's private mounts are in the way."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_the_hosts_loopback(sandbox: Sandbox) -> None:
    """Protection: a network namespace."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = connect(server.getsockname())
        assert without("network", program=program) == "in"
        assert await inside(sandbox, program) == "ECONNREFUSED"


async def test_the_hosts_named_sockets(sandbox: Sandbox, folder: Path) -> None:
    """Protection: a root of named folders. All other walls do not help: a path is no network."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/host.sock")
        server.listen()
        (folder / "host.sock").chmod(0o777)
        program = connect(f"{folder}/host.sock")
        assert without(program=program) == "in"
        assert await inside(sandbox, program) == "ENOENT"


async def test_the_hosts_abstract_sockets(sandbox: Sandbox) -> None:
    """Protection: a network namespace."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0tailrace-escapes-{os.getpid()}")
        server.listen()
        program = connect(f"\0tailrace-escapes-{os.getpid()}")
        assert without("network", program=program) == "in"
        assert await inside(sandbox, program) == "ECONNREFUSED"


async def test_a_network_beyond_the_host(sandbox: Sandbox) -> None:
    """Protection: a network namespace with a loopback alone.

    No control: the tests do not ask for a network on their host.
    """
    for address in (("192.0.2.1", 53), ("169.254.169.254", 80)):
        assert await inside(sandbox, connect(address)) == "ENETUNREACH"
    names = await inside(sandbox, "print({name for _, name in socket.if_nameindex()})")
    assert "lo" in names
    assert "eth0" not in names


async def test_its_own_loopback_works(sandbox: Sandbox) -> None:
    own = "s = socket.create_server(('127.0.0.1', 0))\n"
    assert (
        await inside(sandbox, own + "tell(lambda: socket.create_connection(s.getsockname()))")
        == "in"
    )


LISTENER = """\
import socket, time
inet = socket.create_server(("127.0.0.1", 4321))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0pair")
abstract.listen()
open("up", "w").close()
time.sleep(60)
"""


async def test_another_sandbox(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    """Protection: namespaces for each sandbox. The control connects from the listener's own."""
    await sandbox.write("/tmp/listener.py", LISTENER)
    await sandbox.run("python /tmp/listener.py >/dev/null 2>&1 &")
    for _ in range(100):
        if (await sandbox.run("ls up")).exit_code == 0:
            break
        await asyncio.sleep(0.05)
    programs = [connect(("127.0.0.1", 4321)), connect("\0pair")]
    assert [await inside(sandbox, program) for program in programs] == ["in", "in"]
    async with await client.create(repository) as other:
        for program in programs:
            assert await inside(other, program) == "ECONNREFUSED"
