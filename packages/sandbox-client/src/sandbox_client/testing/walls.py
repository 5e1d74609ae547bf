# ruff: noqa: PTH102 -- its text is also a program that imports next to nothing
"""A program behind all of a sandbox's walls but some: the controls of the escape attempts.

The walls are put up one by one with the system calls that the back-end uses, around the host's own
files. A program that gets through without a wall, and not with it, shows that the wall holds it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from sandbox_client.backends.local.jail import kernel, seccomp

__all__ = ["WALLS", "run_without"]

WALLS = (
    "user",
    "capabilities",
    "no_new_privs",
    "seccomp",
    "nosuid",
    "nodev",
    "dumpable",
    "pid",
    "network",
    "ipc",
    "environment",
)
_NOBODY = 65534
_TIMEOUT_S = 60.0
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2


def run_without(walls: Sequence[str], program: str) -> str:
    """Runs Python code as root behind all walls but these; returns its output with its errors.

    It sees the host's files, a /tmp of its own and the interpreter at /opt/python.
    """
    from pathlib import Path

    from sandbox_client.backends.local.host import base_python
    from sandbox_client.backends.local.users import with_jail_alone

    assert set(walls) <= set(WALLS), walls
    python = base_python()
    arguments = (",".join(walls), str(python.prefix), python.binary, program)
    done = subprocess.run(
        with_jail_alone(Path(__file__).read_text(encoding="utf-8"), *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return done.stdout


def main() -> None:
    """What the started program does; does not return."""
    missing, prefix, binary, program = sys.argv[1:]
    walls = set(WALLS) - set(missing.split(","))
    kinds = {
        "pid": kernel.CLONE_NEWPID,
        "network": kernel.CLONE_NEWNET,
        "ipc": kernel.CLONE_NEWIPC,
    }
    # Whatever else is missing: what the program mounts or names must not be the host's.
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS
    for name, flag in kinds.items():
        flags |= flag if name in walls else 0
    kernel.unshare(flags)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) and 1)
    _mount(walls, prefix)
    if "network" in walls:
        kernel.loopback_up()
    if "no_new_privs" in walls:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    _change_user(walls)
    if "seccomp" in walls:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.Program(seccomp.build_filter(os.uname().machine)).install()
    environ = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/python/lib"}
    if "environment" not in walls:
        environ |= os.environ
    # As in a sandbox, the first process has the program's user.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0 if "dumpable" in walls else 1)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) and 1)
    python = f"/opt/python/{binary}"
    os.execve(python, [python, "-I", "-B", "-c", program], environ)  # noqa: S606


def _mount(walls: set[str], prefix: str) -> None:
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    flags = 0
    if "nosuid" in walls:
        flags |= kernel.MS_NOSUID
        kernel.mount("/usr", "/usr", flags=kernel.MS_BIND)
        remount = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
        kernel.mount("none", "/usr", flags=remount)
    if "nodev" in walls:
        flags |= kernel.MS_NODEV
    source = os.open(prefix, os.O_PATH)
    for folder, mode in (("/tmp", "1777"), ("/opt", "755")):  # noqa: S108
        kernel.mount("tmpfs", folder, "tmpfs", flags, f"mode={mode}")
    os.mkdir("/opt/python")
    kernel.mount(f"/proc/self/fd/{source}", "/opt/python", flags=kernel.MS_BIND)
    if "pid" in walls:
        kernel.mount("proc", "/proc", "proc")


def _change_user(walls: set[str]) -> None:
    if "capabilities" in walls:
        kernel.clear_inheritable_capabilities()
        kernel.drop_bounding_set()
    else:
        kernel.prctl(_PR_SET_KEEPCAPS, 1)
    if "user" in walls:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    if "capabilities" not in walls:
        kernel.change_capabilities(_inherit_all)
        for capability in range(64):
            try:
                kernel.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)
            except OSError:
                continue  # this process has not got it, or the kernel does not know it


def _inherit_all(word: kernel.Capabilities) -> None:
    word.effective = word.inheritable = word.permitted


if __name__ == "__main__":
    main()
