"""Compiling the back-end's small C programs, once for each source, where there is a compiler."""

import logging
import os
import subprocess
from hashlib import sha256
from pathlib import Path

from sandbox_client.backends.local.host import BasePython, compiler
from sandbox_client.backends.local.jail import template

__all__ = ["compile_launcher", "compile_shim"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent


def compile_shim(folder: Path, python: BasePython) -> Path | None:
    """The stand-in for `python`; None where it cannot be compiled."""
    real = f"{template.PYTHON_PREFIX}/{python.binary}"
    return _compile(folder, "python-shim", _HERE / "shim", f'-DREAL_PYTHON="{real}"')


def compile_launcher(folder: Path) -> Path | None:
    """The program that makes sandboxes; None where it cannot be compiled."""
    return _compile(folder, "launcher", _HERE / "launcher")


def _compile(folder: Path, name: str, source: Path, *options: str) -> Path | None:
    found = compiler()
    if found is None:
        return None
    digest = sha256("\0".join(options).encode())
    for file in sorted(source.glob("*.[ch]")):
        digest.update(file.read_bytes())
    target = folder / f"{name}-{digest.hexdigest()[:16]}"
    if target.exists():
        return target
    partial = target.with_suffix(f".{os.getpid()}")
    units = [str(file) for file in sorted(source.glob("*.c"))]
    # Static where the C library allows it: such a process is the cheapest to fork and to execute.
    for linked in (["-static"], []):
        done = subprocess.run(
            [found, "-std=gnu11", "-O2", *options, *linked, "-o", str(partial), *units],
            capture_output=True,
            check=False,
            timeout=60,
        )
        if done.returncode == 0:
            partial.rename(target)
            return target
    logger.warning("cannot compile %s: %s", name, done.stderr.decode(errors="replace")[-500:])
    return None
