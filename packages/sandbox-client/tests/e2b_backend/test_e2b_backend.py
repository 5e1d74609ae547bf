"""What the back-end `e2b` alone promises, by the official SDK against the endpoint over `local`."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2b import E2B
from sandbox_client import (
    EnvironmentRef,
    EnvironmentTree,
    QuotaExhausted,
    Sandbox,
    SandboxClient,
    SandboxGone,
    SandboxUnavailable,
    WrongRequest,
)
from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.e2b.backend import E2BBackend
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.e2b_endpoint import (
    API_KEY,
    RunningEndpoint,
    serving_endpoint,
    tagged_sandboxes,
)
from sandbox_client.testing.service import RunningService
from sandbox_client.types import Command, SandboxLimits, SandboxSpec
from service_kit.errors import Reason, ServiceError

pytestmark = pytest.mark.e2b

StartService = Callable[..., RunningService]
DOCKERFILE = """FROM python:3.11
WORKDIR /workspace
COPY src/ /workspace/
ENV MODE=built
RUN echo "$MODE by $(basename $PWD)" > made.txt
"""


@pytest.fixture(scope="session")
def endpoint(backend: BackendUnderTest) -> Iterator[RunningEndpoint]:
    with serving_endpoint(
        *backend.settings,
        *backend.quick,
        "e2b_api.base_images={'python:3.11'='base'}",
        # Builds of Dockerfiles go by root, of which these sandboxes have none.
        "e2b_api.users=['user','root']",
    ) as running:
        yield running


def settings_for(url: str) -> tuple[str, ...]:
    return (
        "backend=e2b",
        f"e2b.api_url={url}",
        f"e2b.sandbox_url={url}",
        f"e2b.api_key={API_KEY}",
        "e2b.admin_user=user",
        "lease.reap_interval_s=0.1",
    )


@pytest.fixture
def start_service() -> Iterator[StartService]:
    """Starts services over an endpoint, with settings as for `--set`."""
    with ExitStack() as stack:

        def start(url: str, *settings: str) -> RunningService:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-service-"))
            running = RunningService(Path(folder), *settings_for(url), *settings)
            stack.callback(lambda: running.running and running.stop())
            running.start()
            return running

        yield start


@pytest.fixture(scope="session")
def service(endpoint: RunningEndpoint) -> Iterator[RunningService]:
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        running = RunningService(Path(folder), *settings_for(endpoint.url))
        running.start()
        yield running
        assert running.stop() == 0, running.log.read_text()


@pytest.fixture
async def client(service: RunningService) -> AsyncIterator[SandboxClient]:
    async with service.client() as connected:
        yield connected


def tags_of(running: RunningService, endpoint: RunningEndpoint) -> list[str]:
    name = (running.state_dir / "e2b" / "service-id").read_text()
    return tagged_sandboxes(endpoint.url, name)


async def test_a_restarted_service_takes_its_sandboxes_over(
    start_service: StartService, endpoint: RunningEndpoint, repository: EnvironmentTree
) -> None:
    running = start_service(endpoint.url)
    async with running.client(owner="alice", call_timeout_s=20) as alice:
        sandbox = await alice.create(repository, key="attempt-1", labels={"attempt": "1"})
        await sandbox.run("echo kept > kept.txt; sed -i 's/a - b/a + b/' shop.py; sleep 901 &")
        running.kill()
        running.start()
        async with running.client(owner="alice", call_timeout_s=20) as again:
            (info,) = await again.list()
            assert (info.sandbox_id, info.labels) == (sandbox.id, {"attempt": "1"})
            same = await again.create(repository, key="attempt-1", labels={"attempt": "1"})
            assert same.id == sandbox.id
            seen = await same.run("cat kept.txt; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            assert seen.stdout.startswith("kept\n")
            assert "sleep 901" in seen.stdout
            assert b"+    return a + b" in await same.diff()
            assert len(tags_of(running, endpoint)) == 1
            await same.destroy()
        sandbox.gone = True
    assert tags_of(running, endpoint) == []


async def test_what_nobody_comes_back_for_is_reaped_after_a_restart(
    start_service: StartService, endpoint: RunningEndpoint, repository: EnvironmentTree
) -> None:
    running = start_service(endpoint.url, "lease.default_s=1")
    async with running.client(call_timeout_s=20) as client:
        sandbox = await client.create(repository)
        running.kill()
        sandbox.gone = True
    assert len(tags_of(running, endpoint)) == 1
    running.start()
    for _ in range(200):
        if not tags_of(running, endpoint):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("a sandbox outlived its owner")


async def test_e2b_ends_what_its_service_does_not_ask_for_any_more(
    start_service: StartService, endpoint: RunningEndpoint, repository: EnvironmentTree
) -> None:
    running = start_service(endpoint.url, "e2b.sandbox_timeout_s=10")
    sdk = E2B(api_key=API_KEY, api_url=endpoint.url, sandbox_url=endpoint.url)
    async with running.client(call_timeout_s=20) as client:
        sandbox = await client.create(repository)
        (remote_id,) = tags_of(running, endpoint)
        first = (await sdk.AsyncSandbox.get_info(remote_id)).end_at
        for _ in range(100):
            # It is renewed while the service lives...
            if (await sdk.AsyncSandbox.get_info(remote_id)).end_at > first:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("a sandbox was not renewed")
        # ... and has an end of its own should the service not come back.
        left_s = (await sdk.AsyncSandbox.get_info(remote_id)).end_at.timestamp()
        assert left_s - first.timestamp() < 10
        await sandbox.destroy()


async def test_a_sandbox_that_e2b_has_ended_is_gone(
    client: SandboxClient,
    service: RunningService,
    endpoint: RunningEndpoint,
    repository: EnvironmentTree,
) -> None:
    sandbox = await client.create(repository)
    (remote_id,) = tags_of(service, endpoint)
    running = asyncio.create_task(sandbox.run("sleep 911"))
    await asyncio.sleep(0.5)
    sdk = E2B(api_key=API_KEY, api_url=endpoint.url, sandbox_url=endpoint.url)
    assert await sdk.AsyncSandbox.kill(remote_id)
    with pytest.raises(SandboxGone):
        await running
    for call in (sandbox.run("true"), sandbox.diff(), sandbox.read("shop.py")):
        with pytest.raises(SandboxGone):
            await call
    for _ in range(100):
        if not await client.list():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("a lost sandbox stayed in the tables")


async def test_one_recipe_is_built_once_however_many_ask_for_it(
    client: SandboxClient, service: RunningService
) -> None:
    tree = EnvironmentTree({"only.txt": b"for this test\n"})
    await client.put_environment(tree)
    made = await asyncio.gather(*(client.create(tree) for _ in range(8)))
    assert service.log.read_text().count("building template") >= 1
    built = [line for line in service.log.read_text().splitlines() if "building template" in line]
    assert len({line.rpartition(" ")[2] for line in built}) == len(built)
    contents = await asyncio.gather(*(sandbox.read("only.txt") for sandbox in made))
    assert set(contents) == {b"for this test\n"}
    for sandbox in made:
        await sandbox.destroy()


async def test_a_tree_with_a_dockerfile_is_built_from_it(client: SandboxClient) -> None:
    tree = EnvironmentTree(
        {
            ".tailrace/Dockerfile": DOCKERFILE.encode(),
            "src/app.py": b"print('app')\n",
            "other.txt": b"not copied\n",
        }
    )
    async with await client.create(tree) as sandbox:
        listing = await sandbox.run("ls -A; cat made.txt; echo $MODE; python app.py")
        assert listing.stdout == "app.py\nmade.txt\nbuilt by workspace\nbuilt\napp\n"
        # The work folder is compared with what the build has left in it.
        assert await sandbox.diff() == b""
        await sandbox.run("echo more >> app.py; rm made.txt")
        diff = (await sandbox.diff()).decode()
        assert "+more" in diff
        assert "deleted file mode 100644" in diff


async def test_a_dockerfile_that_cannot_be_built_is_told_with_its_step(
    client: SandboxClient,
) -> None:
    failing = EnvironmentTree(
        {".tailrace/Dockerfile": b"FROM python:3.11\nRUN echo because; exit 7\n"}
    )
    with pytest.raises(SandboxUnavailable, match=r"exit status 7: because") as caught:
        await client.create(failing)
    assert not caught.value.retryable
    staged = EnvironmentTree({".tailrace/Dockerfile": b"FROM a AS x\nFROM b\nCOPY --from=x / /\n"})
    with pytest.raises(WrongRequest, match="Dockerfile"):
        await client.create(staged)


async def test_a_template_of_ones_own_is_something_to_start_from(client: SandboxClient) -> None:
    async with await client.create(EnvironmentRef(template="base", workdir="/home/user")) as box:
        await box.write("new.txt", "x")
        assert b"new file mode" in await box.diff()
    with pytest.raises(ServiceError) as caught:
        await client.create(EnvironmentRef(template="no-such-template"))
    assert caught.value.reason is Reason.ENVIRONMENT_UNKNOWN


async def test_a_command_that_kills_its_supervisor_counts_as_killed(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await client.create(repository) as sandbox:
        result = await sandbox.run("echo before; sleep 0.3; kill -9 $PPID; sleep 1")
        assert (result.exit_code, result.signal, result.timed_out) == (137, 9, False)
        assert result.stdout == "before\n"
        assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_a_full_account_says_when_to_come_back(
    backend: BackendUnderTest, start_service: StartService, repository: EnvironmentTree
) -> None:
    # One place, and one more for the build of the template.
    settings = (*backend.settings, *backend.quick, "limits.sandboxes=1")
    with serving_endpoint(*settings) as full:
        running = start_service(full.url, "e2b.retries=0", "e2b.retry_after_s=0.2")
        async with running.client() as client:
            first = await client.create(repository)
            with pytest.raises(QuotaExhausted) as caught:
                await client.create(repository, timeout_s=1)
            assert caught.value.retryable
            assert caught.value.retry_after_s is not None
            assert 0 < caught.value.retry_after_s <= 0.2
            waiting = asyncio.create_task(client.create(repository, timeout_s=20))
            await asyncio.sleep(0.3)
            await first.destroy()
            assert (await (await waiting).run("echo in")).stdout == "in\n"


async def test_creates_are_paced(
    start_service: StartService, endpoint: RunningEndpoint, repository: EnvironmentTree
) -> None:
    running = start_service(endpoint.url, "e2b.creates_per_s=0.01", "e2b.create_burst=1")
    async with running.client() as client:
        await client.create(repository)
        with pytest.raises(QuotaExhausted, match=r"e2b\.creates_per_s") as caught:
            await client.create(repository, timeout_s=1)
        assert caught.value.retry_after_s is not None
        assert 50 < caught.value.retry_after_s <= 100


class LosingProxy:
    """Passes requests on to an endpoint, and loses the answer to the first create."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self.lost = 0
        self.creates = 0
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "LosingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, ours: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        theirs, there = await asyncio.open_connection(self._host, self._port)
        losing = asyncio.Event()

        async def forth() -> None:
            while data := await ours.read(65536):
                if data.startswith(b"POST /v2/sandboxes "):
                    self.creates += 1
                    if not self.lost:
                        self.lost += 1
                        losing.set()
                there.write(data)
                await there.drain()
            there.close()

        async def return_answers() -> None:
            while data := await theirs.read(65536):
                if losing.is_set():
                    # E2B has made it; nobody hears of it.
                    back.transport.abort()
                    there.close()
                    return
                back.write(data)
                await back.drain()
            back.close()

        outcomes = await asyncio.gather(forth(), return_answers(), return_exceptions=True)
        assert all(o is None or isinstance(o, OSError) for o in outcomes), outcomes


async def test_a_create_whose_answer_is_lost_makes_one_sandbox(
    start_service: StartService, endpoint: RunningEndpoint, repository: EnvironmentTree
) -> None:
    warm = start_service(endpoint.url)
    async with warm.client() as client:  # so that the template is there
        await (await client.create(repository)).destroy()
    async with LosingProxy(endpoint.url) as proxy:
        running = await asyncio.to_thread(start_service, proxy.url)
        async with running.client() as client:
            sandbox = await client.create(repository)
            assert proxy.lost == 1
            assert (await sandbox.run("echo in")).stdout == "in\n"
            assert len(tags_of(running, endpoint)) == 1


def test_a_refused_key_stops_the_service_with_a_clear_error(endpoint: RunningEndpoint) -> None:
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        settings = [*settings_for(endpoint.url), f"state_dir={folder}/state"]
        settings += ["e2b.api_key=not-the-key-of-it", "server.bind=127.0.0.1:0"]
        done = subprocess.run(
            [sys.executable, "-m", "sandbox_client", "serve", *(f"--set={s}" for s in settings)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert "Unauthorized" in done.stderr


async def test_snapshots_are_templates_of_the_services_own(
    endpoint: RunningEndpoint, repository: EnvironmentTree
) -> None:
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        config = SandboxServiceConfig.model_validate(
            {
                "state_dir": f"{folder}/state",
                "e2b": {
                    "api_url": endpoint.url,
                    "sandbox_url": endpoint.url,
                    "api_key": API_KEY,
                    "admin_user": "user",
                },
            }
        )
        backend = E2BBackend(config)
        await backend.start()
        try:
            await _use_a_snapshot(backend, repository)
        finally:
            await backend.stop()
        sdk = E2B(api_key=API_KEY, api_url=endpoint.url, sandbox_url=endpoint.url)
        assert await sdk.AsyncSandbox.list_snapshots().next_items() == []


async def _use_a_snapshot(backend: E2BBackend, repository: EnvironmentTree) -> None:
    limits = SandboxLimits(memory_bytes=1 << 29, pids=64, cpus=1.0, disk_bytes=1 << 27)

    async def run(sandbox: object, line: str) -> str:
        command = Command(shell=line, timeout_s=20.0, max_output_bytes=10_000)
        result = await sandbox.run(command, ExecHooks())  # type: ignore[attr-defined]
        return str(result.stdout)

    with tempfile.TemporaryFile() as archive:
        archive.write(repository.tar_bytes())
        archive.seek(0)
        await backend.put_environment(repository.digest, archive)
    spec = SandboxSpec(EnvironmentRef(tree_digest=repository.digest), limits)
    prepared = await backend.create("sb-1", spec)
    await run(prepared, "echo prepared > state.txt")
    assert await prepared.snapshot("snap-1") == 0
    await run(prepared, "echo later > state.txt")
    fork = SandboxSpec(EnvironmentRef(snapshot="snap-1"), limits)
    forks = await asyncio.gather(*(backend.create(f"sb-{n}", fork) for n in range(2, 5)))
    assert [await run(sandbox, "cat state.txt") for sandbox in forks] == ["prepared\n"] * 3
    # A fork's diff is against what it started from, not against the first environment.
    assert await forks[0].diff(1 << 20) == b""
    await run(forks[0], "echo own > own.txt")
    assert b"own.txt" in await forks[0].diff(1 << 20)
    await backend.remove_snapshot("snap-1")
    with pytest.raises(ServiceError) as caught:
        await backend.create("sb-9", fork)
    assert caught.value.reason is Reason.ENVIRONMENT_UNKNOWN


async def test_sandboxes_reach_no_network_unless_asked(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await client.create(repository) as sandbox:
        assert isinstance(sandbox, Sandbox)
        assert (await sandbox.run("cat /proc/net/route")).stdout.count("\n") == 1
    # The endpoint's own sandboxes have none to give.
    with pytest.raises(WrongRequest, match="network"):
        await client.create(repository, limits=SandboxLimits(network=True))
