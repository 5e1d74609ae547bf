"""Becomes another program that the kernel kills when its parent dies.

    python tether.py PARENT_PID PROGRAM ARGUMENTS...

A program of its own because nothing may run in a forked copy of a process that uses gRPC: its
threads are gone in the copy, and now and then gRPC aborts there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent, and becomes the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        sys.exit(1)
    os.execv(program[0], program)  # noqa: S606 - that is the point


if __name__ == "__main__":
    main()
