"""The programs that the back-end `e2b` sends into sandboxes, run here as plain processes."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sandbox_client.backends.e2b.guest import command_line
from sandbox_client.backends.e2b.inside import run
from sandbox_client.backends.e2b.lines import LineReader, input_line

RUN = {
    "argv": [],
    "shell": "",
    "cwd": "/",
    "env": {},
    "timeout_s": 30.0,
    "bound": 10_000,
    "merge_stderr": False,
    "stdin": False,
    "user": "",
    "mark": "unset",
}
ME = Path(__file__)
NOBODY = 65534


@dataclass
class Outcome:
    """What a supervisor has said."""

    lines: list[tuple[str, Any]]

    @property
    def result(self) -> dict[str, Any]:
        letter, payload = self.lines[-1]
        assert letter == "x"
        return dict(payload)

    def output(self, letter: str = "o") -> bytes:
        return b"".join(data for name, data in self.lines if name == letter)


def supervise(*said: str, **request: object) -> Outcome:
    """Runs a command under the supervisor, as E2B's shell would."""
    line = command_line(sys.executable, "run", {**RUN, "mark": ME.name, **request})
    done = subprocess.run(
        ["/bin/bash", "-c", line],
        input="".join(said).encode(),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == b""
    return Outcome(LineReader().feed(done.stdout.decode()))


def living(text: str) -> list[int]:
    """Processes with this text in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def test_a_command_is_told_apart_from_its_supervisor() -> None:
    outcome = supervise(shell="echo out; echo err >&2; exit 3", env={"A": "b"})
    assert (outcome.output(), outcome.output("e")) == (b"out\n", b"err\n")
    assert (outcome.result["exit_code"], outcome.result["signal"]) == (3, 0)
    assert outcome.result["cpu_s"] > 0
    merged = supervise(shell="echo 1; echo 2 >&2; echo 3", merge_stderr=True)
    assert (merged.output(), merged.output("e")) == (b"1\n2\n3\n", b"")


def test_head_and_tail_are_kept_and_the_rest_is_counted() -> None:
    outcome = supervise(shell="seq 1 200000", bound=1000)
    kept = outcome.output()
    assert len(kept) == 1000
    assert kept.startswith(b"1\n2\n")
    assert kept.endswith(b"\n200000\n")
    assert outcome.result["omitted"] == {"o": 1_288_895 - 1000, "e": 0}
    # What is not kept does not travel.
    assert sum(len(data) for letter, data in outcome.lines if letter == "o") == 1000


def test_unbounded_output_is_whole() -> None:
    outcome = supervise(shell="seq 1 200000", bound=None)
    assert len(outcome.output()) == 1_288_895
    assert outcome.result["omitted"] == {"o": 0, "e": 0}


def test_input_arrives_in_order_and_ends() -> None:
    said = (input_line(b"one "), input_line(b"two\xff"), "c\n")
    assert supervise(*said, shell="cat", stdin=True).output() == b"one two\xff"
    assert supervise(shell="cat; echo end").output() == b"end\n"
    # A command that does not read it is none the worse.
    large = [input_line(b"x" * 40_000) for _ in range(20)]
    assert supervise(*large, "c\n", shell="echo done", stdin=True).result["exit_code"] == 0


STUBBORN = (
    "trap '' TERM INT HUP; (setsid sleep 8{n}1 &); "
    "env -i setsid sh -c 'sleep 8{n}2 & sleep 8{n}3' & "
    "sh -c 'sh -c \"sleep 8{n}4 & disown; exit\" &'; sleep 8{n}5"
)


@pytest.mark.parametrize("said", [(), ("k\n",)])
def test_when_it_is_over_the_whole_tree_ends(said: tuple[str, ...]) -> None:
    number = 3 + len(said)
    timeout_s = 0.5 if not said else 30.0
    outcome = supervise(*said, shell=STUBBORN.replace("{n}", str(number)), timeout_s=timeout_s)
    assert outcome.result["signal"] == signal.SIGKILL
    assert outcome.result["timed_out"] is not bool(said)
    assert [pid for n in range(1, 6) for pid in living(f"sleep\0008{number}{n}")] == []


def killing(monkeypatch: pytest.MonkeyPatch, seen: list[set[tuple[int, bytes]]]) -> list[int]:
    """Whom a supervisor kills that sees these processes, one set after the other; -1 is all."""
    killed: list[int] = []
    views = iter(seen)
    supervisor = object.__new__(run.Supervisor)
    monkeypatch.setattr(run, "_tree", lambda mark: next(views))
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(supervisor, "_reap", lambda: None)
    monkeypatch.setattr(supervisor, "_kill_all", lambda: killed.append(-1))
    supervisor._request, supervisor._pid = {"mark": "m"}, 30
    supervisor._kill()
    return killed


def test_who_is_slow_to_die_is_killed_once_and_the_command_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dying = {(pid, b"1") for pid in (10, 20, 30, 40)}
    killed = killing(monkeypatch, [dying] * 300 + [{(20, b"2")}, set(), set()])
    assert killed[0] == 30
    assert sorted(killed[1:-1]) == [10, 20, 40]
    assert killed[-1] == 20  # another process by now


def test_who_was_listed_in_nobodys_tree_is_found_by_a_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orphan = {(10, b"1")}
    assert killing(monkeypatch, [set(), orphan, set(), orphan, set(), set()]) == [10]


def test_what_forks_too_fast_takes_all_the_users_processes_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = killing(monkeypatch, [{(pid, b"1")} for pid in range(100, 300)])
    assert killed[-1] == -1


def test_output_so_far_comes_with_a_timeout() -> None:
    outcome = supervise(shell="echo before; sleep 851", timeout_s=0.5)
    assert outcome.output() == b"before\n"
    assert outcome.result["timed_out"]


def test_a_background_process_goes_on_and_may_write(tmp_path: Path) -> None:
    line = f"(for i in 1 2 3 4 5; do echo x; sleep 0.1; done; touch {tmp_path}/ended) & echo done"
    outcome = supervise(shell=line)
    assert outcome.output().startswith(b"done\n") or b"done\n" in outcome.output()
    assert not (tmp_path / "ended").exists()
    for _ in range(100):
        if (tmp_path / "ended").exists():
            return
        time.sleep(0.05)
    raise AssertionError("a background process was stopped by its closed output")


def test_what_cannot_start_is_a_result() -> None:
    missing = supervise(argv=["nosuchprogram"])
    assert (missing.result["exit_code"], missing.output("e")) == (
        127,
        b"nosuchprogram: not found\n",
    )
    closed = supervise(argv=[str(ME)])
    assert (closed.result["exit_code"], b"Permission" in closed.output("e")) == (126, True)
    nowhere = supervise(shell="pwd", cwd="/no/where")
    assert (nowhere.result["exit_code"], b"/no/where" in nowhere.output("e")) == (126, True)


def test_signals_and_pipes_are_as_in_a_plain_shell() -> None:
    assert supervise(argv=["sh", "-c", "kill -SEGV $$"]).result["signal"] == signal.SIGSEGV
    # Python ignores SIGPIPE; its children must not.
    assert supervise(shell="yes | head -1").output() == b"y\n"


def test_another_user_is_taken_where_there_are_the_rights() -> None:
    outcome = supervise(shell="id -un; echo $HOME; cat /etc/shadow", user="nobody")
    assert outcome.output().startswith(b"nobody\n/nonexistent\n")
    assert b"Permission denied" in outcome.output("e")
    unknown = supervise(shell="id", user="no-such-user")
    assert unknown.result["exit_code"] == 126


# -- files


@pytest.fixture
def work() -> Iterator[Path]:
    # Not pytest's own folder, which is closed to other users.
    with tempfile.TemporaryDirectory(prefix="sandbox-files-") as top:
        Path(top).chmod(0o755)
        yield _fill(Path(top) / "work")


def _fill(folder: Path) -> Path:
    (folder / "pkg").mkdir(parents=True)
    (folder / "shop.py").write_text("a\n")
    (folder / "pkg" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "pkg" / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("pkg/run.sh")
    return folder


class Files:
    """The program for files, with its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.defaults = {
            "as_user": "",
            "inline_bytes": 100_000,
            "limit_bytes": 1_000_000,
            "spool": str(folder.parent / "spool"),
            "path": str(folder),
            "root": "/",
            "exclude": ["*.pyc"],
            "max_bytes": 100_000,
            "remove": [],
        }

    def ask(self, op: str, data: bytes = b"", **request: object) -> tuple[bytes, dict[str, Any]]:
        line = command_line(sys.executable, "files", {**self.defaults, "op": op, **request}, data)
        done = subprocess.run(
            ["/bin/bash", "-c", line], capture_output=True, check=False, timeout=60
        )
        assert done.stderr == b""
        *answered, (letter, answer) = LineReader().feed(done.stdout.decode())
        assert letter == "x"
        return b"".join(payload for _, payload in answered), answer


@pytest.fixture
def files(work: Path) -> Files:
    return Files(work)


def tar_of(*members: tuple[str, bytes | str]) -> bytes:
    """A tar of files (bytes) and links (text)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def in_tar(data: bytes) -> dict[str, tuple[int, bytes | str]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return dict(_entries(tar))


def _entries(tar: tarfile.TarFile) -> Iterator[tuple[str, tuple[int, bytes | str]]]:
    for member in tar:
        source = tar.extractfile(member) if member.isreg() else None
        yield member.name, (member.mode, source.read() if source else member.linkname)


def test_a_listing_tells_all_that_a_diff_needs(files: Files, work: Path) -> None:
    (work / "skipped.pyc").write_text("x")
    (work / "large").write_bytes(b"x" * 100_001)
    os.mkfifo(work / "pipe")
    packed, _ = files.ask("manifest")
    rows = {row[0]: row[1:] for row in json.loads(zlib.decompress(packed))}
    assert rows == {
        "large": ["file", False, 100_001, ""],
        "link": ["link", False, 0, "pkg/run.sh"],
        "pkg/run.sh": ["file", True, 10, hashlib.sha256(b"#!/bin/sh\n").hexdigest()],
        "shop.py": ["file", False, 2, hashlib.sha256(b"a\n").hexdigest()],
    }


def test_states_are_those_of_the_named_files_alone(files: Files) -> None:
    names = zlib.compress(json.dumps(["shop.py", "link", "gone", "gone/too"]).encode())
    packed, _ = files.ask("states", names)
    assert in_tar(packed) == {"shop.py": (0o644, b"a\n"), "link": (0o777, "pkg/run.sh")}


def test_a_folder_is_packed_and_unpacked(files: Files, work: Path) -> None:
    packed, _ = files.ask("pack")
    assert sorted(in_tar(packed)) == ["link", "pkg", "pkg/run.sh", "shop.py"]
    target = work.parent / "copy"
    files.ask("unpack", packed, path=str(target))
    assert (target / "pkg" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "link").readlink() == Path("pkg/run.sh")


def test_what_is_large_is_left_in_a_file(files: Files, work: Path) -> None:
    (work / "big").write_bytes(os.urandom(200_000))
    packed, answer = files.ask("pack", max_bytes=1_000_000)
    assert (packed, answer) == (b"", {"spooled": files.defaults["spool"]})
    spooled = Path(str(files.defaults["spool"]))
    assert in_tar(spooled.read_bytes())["big"][1] == (work / "big").read_bytes()
    spooled.unlink()
    _, answer = files.ask("pack", max_bytes=1_000_000, limit_bytes=150_000)
    assert (answer["error"], spooled.exists()) == ("too_large", False)


def test_a_file_is_written_where_its_links_may_lead(files: Files, work: Path) -> None:
    (work / "inner").symlink_to("pkg")
    (work / "outer").symlink_to("/")

    def write(path: str, root: str) -> dict[str, Any]:
        given = [{"path": path, "root": root, "mode": 0o640}]
        return files.ask("write", tar_of(("0", b"new")), files=given)[1]

    assert write(f"{work}/inner/x", str(work)) == {}
    assert (work / "pkg" / "x").read_bytes() == b"new"
    assert (work / "pkg" / "x").stat().st_mode & 0o777 == 0o640
    outside = work.parent / "outside"
    refused = write(f"{work}/outer{outside}", str(work))
    assert (refused["error"], "through a link" in refused["message"]) == ("refused", True)
    assert not outside.exists()
    assert write(f"{work}/outer{outside}", "/") == {}
    assert outside.read_bytes() == b"new"


@pytest.mark.parametrize("path", ["missing", "pkg", "pipe"])
def test_reading_what_is_no_file_is_refused(files: Files, work: Path, path: str) -> None:
    os.mkfifo(work / "pipe")
    _, answer = files.ask("read", path=f"{work}/{path}")
    assert answer["error"] == "refused"
    assert path in answer["message"]


def test_unpacking_goes_through_no_link(files: Files, work: Path) -> None:
    (work / "out").symlink_to("/tmp")
    for archive in (
        tar_of(("out/escaped", b"x")),
        tar_of(("new", "/tmp"), ("new/escaped", b"x")),
    ):
        _, answer = files.ask("unpack", archive)
        assert answer["error"] == "refused"
    assert not Path("/tmp/escaped").exists()
    assert files.ask("unpack", b"no tar" * 200)[1]["error"] == "refused"


def test_removals_come_first_and_take_empty_folders_along(files: Files, work: Path) -> None:
    _, answer = files.ask("unpack", tar_of(("pkg", b"now a file")), remove=["pkg/run.sh"])
    assert answer == {}
    assert (work / "pkg").read_bytes() == b"now a file"


def test_closed_files_are_seen_and_stay_closed(files: Files, work: Path) -> None:
    paths = [work / "shop.py", work / "pkg", work]
    for path in (work.parent, *work.rglob("*"), work):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for path in paths:
        path.chmod(0)
    line = command_line("python3", "files", {**files.defaults, "op": "manifest"})
    done = subprocess.run(
        ["/bin/bash", "-c", line],
        capture_output=True,
        check=True,
        timeout=60,
        user=NOBODY,
        group=NOBODY,
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
    )
    *answered, _ = LineReader().feed(done.stdout.decode())
    rows = json.loads(zlib.decompress(b"".join(data for _, data in answered)))
    assert [row[0] for row in rows] == ["link", "pkg/run.sh", "shop.py"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0, 0, 0]
