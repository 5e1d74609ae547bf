"""Escape attempts: Python programs that tell how far they got, run inside and where a wall is not.

A program is held if it tells the name of an error; its control, the same program without the
protection, tells "in".
"""

import asyncio
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from sandbox_client.handle import Sandbox
from sandbox_client.testing.walls import run_without

__all__ = ["each", "inside", "plainly", "root_of", "sleeping", "wait_until", "without"]

# For the programs: `tell` runs an attempt and prints "in" or the error that stopped it; `syscall`
# passes whole registers, as the kernel looks at more than an int's half of them.
_PRELUDE = """\
import ctypes, errno, os, socket, stat, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def syscall(*arguments):
    return call(libc.syscall(*(ctypes.c_long(a) if type(a) is int else a for a in arguments)))

def tell(attempt):
    try:
        attempt()
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    else:
        print("in", flush=True)

"""
_TIMEOUT_S = 60.0
_WAIT_S = 20.0
_POLL_S = 0.025
_serial = itertools.count()


async def inside(sandbox: Sandbox, program: str, *, timeout_s: float = 30.0) -> str:
    """Runs an attempt in a sandbox; returns what it tells."""
    await sandbox.write("/tmp/attempt.py", _PRELUDE + program)  # noqa: S108
    command = "python /tmp/attempt.py"
    result = await sandbox.run(command, timeout_s=timeout_s, merge_stderr=True)
    return result.stdout.strip()


def each(programs: Iterable[str]) -> str:
    """A program that runs these one after the other, each in a process of its own."""
    return f"""\
for text in {list(programs)!r}:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            exec(text)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(pid, 0)
"""


@functools.cache
def without(*walls: str, program: str) -> str:
    """Runs an attempt behind all walls but these; returns what it tells."""
    return run_without(walls, _PRELUDE + program).strip()


@functools.cache
def plainly(program: str) -> str:
    """Runs an attempt as this process's user on this host; returns what it tells."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _PRELUDE + program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return done.stdout.strip()


async def wait_until(holds: Callable[[], object]) -> None:
    """Returns once it holds."""
    for _ in range(int(_WAIT_S / _POLL_S)):
        if holds():
            return
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"it did not come true within {_WAIT_S:g} s")


def sleeping(seconds: str) -> list[int]:
    """This host's ids of the processes that sleep for so long, wherever they run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if arguments[:2] == [b"sleep", seconds.encode()]:
            found.append(int(folder.name))
    return found


async def root_of(sandbox: Sandbox) -> Path:
    """A sandbox's root folder as root sees it from this host, through a process inside."""
    seconds = f"76544.{os.getpid()}{next(_serial)}"
    await sandbox.run(f"sleep {seconds} >/dev/null 2>&1 &")
    await wait_until(lambda: sleeping(seconds))
    return Path(f"/proc/{sleeping(seconds)[0]}/root")
