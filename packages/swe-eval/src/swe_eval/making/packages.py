"""The Python that the tests run with: its interpreter and the folder of its packages."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swe_eval.errors import RepositoryError

__all__ = ["PythonPackages", "copy_pytest", "look_into", "own_packages"]

_ASK = """\
import importlib.metadata as m, json, sys, sysconfig
found = {d.metadata["Name"]: d.version for d in m.distributions() if d.metadata["Name"]}
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "found": found,
    "folder": sysconfig.get_path("purelib")}))
"""
_ASK_S = 60.0
_NOT_NEEDED = {"pip", "setuptools", "wheel", "uv"}


@dataclass(frozen=True, kw_only=True)
class PythonPackages:
    """An interpreter, and a folder of packages for it as `local.site_packages` takes it."""

    python: Path
    version: str
    """`3.11`."""
    folder: Path
    requirements: tuple[str, ...]
    """`name==version` of what is in the folder, in order."""


def look_into(python: Path) -> PythonPackages:
    """The packages of an interpreter, or of a virtual environment's folder.

    Raises:
        RepositoryError: it is none, or lacks pytest.
    """
    binary = python / "bin" / "python" if python.is_dir() else python
    try:
        done = subprocess.run(
            [str(binary), "-I", "-B", "-c", _ASK],
            capture_output=True,
            check=True,
            timeout=_ASK_S,
            text=True,
        )
        said: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RepositoryError(
            f"--python {python}: expected an interpreter or a virtual environment, but {error}"
        ) from error
    versions = {name: version for name, version in said["found"].items() if version}
    if "pytest" not in versions:
        raise RepositoryError(f"--python {python}: it has no pytest; install it there")
    return PythonPackages(
        python=binary,
        version=said["version"],
        folder=Path(said["folder"]),
        requirements=_pinned(versions.items()),
    )


def copy_pytest(target: Path) -> PythonPackages:
    """This interpreter, with nothing but its pytest and what that needs, copied into a folder.

    Raises:
        RepositoryError: there is no pytest.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = ["pytest"]
    while waiting:
        name = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or an older Python
        if name not in found:
            found[name] = distribution
            waiting += _requirements(distribution)
    if "pytest" not in found:
        raise RepositoryError(
            "this Python has no pytest; install it, or name an environment that has it with "
            "--python"
        )
    requirements = _pinned((name, d.version) for name, d in found.items())
    _copy(found.values(), target, "".join(f"{line}\n" for line in requirements))
    return PythonPackages(
        python=Path(sys.executable),
        version="{}.{}".format(*sys.version_info),
        folder=target,
        requirements=requirements,
    )


def _copy(
    distributions: Iterable[importlib.metadata.Distribution], target: Path, requirements: str
) -> None:
    """Makes the folder, unless it is there: a running service may be using it."""
    listing = target / "requirements.txt"
    if listing.is_file() and listing.read_text("utf-8") == requirements:
        return
    shutil.rmtree(target, ignore_errors=True)
    for distribution in distributions:
        for path in distribution.files or ():
            # Not what lies outside, as programs do, nor what an import would make.
            if ".." not in path.parts and "__pycache__" not in path.parts:
                place = target / path
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(path.locate()), place)
    listing.write_text(requirements, "utf-8")


def _requirements(distribution: importlib.metadata.Distribution) -> list[str]:
    needed = [r for r in distribution.requires or () if "extra ==" not in r]
    return [re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in needed]


def _pinned(versions: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    found = {f"{name.lower()}=={v}" for name, v in versions if name.lower() not in _NOT_NEEDED}
    return tuple(sorted(found))


def own_packages(sources: Collection[str], folder: Path) -> list[str]:
    """Packages and modules of the repository that a folder holds too: copies without the bugs."""
    names = set()
    for path in sources:
        parts = path.removeprefix("src/").split("/")
        if parts[1:] == ["__init__.py"] or (len(parts) == 1 and parts != ["setup.py"]):
            names.add(parts[0])
    return sorted(name for name in names if (folder / name).exists())
