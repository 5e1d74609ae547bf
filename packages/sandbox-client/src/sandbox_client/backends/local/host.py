"""What this host offers for isolation, and where its interpreter is. Looks, changes nothing."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BasePython", "base_python", "compiler", "isolation_problems"]

_NEEDED_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_CHOWN": 0}
_MIN_KERNEL = (5, 6)


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


def isolation_problems() -> dict[str, str]:
    """What keeps this host from isolating sandboxes at all: problem -> what to do about it."""
    problems: dict[str, str] = {}
    if sys.platform != "linux":
        return {f"the host runs {platform.system()}": "run the sandbox service on Linux"}
    release = platform.release().split("-")[0].split(".")
    version = tuple(int(part) for part in release[:2] if part.isdigit())
    if version < _MIN_KERNEL:
        problems[f"kernel {platform.release()} is older than 5.6"] = "use a newer kernel"
    if os.geteuid() != 0:
        problems["the service does not run as root"] = (
            "run it as root (sudo), or in a container started with --privileged"
        )
    else:
        effective = _effective_capabilities()
        lacking = [name for name, bit in _NEEDED_CAPABILITIES.items() if not effective >> bit & 1]
        if lacking:
            problems[f"root lacks {', '.join(lacking)}"] = (
                "start the container with --privileged or --cap-add SYS_ADMIN"
            )
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


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
