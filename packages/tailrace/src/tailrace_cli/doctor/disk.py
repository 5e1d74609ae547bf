"""Is there room for ledgers, checkpoints and weights?"""

from __future__ import annotations

import shutil
from pathlib import Path

from tailrace_cli.doctor.base import Finding, Status

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory that processes share is the point
NEEDED_BYTES = {"runs folder": 2 * 2**30, "shared memory": 256 * 2**20}


def check(runs: Path = Path(), shared_memory: Path = SHARED_MEMORY) -> list[Finding]:
    """Free space where runs are kept and where weights are handed over."""
    findings = []
    for name, path in (("runs folder", runs), ("shared memory", shared_memory)):
        if not path.exists():
            fix = "mount a tmpfs there, or set weight-sync's store to a folder"
            findings.append(Finding(f"disk: {name}", Status.PROBLEM, "does not exist", fix))
            continue
        free = shutil.disk_usage(path).free
        needed = NEEDED_BYTES[name]
        found = f"{free / 2**30:.1f} GiB free, {needed / 2**30:.2f} needed"
        if free >= needed:
            findings.append(Finding(f"disk: {name}", Status.OK, found))
        else:
            fix = "free space there, or choose another folder with --out"
            findings.append(Finding(f"disk: {name}", Status.PROBLEM, found, fix))
    return findings
