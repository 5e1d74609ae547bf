"""What the kernel tells about processes that are nobody's children here."""

import contextlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import pytest
from sandbox_client.backends.docker.processes import ends_are_told, exit_status, is_ending

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


@pytest.mark.parametrize(
    ("last_words", "status"), [("exit 7", 7 << 8), ("exit 137", 137 << 8), ("kill -SEGV $$", 11)]
)
def test_a_process_of_others_is_told_by_its_own_status(last_words: str, status: int) -> None:
    # A grandchild, which the shell in between collects.
    with tempfile.TemporaryDirectory() as folder:
        go = Path(folder) / "go"
        os.mkfifo(go)
        shell = subprocess.Popen(
            ["sh", "-c", f"sh -c 'read go < {go}; {last_words}' & echo $!; wait $!"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert shell.stdout is not None
        pid_fd = os.pidfd_open(int(shell.stdout.readline()))
        try:
            go.write_text("now\n")
            shell.wait(timeout=20)
            shell.stdout.close()
            if KERNEL < (6, 15):
                with pytest.raises(NotImplementedError):
                    exit_status(pid_fd)
            else:
                assert exit_status(pid_fd) == status
        finally:
            os.close(pid_fd)


def test_of_a_living_process_no_status_is_told() -> None:
    pid_fd = os.pidfd_open(os.getpid())
    with contextlib.suppress(NotImplementedError):
        assert exit_status(pid_fd) is None
    os.close(pid_fd)


def test_what_the_kernel_tells_is_found_out_by_asking_it() -> None:
    assert ends_are_told() == (KERNEL >= (6, 15))


def test_who_lives_is_not_ending_and_who_has_ended_is() -> None:
    assert not is_ending(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    assert not is_ending(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
    assert is_ending(child.pid)
    child.wait()
    assert is_ending(child.pid)
