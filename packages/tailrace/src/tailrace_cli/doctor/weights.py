"""Can this host take part in the broadcasts of weights that the stack asks for?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError
from weight_sync.config import WeightSyncConfig

from tailrace_cli.doctor.base import Finding, Status
from tailrace_cli.stack.spec import StackSpec

INTERFACES = Path("/sys/class/net")


def check(
    stack: StackSpec,
    interfaces: Path = INTERFACES,
    installed: Callable[[str], object] = importlib.util.find_spec,
) -> list[Finding]:
    """Interface and torch of each weight-sync process that uses collectives; else nothing."""
    findings = []
    for process in stack.processes:
        if process.module != "weight_sync":
            continue
        name = f"weights: {process.name}"
        try:
            receiver = WeightSyncConfig.model_validate(process.config).receiver
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            fix = "correct the stack file; python -m weight_sync config lists every setting"
            findings.append(Finding(f"{name}: settings", Status.PROBLEM, wrong, fix))
            continue
        if "collective" in receiver.transports or receiver.sglang_load == "distributed":
            findings.append(_interface(name, receiver.collective.interface, interfaces))
            findings.append(_torch(name, installed))
    return findings


def _interface(name: str, interface: str, interfaces: Path) -> Finding:
    name = f"{name}: interface"
    state = interfaces / interface / "operstate"
    if not state.is_file():
        known = ", ".join(sorted(path.name for path in interfaces.iterdir())) or "none"
        fix = f"set receiver.collective.interface to one of: {known}"
        return Finding(name, Status.PROBLEM, f"there is no interface {interface!r}", fix)
    # Loopback says "unknown".
    found = state.read_text().strip()
    if found not in ("up", "unknown"):
        fix = f"bring it up (ip link set {interface} up), or choose another"
        return Finding(name, Status.PROBLEM, f"{interface} is {found}", fix)
    return Finding(name, Status.OK, f"broadcasts go over {interface}")


def _torch(name: str, installed: Callable[[str], object]) -> Finding:
    name = f"{name}: torch"
    if installed("torch") is None:
        fix = "install weight-sync[collective], or on a ROCm host the image's torch"
        return Finding(name, Status.PROBLEM, "collectives need torch", fix)
    return Finding(name, Status.OK, "installed")
