"""Is there enough memory for the embedded stack?"""

from __future__ import annotations

from pathlib import Path

from tailrace_cli.doctor.base import Finding, Status

NEEDED_BYTES = 6 * 2**30
"""Peak of the demo over all processes."""


def available_bytes(meminfo: str) -> int:
    """MemAvailable of a /proc/meminfo text, in bytes."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no MemAvailable line in /proc/meminfo")


def check(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    """Memory available now against what the demo needs at its peak."""
    available = available_bytes(meminfo.read_text())
    found = f"{available / 2**30:.1f} GiB available, the demo needs {NEEDED_BYTES / 2**30:.0f}"
    if available >= NEEDED_BYTES:
        return [Finding("memory", Status.OK, found)]
    fix = "stop other programs, or run the services on several machines"
    return [Finding("memory", Status.WARNING, found, fix)]
