"""Images of a registry: sandboxes on them, pulls within a budget, a disk that fills up."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from sandbox_client import (
    EnvironmentRef,
    EnvironmentTree,
    ImageStage,
    QuotaExhausted,
    SandboxClient,
    ServiceStatus,
    WrongRequest,
)
from sandbox_client.testing.dockerd import Dockerd
from sandbox_client.testing.registry import Registry
from sandbox_client.testing.service import RunningService

StartService = Callable[..., RunningService]

FILES = {
    "testbed/app.py": "print('old')\n",
    "testbed/pkg/data.txt": "one\n",
    "opt/tool/bin/tool": "#!/bin/sh\necho tool\n",
}


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


def gauge(status: ServiceStatus, name: str) -> float:
    (found,) = (limiter for limiter in status.limiters if limiter.name == name)
    return found.in_use


async def test_a_sandbox_starts_from_an_images_own_work_folder(
    client: SandboxClient, registry: Registry
) -> None:
    path = "PATH=/opt/tool/bin:/usr/bin:/bin"
    reference = EnvironmentRef(
        image=registry.add("whole", FILES, (path, "LEVEL=9", "HOME=/root")), workdir="/testbed"
    )
    async with await client.create(reference) as sandbox:
        seen = await sandbox.run("pwd; cat app.py; echo $PATH $LEVEL $HOME; stat -c %u . app.py")
        assert seen.stdout.split() == [
            *("/testbed", "print('old')", "/opt/tool/bin:/usr/bin:/bin", "9", "/tmp"),
            *("65534", "65534"),
        ]
        assert await sandbox.diff() == b""
        await sandbox.run("sed -i s/old/new/ app.py; echo > /opt/tool/x")
        diff = await sandbox.diff()
        assert b"-print('old')\n+print('new')\n" in diff
        async with await client.create(reference) as fresh:
            assert await fresh.read("app.py") == b"print('old')\n"
            assert await fresh.apply_patch(diff) == ["app.py"]
            assert (await fresh.run("ls /opt/tool")).stdout == "bin\n"
        # A fork has its image too.
        async with (
            await sandbox.snapshot() as snapshot,
            await client.create(snapshot=snapshot) as fork,
        ):
            assert (await fork.run("tool; cat app.py")).stdout == "tool\nprint('new')\n"
            assert await fork.diff() == b""


async def test_an_image_without_the_work_folder_starts_with_an_empty_one(
    client: SandboxClient, registry: Registry
) -> None:
    image = registry.add("whole", FILES)
    async with await client.create(EnvironmentRef(image=image)) as sandbox:
        assert (await sandbox.run("pwd; ls -A; echo new > f")).stdout == "/workspace\n"
        assert b"+new" in await sandbox.diff()


async def test_an_image_without_a_shell_is_the_requests_fault(
    client: SandboxClient, registry: Registry
) -> None:
    with pytest.raises(WrongRequest, match="/bin/sh"):
        await client.create(EnvironmentRef(image=registry.add("bare", FILES, programs=("ls",))))


async def test_an_image_is_pulled_once_however_many_ask(
    client: SandboxClient, registry: Registry
) -> None:
    before = gauge(await client.status(), "docker.image_pulls_per_hour")
    image = registry.add("popular", FILES)
    made = await asyncio.gather(*(client.create(EnvironmentRef(image=image)) for _ in range(3)))
    for sandbox in made:
        await sandbox.destroy()
    assert registry.pulls["popular"] == 1
    assert gauge(await client.status(), "docker.image_pulls_per_hour") == before + 1


async def test_what_no_registry_has_is_the_requests_fault(
    client: SandboxClient, registry: Registry
) -> None:
    for image in (f"{registry.host}/missing:latest", "Not An Image"):
        with pytest.raises(WrongRequest, match="image"):
            await client.create(EnvironmentRef(image=image))


async def test_a_slow_pull_keeps_nobody_waiting_and_goes_on(
    start_service: StartService, registry: Registry
) -> None:
    image = registry.add("slow", FILES)
    running = start_service("docker.pull_wait_s=0.2", "limits.retry_after_s=0.5")
    async with running.client() as client:
        registry.delay_s = 1.0
        try:
            with pytest.raises(QuotaExhausted, match="still being pulled"):
                await client.create(EnvironmentRef(image=image), timeout_s=0.5)
        finally:
            registry.delay_s = 0.0
        await (await client.create(EnvironmentRef(image=image), timeout_s=30)).destroy()
        assert registry.pulls["slow"] == 1


async def test_images_are_fetched_ahead_of_sandboxes(
    client: SandboxClient, registry: Registry
) -> None:
    wanted = [registry.add("first", FILES), f"{registry.host}/lost:latest"]
    asked = await client.prefetch_images(wanted)
    assert [image.stage for image in asked] == [ImageStage.PULLING] * 2
    seen: dict[str, ImageStage] = {}
    for _ in range(200):
        for image in await client.prefetch_images([i for i in wanted if i not in seen]):
            if image.stage is not ImageStage.PULLING:
                seen[image.image] = image.stage
        if len(seen) == 2:
            break
        await asyncio.sleep(0.05)
    assert seen == {wanted[0]: ImageStage.PRESENT, wanted[1]: ImageStage.FAILED}
    assert registry.pulls["first"] == 1


async def test_hosts_share_one_budget_of_pulls(
    start_service: StartService, registry: Registry
) -> None:
    keeper = start_service("docker.image_pulls_per_hour=2")
    other = start_service(f"docker.pull_budget.target={keeper.target}")
    images = [registry.add(f"budget-{n}", FILES) for n in range(3)]
    async with keeper.client() as at_keeper, other.client() as at_other:
        await (await at_other.create(EnvironmentRef(image=images[0]))).destroy()
        await (await at_keeper.create(EnvironmentRef(image=images[1]))).destroy()
        assert gauge(await at_keeper.status(), "docker.image_pulls_per_hour") == 2
        for client in (at_keeper, at_other):
            with pytest.raises(QuotaExhausted, match="2 pulls in any hour") as caught:
                await client.create(EnvironmentRef(image=images[2]))
            assert caught.value.retry_after_s is not None
            assert 3000 < caught.value.retry_after_s <= 3600
        # What is there needs no pull.
        await (await at_other.create(EnvironmentRef(image=images[1]))).destroy()
    assert registry.pulls["budget-2"] == 0


async def test_a_registry_that_refuses_is_not_the_tasks_fault(
    client: SandboxClient, registry: Registry
) -> None:
    image = registry.add("refused", FILES)
    registry.too_often = True
    try:
        with pytest.raises(QuotaExhausted, match="pull no more"):
            await client.create(EnvironmentRef(image=image), timeout_s=20)
    finally:
        registry.too_often = False


async def test_a_full_disk_costs_unused_images_of_its_own_then_refuses(
    start_service: StartService, registry: Registry, dockerd: Dockerd, repository: EnvironmentTree
) -> None:
    image = registry.add("big", FILES)
    running = start_service()
    async with running.client() as client:
        await (await client.create(EnvironmentRef(image=image))).destroy()
    running.stop()
    assert image in images_of(dockerd)
    full = RunningService(running.folder, *running.settings, "docker.disk_watermark=0.0001")
    full.start()
    try:
        async with full.client() as client:
            with pytest.raises(QuotaExhausted, match="disk_watermark") as caught:
                await client.create(repository, timeout_s=0.5)
            assert caught.value.retryable
            assert gauge(await client.status(), "docker.disk_watermark") > 0.0001
    finally:
        full.stop()
    assert image not in images_of(dockerd)
    # Others' images are not this service's to remove.
    assert "tailrace-test-base:latest" in images_of(dockerd)


def images_of(dockerd: Dockerd) -> list[str]:
    return [tag for image in dockerd.call("GET", "/images/json") for tag in image["RepoTags"] or ()]
