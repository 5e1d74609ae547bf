"""Snapshots of prepared sandboxes and sandboxes that start from them."""

import asyncio

import pytest
from sandbox_client import (
    EnvironmentRef,
    EnvironmentTree,
    EnvironmentUnknown,
    Sandbox,
    SandboxClient,
    WrongRequest,
)

PREPARE = (
    "sed -i 's/a - b/a + b/' shop.py && rm pkg/gone.txt && rm -r link && mkdir -p build/out && "
    "echo built > build/out/lib && chmod 750 build/out/lib && ln -s lib build/out/latest && "
    "rm -rf pkg && mkdir pkg && echo only > pkg/only.txt && "
    "mkdir /tmp/cache && echo warm > /tmp/cache/wheel && touch -d 2020-01-02 /tmp/cache/wheel"
)
LOOK = (
    "cat shop.py; find build pkg link | sort; stat -c '%a %U' build/out/lib; "
    "readlink build/out/latest; cat build/out/latest /tmp/cache/wheel; "
    "stat -c %Y /tmp/cache/wheel; ls -A /logs"
)


async def prepared(client: SandboxClient, repository: EnvironmentTree) -> Sandbox:
    sandbox = await client.create(repository)
    assert (await sandbox.run(PREPARE)).exit_code == 0
    return sandbox


async def test_forks_start_with_all_the_files_of_the_prepared_sandbox(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await prepared(client, repository) as first:
        expected = (await first.run(LOOK)).stdout
        assert "pkg/only.txt" in expected
        assert "750 agent" in expected
        snapshot = await first.snapshot()
        await first.run("echo later > build/out/lib; echo later > /tmp/cache/wheel")
    # It is gone, the snapshot is not.
    forks = await asyncio.gather(*(client.create(snapshot=snapshot) for _ in range(3)))
    for fork in forks:
        assert (await fork.run(LOOK)).stdout == expected
    await asyncio.gather(*(fork.destroy() for fork in forks))
    await snapshot.destroy()


async def test_a_forks_changes_are_its_own_and_its_diff_shows_nothing_else(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with (
        await prepared(client, repository) as first,
        await first.snapshot() as snapshot,
        await client.create(snapshot=snapshot) as one,
        await client.create(snapshot=snapshot) as two,
    ):
        assert await one.diff() == b""
        await one.run("echo more >> pkg/only.txt; rm build/out/latest; echo x > /tmp/cache/wheel")
        diff = await one.diff()
        assert b"+more" in diff
        assert b"deleted file mode 120000" in diff
        assert b"shop.py" not in diff
        assert (await two.run("cat /tmp/cache/wheel")).stdout == "warm\n"
        assert await two.diff() == b""
        # As of its start, the patch fits.
        assert sorted(await two.apply_patch(diff)) == ["build/out/latest", "pkg/only.txt"]
        assert await two.diff() == diff


async def test_a_fork_can_be_prepared_further(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    first = await prepared(client, repository)
    lower = await first.snapshot()
    second = await client.create(snapshot=lower)
    await second.run("rm -r build; echo two > pkg/two.txt; rm /tmp/cache/wheel; echo n > /logs/n")
    expected = (await second.run(LOOK)).stdout
    upper = await second.snapshot()
    # What it was made from is kept for as long as it needs it.
    for ended in (first, second, lower):
        await ended.destroy()
    with pytest.raises(EnvironmentUnknown):
        await client.create(snapshot=lower)
    async with await client.create(snapshot=upper) as third:
        assert (await third.run(LOOK)).stdout == expected
        assert await third.diff() == b""
        await upper.destroy()
        # What lives on it goes on.
        assert (await third.run("cat pkg/two.txt shop.py")).stdout.startswith("two\ndef add")


async def test_the_same_key_gives_the_same_snapshot(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    async with await prepared(client, repository) as sandbox:
        made = await asyncio.gather(*(sandbox.snapshot(key="k") for _ in range(3)))
        assert len({snapshot.id for snapshot in made}) == 1
        assert (await sandbox.snapshot()).id != made[0].id


async def test_no_snapshot_is_taken_of_a_sandbox_at_work(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run("sleep 30"))
    await asyncio.sleep(0.2)
    with pytest.raises(WrongRequest, match="running"):
        await sandbox.snapshot()
    running.cancel()


async def test_what_is_not_there_is_told_as_such(client: SandboxClient) -> None:
    with pytest.raises(EnvironmentUnknown) as caught:
        await client.create(snapshot="sn-nothing")
    assert caught.value.metadata == {"snapshot": "sn-nothing"}
    assert not await client.destroy_snapshot("sn-nothing")
    with pytest.raises(WrongRequest, match="not from both"):
        await client.create("ab" * 32, snapshot="sn-nothing")


async def test_a_snapshot_keeps_its_work_folder_and_variables(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    await client.put_environment(repository)
    reference = EnvironmentRef(
        tree_digest=repository.digest, workdir="/testbed", env={"A": "1", "B": "1"}
    )
    async with await client.create(reference) as first, await first.snapshot() as snapshot:
        again = EnvironmentRef(snapshot=snapshot.id, env={"B": "2"})
        async with await client.create(again) as fork:
            assert fork.workdir == "/testbed"
            assert (await fork.run("echo $PWD $A $B")).stdout == "/testbed 1 2\n"
