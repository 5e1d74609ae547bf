"""Checks and names releases: each package has its own version, tag and CHANGELOG.

Usage:
    python tools/release.py check           versions, CHANGELOGs and siblings' ranges agree
    python tools/release.py tags            tags `<package>-v<version>` that git does not have yet
    python tools/release.py notes PACKAGE   the CHANGELOG section of its version
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def projects() -> dict[str, dict[str, Any]]:
    """pyproject's [project] table by package folder."""
    found = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return {p.parent.name: tomllib.loads(p.read_text())["project"] for p in found}


def changelog_section(package: str) -> tuple[str, str]:
    """Version and text of the newest section of a package's CHANGELOG."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    found = re.search(r"^## (\S+).*?$\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if not found:
        raise SystemExit(f"packages/{package}/CHANGELOG.md has no '## <version>' section")
    return found[1], found[2].strip()


def problems() -> list[str]:
    found = []
    every = projects()
    versions = {project["name"]: project["version"] for project in every.values()}
    for package, project in every.items():
        top, text = changelog_section(package)
        if top != project["version"]:
            found.append(
                f"{package}: version {project['version']}, but its CHANGELOG's top section is {top}"
            )
        if not text:
            found.append(f"{package}: the CHANGELOG section {top} is empty")
        lines = [
            *project["dependencies"],
            *chain(*project.get("optional-dependencies", {}).values()),
        ]
        for requirement in map(Requirement, lines):
            version = versions.get(requirement.name)
            if version and not requirement.specifier.contains(version):
                found.append(f"{package} requires {requirement}, but the workspace has {version}")
            if version and not requirement.specifier:
                found.append(f"{package} requires {requirement.name} without a version range")
    return found


def missing_tags() -> list[str]:
    tags = subprocess.run(
        ["git", "tag"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    wanted = [f"{package}-v{project['version']}" for package, project in projects().items()]
    return [tag for tag in wanted if tag not in tags]


def main(arguments: list[str]) -> int:
    match arguments:
        case ["check"]:
            found = problems()
            print("\n".join(found) or "versions, changelogs and ranges agree")
            return 1 if found else 0
        case ["tags"]:
            print("\n".join(missing_tags()))
            return 0
        case ["notes", package]:
            print(changelog_section(package)[1])
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
