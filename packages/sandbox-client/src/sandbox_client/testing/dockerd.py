"""A dockerd of one's own: started by hand, apart from any other on the host, gone without a trace.

Interface, for tests and benchmarks::

    problem = dockerd_missing()            # "" if one can run here
    with running_dockerd() as dockerd:     # about 2 s; needs root
        dockerd.import_image(tar_file, "base:latest")
        dockerd.socket                     # Path; give services docker.socket=...
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from urllib.parse import quote

from sandbox_client.backends.local.host import isolation_problems
from sandbox_client.backends.local.jail import kernel

__all__ = ["Dockerd", "dockerd_missing", "running_daemon", "running_dockerd"]

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 120.0
_CGROUPS = Path("/sys/fs/cgroup")


def dockerd_missing() -> str:
    """Why no dockerd can run here; empty if one can."""
    problems = isolation_problems()
    if problems:
        return f"dockerd cannot run here: {'; '.join(problems)}"
    lacking = [name for name in ("dockerd", "containerd", "runc") if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this host (Debian's package is docker.io)"
    return ""


@dataclass(frozen=True)
class Dockerd:
    """A running daemon."""

    folder: Path
    """Everything it writes is below."""
    socket: Path
    """Where it listens."""
    pid: int
    cgroup_parent: str
    """Its containers' cgroups are below this name, in every hierarchy."""

    @classmethod
    def at(cls, socket: Path) -> "Dockerd":
        """The daemon of `running_daemon` that listens there."""
        pid, cgroup_parent = (socket.parent / "running").read_text().split()
        return cls(socket.parent, socket, int(pid), cgroup_parent)

    def call(self, method: str, path: str, body: bytes | IO[bytes] | None = None) -> Any:
        """Makes one call of the Engine API.

        Raises:
            RuntimeError: the daemon answered with an error.
        """
        connection = _UnixConnection(self.socket)
        try:
            # A daemon that refuses a body does not wait for its end.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body, {"Content-Type": "application/x-tar"})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {raw[:500]!r}")
        # Progress comes as one JSON object a line; its last line tells how it ended.
        lines = raw.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    def import_image(self, root: IO[bytes], name: str) -> None:
        """Makes an image of a root file system's tar."""
        repository, _, tag = name.partition(":")
        ended = self.call(
            "POST", f"/images/create?fromSrc=-&repo={repository}&tag={tag or 'latest'}", root
        )
        if "error" in ended:
            raise RuntimeError(f"import of {name}: {ended['error']}")

    def containers(self, label: str = "") -> list[str]:
        """Ids of all containers, also of those that do not run, or of those with a label."""
        filters = quote(json.dumps({"label": [label]} if label else {}))
        return [c["Id"] for c in self.call("GET", f"/containers/json?all=1&filters={filters}")]


@contextlib.contextmanager
def running_dockerd() -> Iterator[Dockerd]:
    """Starts a daemon with folders, socket and cgroups of its own; ends it with all its containers.

    It has no network: containers get `none` or `host`.

    Raises:
        RuntimeError: it did not start; the message holds its log.
    """
    # Short and plain: a socket's path has room for about a hundred bytes, and containerd is choosy.
    name = f"dockerd-{secrets.token_hex(4)}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o711)
    config = {
        "data-root": str(folder / "data"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(folder / "pid"),
        "hosts": [f"unix://{folder}/docker.sock"],
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
        "cgroup-parent": f"/{name}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        # Another daemon's containerd may be running: its containers stay out of sight.
        "containerd-namespace": name,
        "containerd-plugins-namespace": f"{name}-plugins",
    }
    (folder / "daemon.json").write_text(json.dumps(config))
    command = ["dockerd", "--config-file", str(folder / "daemon.json")]
    with running_daemon(command, folder / "docker.sock", cgroup_parent=name) as dockerd:
        yield dockerd


@contextlib.contextmanager
def running_daemon(
    command: Sequence[str],
    socket: Path,
    *,
    cgroup_parent: str,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Dockerd]:
    """Starts a daemon that keeps everything in its socket's folder; ends it and removes that.

    Raises:
        RuntimeError: it did not start; the message holds its log.
    """
    folder = socket.parent
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,  # podman's conmon leaves a file there when memory runs out
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environ},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    (folder / "running").write_text(f"{process.pid} {cgroup_parent}")
    daemon = Dockerd.at(socket)
    try:
        _wait_until_up(daemon, process)
        yield daemon
        for container in daemon.containers():
            daemon.call("DELETE", f"/containers/{container}?force=1")
    finally:
        _end(process)
        _clean_up(folder, cgroup_parent)


def _end_with_parent() -> None:
    # SIGTERM: it then ends its containers and its containerd.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_up(dockerd: Dockerd, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = _UnixConnection(dockerd.socket)
            connection.request("GET", "/_ping")
            if connection.getresponse().status == 200:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the daemon did not start:\n{(dockerd.folder / 'log').read_text()}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_STOP_TIMEOUT_S)


def _clean_up(folder: Path, name: str) -> None:
    """Removes what a daemon leaves behind: processes, mounts (a network namespace's), cgroups."""
    for pid in _processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{folder}/"):
            kernel.umount(mount)
    for base in _CGROUPS.glob(f"*/{name}"):
        _remove_cgroup(base)
    _remove_cgroup(_CGROUPS / name)
    shutil.rmtree(folder)


def _processes_of(folder: Path) -> list[int]:
    """Processes whose command line names a file of the daemon's: its containerd and shims."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _remove_cgroup(folder: Path) -> None:
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)  # noqa: PTH106 -- the folder of a file system without files


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_CALL_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
