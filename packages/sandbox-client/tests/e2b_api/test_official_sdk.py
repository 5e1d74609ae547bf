"""What a program that uses E2B's official SDK can rely on here, behaviour by behaviour."""

import asyncio
import io
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import e2b
import pytest
from e2b import (
    E2B,
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    RateLimitException,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import (
    AuthenticationException,
    NotEnoughSpaceException,
    SandboxNotFoundException,
    SandboxNotRunningException,
)
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.e2b_endpoint import API_KEY, RunningEndpoint, serving_endpoint

Behaviour = Callable[[E2B, AsyncSandbox], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}
BACKENDS = ("local", "docker")


@pytest.fixture(scope="session")
def endpoint(backend: BackendUnderTest) -> Iterator[RunningEndpoint]:
    """One endpoint for all tests that leave it as they found it."""
    with serving_endpoint(
        *backend.settings,
        *backend.quick,
        "lease.reap_interval_s=0.1",
        "lease.max_s=600",
        "e2b_api.base_images={'python:3.11'='base'}",
    ) as running:
        yield running


def sdk_of(endpoint: RunningEndpoint, **options: object) -> E2B:
    """The official SDK, bound to an endpoint; without retries unless asked for."""
    url = endpoint.url
    params = {"api_key": API_KEY, "api_url": url, "sandbox_url": url, "retries": 0}
    return E2B(**{**params, **options})  # type: ignore[arg-type]


@pytest.fixture
def sdk(endpoint: RunningEndpoint) -> E2B:
    return sdk_of(endpoint)


@pytest.fixture
async def box(sdk: E2B) -> AsyncIterator[AsyncSandbox]:
    """A sandbox of the SDK's."""
    made = await sdk.AsyncSandbox.create(
        timeout=120, metadata={"made": "here"}, envs={"TEAM": "e2b"}
    )
    yield made
    await made.kill()


def behaviour(check: Behaviour) -> Behaviour:
    BEHAVIOURS[check.__name__] = check
    return check


# -- commands


@behaviour
async def output_and_errors_come_apart(sdk: E2B, box: AsyncSandbox) -> None:
    result = await box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    assert result.error is None


@behaviour
async def commands_are_bashs(sdk: E2B, box: AsyncSandbox) -> None:
    assert (await box.commands.run("a=(1 2 3); echo ${a[1]} $BASH_VERSION")).stdout[:2] == "2 "


@behaviour
async def variables_come_from_the_sandbox_and_the_command(sdk: E2B, box: AsyncSandbox) -> None:
    result = await box.commands.run("echo $TEAM $MINE $HOME", envs={"MINE": "a b"})
    assert result.stdout == "e2b a b /home/user\n"


@behaviour
async def commands_start_in_the_home_or_where_asked(sdk: E2B, box: AsyncSandbox) -> None:
    assert (await box.commands.run("pwd")).stdout == "/home/user\n"
    assert (await box.commands.run("pwd", cwd="/tmp")).stdout == "/tmp\n"
    await box.files.make_dir("sub")
    assert (await box.commands.run("pwd", cwd="sub")).stdout == "/home/user/sub\n"


@behaviour
async def a_folder_that_does_not_exist_is_refused(sdk: E2B, box: AsyncSandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="cwd '/nowhere' does not exist"):
        await box.commands.run("pwd", cwd="/nowhere")


@behaviour
async def the_user_is_checked(sdk: E2B, box: AsyncSandbox) -> None:
    assert (await box.commands.run("id -u", user="user")).stdout != "0\n"
    with pytest.raises(AuthenticationException, match="invalid username: 'root'"):
        await box.commands.run("id -u", user="root")


@behaviour
async def callbacks_get_output_while_the_command_runs(sdk: E2B, box: AsyncSandbox) -> None:
    seen: list[str] = []
    began = asyncio.Event()

    def take(text: str) -> None:
        seen.append(f"out {text}")
        began.set()

    handle = await box.commands.run(
        "echo one; read x; echo two $x >&2",
        background=True,
        stdin=True,
        on_stdout=take,
        on_stderr=lambda text: seen.append(f"err {text}"),
    )
    # The command cannot go on before its first line has been seen here.
    await began.wait()
    await handle.send_stdin("go\n")
    await handle.wait()
    assert seen == ["out one\n", "err two go\n"]


@behaviour
async def failing_raises_with_everything(sdk: E2B, box: AsyncSandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        await box.commands.run("echo partly; echo why >&2; exit 3")
    error = caught.value
    assert (error.exit_code, error.stdout, error.stderr) == (3, "partly\n", "why\n")
    assert error.error == "exit status 3"


@behaviour
async def a_timeout_is_one_and_ends_the_whole_tree(sdk: E2B, box: AsyncSandbox) -> None:
    seen: list[str] = []
    began = time.monotonic()
    with pytest.raises(TimeoutException) as caught:
        await box.commands.run(
            "echo before; setsid sleep 801 & sleep 802", timeout=1, on_stdout=seen.append
        )
    assert type(caught.value) is TimeoutException
    assert time.monotonic() - began >= 0.9
    assert seen == ["before\n"]
    await eventually(lambda: no_sleepers(box), "a timed-out command left processes")


@behaviour
async def bytes_that_are_no_text_are_replaced(sdk: E2B, box: AsyncSandbox) -> None:
    assert (await box.commands.run("printf 'caf\\351 \\303\\251'")).stdout == "caf� é"


@behaviour
async def large_output_arrives_whole(sdk: E2B, box: AsyncSandbox) -> None:
    result = await box.commands.run("seq 1 600000; seq 1 100000 >&2")
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 600_001))
    assert len(result.stderr) == 588_895


@behaviour
async def a_background_command_is_listed_and_killed(sdk: E2B, box: AsyncSandbox) -> None:
    handle = await box.commands.run("sleep 811 & sleep 812", background=True, envs={"A": "b"})
    (listed,) = await box.commands.list()
    assert (listed.pid, listed.cmd, listed.args[-1]) == (
        handle.pid,
        "/bin/bash",
        "sleep 811 & sleep 812",
    )
    assert listed.envs == {"A": "b"}
    assert await handle.kill()
    with pytest.raises(CommandExitException) as caught:
        await handle.wait()
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")
    assert await box.commands.list() == []
    assert not await box.commands.kill(handle.pid)
    await eventually(lambda: no_sleepers(box), "a killed command left processes")


@behaviour
async def input_can_be_sent_streamed_and_closed(sdk: E2B, box: AsyncSandbox) -> None:
    handle = await box.commands.run("cat; echo end", background=True, stdin=True)
    await handle.send_stdin("one\n")
    async with box.commands.stream_input(handle.pid) as stdin:
        await stdin.send("two\n")
        await stdin.send(b"three\xff\n")
    await handle.close_stdin()
    assert (await handle.wait()).stdout == "one\ntwo\nthree�\nend\n"


@behaviour
async def without_input_a_command_reads_none(sdk: E2B, box: AsyncSandbox) -> None:
    assert (await box.commands.run("cat; echo end", timeout=10)).stdout == "end\n"
    with pytest.raises(e2b.NotFoundException):
        await box.commands.send_stdin(99, "x")


@behaviour
async def a_command_outlives_its_reader_and_can_be_joined_again(
    sdk: E2B, box: AsyncSandbox
) -> None:
    handle = await box.commands.run("read x; echo got $x", background=True, stdin=True)
    await handle.disconnect()
    joined = await box.commands.connect(handle.pid)
    await box.commands.send_stdin(handle.pid, "it\n")
    assert (await joined.wait()).stdout == "got it\n"


@behaviour
async def a_slow_reader_holds_the_command_up_and_loses_nothing(sdk: E2B, box: AsyncSandbox) -> None:
    size = 0

    async def slowly(text: str) -> None:
        nonlocal size
        if not size:
            await asyncio.sleep(0.5)
        size += len(text)

    await box.commands.run(
        "head -c 30000000 /dev/zero | tr '\\0' x", on_stdout=slowly, retain_output=False
    )
    assert size == 30_000_000


# -- files


@behaviour
async def written_files_are_read_back(sdk: E2B, box: AsyncSandbox) -> None:
    info = await box.files.write("notes/a.txt", "grüße")
    assert (info.name, info.path, info.type) == (
        "a.txt",
        "/home/user/notes/a.txt",
        FileType.FILE,
    )
    assert await box.files.read("/home/user/notes/a.txt") == "grüße"
    assert await box.files.read("~/notes/a.txt") == "grüße"


@behaviour
async def bytes_come_back_as_they_were(sdk: E2B, box: AsyncSandbox) -> None:
    content = bytes(range(256)) * 20_000  # more than is kept in memory on the way
    await box.files.write("/tmp/raw.bin", content)
    assert bytes(await box.files.read("/tmp/raw.bin", format="bytes")) == content
    parts = [part async for part in await box.files.read("/tmp/raw.bin", format="stream")]
    assert b"".join(parts) == content


@behaviour
async def uploads_may_be_streams_and_zipped(sdk: E2B, box: AsyncSandbox) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b"one ", b"two ", b"three"):
            yield part

    await box.files.write("streamed", chunks())
    await box.files.write("filed", io.BytesIO(b"from a file"))
    await box.files.write("zipped", b"z" * 3_000_000, gzip=True)
    result = await box.commands.run("cat streamed filed; wc -c < zipped")
    assert result.stdout == "one two threefrom a file3000000\n"


@behaviour
async def many_files_are_written_at_once(sdk: E2B, box: AsyncSandbox) -> None:
    infos = await box.files.write_files(
        [{"path": "many/a", "data": "1"}, {"path": "/tmp/ä b", "data": b"\0\xff"}]
    )
    assert [info.path for info in infos] == ["/home/user/many/a", "/tmp/ä b"]
    assert bytes(await box.files.read("/tmp/ä b", format="bytes")) == b"\0\xff"


@behaviour
async def folders_are_listed_to_a_depth(sdk: E2B, box: AsyncSandbox) -> None:
    await box.commands.run("mkdir -p d/e/f; echo 12345 > d/x; ln -s x d/l; chmod 640 d/x")
    entries = {entry.path: entry for entry in await box.files.list("d")}
    assert sorted(entries) == [f"/home/user/d/{name}" for name in ("e", "l", "x")]
    file = entries["/home/user/d/x"]
    assert (file.type, file.size, file.mode, file.permissions) == (
        FileType.FILE,
        6,
        0o640,
        "rw-r-----",
    )
    assert entries["/home/user/d/e"].type is FileType.DIR
    link = entries["/home/user/d/l"]
    assert (link.type, link.symlink_target) == (FileType.SYMLINK, "x")
    deep = await box.files.list("/home/user/d", depth=2)
    assert "/home/user/d/e/f" in [entry.path for entry in deep]


@behaviour
async def what_is_missing_is_told_as_such(sdk: E2B, box: AsyncSandbox) -> None:
    assert not await box.files.exists("nowhere")
    for call in (
        box.files.read("nowhere"),
        box.files.list("nowhere"),
        box.files.get_info("no/where"),
        box.files.rename("nowhere", "elsewhere"),
    ):
        with pytest.raises(FileNotFoundException):
            await call


@behaviour
async def files_and_folders_are_not_confused(sdk: E2B, box: AsyncSandbox) -> None:
    await box.commands.run("mkdir d; touch f")
    for call in (box.files.read("d"), box.files.list("f"), box.files.make_dir("f")):
        with pytest.raises(InvalidArgumentException):
            await call


@behaviour
async def entries_are_described(sdk: E2B, box: AsyncSandbox) -> None:
    await box.files.write("x.txt", "12")
    info = await box.files.get_info("x.txt")
    assert (info.name, info.path, info.type, info.size, info.mode) == (
        "x.txt",
        "/home/user/x.txt",
        FileType.FILE,
        2,
        0o644,
    )
    user = (await box.commands.run("id -un; id -gn")).stdout.split()
    assert [info.owner, info.group] == user
    assert abs(info.modified_time.timestamp() - time.time()) < 600


@behaviour
async def entries_are_renamed_and_removed(sdk: E2B, box: AsyncSandbox) -> None:
    await box.files.write("old/name", "x")
    moved = await box.files.rename("old/name", "new/deep/name")
    assert moved.path == "/home/user/new/deep/name"
    assert await box.files.exists("new/deep/name")
    assert not await box.files.exists("old/name")
    await box.files.remove("new")
    assert not await box.files.exists("new")


@behaviour
async def folders_are_made_once(sdk: E2B, box: AsyncSandbox) -> None:
    assert await box.files.make_dir("a/b/c")
    assert not await box.files.make_dir("a/b/c")
    assert await box.files.exists("a/b/c")


@behaviour
async def a_full_disk_is_told_apart(sdk: E2B, box: AsyncSandbox) -> None:
    await box.commands.run("head -c 1000000000 /dev/zero > fill; true", timeout=60)
    with pytest.raises(NotEnoughSpaceException):
        await box.files.write("more", b"x" * 100_000)


@behaviour
async def files_outside_the_writable_places_are_refused(sdk: E2B, box: AsyncSandbox) -> None:
    with pytest.raises(InvalidArgumentException):
        await box.files.write("/usr/bin/x", "x")
    with pytest.raises(SandboxException):
        await box.files.make_dir("/etc/x")
    with pytest.raises(InvalidArgumentException):
        await box.files.write("/../../x", "x")


# -- the life of a sandbox


@behaviour
async def a_sandbox_tells_about_itself(sdk: E2B, box: AsyncSandbox) -> None:
    info = await box.get_info()
    assert (info.sandbox_id, info.template_id, info.state) == (
        box.sandbox_id,
        "base",
        SandboxState.RUNNING,
    )
    assert info.metadata == {"made": "here"}
    assert 100 < (info.end_at - info.started_at).total_seconds() <= 120


@behaviour
async def its_time_can_be_set(sdk: E2B, box: AsyncSandbox) -> None:
    await box.set_timeout(500)
    info = await box.get_info()
    assert 490 < info.end_at.timestamp() - time.time() <= 500
    with pytest.raises(SandboxException, match="between 1 and 600"):
        await box.set_timeout(601)
    await box.set_timeout(0)
    assert not await box.is_running()


@behaviour
async def it_ends_when_its_time_is_over(sdk: E2B, box: AsyncSandbox) -> None:
    await box.set_timeout(1)
    await eventually(lambda: _not(box.is_running()), "the sandbox outlived its time")
    with pytest.raises(SandboxNotRunningException):
        await box.commands.run("true")


@behaviour
async def pausing_stops_its_processes_and_connecting_resumes_them(
    sdk: E2B, box: AsyncSandbox
) -> None:
    handle = await box.commands.run(
        "while :; do date +%s%N > t; mv t tick; sleep 0.02; done", background=True, timeout=0
    )
    await eventually(lambda: box.files.exists("tick"), "the command did not begin")
    assert await box.pause()
    assert not await box.pause()
    with pytest.raises(SandboxNotRunningException):
        await handle.wait()
    with pytest.raises(SandboxNotRunningException):
        await box.commands.run("true")
    assert not await box.is_running()
    assert (await box.get_info()).state is SandboxState.PAUSED
    paused_at = time.time_ns()
    await asyncio.sleep(0.3)
    resumed_at = time.time_ns()
    again = await sdk.AsyncSandbox.connect(box.sandbox_id)
    # No tick between: it was stopped, and goes on where it was.
    first = int(await again.files.read("tick"))
    assert first < paused_at or first > resumed_at
    assert [process.pid for process in await again.commands.list()] == [handle.pid]

    async def ticked() -> bool:
        return int(await again.files.read("tick")) > resumed_at

    await eventually(ticked, "the command did not go on")


@behaviour
async def pausing_without_memory_keeps_the_files_alone(sdk: E2B, box: AsyncSandbox) -> None:
    await box.commands.run("sleep 821", background=True, timeout=0)
    await box.files.write("kept", "x")
    await box.pause(mode="filesystem")
    await box.connect()
    assert await box.files.read("kept") == "x"
    assert await box.commands.list() == []
    assert await no_sleepers(box)


@behaviour
async def another_program_can_connect(sdk: E2B, box: AsyncSandbox) -> None:
    await box.files.write("shared", "from the first")
    other = await sdk.AsyncSandbox.connect(box.sandbox_id, timeout=300)
    assert await other.files.read("shared") == "from the first"
    # A running sandbox's time is prolonged, never cut.
    await sdk.AsyncSandbox.connect(box.sandbox_id, timeout=10)
    assert (await box.get_info()).end_at.timestamp() - time.time() > 200


@behaviour
async def killing_works_once(sdk: E2B, box: AsyncSandbox) -> None:
    assert await box.is_running()
    assert await box.kill()
    assert not await box.kill()
    assert not await box.is_running()
    with pytest.raises(SandboxNotRunningException):
        await box.commands.run("true")
    with pytest.raises(SandboxNotRunningException):
        await box.files.list(".")
    for call in (box.get_info(), box.set_timeout(10), box.connect(), box.fork()):
        with pytest.raises(SandboxNotFoundException):
            await call


@behaviour
async def killing_ends_a_running_command_with_the_right_error(sdk: E2B, box: AsyncSandbox) -> None:
    handle = await box.commands.run("sleep 831", background=True, timeout=0)
    await box.kill()
    with pytest.raises(SandboxNotRunningException):
        await handle.wait()


@behaviour
async def the_same_idempotency_key_gives_the_same_sandbox(sdk: E2B, box: AsyncSandbox) -> None:
    first, second = await asyncio.gather(
        *(sdk.AsyncSandbox.create(idempotency_key="only-one", timeout=60) for _ in range(2))
    )
    assert first.sandbox_id == second.sandbox_id
    assert (await second.commands.run("echo in")).stdout == "in\n"
    await first.kill()


@behaviour
async def sandboxes_are_listed_by_pages_and_filters(sdk: E2B, box: AsyncSandbox) -> None:
    made = [
        await sdk.AsyncSandbox.create(metadata={"group": "a b&c", "n": str(n)}, timeout=60)
        for n in range(5)
    ]
    await made[3].pause()
    query = SandboxQuery(metadata={"group": "a b&c"})
    paginator = sdk.AsyncSandbox.list(query=query, limit=2, order="asc")
    pages = []
    while paginator.has_next:
        pages.append([info.metadata["n"] for info in await paginator.next_items()])
    assert pages == [["0", "1"], ["2", "3"], ["4"]]
    query = SandboxQuery(metadata={"group": "a b&c"}, state=[SandboxState.PAUSED])
    (paused,) = await sdk.AsyncSandbox.list(query=query).next_items()
    assert paused.sandbox_id == made[3].sandbox_id
    for sandbox in made:
        await sandbox.kill()


@behaviour
async def a_snapshot_is_something_to_start_from(sdk: E2B, box: AsyncSandbox) -> None:
    await box.commands.run("mkdir -p repo; echo prepared > repo/state; chmod +x repo/state")
    snapshot = await box.create_snapshot(name="prepared")
    await box.commands.run("echo changed > repo/state")
    other = await sdk.AsyncSandbox.create(snapshot.snapshot_id, timeout=60)
    assert (await other.commands.run("cat repo/state; test -x repo/state")).stdout == "prepared\n"
    named = await sdk.AsyncSandbox.create("prepared", timeout=60)
    assert await named.files.read("repo/state") == "prepared\n"
    (listed,) = await sdk.AsyncSandbox.list_snapshots(box.sandbox_id).next_items()
    assert (listed.snapshot_id, listed.names) == (snapshot.snapshot_id, ["prepared"])
    for sandbox in (other, named):
        await sandbox.kill()
    assert await sdk.AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
    assert not await sdk.AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
    with pytest.raises(SandboxException, match="not found"):
        await sdk.AsyncSandbox.create(snapshot.snapshot_id)


@behaviour
async def a_snapshot_with_processes_is_refused(sdk: E2B, box: AsyncSandbox) -> None:
    with pytest.raises(SandboxException, match="not processes"):
        await box.create_snapshot(mode="full")


@behaviour
async def a_fork_is_many_sandboxes_from_one_state(sdk: E2B, box: AsyncSandbox) -> None:
    await box.files.write("state", "common")
    forks = [fork for fork in await box.fork(count=3, timeout=60) if isinstance(fork, AsyncSandbox)]
    assert len({fork.sandbox_id for fork in forks} | {box.sandbox_id}) == 4
    await forks[0].files.write("state", "own")
    assert [await fork.files.read("state") for fork in forks] == ["own", "common", "common"]
    for fork in forks:
        await fork.kill()


@behaviour
async def usage_is_measured(sdk: E2B, box: AsyncSandbox) -> None:
    await box.commands.run("head -c 20000000 /dev/zero > ballast")
    (metrics,) = await box.get_metrics()
    assert 20_000_000 < metrics.disk_used < metrics.disk_total
    assert 0 < metrics.mem_used < metrics.mem_total
    assert metrics.cpu_count >= 1
    assert metrics.cpu_used_pct >= 0


@behaviour
async def what_is_not_offered_is_refused_with_a_typed_error(sdk: E2B, box: AsyncSandbox) -> None:
    create = sdk.AsyncSandbox.create
    for call in (
        create("no-such-template"),
        create(lifecycle={"on_timeout": "pause"}),
        create(allow_internet_access=True),
        create(network={"allow_out": ["1.2.3.4/32"]}),
        create(timeout=100_000),
        box.update_network({"deny_out": ["0.0.0.0/0"]}),
        box.pty.create(size=e2b.PtySize(rows=10, cols=10), on_data=print),
        box.files.watch_dir(".", on_event=print),
        box.files.write("x", "y", metadata={"a": "b"}),
    ):
        with pytest.raises(SandboxException):
            await call
    without = await create(allow_internet_access=False, timeout=60)
    await without.kill()


async def no_sleepers(box: AsyncSandbox) -> bool:
    found = await box.commands.run("cat /proc/[0-9]*/comm 2>/dev/null; true")
    return "sleep" not in found.stdout.split()


async def _not(answer: Awaitable[bool]) -> bool:
    return not await answer


async def eventually(check: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(200):
        if await check():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(what)


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_the_sdk_finds(name: str, sdk: E2B, box: AsyncSandbox) -> None:
    await BEHAVIOURS[name](sdk, box)


async def test_a_full_service_is_a_rate_limit_with_a_time_to_wait(
    backend: BackendUnderTest,
) -> None:
    settings = (*backend.settings, *backend.quick, "limits.retry_after_s=0.1")
    bounds = ("limits.sandboxes=1", "limits.spool_bytes=1048576")
    with serving_endpoint(*settings, *bounds) as full:
        only = await sdk_of(full).AsyncSandbox.create()
        with pytest.raises(RateLimitException, match=r"limits\.sandboxes"):
            await sdk_of(full).AsyncSandbox.create()
        # Forms and plain bodies go different ways.
        for data in (b"x" * 1_100_000, io.BytesIO(b"x" * 1_100_000)):
            with pytest.raises(RateLimitException, match=r"limits\.spool_bytes"):
                await only.files.write("large", data)
        async with full.service.client() as client:
            limiters = {limiter.name: limiter for limiter in (await client.status()).limiters}
        assert limiters["spool_bytes"].in_use == 0
        assert limiters["e2b_api.connections"].in_use > 0
        assert limiters["e2b_api.builds"].limit == 64
        # With its retries on, the SDK waits as it is told, and gets in.
        waiting = asyncio.create_task(sdk_of(full, retries=3).AsyncSandbox.create())
        await asyncio.sleep(0.2)
        await only.kill()
        assert await (await waiting).is_running()


async def test_a_wrong_key_opens_nothing(endpoint: RunningEndpoint, box: AsyncSandbox) -> None:
    stranger = sdk_of(endpoint, api_key="wrong")
    for call in (
        stranger.AsyncSandbox.create(),
        stranger.AsyncSandbox.connect(box.sandbox_id),
        stranger.AsyncSandbox.kill(box.sandbox_id),
        stranger.AsyncSandbox.list().next_items(),
    ):
        with pytest.raises(AuthenticationException):
            await call


async def test_one_sandboxs_token_does_not_open_another(sdk: E2B, box: AsyncSandbox) -> None:
    other = await sdk.AsyncSandbox.create(timeout=60)
    headers = {**other.connection_config.sandbox_headers, "E2b-Sandbox-Id": box.sandbox_id}
    config = e2b.ConnectionConfig(
        api_key=API_KEY,
        api_url=other.connection_config.api_url,
        sandbox_url=other.envd_api_url,
        extra_sandbox_headers=headers,
    )
    thief = AsyncSandbox(
        sandbox_id=box.sandbox_id,
        sandbox_domain=None,
        envd_version=other._envd_version,
        envd_access_token="stolen",
        traffic_access_token=None,
        connection_config=config,
    )
    with pytest.raises(AuthenticationException):
        await thief.commands.run("true")
    with pytest.raises(AuthenticationException):
        await thief.files.read("x")
    await other.kill()


PROGRAM = """
from e2b import Sandbox

with Sandbox.create() as sandbox:
    sandbox.files.write("hello.py", "print('hello from', __file__)")
    print(sandbox.commands.run("python hello.py").stdout, end="")
"""


def test_a_program_is_pointed_here_by_its_environment_alone(endpoint: RunningEndpoint) -> None:
    environ = {
        "E2B_API_URL": endpoint.url,
        "E2B_SANDBOX_URL": endpoint.url,
        "E2B_API_KEY": API_KEY,
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("hello from /home/user/hello.py\n", 0), done.stderr
