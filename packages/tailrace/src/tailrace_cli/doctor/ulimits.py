"""Do the limits of this shell let hundreds of sandboxes run?"""

from __future__ import annotations

import resource

from tailrace_cli.doctor.base import Finding, Status

NEEDED = {"open files": (resource.RLIMIT_NOFILE, 4096), "processes": (resource.RLIMIT_NPROC, 4096)}
FLAGS = {"open files": "-n", "processes": "-u"}


def judge(name: str, soft: int, needed: int) -> Finding:
    """A soft limit (-1: unlimited) against what is needed."""
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    found = f"{shown}, {needed} needed"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding(f"ulimit: {name}", Status.OK, found)
    fix = f"ulimit {FLAGS[name]} {needed}"
    return Finding(f"ulimit: {name}", Status.WARNING, found, fix)


def check() -> list[Finding]:
    """Soft limits of this process."""
    return [judge(name, resource.getrlimit(which)[0], n) for name, (which, n) in NEEDED.items()]
