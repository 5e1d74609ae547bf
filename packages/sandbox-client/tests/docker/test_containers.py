"""Containers as sandboxes: what surrounds them, and how they end."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_client import (
    EnvironmentRef,
    EnvironmentTree,
    SandboxClient,
    SandboxGone,
    SandboxLimits,
    WrongRequest,
)
from sandbox_client.backends.docker import doctor
from sandbox_client.config import DockerConfig
from sandbox_client.findings import Level
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.dockerd import Dockerd
from sandbox_client.testing.service import RunningService

StartService = Callable[..., RunningService]
LABEL = "dev.tailrace.service"


async def eventually(check: Callable[[], object], what: str) -> None:
    for _ in range(200):
        if check():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(what)


def pids_of(dockerd: Dockerd) -> set[int]:
    """Processes of all containers, by the cgroups that their daemon made."""
    found: set[int] = set()
    for container in cgroups_of(dockerd):
        with contextlib.suppress(OSError):  # it is being removed
            for folder in (container, *container.glob("*/")):
                found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
    return found


def cgroups_of(dockerd: Dockerd) -> list[Path]:
    """Cgroups of all containers, in one hierarchy."""
    root = Path("/sys/fs/cgroup")
    base = root / "freezer" if (root / "freezer").is_dir() else root
    return list((base / dockerd.cgroup_parent).glob("*/"))


async def test_a_killed_services_containers_end_by_themselves(
    start_service: StartService, dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    others = pids_of(dockerd)
    running = start_service()
    async with running.client() as client:
        sandbox = await client.create(repository)
        await sandbox.run("setsid sleep 711 & sleep 712 &")
        assert len(pids_of(dockerd) - others) >= 4
        running.kill()
    # No successor and no lease is needed for this.
    await eventually(lambda: pids_of(dockerd) <= others, "processes outlived their service")
    left = dockerd.containers(LABEL)
    running.start()
    assert set(left) - set(dockerd.containers(LABEL)), "its successor left the container behind"


async def test_a_destroyed_sandbox_leaves_no_container_cgroup_or_mount(
    client: SandboxClient, service: RunningService, dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    def traces() -> list[str]:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return [
            *dockerd.containers(LABEL),
            *map(str, cgroups_of(dockerd)),
            *(mount for mount in mounts if str(service.state_dir) in mount),
            *(str(path) for path in (service.state_dir / "docker").glob("*/*")),
        ]

    before = traces()
    sandbox = await client.create(repository)
    await sandbox.run("sleep 721 & echo x > x")
    assert len(traces()) > len(before) + 4
    await sandbox.destroy()
    # The daemon removes a cgroup a moment after its container.
    await eventually(lambda: traces() == before, f"left behind: {set(traces()) - set(before)}")


async def test_a_container_that_somebody_else_ends_is_gone(
    client: SandboxClient, dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    before = set(dockerd.containers(LABEL))
    sandbox = await client.create(repository)
    (container,) = set(dockerd.containers(LABEL)) - before
    call = asyncio.create_task(sandbox.run("sleep 731"))
    await asyncio.sleep(0.5)
    dockerd.call("POST", f"/containers/{container}/kill")
    with pytest.raises(SandboxGone, match="container"):
        await call
    await eventually(lambda: container not in dockerd.containers(LABEL), "it was not removed")
    assert sandbox.id not in [info.sandbox_id for info in await client.list()]


async def test_what_others_run_on_the_daemon_is_left_alone(
    start_service: StartService, dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    first, second = start_service(), start_service()
    async with first.client() as client:
        sandbox = await client.create(repository)
        second.kill()
        second.start()  # removes its own leftovers
        assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_one_network_serves_all_who_ask_and_the_others_have_none(
    start_service: StartService, dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    interfaces = "cat /proc/net/dev"
    running = start_service("docker.network=tailrace-test")
    async with running.client() as client:
        limits = SandboxLimits(network=True)
        online = [await client.create(repository, limits=limits) for _ in range(2)]
        offline = await client.create(repository)
        for sandbox in online:
            assert "eth0" in (await sandbox.run(interfaces)).stdout
        assert "eth0" not in (await offline.run(interfaces)).stdout
        named = [n["Name"] for n in dockerd.call("GET", "/networks")]
        assert sorted(set(named) - {"host", "none", "bridge"}) == ["tailrace-test"]
    running.stop()


@pytest.mark.parametrize(
    ("environment", "limits", "match"),
    [
        (EnvironmentRef(template="x"), SandboxLimits(), "folder trees and images"),
        (EnvironmentRef(tree_digest="x"), SandboxLimits(network=True), r"docker\.network"),
    ],
)
async def test_what_the_service_is_not_set_up_for_is_refused(
    client: SandboxClient, environment: EnvironmentRef, limits: SandboxLimits, match: str
) -> None:
    with pytest.raises(WrongRequest, match=match):
        await client.create(environment, limits=limits)


def test_the_doctor_finds_nothing_wrong_with_this_daemon(backend: BackendUnderTest) -> None:
    settings = dict(setting.split("=", 1) for setting in backend.settings)
    config = DockerConfig(
        socket=Path(settings["docker.socket"]),
        base_image=settings["docker.base_image"],
        disk_watermark=1,
    )
    levels = {finding.check: finding.level for finding in doctor.examine(config)}
    assert set(levels.values()) == {Level.OK}, levels
    assert {"the daemon's API", "the containers' cgroups", "the base image"} <= levels.keys()
    absent = {f.check: f.level for f in doctor.examine(DockerConfig(socket=config.socket))}
    assert absent["the base image"] is Level.WARNING
