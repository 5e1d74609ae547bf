"""What protects sandboxes on this host, what is missing, and how to mend it.

The judgements are pure functions of what was found; `examine` looks at this host, and `try_sandbox`
makes one sandbox for real.
"""

import asyncio
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from service_kit.errors import ServiceError, StartupError

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.local import host, users
from sandbox_client.backends.local.backend import LocalBackend
from sandbox_client.backends.local.cgroups import detect_cgroups
from sandbox_client.backends.local.jail import seccomp
from sandbox_client.checks import complete_command, complete_spec
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.environments import EnvironmentTree
from sandbox_client.findings import Finding, Level
from sandbox_client.types import Command, EnvironmentRef, SandboxSpec

__all__ = [
    "Finding",
    "Level",
    "examine",
    "judge_cgroups",
    "judge_compiler",
    "judge_extra",
    "judge_isolation",
    "judge_memory",
    "judge_open_files",
    "judge_root",
    "judge_seccomp",
    "judge_user",
    "try_sandbox",
]

_FILES_A_SANDBOX = 8
_FILES_A_COMMAND = 4
_FILES_OF_THE_SERVICE = 128
_TRIAL_TIMEOUT_S = 60.0


def judge_isolation(problems: Mapping[str, str]) -> list[Finding]:
    """Whether sandboxes can be isolated at all; `problems` as of `host.isolation_problems`."""
    if not problems:
        return [Finding("isolation", Level.OK, "namespaces, overlay and the rights for them")]
    return [Finding("isolation", Level.PROBLEM, what, fix) for what, fix in problems.items()]


def judge_cgroups(
    version: int, usable: set[str], problems: Mapping[str, str], *, rootless: bool = False
) -> list[Finding]:
    """Which limits cgroups can enforce; `rootless` if an ordinary user runs the service."""
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
        elif controller == "pids" and rootless:
            found = "limited in each sandbox's own user namespace instead"
            findings.append(Finding(name, Level.OK, found))
        else:
            why = problems.get(controller, "not found")
            fix = "mount cgroups writable for this service, or start the container --privileged"
            if rootless:
                fix = "run the service as root where commands may use up the host's memory"
            findings.append(Finding(name, Level.WARNING, f"{why}; {instead}", fix))
    return findings


def judge_user(*, root: bool, subordinate: bool) -> Finding:
    """Under whose id commands run."""
    if root:
        return Finding("the commands' user", Level.OK, "one that owns nothing on the host")
    if subordinate:
        return Finding("the commands' user", Level.OK, "a subordinate id of the service's user")
    return Finding(
        "the commands' user",
        Level.WARNING,
        "the service's own: only mounts and namespaces keep commands from what is this user's",
        "install newuidmap (Debian: uidmap) and give the user a range in /etc/subuid and "
        "/etc/subgid, or run the service as root",
    )


def judge_extra(backend: str, missing: str | None = None) -> Finding:
    """Whether a back-end's own library is there."""
    if missing is None:
        return Finding("the back-end's library", Level.OK, "installed")
    fix = f"pip install 'sandbox-client[{backend}]'"
    return Finding("the back-end's library", Level.PROBLEM, f"{missing} is not installed", fix)


def judge_root(lacking: Sequence[str]) -> Finding:
    """Whether a service that looks into containers may do so."""
    if not lacking:
        return Finding("the service's user", Level.OK, "root")
    fix = "run the service as root, as the daemon is"
    return Finding("the service's user", Level.PROBLEM, f"lacks {', '.join(lacking)}", fix)


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
    """Whether the back-end's small C programs can be made."""
    if compiler is not None or not wanted:
        return Finding("C compiler", Level.OK, compiler or "not asked for")
    return Finding(
        "C compiler",
        Level.WARNING,
        "none: half as many sandboxes start in a second, and `cd x && python y.py` starts a fresh "
        "interpreter, 15 ms more CPU time",
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
    """All findings about this host for a service of this configuration; changes nothing.

    Not to be called from a running event loop.
    """
    config = config or SandboxServiceConfig()
    look = {"local": _examine_local, "docker": _examine_docker, "e2b": _examine_e2b}
    limits = config.limits
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [
        *look[config.backend](config),
        judge_open_files(files, limits.sandboxes, limits.commands),
    ]


def _examine_local(config: SandboxServiceConfig) -> list[Finding]:
    problems = host.isolation_problems()
    findings = judge_isolation(problems)
    if not problems:
        root = os.geteuid() == 0
        setup = detect_cgroups(config.local.cgroup_parent, f"doctor-{os.getpid()}", make=False)
        found = (setup.version, set(setup.bases), setup.problems)
        findings += judge_cgroups(*found, rootless=not root)
        ids = users.subordinate_ids(config.local.uid, config.local.gid)
        findings.append(judge_user(root=root, subordinate=ids is not None))
    return [
        *findings,
        judge_seccomp(os.uname().machine, config.local.seccomp),
        judge_compiler(host.compiler(), config.local.compile_shim or config.local.compile_launcher),
        judge_memory(_available_bytes(), config.limits.sandboxes, LocalBackend.idle_bytes),
    ]


def _examine_docker(config: SandboxServiceConfig) -> list[Finding]:
    try:
        from sandbox_client.backends.docker import doctor
    except ModuleNotFoundError as error:
        return [judge_extra("docker", error.name)]
    lacking = users.lacking_capabilities()
    return [judge_extra("docker"), judge_root(lacking), *doctor.examine(config.docker)]


def _examine_e2b(config: SandboxServiceConfig) -> list[Finding]:
    try:
        import e2b  # noqa: F401 -- only whether it is there
    except ModuleNotFoundError as error:
        return [judge_extra("e2b", error.name)]
    return [judge_extra("e2b")]


def try_sandbox(config: SandboxServiceConfig | None = None) -> Finding:
    """Makes one sandbox of `local` in a temporary state folder, and runs a command; takes a second.

    Other back-ends are not tried: that pulls images, or costs money.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-doctor-") as folder:
        given = config or SandboxServiceConfig()
        trial = given.model_copy(update={"state_dir": Path(folder) / "state"})
        try:
            if users.lacking_capabilities():
                return _try_in_user_namespace(trial)
            return asyncio.run(_try_sandbox(trial))
        except (ServiceError, StartupError, OSError) as error:
            return Finding(
                "a sandbox", Level.PROBLEM, f"cannot be made: {error}", "mend the findings above"
            )


# Reads a configuration, prints the finding.
_TRIAL = """\
import dataclasses, json, sys
from sandbox_client import doctor
from sandbox_client.config import SandboxServiceConfig
config = SandboxServiceConfig.model_validate_json(sys.stdin.read())
print(json.dumps(dataclasses.asdict(doctor.try_sandbox(config))))
"""


def _try_in_user_namespace(config: SandboxServiceConfig) -> Finding:
    host.require_isolation()
    argv = [sys.executable, "-c", _TRIAL]
    done = subprocess.run(
        users.inside_user_namespace(argv, config.local.uid, config.local.gid),
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TRIAL_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2])
    found = json.loads(done.stdout.splitlines()[-1])
    return Finding(found["check"], Level(found["level"]), found["found"], found["fix"])


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
