"""Are the ports of a stack free?"""

from __future__ import annotations

from tailrace_cli.doctor.base import Finding, Status
from tailrace_cli.stack.health import port_is_free
from tailrace_cli.stack.spec import StackSpec


def check(stack: StackSpec) -> list[Finding]:
    """Each process's address."""
    findings = []
    for process in stack.processes:
        name = f"port: {process.name}"
        if port_is_free(process.target):
            findings.append(Finding(name, Status.OK, f"{process.target} is free"))
        else:
            fix = "stop what listens there (tailrace status shows whether it is a stack of yours)"
            findings.append(Finding(name, Status.WARNING, f"{process.target} is taken", fix))
    return findings
