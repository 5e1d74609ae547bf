# ruff: noqa: PTH110, PTH118 -- keeps the fork-server small: no pathlib
"""Reading `python`'s command line: which programs the warm interpreter can run faithfully."""

import os
from dataclasses import dataclass

__all__ = ["BASE_ENVIRON", "PythonRun", "parse_python"]

BASE_ENVIRON = {
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One seed for all, so that a set's order is the same in every run of a program.
    "PYTHONHASHSEED": "0",
}
"""What the warm interpreter was started with; a program that asks for another gets a real one."""

_HARMLESS = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED"})


@dataclass
class PythonRun:
    """A Python program to run: what the command line says after its options are read."""

    kind: str
    """"command" (-c), "module" (-m), "script" or "stdin"."""
    value: str
    """Code, module name or path; empty for stdin."""
    argv: list[str]
    """The whole command line."""
    rest: list[str]
    """`sys.argv` after its first element."""
    environ: dict[str, str]
    cwd: str
    unbuffered: bool = False
    executable: str = ""


def parse_python(argv: list[str], environ: dict[str, str], cwd: str) -> PythonRun | None:
    """The program of a `python` command line; None if only a real interpreter runs it rightly."""
    if not _environ_fits(environ, cwd):
        return None
    unbuffered = bool(environ.get("PYTHONUNBUFFERED"))
    at = 1
    while at < len(argv):
        argument = argv[at]
        if not argument.startswith("-") or argument == "-":
            break
        for place, letter in enumerate(argument[1:], 2):
            if letter == "B":
                continue
            if letter == "u":
                unbuffered = True
                continue
            if letter not in "cm":
                return None
            value = argument[place:]
            if not value:
                at += 1
                if at >= len(argv):
                    return None
                value = argv[at]
            kind = "command" if letter == "c" else "module"
            return PythonRun(kind, value, argv, argv[at + 1 :], environ, cwd, unbuffered)
        at += 1
    if at >= len(argv) or argv[at] == "-":
        dash = "".join(argv[at : at + 1])
        return PythonRun("stdin", dash, argv, argv[at + 1 :], environ, cwd, unbuffered)
    return PythonRun("script", argv[at], argv, argv[at + 1 :], environ, cwd, unbuffered)


def _environ_fits(environ: dict[str, str], cwd: str) -> bool:
    for name, value in environ.items():
        if name.startswith(("PYTHON", "LC_")) or name in ("LANG", "LANGUAGE"):
            if name in _HARMLESS:
                continue
            if BASE_ENVIRON.get(name) != value:
                return False
    if any(environ.get(name) != value for name, value in BASE_ENVIRON.items()):
        return False
    # These modules are run by the interpreter's start, which is over here.
    return not any(
        os.path.exists(os.path.join(cwd, folder, f"{name}.py"))
        for folder in environ.get("PYTHONPATH", "").split(":")
        if folder
        for name in ("sitecustomize", "usercustomize")
    )
