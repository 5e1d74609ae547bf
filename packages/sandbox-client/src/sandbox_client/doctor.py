"""What protects sandboxes on this host, what is missing, and how to mend it.

The judgements are pure functions of what was found; `examine` looks at this host, and `try_sandbox`
makes one sandbox for real.
"""

import asyncio
import io
import os
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from service_kit.errors import ServiceError, StartupError

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.local import host
from sandbox_client.backends.local.backend import LocalBackend
from sandbox_client.backends.local.cgroups import detect_cgroups
from sandbox_client.backends.local.jail import seccomp
from sandbox_client.checks import complete_command, complete_spec
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.environments import EnvironmentTree
from sandbox_client.types import Command, EnvironmentRef, SandboxSpec

__all__ = [
    "Finding",
    "Level",
    "examine",
    "judge_cgroups",
    "judge_compiler",
    "judge_isolation",
    "judge_memory",
    "judge_open_files",
    "judge_seccomp",
    "try_sandbox",
]

_FILES_A_SANDBOX = 6
_FILES_A_COMMAND = 4
_FILES_OF_THE_SERVICE = 128


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """Sandboxes run, with less protection, fewer at once, or slower."""
    PROBLEM = "problem"
    """Sandboxes cannot run."""


@dataclass(frozen=True)
class Finding:
    """One thing about this host; what is not ok comes with what to do about it."""

    check: str
    level: Level
    found: str
    fix: str = ""


def judge_isolation(problems: Mapping[str, str]) -> list[Finding]:
    """Whether sandboxes can be isolated at all; `problems` as of `host.isolation_problems`."""
    if not problems:
        return [Finding("isolation", Level.OK, "namespaces, overlay and the rights for them")]
    return [Finding("isolation", Level.PROBLEM, what, fix) for what, fix in problems.items()]


def judge_cgroups(version: int, usable: set[str], problems: Mapping[str, str]) -> list[Finding]:
    """Which limits cgroups can enforce."""
    without = {
        "memory": "each process has an address-space limit instead, the sandbox as a whole none",
        "pids": "all sandboxes together have a limit of processes, one alone has none",
        "cpu": "a sandbox can use every core",
    }
    findings = []
    for controller, instead in without.items():
        name = f"cgroup v{version} {controller}"
        if controller in usable:
            findings.append(Finding(name, Level.OK, "can be limited"))
        else:
            why = problems.get(controller, "not found")
            fix = "mount cgroups writable for this service, or start the container --privileged"
            findings.append(Finding(name, Level.WARNING, f"{why}; {instead}", fix))
    return findings


def judge_seccomp(machine: str, enabled: bool) -> Finding:
    """Whether system calls are filtered."""
    if not seccomp.is_supported(machine):
        fix = "use an x86_64 or aarch64 host for commands that may be hostile"
        return Finding("system calls", Level.WARNING, f"no filter for {machine}", fix)
    if not enabled:
        return Finding(
            "system calls", Level.WARNING, "the filter is off", "set local.seccomp to true"
        )
    return Finding("system calls", Level.OK, "dangerous ones are closed")


def judge_compiler(compiler: str | None, wanted: bool) -> Finding:
    """Whether Python inside shell commands runs warm."""
    if compiler is not None or not wanted:
        return Finding("warm Python in shells", Level.OK, compiler or "not asked for")
    return Finding(
        "warm Python in shells",
        Level.WARNING,
        "no C compiler, so `cd x && python y.py` starts a fresh interpreter: 15 ms more CPU time",
        "install gcc (or nothing: it is only slower)",
    )


def judge_open_files(hard_limit: int, sandboxes: int, commands: int) -> Finding:
    """Whether the service may open enough files for its limits."""
    needed = _FILES_OF_THE_SERVICE + _FILES_A_SANDBOX * sandboxes + _FILES_A_COMMAND * commands
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= needed:
        return Finding("open files", Level.OK, f"{needed} needed")
    return Finding(
        "open files",
        Level.WARNING,
        f"at most {hard_limit}, {needed} needed for {sandboxes} sandboxes",
        f"ulimit -Hn {needed}, or lower limits.sandboxes",
    )


def judge_memory(available_bytes: int, sandboxes: int, idle_bytes: int) -> Finding:
    """Whether the configured number of idle sandboxes fits into memory."""
    needed = sandboxes * idle_bytes
    found = f"{available_bytes >> 20} MiB available"
    if available_bytes >= 2 * needed:
        return Finding("memory for sandboxes", Level.OK, found)
    return Finding(
        "memory for sandboxes",
        Level.WARNING,
        f"{found}, {sandboxes} idle sandboxes alone take {needed >> 20} MiB",
        "lower limits.sandboxes, or use a host with more memory",
    )


def examine(config: SandboxServiceConfig | None = None) -> list[Finding]:
    """All findings about this host for a service of this configuration; changes nothing."""
    config = config or SandboxServiceConfig()
    problems = host.isolation_problems()
    findings = judge_isolation(problems)
    if os.geteuid() == 0:
        setup = detect_cgroups(config.local.cgroup_parent, f"doctor-{os.getpid()}", make=False)
        findings += judge_cgroups(setup.version, set(setup.bases), setup.problems)
    limits = config.limits
    return [
        *findings,
        judge_seccomp(os.uname().machine, config.local.seccomp),
        judge_compiler(host.compiler(), config.local.compile_shim),
        judge_open_files(
            resource.getrlimit(resource.RLIMIT_NOFILE)[1], limits.sandboxes, limits.commands
        ),
        judge_memory(_available_bytes(), limits.sandboxes, 2 << 20),
    ]


def try_sandbox(config: SandboxServiceConfig | None = None) -> Finding:
    """Makes one sandbox in a temporary state folder and runs a command in it; takes a second."""
    with tempfile.TemporaryDirectory(prefix="sandbox-doctor-") as folder:
        given = config or SandboxServiceConfig()
        trial = given.model_copy(update={"state_dir": Path(folder) / "state"})
        try:
            return asyncio.run(_try_sandbox(trial))
        except (ServiceError, StartupError, OSError) as error:
            return Finding(
                "a sandbox", Level.PROBLEM, f"cannot be made: {error}", "mend the findings above"
            )


async def _try_sandbox(config: SandboxServiceConfig) -> Finding:
    backend = LocalBackend(config)
    tree = EnvironmentTree({"hello.py": b"print('hello')\n"})
    await backend.start()
    try:
        await backend.put_environment(tree.digest, io.BytesIO(tree.tar_bytes()))
        spec = SandboxSpec(EnvironmentRef(tree_digest=tree.digest))
        sandbox = await backend.create("doctor", complete_spec(config.sandbox, spec))
        command = complete_command(config.exec, Command(argv=("python", "hello.py"), timeout_s=20))
        result = await sandbox.run(command, ExecHooks())
        await sandbox.destroy()
    finally:
        await backend.stop()
    if result.stdout == "hello\n":
        return Finding("a sandbox", Level.OK, "starts and runs Python")
    return Finding(
        "a sandbox",
        Level.PROBLEM,
        f"Python in it ended with {result.exit_code}: {result.stderr[-300:]}",
        "set local.python to an interpreter that works from /opt/python",
    )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
