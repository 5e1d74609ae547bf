"""A podman service of one's own, beside `running_dockerd`: the same interface, the same end."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_client.backends.local.host import isolation_problems
from sandbox_client.testing.dockerd import Dockerd, running_daemon

__all__ = ["podman_missing", "running_podman"]

_CONTAINERS = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
exit_command_delay = 1
runtime = "runc"
[network]
network_config_dir = "{folder}/networks"
"""
_REGISTRIES = """\
[[registry]]
location = "127.0.0.1"
insecure = true
"""


def podman_missing() -> str:
    """Why no podman can run here; empty if one can."""
    problems = isolation_problems()
    if problems:
        return f"podman cannot run here: {'; '.join(problems)}"
    lacking = [name for name in ("podman", "conmon", "runc") if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this host (Debian's packages are podman and runc)"
    return ""


@contextlib.contextmanager
def running_podman() -> Iterator[Dockerd]:
    """Starts `podman system service` as root with folders and a socket of its own; ends it.

    Raises:
        RuntimeError: it did not start; the message holds its log.
    """
    folder = Path(tempfile.gettempdir()) / f"podman-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o711)
    (folder / "containers.conf").write_text(_CONTAINERS.format(folder=folder))
    (folder / "registries.conf").write_text(_REGISTRIES)
    environ = {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
        "TMPDIR": str(folder),
    }
    places = [f"--{name}={folder / name}" for name in ("root", "runroot", "tmpdir")]
    socket = folder / "podman.sock"
    command = ["podman", *places, "system", "service", "--time=0", f"unix://{socket}"]
    with running_daemon(command, socket, cgroup_parent="libpod_parent", environ=environ) as podman:
        yield podman
