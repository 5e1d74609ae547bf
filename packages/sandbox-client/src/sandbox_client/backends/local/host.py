"""What this host offers for isolation, and where its interpreter is. Looks, changes nothing."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.backends.local.users import lacking_capabilities, user_namespace_problem
from sandbox_client.errors import IsolationUnavailable

__all__ = [
    "BasePython",
    "base_python",
    "compiler",
    "isolation_problems",
    "launcher_problem",
    "require_isolation",
]

_MIN_KERNEL = (5, 6)
# A process can join all namespaces of another by its pidfd.
_MIN_LAUNCHER_KERNEL = (5, 8)

_ASK_SITE = "import site; print('\\n'.join(site.getsitepackages()))"


@dataclass(frozen=True)
class BasePython:
    """The interpreter that sandboxes use."""

    prefix: Path
    binary: str
    """Path below the prefix, such as "bin/python3.11"."""
    shared_library: bool
    """Its libpython may be found by an absolute path only."""

    @property
    def executable(self) -> Path:
        """Where it is on the host."""
        return self.prefix / self.binary

    def site_folders(self) -> list[str]:
        """The host's folders of installed packages, which sandboxes do not get to see."""
        done = subprocess.run(
            [str(self.executable), "-I", "-B", "-c", _ASK_SITE],
            capture_output=True,
            check=True,
            timeout=60,
            text=True,
        )
        return done.stdout.split("\n")[:-1]


def base_python(chosen: Path | None = None) -> BasePython:
    """The interpreter below this one's virtual environment, or the one chosen by the config."""
    if chosen is not None:
        real = chosen.resolve()
        return BasePython(real.parent.parent, f"{real.parent.name}/{real.name}", True)
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    prefix = Path(sys.base_prefix).resolve()
    binary = base.relative_to(prefix) if base.is_relative_to(prefix) else Path("bin/python3")
    shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))
    return BasePython(prefix, str(binary), shared)


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def launcher_problem(*, rootless: bool) -> str:
    """Why sandboxes have to be made in Python although they can be made; empty if in C too."""
    if rootless:
        return "the service is not root"
    if _kernel_version() < _MIN_LAUNCHER_KERNEL:
        return f"kernel {platform.release()} is older than 5.8"
    return ""


def _kernel_version() -> tuple[int, ...]:
    release = platform.release().split("-")[0].split(".")
    return tuple(int(part) for part in release[:2] if part.isdigit())


def isolation_problems() -> dict[str, str]:
    """What keeps this host from isolating sandboxes at all: problem -> what to do about it."""
    problems: dict[str, str] = {}
    if sys.platform != "linux":
        return {f"the host runs {platform.system()}": "run the sandbox service on Linux"}
    if _kernel_version() < _MIN_KERNEL:
        problems[f"kernel {platform.release()} is older than 5.6"] = "use a newer kernel"
    problems |= _lacking_rights()
    for kind in ("mnt", "pid", "ipc", "uts", "net"):
        if not Path(f"/proc/self/ns/{kind}").exists():
            problems[f"the kernel has no {kind} namespaces"] = "use a kernel built with them"
    filesystems = Path("/proc/filesystems").read_text(encoding="ascii")
    for name, fix in (("overlay", "run `modprobe overlay`"), ("tmpfs", "use another kernel")):
        if f"\t{name}\n" not in filesystems and not _loadable(name):
            problems[f"the kernel has no {name} file system"] = fix
    return problems


def _loadable(module: str) -> bool:
    """Whether the kernel can load a file system's module when it is first mounted."""
    listing = Path(f"/lib/modules/{platform.release()}/modules.dep")
    try:
        return f"/{module}.ko" in listing.read_text(encoding="utf-8")
    except OSError:
        return False


def require_isolation() -> None:
    """Raises `IsolationUnavailable`, naming all that is missing, if this host cannot isolate."""
    problems = isolation_problems()
    if problems:
        text = "; ".join(f"{what} ({fix})" for what, fix in problems.items())
        raise IsolationUnavailable(
            f"this host cannot isolate sandboxes, and they never run without isolation: {text}"
        )


def _lacking_rights() -> dict[str, str]:
    lacking = lacking_capabilities()
    if not lacking:
        return {}
    if os.geteuid() == 0:
        # In a user namespace of such a root's, commands would run under root's own id.
        fix = "start the container with --privileged or --cap-add SYS_ADMIN"
        return {f"root lacks {', '.join(lacking)}": fix}
    why = user_namespace_problem()
    if not why:
        return {}
    what = f"the service does not run as root, and as an ordinary user it {why}"
    return {what: f"run it as root (sudo), or {_advice(why)}"}


def _advice(why: str) -> str:
    """What opens user namespaces, by the step of the trial that failed."""
    if "overlay" in why:
        return "use Linux 6.6 or later, whose tmpfs holds user attributes"
    if "/proc" in why:
        return "uncover /proc in this container (--security-opt systempaths=unconfined)"
    closed = [
        f"sysctl {name}={open_}"
        for name, open_ in (
            ("kernel.unprivileged_userns_clone", "1"),
            ("kernel.apparmor_restrict_unprivileged_userns", "0"),
        )
        if _sysctl(name) not in ("", open_)
    ]
    if _sysctl("user.max_user_namespaces") == "0":
        closed.append("sysctl user.max_user_namespaces=10000")
    return "open user namespaces to its user" + (f": {', '.join(closed)}" if closed else "")


def _sysctl(name: str) -> str:
    try:
        return Path(f"/proc/sys/{name.replace('.', '/')}").read_text(encoding="ascii").strip()
    except OSError:
        return ""
