"""What this host can give a sandbox: the findings of sandbox-client's own doctor, and a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import ValidationError
from sandbox_client import doctor
from sandbox_client.config import SandboxServiceConfig

from tailrace_cli.doctor.base import Finding, Status
from tailrace_cli.stack.spec import StackSpec

STATUS = {
    doctor.Level.OK: Status.OK,
    doctor.Level.WARNING: Status.WARNING,
    doctor.Level.PROBLEM: Status.PROBLEM,
}
Examine = Callable[[SandboxServiceConfig], Sequence[doctor.Finding]]
Trial = Callable[[SandboxServiceConfig], doctor.Finding]


def check(
    stack: StackSpec, examine: Examine = doctor.examine, trial: Trial = doctor.try_sandbox
) -> list[Finding]:
    """Findings for the sandbox service of a stack, as it is configured there.

    One sandbox of `local` is made for real, unless something is known to stand in its way. Not to
    be called from a running event loop.
    """
    findings = []
    for process in stack.processes:
        if process.module != "sandbox_client":
            continue
        try:
            config = SandboxServiceConfig.model_validate(process.config)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            fix = "correct the stack file; python -m sandbox_client config lists every setting"
            findings.append(Finding("sandbox: settings", Status.PROBLEM, wrong, fix))
            continue
        found = list(examine(config))
        stopped = any(f.level is doctor.Level.PROBLEM for f in found)
        if config.backend == "local" and not stopped:
            found.append(trial(config))
        findings += [Finding(f"sandbox: {f.check}", STATUS[f.level], f.found, f.fix) for f in found]
    return findings
