"""Which packages a change affects, as a JSON list: those it touches and those that depend on them.

Usage: python tools/affected.py BASE     (a git revision; prints e.g. ["service-kit", "tailrace"])

A change outside packages/ (contracts, tools, the lock, CI) affects every package.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTATION = ("docs/", "README.md", "CONTRIBUTING.md", "LICENSE")


def dependents(requirements: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """For each package, every package that needs it, directly or not."""
    direct = {
        name: {n for n, needs in requirements.items() if name in needs} for name in requirements
    }
    found: dict[str, set[str]] = {}
    for name in requirements:
        seen: set[str] = set()
        queue = [name]
        while queue:
            fresh = direct[queue.pop()] - seen
            seen |= fresh
            queue.extend(fresh)
        found[name] = seen
    return found


def affected(changed: Iterable[str], requirements: Mapping[str, Iterable[str]]) -> list[str]:
    """Packages that a change of these files (paths from the root) affects, sorted."""
    needed_by = dependents(requirements)
    touched: set[str] = set()
    for path in changed:
        parts = path.split("/")
        if parts[0] == "packages" and len(parts) > 2 and parts[1] in requirements:
            touched.add(parts[1])
        elif not path.startswith(DOCUMENTATION):
            return sorted(requirements)
    return sorted(touched.union(*(needed_by[name] for name in touched)) if touched else touched)


def workspace_requirements() -> dict[str, set[str]]:
    """Folder of each package, and the folders of those it requires (extras included)."""
    projects = {
        p.parent.name: tomllib.loads(p.read_text())["project"]
        for p in ROOT.glob("packages/*/pyproject.toml")
    }
    folder_of = {project["name"]: folder for folder, project in projects.items()}
    needs = {}
    for folder, project in projects.items():
        lines = [*project["dependencies"]]
        for extra in project.get("optional-dependencies", {}).values():
            lines += extra
        names = {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in lines}
        needs[folder] = {folder_of[name] for name in names if name in folder_of} - {folder}
    return needs


def main(base: str) -> None:
    changed = subprocess.run(
        ["git", "diff", "--name-only", f"{base}...HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    print(json.dumps(affected(changed, workspace_requirements())))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
