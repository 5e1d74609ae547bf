# ruff: noqa: PTH123 -- keeps what is started small: no pathlib
"""The launcher in C: laying out what it reads, and becoming it, with a warm interpreter beside."""

import os
import shutil
import signal
import socket
from typing import Any, NoReturn

from sandbox_client.backends.local.jail import kernel, wire
from sandbox_client.backends.local.jail.boot import CODE_FOLDER, CONTROL_FD
from sandbox_client.backends.local.jail.seccomp import build_filter, is_supported
from sandbox_client.backends.local.jail.shims import SHIM_PYTHONS
from sandbox_client.backends.local.jail.walls import may_set_groups

__all__ = ["become", "place"]

# What the process list of a sandbox shows of it.
_PROGRAM = f"{CODE_FOLDER}/init"
_WARM_FD = 4


def place(root: str, binary: str, server: dict[str, Any]) -> None:
    """Puts the program, its settings and its filter of system calls into the template root.

    Args:
        root: where the template root is mounted.
        binary: the compiled launcher, on the host.
        server: as `Settings`; with the host's /proc still in place.
    """
    shutil.copyfile(binary, f"{root}{CODE_FOLDER}/launcher")
    os.chmod(f"{root}{CODE_FOLDER}/launcher", 0o500)  # noqa: PTH101
    limits = [number for pair in server["rlimits"] for number in pair]
    head = [server["own_uid"], server["own_gid"], server["python_path"], int(may_set_groups())]
    rows = [[len(row), *row] for row in (limits, server["mounts"], SHIM_PYTHONS)]
    fields: list[wire.Field] = [*head, server["spares"], *(field for row in rows for field in row)]
    with open(f"{root}{CODE_FOLDER}/launcher.settings", "wb") as file:
        file.write(wire.encode(*fields))
    machine = os.uname().machine
    with open(f"{root}{CODE_FOLDER}/filter", "wb") as file:
        if server["seccomp"] and is_supported(machine):
            file.write(build_filter(machine))


def become(warm: list[str], environ: dict[str, str]) -> NoReturn:
    """Starts the warm interpreter as a child and turns this process into the launcher."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(theirs.fileno(), CONTROL_FD)
        os.execve(warm[0], warm, environ)  # noqa: S606
    os.dup2(ours.fileno(), _WARM_FD)
    os.set_inheritable(_WARM_FD, True)  # it may have been there already
    os.execve(f"{CODE_FOLDER}/launcher", [_PROGRAM], {})  # noqa: S606
