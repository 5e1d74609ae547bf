"""A first process's work, done some times beforehand in the fork-server.

The interpreter rewrites code while it learns how it is used. Done here, once, that code stays as it
is in every sandbox; done there, each would copy every page that is written to.
"""

import os
import socket

from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.init import Init
from sandbox_client.backends.local.jail.messages import Exec

__all__ = ["rehearse"]

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
