# ruff: noqa: ASYNC240 -- the controls look at the host itself
"""Where file calls and commands do not lead: out of the sandbox, and into another one."""

import io
import os
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient
from sandbox_client.backends.local.jail import kernel
from sandbox_client.errors import PatchRejected, WrongRequest
from sandbox_client.testing.attempts import inside, plainly, root_of, without
from sandbox_client.testing.service import RunningService
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb


@pytest.fixture
def host_folder() -> Iterator[Path]:
    """A folder of the host's that everybody may read and write."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="host-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret.txt").write_text("the host's secret\n")
        (folder / "secret.txt").chmod(0o666)
        yield folder


def tree_with(name: str) -> EnvironmentTree:
    """A tree whose archive has one file of this name."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    tree = EnvironmentTree({})
    object.__setattr__(tree, "tar_bytes", out.getvalue)
    return tree


def changing(path: str) -> bytes:
    """A diff that replaces the secret's first line."""
    header = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n"
    return f"{header}-the host's secret\n+changed\n".encode()


# Every call with every way out; `{up}` climbs from the work folder, the others are links there.
CALLS: dict[str, Callable[[Sandbox, str], Awaitable[Any]]] = {
    "read": lambda sandbox, path: sandbox.read(path),
    "write": lambda sandbox, path: sandbox.write(path, "changed"),
    "upload to": lambda sandbox, path: sandbox.upload(EnvironmentTree({"x": b"x"}), path),
    "upload of": lambda sandbox, path: sandbox.upload(tree_with(path), "."),
    "download": lambda sandbox, path: sandbox.download(path),
    "apply_patch": lambda sandbox, path: sandbox.apply_patch(changing(path)),
}
WAYS = {
    "..": "../../../..{host}/secret.txt",
    ".. below a folder": "pkg/../../../..{host}/secret.txt",
    "link to a file": "file",
    "link to a folder": "folder/secret.txt",
    "link with ..": "climbing/secret.txt",
    "link to a link": "twice",
}
LINKS = (
    "ln -s {host}/secret.txt file; ln -s {host} folder; ln -s ../../../../../..{host} climbing; "
    "ln -s folder/secret.txt twice"
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
async def test_no_file_call_leads_out(
    sandbox: Sandbox, host_folder: Path, call: str, way: str
) -> None:
    """Protection: the kernel keeps every walk below the sandbox's root, links included."""
    await sandbox.run(LINKS.format(host=host_folder))
    path = WAYS[way].format(host=host_folder)
    if call == "upload of" and way in ("link to a file", "link to a link"):
        await CALLS[call](sandbox, path)  # takes the link's place
        assert (await sandbox.run(f"stat -c %F {path}")).stdout == "regular file\n"
    else:
        with pytest.raises((WrongRequest, PatchRejected)):
            await CALLS[call](sandbox, path)
    assert [p.name for p in host_folder.iterdir()] == ["secret.txt"]
    assert (host_folder / "secret.txt").read_text() == "the host's secret\n"


async def test_the_ways_do_lead_out_of_a_folder_that_is_merely_joined(
    sandbox: Sandbox, host_folder: Path, tmp_path: Path
) -> None:
    """The control: the same paths, opened as a service would that only joins them."""
    await sandbox.run(LINKS.format(host=host_folder))
    seen = await root_of(sandbox) / "workspace"
    for way in ("link to a file", "link to a folder", "link to a link"):
        path = WAYS[way].format(host=host_folder)
        assert (seen / path).read_text() == "the host's secret\n", way
    # From a mount's root nothing leads up, so this is shown where there are folders above.
    work = tmp_path / "a" / "workspace"
    (work / "pkg").mkdir(parents=True)
    (work / "climbing").symlink_to("../..")
    (tmp_path / "secret.txt").write_text("the host's secret\n")
    for path in ("../../secret.txt", "pkg/../../../secret.txt", "climbing/secret.txt"):
        assert (work / path).read_text() == "the host's secret\n", path


async def test_the_diff_shows_links_and_not_what_they_lead_to(
    sandbox: Sandbox, host_folder: Path
) -> None:
    """Protection: the diff is read without following links. The control follows one."""
    seen = await root_of(sandbox) / "workspace"
    await sandbox.run(
        LINKS.format(host=host_folder)
        + f"; rm -r pkg && ln -s {host_folder} pkg; chmod 000 shop.py; chmod 000 ."
    )
    text = (await sandbox.diff()).decode()
    assert "the host's secret" not in text
    assert text.count("new file mode 120000") == 5
    assert (seen / "pkg" / "secret.txt").read_text() == "the host's secret\n"


async def test_file_calls_do_not_show_the_service_in_proc(sandbox: Sandbox) -> None:
    """Protection: /proc is refused: part of it shows who asks, and that is the service.

    The control opens the same file of the sandbox's /proc as the service would.
    """
    assert (await sandbox.run("cat /proc/sys/kernel/hostname")).stdout == "sandbox\n"
    await sandbox.run(
        "ln -s /proc/sys/kernel/hostname knob; ln -s /proc/sys tree; mkdir in; ln -s /proc in/p"
    )
    seen = await root_of(sandbox) / "proc/sys/kernel/hostname"
    assert seen.read_text().strip() == os.uname().nodename != "sandbox"
    for path in ("/proc/sys/kernel/hostname", "/workspace/knob", "/proc/keys", "/proc/1/maps"):
        with pytest.raises(WrongRequest, match="/proc"):
            await sandbox.read(path)
        with pytest.raises(WrongRequest):
            await sandbox.write(path, "x")
    for path in ("/proc/sys/kernel", "/workspace/tree", "/proc"):
        with pytest.raises(WrongRequest, match="/proc"):
            await sandbox.download(path)
        with pytest.raises(WrongRequest):
            await sandbox.upload(EnvironmentTree({"hostname": b"x"}), path)
    with tarfile.open(fileobj=io.BytesIO(await sandbox.download("in"))) as tar:
        assert [(member.name, member.issym()) for member in tar] == [("p", True)]


async def test_file_calls_have_no_more_rights_than_a_command(sandbox: Sandbox) -> None:
    """Protection: the service takes the user's identity. The control reads as the service."""
    for path in ("/usr/bin/env", "/etc/passwd", "/opt/python/x", "/x"):
        with pytest.raises(WrongRequest):
            await sandbox.write(path, "x")
    await sandbox.run("echo closed > closed; chmod 000 closed")
    with pytest.raises(WrongRequest, match="may not"):
        await sandbox.read("closed")
    assert (await root_of(sandbox) / "workspace/closed").read_text() == "closed\n"
    await sandbox.write("open", "x")
    assert await sandbox.read("open") == b"x"


# -- what a command finds


async def test_only_named_folders_of_the_host_are_there(
    sandbox: Sandbox, host_folder: Path
) -> None:
    """Protection: a root of named folders. The control is one that everybody can read outside."""
    top = set((await sandbox.run("ls -A /")).stdout.split())
    allowed = "bin dev etc lib lib32 lib64 libx32 logs opt proc root run sbin sys tests tmp usr var"
    # The root is shared: it has an empty folder for every work folder that was ever asked for.
    assert top <= {*allowed.split(), "solution", "workspace", "testbed", ".tailrace"}
    found = await sandbox.run("find /run /sys /var /root /home /.tailrace -type f -o -type s")
    assert found.stdout == ""
    assert (await sandbox.run("ls -A /home /work /etc/ssl /boot /mnt /srv")).stdout == ""
    program = f"tell(lambda: open('{host_folder}/secret.txt').read())"
    assert without(program=program) == "in"
    assert await inside(sandbox, program) == "ENOENT"


async def test_the_services_own_folders_are_hidden(
    sandbox: Sandbox, service: RunningService
) -> None:
    """Protection: the same, and masks where they lie in a folder that is shown."""
    import sandbox_client

    for folder in (service.state_dir, Path(sandbox_client.__file__).parent, Path.cwd()):
        assert folder.is_dir()  # the control
        assert (await sandbox.run(f"ls -A {folder}")).stdout == ""
    everywhere = await sandbox.run("find / -name 'sandbox_client*' -not -path '/proc/*'")
    assert everywhere.stdout == ""


async def test_the_hosts_files_cannot_be_written(sandbox: Sandbox, host_folder: Path) -> None:
    """Protection: a read-only root; another user. The control is a folder open to everybody."""
    attempts = (
        "touch /usr/bin/evil; echo x >> /etc/passwd; rm -f /usr/bin/env; mkdir /new; "
        "touch /opt/python/evil; ln -s x /bin/evil; mv /usr /gone; chmod 777 /; chmod 777 /opt; "
        "touch /.tailrace/evil; echo x > /opt/tailrace/bin/python"
    )
    await sandbox.run(attempts)
    assert not Path("/usr/bin/evil").exists()
    assert Path("/usr/bin/env").exists()
    check = await sandbox.run(
        "ls -d /new /opt/python/evil /bin/evil /.tailrace/evil; cat /etc/passwd; stat -c %a / /opt;"
        "head -c 1 /opt/tailrace/bin/python"
    )
    lines = check.stdout.split("\n")
    assert lines[-3:-1] == ["755", "755"]
    assert lines[-1] != "x"
    assert "x" not in lines[:-3]
    without(program=f"open('{host_folder}/evil', 'w')")
    assert (host_folder / "evil").exists()


BELOW = """\
MS_BIND, MS_REC, MS_REMOUNT, MS_RDONLY, MS_PRIVATE = 4096, 16384, 32, 1, 1 << 18
call(libc.unshare(0x20000))
call(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
call(libc.mount(PLACE, PLACE, None, MS_BIND | MS_REC, None))
call(libc.mount(None, PLACE, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None))
"""


async def test_a_mount_below_a_folder_that_is_shown_cannot_be_written(
    start_service: Callable[..., RunningService], repository: EnvironmentTree, host_folder: Path
) -> None:
    """Protection: mounts below are left out, or made read-only with it.

    The control makes only the upper one read-only, which is what the mount call does by itself.
    """
    below = host_folder / "below"
    below.mkdir()
    kernel.mount("tmpfs", str(below), "tmpfs", data="mode=777")
    try:
        program = f"tell(lambda: os.open('{below}/evil', os.O_CREAT | os.O_WRONLY, 0o666))"
        recipe = BELOW.replace("PLACE", repr(os.fsencode(host_folder)))
        upper = program.replace("/below", "")
        assert plainly(recipe + program + "\n" + upper) == "in\nEROFS"
        (below / "evil").unlink()
        running = start_service(f'local.visible=["/usr", "{host_folder}"]')
        async with running.client() as client, await client.create(repository) as sandbox:
            assert (await sandbox.run(f"cat {host_folder}/secret.txt")).stdout.startswith("the h")
            assert await inside(sandbox, program) == "EROFS"
    finally:
        kernel.umount(str(below))


async def test_another_attempts_files_are_out_of_reach(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree, host_folder: Path
) -> None:
    """Protection: mounts of each sandbox's own; the user is the same in all.

    The control reads a file of that user's where the mounts are shared.
    """
    places = "/workspace/answer.txt /tmp/answer.txt /logs/answer.txt /tests/answer.txt"
    await sandbox.run(f"for p in {places}; do echo 'the answer' > $p; chmod 600 $p; done")
    async with await client.create(repository) as other:
        found = await other.run("find / -name 'answer*'; grep -r 'the answer' /tmp /workspace")
        assert found.stdout == ""
        assert (await other.run(f"cat {places}")).stdout == ""
    assert (await sandbox.run(f"cat {places}")).stdout == "the answer\n" * 4
    theirs = host_folder / "theirs"
    theirs.write_text("the answer\n")
    theirs.chmod(0o600)
    os.chown(theirs, 65534, 65534)
    assert without(program=f"print(open('{theirs}').read())") == "the answer"


async def test_a_name_full_of_newlines_fools_nobody(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    """Protection: names are quoted in diffs. The control prints names as they are."""
    name = "x\n+++ b\\passwd\n@@ -0,0 +1 @@\n+root\n"
    await sandbox.write("/tmp/make.py", f"open({name!r}, 'w').write('y')")
    await sandbox.run("python /tmp/make.py")
    diff = await sandbox.diff()
    assert b"\n+root\n" not in diff
    assert diff.count(b"diff --git") == 1
    assert "\n+root\n" in (await sandbox.run("ls -b | cat; ls -N")).stdout
    async with await client.create(repository) as fresh:
        assert await fresh.apply_patch(diff) == [name]


async def test_a_name_that_is_no_text_is_no_fault_of_the_machine(
    client: SandboxClient, sandbox: Sandbox, repository: EnvironmentTree
) -> None:
    """Else an agent could make every grading fail, and its failures count for nobody.

    Protection: such names are replaced where only text can pass. The control passes one on.
    """
    name = os.fsdecode(b"bad\xff")
    await sandbox.write("/tmp/make.py", "open(b'bad\\xff', 'w').write('y\\n')\n")
    await sandbox.run("python /tmp/make.py; echo y > good")
    diff = await sandbox.diff()
    assert await sandbox.download(".")
    async with await client.create(repository) as fresh:
        assert await fresh.apply_patch(diff) == ["bad\ufffd", "good"]
        assert await fresh.diff() == diff
        with pytest.raises(PatchRejected, match="bad"):
            await fresh.apply_patch(diff)
    with pytest.raises(UnicodeEncodeError):
        pb.ApplyPatchResponse(changed_paths=[name])
