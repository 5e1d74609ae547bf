"""A first process's work, or a zygote's, done some times beforehand in the fork-server.

The interpreter rewrites code while it learns how it is used. Done here, once, that code stays as it
is in every sandbox; done there, each would copy every page that is written to.
"""

import os
import socket

from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.init import Init
from sandbox_client.backends.local.jail.messages import Exec
from sandbox_client.backends.local.jail.zygote import Zygote

__all__ = ["rehearse", "rehearse_zygote"]

_ROUNDS = 20
_COMMANDS = (["true"], ["python", "-c", "pass"])


def rehearse(python_path: str, environ: dict[str, str]) -> None:
    """Runs `true` and an empty Python program as a sandbox's first process would."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    init = Init(theirs, python_path, null)
    for number in range(_ROUNDS * len(_COMMANDS)):
        argv = _COMMANDS[number % len(_COMMANDS)]
        asked = Exec(number, "/", " ".join(argv), argv, environ)
        wire.send(ours, *asked.fields(), fds=[null, null, null])
        if init.rehearse_once() is not None:
            os._exit(0)  # in the forked program
        wire.receive(ours)
    init.close()
    ours.close()
    os.close(null)


def rehearse_zygote(environ: dict[str, str]) -> None:
    """Runs an empty Python program as a sandbox's warm interpreter would."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    zygote = Zygote(theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), null)
    variables = [f"{name}={value}" for name, value in environ.items()]
    argv = ["python", "-c", "pass"]
    for number in range(_ROUNDS):
        command: list[wire.Field] = [len(argv), *argv, *variables]
        wire.send(ours, "run", number, argv[0], "/", *command, fds=[null, null, null])
        if zygote.rehearse_once() is not None:
            os._exit(0)  # in the forked program
        for _ in ("started", "started", "ended"):  # the program says so too
            wire.receive(ours)
    zygote.close()
    ours.close()
    os.close(null)
