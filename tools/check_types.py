"""mypy --strict over every package's source and tests, and over integration_tests/ and tools/.

Usage: python tools/check_types.py [PACKAGE ...]

One run per package: test modules of different packages may carry the same name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def targets(names: list[str]) -> list[list[str]]:
    packages = [
        p
        for p in sorted(ROOT.glob("packages/*"))
        if p.name != "protos" and (not names or p.name in names)
    ]
    groups = [[str(p / "src"), str(p / "tests")] for p in packages]
    if not names:
        groups += [[str(ROOT / "tools")], [str(ROOT / "integration_tests")]]
    return [[t for t in group if any(Path(t).rglob("*.py"))] for group in groups]


def main() -> int:
    failed = 0
    for group in targets(sys.argv[1:]):
        if group:
            print("mypy", *(str(Path(t).relative_to(ROOT)) for t in group), flush=True)
            failed |= subprocess.run(["mypy", *group], cwd=ROOT, check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
