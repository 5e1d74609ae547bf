"""Python, cores, and the libraries of the embedded engine and trainer."""

from __future__ import annotations

import importlib.util
import os
import platform

from tailrace_cli.doctor.base import Finding, Status


def check() -> list[Finding]:
    """What there is to compute with."""
    cores = len(os.sched_getaffinity(0))
    findings = [Finding("python", Status.OK, platform.python_version())]
    if cores >= 2:
        findings.append(Finding("cores", Status.OK, str(cores)))
    else:
        fix = "use a machine with two cores or more: engine and trainer run side by side"
        findings.append(Finding("cores", Status.WARNING, str(cores), fix))
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        fix = "pip install 'tailrace[demo]'; services that need no model work without"
        findings.append(Finding("embedded engine", Status.WARNING, f"no {', '.join(missing)}", fix))
    else:
        findings.append(Finding("embedded engine", Status.OK, "torch and transformers are there"))
    return findings
