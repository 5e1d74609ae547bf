"""Back-end `local` for users who are not root: what it tells, and that it refuses where it must."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree
from sandbox_client.testing.backends import BACKENDS, BackendUnderTest
from sandbox_client.testing.ordinary_user import OrdinaryUser
from sandbox_client.testing.service import RunningService

USER = OrdinaryUser(20001)

# Root of a user namespace that has all ids, in which nobody can make another one.
CLOSED = """\
import os, sys
from sandbox_client.backends.local.jail import kernel
wait, go = os.pipe()
target = os.getpid()
helper = os.fork()
if helper == 0:
    os.read(wait, 1)
    for kind in ("uid", "gid"):
        with open(f"/proc/{target}/{kind}_map", "w") as out:
            out.write("0 0 4294967294")
    os._exit(0)
kernel.unshare(kernel.CLONE_NEWUSER)
os.write(go, b"x")
os.waitpid(helper, 0)
with open("/proc/sys/user/max_user_namespaces", "w") as out:
    out.write("0")
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def needs_root() -> None:
    missing = BACKENDS["local"].missing()
    if missing:
        pytest.skip(missing)


def serve(folder: Path, wrap: Callable[[list[str]], list[str]]) -> subprocess.CompletedProcess[str]:
    """Runs the service, which is expected to refuse."""
    argv = [sys.executable, "-m", "sandbox_client", "serve"]
    for option in (f"state_dir={folder}/state", "server.bind=127.0.0.1:0"):
        argv += ["--set", option]
    return subprocess.run(
        wrap(argv), capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )


@pytest.mark.usefixtures("needs_root")
def test_it_refuses_where_no_user_namespace_can_be_made(open_folder: Path) -> None:
    def closed(argv: list[str]) -> list[str]:
        return [sys.executable, "-c", CLOSED, *USER.command(argv)]

    done = serve(open_folder, closed)
    assert done.returncode == 2
    assert "ISOLATION_UNAVAILABLE" in done.stderr
    assert "never run without isolation" in done.stderr
    assert "as an ordinary user it cannot make a user namespace" in done.stderr
    assert "sysctl user.max_user_namespaces=10000" in done.stderr
    assert not (open_folder / "state").exists()
    # The control: the same user, where the namespaces are open.
    running = RunningService(open_folder, "local.compile_shim=false", user=USER)
    running.start()
    assert running.stop() == 0


@pytest.mark.usefixtures("needs_root")
def test_it_refuses_a_root_without_roots_rights(open_folder: Path) -> None:
    """In a user namespace of such a root's, commands would run under the host root's id."""

    def powerless(argv: list[str]) -> list[str]:
        drop = (
            "import os, sys\nfrom sandbox_client.backends.local.jail import kernel\n"
            "kernel.drop_bounding_set()\nkernel.clear_inheritable_capabilities()\n"
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        return [sys.executable, "-c", drop, *argv]

    done = serve(open_folder, powerless)
    assert done.returncode == 2
    assert "root lacks CAP_SYS_ADMIN" in done.stderr
    assert "--privileged" in done.stderr


DOCTOR = """\
import dataclasses, json
from sandbox_client import doctor
print(json.dumps([dataclasses.asdict(f) for f in [*doctor.examine(), doctor.try_sandbox()]]))
"""


def test_the_doctor_tells_what_is_missing(ordinary: BackendUnderTest) -> None:
    assert ordinary.user is not None
    command = ordinary.user.command([sys.executable, "-c", DOCTOR])
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", timeout=60)
    levels = {f["check"]: f["level"] for f in json.loads(done.stdout)}
    assert levels["isolation"] == "ok"
    assert levels["a sandbox"] == "ok"
    limits = {check.split()[-1]: level for check, level in levels.items() if "cgroup" in check}
    assert limits == {"memory": "warning", "pids": "ok", "cpu": "warning"}
    own = ordinary.user.subordinate == 0
    assert levels["the commands' user"] == ("warning" if own else "ok")


async def test_the_service_tells_what_is_missing_and_honours_each_limit_it_can(
    ordinary: BackendUnderTest, open_folder: Path, repository: EnvironmentTree
) -> None:
    running = ordinary.service(open_folder, "local.compile_shim=false")
    running.start()
    try:
        async with running.client() as client:
            missing = (await client.status()).missing_protections
            assert [m.split(":")[0] for m in missing if "cgroup" in m] == [
                "no cgroup limit for memory",
                "no cgroup limit for cpu",
            ]
            assert any("own user" in m for m in missing) == (ordinary.commands_uid == 20001)
            async with await client.create(repository) as sandbox:
                shown = await sandbox.run("id -u; cat /proc/self/uid_map; ulimit -p; ulimit -v")
                uid, inside, _, count, processes, kib = shown.stdout.split()
                assert (uid, inside, count) == ("65534", "65534", "1")
                assert (processes, kib) == ("128", str(512 * 1024))
    finally:
        assert running.stop() == 0
