"""Lints protos/ with buf (STANDARD) and compares it with the main branch (breaking changes, FILE).

Usage: python tools/check_contracts.py [BASE]

BASE is a git revision; by default the merge base with origin/main, else HEAD~1.

Before version 1.0 a contract may break: say so in the CHANGELOG of protos and name the file in
protos/breaking-allowed.txt for that one change.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "protos" / "breaking-allowed.txt"


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def base_revision() -> str | None:
    for arguments in (("merge-base", "HEAD", "origin/main"), ("rev-parse", "HEAD~1")):
        found = git(*arguments)
        revision = found.stdout.decode().strip()
        if found.returncode == 0 and revision != git("rev-parse", "HEAD").stdout.decode().strip():
            return revision
    return None


def breaking(base: str) -> int:
    """buf's verdict on HEAD's working tree against `base`, less the files that may break."""
    with tempfile.TemporaryDirectory() as folder:
        archive = git("archive", base, "protos")
        if archive.returncode != 0:
            print(f"no protos at {base}: nothing to compare")
            return 0
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        found = subprocess.run(
            ["buf", "breaking", "protos", "--against", f"{folder}/protos"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    allowed = ALLOWED.read_text().split() if ALLOWED.exists() else []
    lines = [line for line in (found.stdout + found.stderr).splitlines() if line.strip()]
    kept = [line for line in lines if not any(name in line for name in allowed)]
    print("\n".join(kept) or f"no breaking change against {base[:12]}")
    return 1 if kept else 0


def main() -> int:
    lint = subprocess.run(["buf", "lint", "protos"], cwd=ROOT, check=False).returncode
    if lint:
        return lint
    base = sys.argv[1] if len(sys.argv) > 1 else base_revision()
    return breaking(base) if base else 0


if __name__ == "__main__":
    sys.exit(main())
