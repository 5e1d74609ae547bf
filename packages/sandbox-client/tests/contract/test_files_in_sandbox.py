"""Files, trees, diffs and patches of a real sandbox, over a real channel."""

import io
import tarfile

import pytest
from sandbox_client import (
    EnvironmentTree,
    FileContent,
    PatchRejected,
    Sandbox,
    SandboxClient,
    TooLarge,
    WrongRequest,
)


async def test_written_files_can_be_read_and_run(sandbox: Sandbox) -> None:
    await sandbox.write_files(
        [
            FileContent("new/deep/file.txt", b"content\0\xff"),
            FileContent("/tmp/tool.sh", b"#!/bin/sh\necho tool\n", 0o755),
            FileContent("/logs/reward.txt", b"1"),
            FileContent("/solution/solve.sh", b"echo solved"),
        ]
    )
    assert await sandbox.read("new/deep/file.txt") == b"content\0\xff"
    told = await sandbox.run("/tmp/tool.sh; sh /solution/solve.sh; cat /logs/reward.txt")
    assert told.stdout == "tool\nsolved\n1"
    owner = await sandbox.run("id -u; stat -c %u:%a new/deep new/deep/file.txt /tmp/tool.sh")
    user, *modes = owner.stdout.split()
    assert modes == [f"{user}:755", f"{user}:644", f"{user}:755"]


async def test_writing_replaces_what_was_there(sandbox: Sandbox) -> None:
    # The command has looked before, so a stale view of the folder would show.
    assert (await sandbox.run("cat later.txt")).exit_code == 1
    await sandbox.write("later.txt", "long first version")
    assert (await sandbox.run("cat later.txt")).stdout == "long first version"
    await sandbox.write("later.txt", "second")
    assert (await sandbox.run("cat later.txt")).stdout == "second"


async def test_large_files_travel_in_pieces(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 12_000
    await sandbox.write("big.bin", content)
    assert await sandbox.read("big.bin") == content
    with pytest.raises(TooLarge, match="3072000 bytes"):
        await sandbox.read("big.bin", max_bytes=1000)


async def test_reading_what_is_no_file_is_refused(sandbox: Sandbox) -> None:
    await sandbox.run("mkfifo pipe; ln -s /proc/1/environ env; chmod 000 shop.py")
    for path in ("missing", "pkg", "pipe", "shop.py"):
        with pytest.raises(WrongRequest, match=path):
            await sandbox.read(path)


@pytest.mark.parametrize(
    "path",
    ["../etc/passwd", "a/../../../etc/passwd", "/..", "/usr/bin/x", "/etc/passwd", "/proc/1/x"],
)
async def test_paths_outside_the_writable_places_are_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(WrongRequest):
        await sandbox.write(path, "x")


async def test_links_made_inside_do_not_lead_calls_out(sandbox: Sandbox) -> None:
    await sandbox.run(
        "ln -s / root; ln -s ../../../../../../etc up; ln -s /etc/passwd passwd; ln -s pkg inner"
    )
    # An absolute link means the sandbox's own root, never the host's.
    with pytest.raises(WrongRequest):
        await sandbox.write("root/tmp/x", "x")
    with pytest.raises(WrongRequest):
        await sandbox.read("up/shadow")
    with pytest.raises(WrongRequest):
        await sandbox.read("passwd")
    # A link that stays inside is followed.
    assert await sandbox.read("inner/data.txt") == b"one\ntwo\nthree\n"
    inside = (await sandbox.run("cat /etc/passwd")).stdout_bytes
    assert await sandbox.read("/workspace/passwd") == inside


async def test_a_full_disk_is_told_apart(client: SandboxClient, sandbox: Sandbox) -> None:
    filled = await sandbox.run("head -c 1000000000 /dev/zero > fill", timeout_s=60)
    assert filled.exit_code != 0
    with pytest.raises(TooLarge, match="disk limit"):
        await sandbox.write("more", b"x" * 100_000)


async def test_a_tree_goes_in_and_comes_out_again(sandbox: Sandbox) -> None:
    tree = EnvironmentTree(
        {"a/x.txt": b"1", "run": b"#!/bin/sh\n"},
        executable=frozenset({"run"}),
        links={"a/l": "x.txt"},
        folders=frozenset({"empty"}),
    )
    await sandbox.upload(tree, "/tests/suite")
    listing = await sandbox.run("cd /tests/suite && find . | sort && test -x run && cat a/l")
    assert listing.stdout == ".\n./a\n./a/l\n./a/x.txt\n./empty\n./run\n1"
    archive = await sandbox.download("/tests/suite")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {m.name: (m.isdir(), m.mode, m.linkname) for m in tar}
    assert found == {
        "a": (True, 0o755, ""),
        "a/x.txt": (False, 0o644, ""),
        "a/l": (False, 0o777, "x.txt"),
        "empty": (True, 0o755, ""),
        "run": (False, 0o755, ""),
    }


def archive_with(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


HOSTILE = [
    archive_with((member("../out"), b"x")),
    archive_with((member("/etc/out"), b"x")),
    archive_with((member("a", tarfile.SYMTYPE, "/tmp"), b""), (member("a/out"), b"x")),
    archive_with((member("dev", tarfile.CHRTYPE), b"")),
    archive_with((member("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")),
    b"this is no archive at all" * 100,
]


@pytest.mark.parametrize("archive", HOSTILE)
async def test_archives_cannot_write_outside_their_folder(
    client: SandboxClient, sandbox: Sandbox, archive: bytes
) -> None:
    tree = EnvironmentTree({})
    object.__setattr__(tree, "tar_bytes", lambda: archive)
    with pytest.raises(WrongRequest):
        await sandbox.upload(tree, "target")
    assert (await sandbox.run("ls /tmp /etc/out")).stdout.strip() == "/tmp:"
    with pytest.raises(WrongRequest):
        await client.put_environment_tar("0" * 64, archive)


async def test_an_environment_must_have_the_digest_it_claims(client: SandboxClient) -> None:
    tree = EnvironmentTree({"claimed.txt": b"x"})
    with pytest.raises(WrongRequest, match=tree.digest):
        await client.put_environment_tar("0" * 64, tree.tar_bytes())
    with pytest.raises(WrongRequest, match="64 lower-case"):
        await client.put_environment_tar("short", tree.tar_bytes())
    assert await client.missing_environments([tree.digest, "0" * 64]) == [tree.digest, "0" * 64]
    assert await client.put_environment(tree)
    assert not await client.put_environment(tree)
    assert await client.missing_environments([tree.digest]) == []


async def test_an_untouched_work_folder_has_no_diff(sandbox: Sandbox) -> None:
    await sandbox.run("cat shop.py; python test_shop.py; touch shop.py; echo x > /tmp/elsewhere")
    assert await sandbox.diff() == b""


CHANGE_EVERYTHING = r"""
sed -i '2c\    return a + b' shop.py
rm pkg/gone.txt
printf 'no newline at the end' > pkg/new.txt
: > empty.txt
chmod +x pkg/data.txt
printf '\000\001' >> image.bin
rm link && ln -s shop.py link
mv run.sh moved.sh
mkdir -p 'dir with blanks/a b' && echo ü > 'dir with blanks/a b/ünïcode.txt'
rm -r pkg/__init__.py && mkdir pkg/__init__.py && echo now a folder > pkg/__init__.py/x
mkdir -p __pycache__ .git && touch __pycache__/a.pyc .git/config
mkfifo pipe
"""


async def test_the_diff_shows_every_kind_of_change_and_applies_elsewhere(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    done = await sandbox.run(CHANGE_EVERYTHING)
    assert done.stderr == ""
    diff = await sandbox.diff()
    text = diff.decode()
    for part in (
        "-    return a - b\n+    return a + b\n",
        "deleted file mode 100644",
        "\\ No newline at end of file",
        "old mode 100644\nnew mode 100755",
        "GIT binary patch",
        "-pkg/data.txt\n\\ No newline at end of file\n+shop.py\n",
        '"b/dir with blanks/a b/',
    ):
        assert part in text, part
    for left_out in ("__pycache__", ".git/config", "pipe"):
        assert left_out not in text
    everything = "find . ( -name .git -o -name __pycache__ -o -name pipe ) -prune -o"
    show = f"{everything} -printf '%p %y %l %#m\\n' | sort; {everything} -type f -print0".replace(
        "(", "\\("
    ).replace(")", "\\)")
    show += " | sort -z | xargs -0 sha256sum"
    async with await client.create(repository) as fresh:
        changed = await fresh.apply_patch(diff)
        assert "shop.py" in changed
        assert "pkg/gone.txt" in changed
        assert (await fresh.run(show)).stdout_bytes == (await sandbox.run(show)).stdout_bytes
        assert await fresh.diff() == diff


async def test_a_replaced_folder_is_seen_as_its_files(sandbox: Sandbox) -> None:
    await sandbox.run(
        "rm -r pkg && mkdir -p pkg/sub && echo new > pkg/sub/a.txt && echo one > pkg/data.txt"
    )
    text = (await sandbox.diff()).decode()
    assert "deleted file mode 100644" in text.split("a/pkg/gone.txt")[1]
    assert "+++ b/pkg/sub/a.txt" in text
    assert "-two\n-three\n" in text


async def test_the_diff_cannot_be_bent_by_what_runs_inside(sandbox: Sandbox) -> None:
    await sandbox.run(
        "ln -s /etc evil; rm -r pkg && ln -s /usr pkg; chmod 000 shop.py; chmod 000 ."
    )
    text = (await sandbox.diff()).decode()
    assert "new file mode 120000" in text
    assert "root:" not in text
    assert text.count("diff --git") < 10


async def test_a_diff_over_the_bound_is_refused_not_cut(sandbox: Sandbox) -> None:
    await sandbox.run("seq 1 3000 > long.txt")
    with pytest.raises(TooLarge, match="larger than 2000 bytes"):
        await sandbox.diff(max_bytes=2000)
    await sandbox.run("head -c 20000000 /dev/zero > huge.bin")
    with pytest.raises(TooLarge, match="huge"):
        await sandbox.diff()
    with pytest.raises(WrongRequest, match="max_bytes"):
        await sandbox.diff(max_bytes=-1)


async def test_a_sparse_giant_does_not_stop_the_service(sandbox: Sandbox) -> None:
    await sandbox.run("truncate -s 1000G giant.bin; mkdir -p $(printf 'd/%.0s' $(seq 1 300))")
    with pytest.raises(TooLarge):
        await sandbox.diff()
    assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_a_patch_that_does_not_fit_changes_nothing(sandbox: Sandbox) -> None:
    patch = (
        b"--- a/pkg/data.txt\n+++ b/pkg/data.txt\n@@ -1 +1 @@\n-one\n+uno\n"
        b"--- a/shop.py\n+++ b/shop.py\n@@ -1 +1 @@\n-wrong line\n+x\n"
    )
    with pytest.raises(PatchRejected, match=r"shop\.py: hunk 1 of 1"):
        await sandbox.apply_patch(patch)
    assert await sandbox.diff() == b""


async def test_a_patch_does_not_follow_links_out_of_the_work_folder(sandbox: Sandbox) -> None:
    await sandbox.run("ln -s /tmp out")
    with pytest.raises(PatchRejected):
        await sandbox.apply_patch(b"--- /dev/null\n+++ b/out/x\n@@ -0,0 +1 @@\n+x\n")
    assert (await sandbox.run("ls /tmp")).stdout == ""


async def test_an_empty_patch_is_no_change(sandbox: Sandbox) -> None:
    assert await sandbox.apply_patch(b"") == []


async def test_a_tree_too_large_for_memory_comes_out_whole(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 12_000
    await sandbox.write("big/file.bin", content)
    with tarfile.open(fileobj=io.BytesIO(await sandbox.download("big"))) as tar:
        packed = tar.extractfile("file.bin")
        assert packed is not None
        assert packed.read() == content
