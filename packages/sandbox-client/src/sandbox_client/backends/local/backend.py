"""Back-end `local`: sandboxes made of namespaces on this host."""

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO

from service_kit.server import MIB

import sandbox_client
from sandbox_client.backends.local import host
from sandbox_client.backends.local.cgroups import (
    CgroupLimits,
    CgroupSetup,
    SandboxCgroup,
    detect_cgroups,
)
from sandbox_client.backends.local.compiled import compile_launcher, compile_shim
from sandbox_client.backends.local.forkserver import (
    ForkServerProcess,
    end_leftover,
    write_record,
)
from sandbox_client.backends.local.jail import seccomp
from sandbox_client.backends.local.jail.messages import Create
from sandbox_client.backends.local.layers import Layers, open_stores
from sandbox_client.backends.local.sandbox import LocalSandbox, SandboxSettings
from sandbox_client.backends.local.store import EMPTY_DIGEST
from sandbox_client.backends.local.users import found_ids, lacking_capabilities
from sandbox_client.backends.setup import (
    allow_many_open_files,
    check_workdir,
    command_environ,
    take_lock,
)
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import (
    IsolationUnavailable,
    SandboxGone,
    SandboxUnavailable,
    WrongRequest,
)
from sandbox_client.types import SandboxLimits, SandboxSpec

__all__ = ["LocalBackend"]

logger = logging.getLogger(__name__)


class LocalBackend:
    """Makes sandboxes through a fork-server; see `Backend`."""

    name = "local"
    idle_bytes = 2 * MIB

    def __init__(self, config: SandboxServiceConfig) -> None:
        self._config = config
        self._local = config.local
        self._state = config.state_dir
        self._run_dir = self._state / "run"
        self._record = self._run_dir / "forkserver"
        self._ids = found_ids(config.local.uid, config.local.gid)
        self._store, self._snapshots = open_stores(config, self._ids)
        self._lock: IO[bytes] | None = None
        self._cgroups = CgroupSetup(1, {})
        self._host_cpus = os.cpu_count() or 1
        self._python = host.base_python(config.local.python)
        self._shim: Path | None = None
        self._launcher: Path | None = None
        self._server: ForkServerProcess | None = None
        self._starting = asyncio.Lock()
        self._sandboxes: dict[str, LocalSandbox] = {}

    # -- life of the back-end

    async def start(self) -> None:
        """Takes the state folder, ends leftovers, starts the fork-server."""
        host.require_isolation()
        if lacking_capabilities():
            raise IsolationUnavailable(
                "this process has not entered a user namespace, as `python -m sandbox_client "
                "serve` does for an ordinary user"
            )
        self._lock = take_lock(self._state)
        allow_many_open_files()
        self._run_dir.mkdir(exist_ok=True)
        ended = end_leftover(self._record)
        self._cgroups = detect_cgroups(self._local.cgroup_parent, self.service_id)
        left = self._cgroups.remove_leftovers()
        if ended or left:
            logger.warning("ended what a killed service left behind: %d cgroups", left)
        if self._local.require_cgroups and not {"memory", "pids"} <= set(self._cgroups.bases):
            raise IsolationUnavailable(
                "local.require_cgroups is set, but memory and processes cannot be limited: "
                + "; ".join(f"{name}: {why}" for name, why in self._cgroups.problems.items())
            )
        await asyncio.to_thread(self._store.open)
        await asyncio.to_thread(self._snapshots.open)
        if self._local.compile_shim:
            self._shim = await asyncio.to_thread(compile_shim, self._state, self._python)
        if self._local.compile_launcher and not self._launcher_problem():
            self._launcher = await asyncio.to_thread(compile_launcher, self._state)
        await self._fork_server()

    async def stop(self) -> None:
        """Ends every sandbox and the fork-server."""
        ends = (sandbox.destroy() for sandbox in list(self._sandboxes.values()))
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, Exception):
                # It dies with the fork-server, at the latest.
                logger.warning("a sandbox did not end cleanly: %s", outcome)
        if self._server is not None:
            await self._server.stop()
            self._server = None
        self._cgroups.close()
        self._record.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def service_id(self) -> str:
        """Name of this service's cgroups; it stays with the state folder."""
        return sha256(str(self._state).encode()).hexdigest()[:12]

    def missing_protections(self) -> tuple[str, ...]:
        """Protections that this host cannot give."""
        missing = [
            f"no cgroup limit for {controller}: {why}"
            for controller, why in self._cgroups.problems.items()
            # In user namespaces of their own, sandboxes have a limit of processes each.
            if controller != "pids" or not self._ids.rootless
        ]
        if self._ids.shared:
            missing.append("commands run as the service's own user: it has no subordinate ids")
        machine = os.uname().machine
        if not self._local.seccomp:
            missing.append("no seccomp filter: local.seccomp is off")
        elif not seccomp.is_supported(machine):
            missing.append(f"no seccomp filter: none is known for {machine}")
        if self._local.compile_shim and self._shim is None:
            missing.append(
                "no warm Python inside shell commands: no C compiler (slower, not unsafe)"
            )
        if self._local.compile_launcher and self._launcher is None:
            why = self._launcher_problem() or "no C compiler"
            missing.append(f"sandboxes are made in Python, not in C: {why} (slower, not unsafe)")
        return tuple(missing)

    def _launcher_problem(self) -> str:
        return host.launcher_problem(rootless=self._ids.rootless)

    def limiters(self) -> list[LimiterStatus]:
        """Disk space of stored environments and snapshots."""
        return self._snapshots.limiters()

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot's layer."""
        await self._snapshots.remove(snapshot_id)

    # -- environments

    def missing_environments(self, digests: Sequence[str]) -> list[str]:
        """Which of these environments are not stored."""
        return [digest for digest in digests if digest not in self._store]

    async def put_environment(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores a tree after verifying its digest."""
        return await self._store.put(digest, archive)

    # -- sandboxes

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> LocalSandbox:
        """Makes a sandbox."""
        layers = self._check(spec)
        self._store.hold(layers.environment)
        try:
            server = await self._fork_server()
            return await self._create(server, sandbox_id, spec, layers)
        except BaseException:
            self._store.let_go(layers.environment)
            raise

    async def _create(
        self, server: ForkServerProcess, sandbox_id: str, spec: SandboxSpec, layers: Layers
    ) -> LocalSandbox:
        limits, workdir, digest = spec.limits, spec.environment.workdir, layers.environment
        cpus = limits.cpus if limits.cpus < self._host_cpus else 0.0
        try:
            cgroup = self._cgroups.acquire(CgroupLimits(limits.memory_bytes, limits.pids, cpus))
        except OSError as error:
            raise SandboxUnavailable(f"cannot make the sandbox's cgroups: {error}") from error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        async def keep(snapshot_id: str, upper_fd: int, mounts: Sequence[int]) -> int:
            return await self._snapshots.keep(snapshot_id, upper_fd, mounts, layers)

        async def end() -> None:
            try:
                await server.end(sandbox_id, timeout_s=self._local.start_timeout_s)
            finally:
                self._forget(sandbox_id, digest, cgroup)

        settings = SandboxSettings(
            sandbox_id,
            workdir,
            self._store.tree(digest),
            self._local.writable,
            command_environ(self._local.user, self._config.exec.path, spec.environment.env),
            self._local.user,
            self._local.uid,
            self._ids,
            self._config.exec.kill_grace_s,
            self._local.diff_exclude,
            self._config.limits.diff_bytes,
        )
        sandbox = LocalSandbox(settings, ours, cgroup, keep, end)
        self._sandboxes[sandbox_id] = sandbox
        asked = Create(
            sandbox_id,
            workdir,
            self._rlimits(limits),
            limits.disk_bytes,
            self._config.sandbox.inodes,
            layers.work,
            {n: layer for n in layers.mounts if (layer := layers.mount(n)) is not None},
        )
        try:
            with theirs:
                fds = [theirs.fileno(), *cgroup.joins]
                server.create(asked, fds, sandbox.fail)
            async with asyncio.timeout(self._local.start_timeout_s):
                await sandbox.wait_ready()
        except BaseException as error:
            # The caller's reference count is given back by `create`, not by `_forget`.
            self._store.hold(digest)
            await sandbox.destroy()
            if isinstance(error, SandboxGone):
                raise SandboxUnavailable(f"the sandbox did not start: {error.message}") from error
            if isinstance(error, TimeoutError):
                raise SandboxUnavailable(
                    f"the sandbox did not start within {self._local.start_timeout_s:g} s"
                ) from None
            raise
        return sandbox

    def _forget(self, sandbox_id: str, digest: str, cgroup: SandboxCgroup) -> None:
        self._sandboxes.pop(sandbox_id, None)
        self._store.let_go(digest)
        if not self._cgroups.release(cgroup):
            logger.warning("the cgroup of sandbox %s is still in use", sandbox_id)

    def _check(self, spec: SandboxSpec) -> Layers:
        environment = spec.environment
        if environment.image or environment.template:
            raise WrongRequest(
                "back-end `local` starts from folder trees: set tree_digest, found an image or "
                "a template"
            )
        if spec.limits.network:
            raise WrongRequest(
                "back-end `local` gives no network to sandboxes; set limits.network to false"
            )
        check_workdir(environment.workdir, self._local.writable)
        return self._snapshots.find(environment)

    # -- the fork-server

    async def _fork_server(self) -> ForkServerProcess:
        """The running fork-server; starts one if the last has ended."""
        async with self._starting:
            if self._server is None or not self._server.alive:
                if self._server is not None:
                    logger.warning("the fork-server has ended; starting another")
                self._server = await ForkServerProcess.start(
                    self._run_dir,
                    self._python,
                    await asyncio.to_thread(self._server_settings),
                    timeout_s=self._local.start_timeout_s,
                )
                write_record(self._record, self._server.pid)
            return self._server

    def _server_settings(self) -> dict[str, object]:
        package = Path(sandbox_client.__file__).resolve().parent.parent
        python, local = self._python, self._local
        visible = [str(path) for path in local.visible if path.is_dir()]
        masked = [str(path) for path in (*local.masked, package, self._state)]
        if sys.prefix != sys.base_prefix:
            masked.append(sys.prefix)
        return {
            "template": {
                "root": str(self._run_dir / "root"),
                "visible": visible,
                "masked": masked,
                "python_prefix": str(python.prefix),
                "link_python_home": python.shared_library,
                "shim": str(self._shim) if self._shim else None,
                "python_binary": python.binary,
                "site_folders": python.site_folders(),
                "site_packages": str(local.site_packages) if local.site_packages else None,
                "environments": str(self._state / "environments"),
                "user": [local.user, local.uid, local.gid],
                "rootless": self._ids.rootless,
            },
            "server": {
                "uid": local.uid,
                "gid": local.gid,
                "own_uid": self._ids.uid,
                "own_gid": self._ids.gid,
                "rootless": self._ids.rootless,
                "python_path": f"/opt/python/{python.binary}",
                "mounts": local.writable,
                "seccomp": local.seccomp,
                "rehearsal_digest": EMPTY_DIGEST,
                "rlimits": [
                    (resource.RLIMIT_CORE, 0),
                    (resource.RLIMIT_NOFILE, self._config.sandbox.open_files),
                    (resource.RLIMIT_MEMLOCK, 64 * 1024),
                ],
                "spares": local.spares,
            },
            "launcher": str(self._launcher) if self._launcher else None,
            "environ": command_environ(local.user, self._config.exec.path, {}),
            "preload": local.preload,
        }

    def _rlimits(self, limits: SandboxLimits) -> list[tuple[int, int]]:
        """Coarser stand-ins for the limits that no cgroup enforces."""
        found = []
        if "pids" not in self._cgroups.bases:
            # Counted for a sandbox's own user namespace, or else for all sandboxes together.
            count = limits.pids if self._ids.rootless else self._config.sandbox.pids * 4
            found.append((resource.RLIMIT_NPROC, count))
        if "memory" not in self._cgroups.bases:
            found.append((resource.RLIMIT_AS, limits.memory_bytes))  # of each process alone
        return found
