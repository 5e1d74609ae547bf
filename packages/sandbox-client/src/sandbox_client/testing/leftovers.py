"""What a local service has on this host, and what of it is still there when it is gone."""

from hashlib import sha256
from pathlib import Path

__all__ = ["leftovers", "processes_of", "service_cgroups", "unfinished_files"]

_CGROUPS = Path("/sys/fs/cgroup")
_COMPILED = ("launcher-", "python-shim-")
_KNOWN = frozenset({"environments", "lock", "run"})


def _service(state_dir: Path) -> str:
    return f"tailrace/{sha256(str(state_dir).encode()).hexdigest()[:12]}"


def processes_of(state_dir: Path) -> list[int]:
    """Every process of a service but itself, whoever its parent is by now.

    Commands are known by their cgroups, the fork-server and first processes by the log they hold.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            log = str((folder / "fd/2").readlink())
            groups = (folder / "cgroup").read_text()
        except OSError:
            continue  # it has ended
        if log.startswith(f"{state_dir}/") or f"/{_service(state_dir)}/" in groups:
            found.append(int(folder.name))
    return found


def service_cgroups(state_dir: Path) -> list[Path]:
    """The cgroups of a service's sandboxes, in use or kept for the next."""
    own = _service(state_dir)
    return [*_CGROUPS.glob(f"*/{own}/*/"), *_CGROUPS.glob(f"{own}/*/")]


def unfinished_files(state_dir: Path) -> set[str]:
    """Names in the state folder that no service needs that has just started."""
    environments = state_dir / "environments"
    partial = {path.name for path in environments.iterdir() if not path.name.isalnum()}
    snapshots = {path.name for path in (environments / "snapshots").iterdir()}
    others = {path.name for path in state_dir.iterdir()} - _KNOWN
    return partial | snapshots | {name for name in others if not name.startswith(_COMPILED)}


def leftovers(state_dir: Path) -> list[str]:
    """What a service that has ended should have taken with it; empty if all is well."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return [
        *(f"process {pid}" for pid in processes_of(state_dir)),
        *(f"cgroup {group}" for group in service_cgroups(state_dir)),
        *(f"mount {line}" for line in mounts if str(state_dir) in line),
        *(f"file {name}" for name in sorted(unfinished_files(state_dir))),
    ]
