"""Back-end `docker` with podman at its socket: where podman is not as dockerd is.

The contract over it is a long form: `pytest -m slow -k podman`.
"""

import contextlib
from collections.abc import Callable

import pytest
from sandbox_client import EnvironmentRef, EnvironmentTree, Sandbox, SandboxClient, WrongRequest
from sandbox_client.backends.docker import doctor
from sandbox_client.config import DockerConfig
from sandbox_client.findings import Level
from sandbox_client.testing.dockerd import Dockerd
from sandbox_client.testing.registry import Registry
from sandbox_client.testing.service import RunningService

LABEL = "dev.tailrace.service"


async def test_commands_end_as_with_dockerd(sandbox: Sandbox) -> None:
    # Podman tells no exit codes of them.
    assert (await sandbox.run("exit 137")).exit_code == 137
    assert (await sandbox.run("kill -TERM $$")).signal == 15
    late = await sandbox.run("setsid sleep 761 & sleep 762", timeout_s=0.5)
    assert late.timed_out
    left = await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sleep 76" not in left.stdout
    await sandbox.run("echo new > pkg/new.txt; rm pkg/gone.txt")
    diff = await sandbox.diff()
    assert diff.count(b"diff --git") == 2


async def test_images_are_pulled_and_bad_ones_are_the_requests_fault(client: SandboxClient) -> None:
    with contextlib.closing(Registry()) as registry:
        whole = EnvironmentRef(image=registry.add("whole", {"repo/f": "text\n"}), workdir="/repo")
        async with await client.create(whole) as sandbox:
            assert await sandbox.read("f") == b"text\n"
            assert await sandbox.diff() == b""
        bad = (
            registry.add("bare", {}, programs=("ls",)),
            f"{registry.host}/missing:latest",
            "Not An Image",
        )
        for image in bad:
            with pytest.raises(WrongRequest):
                await client.create(EnvironmentRef(image=image))


async def test_a_killed_services_containers_end_and_are_removed_by_the_next(
    start_service: Callable[..., RunningService], dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    before = set(dockerd.containers(LABEL))
    running = start_service()
    async with running.client() as client:
        sandbox = await client.create(repository)
        await sandbox.run("setsid sleep 771 & sleep 772 &")
        left = set(dockerd.containers(LABEL)) - before
        assert left
        running.kill()
    running.start()
    assert set(dockerd.containers(LABEL)) == before


def test_the_doctor_names_podman_and_what_its_filter_allows(dockerd: Dockerd) -> None:
    findings = doctor.examine(DockerConfig(socket=dockerd.socket, disk_watermark=1))
    (daemon,) = (f for f in findings if f.check == "the container daemon")
    assert (daemon.level, daemon.found.split()[0]) == (Level.OK, "Podman")
    warned = [f.found for f in findings if f.check == "the daemon's protections"]
    assert ["user namespaces" in found for found in warned] == [True]


async def test_that_its_networks_do_not_keep_sandboxes_apart_is_told(
    start_service: Callable[..., RunningService],
) -> None:
    async with start_service("docker.network=tailrace-test").client() as client:
        missing = (await client.status()).missing_protections
        assert ["tailrace-test reach each other" in text for text in missing] == [False, True]
