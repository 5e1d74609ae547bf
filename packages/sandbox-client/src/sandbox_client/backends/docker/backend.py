"""Back-end `docker`: sandboxes made of containers of a dockerd on this host."""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from service_kit.server import MIB

from sandbox_client.backends.docker.budget import OwnBudget, PullBudget, SharedBudget
from sandbox_client.backends.docker.engine import (
    Engine,
    EngineInfo,
    ImageInfo,
    NotThereError,
)
from sandbox_client.backends.docker.images import Images
from sandbox_client.backends.docker.mounts import (
    Origin,
    SandboxMounts,
    leftover_mounts,
    make_mounts,
    remove_mounts,
)
from sandbox_client.backends.docker.prefetch import Prefetcher
from sandbox_client.backends.docker.processes import most_processes
from sandbox_client.backends.docker.running import PIPES_FOLDER, ContainerSettings
from sandbox_client.backends.docker.sandbox import DockerSandbox, SandboxSettings
from sandbox_client.backends.ends import to_its_end
from sandbox_client.backends.local import host
from sandbox_client.backends.local.layers import Layers, open_stores
from sandbox_client.backends.local.users import Ids, lacking_capabilities
from sandbox_client.backends.setup import (
    allow_many_open_files,
    check_workdir,
    command_environ,
    take_lock,
)
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import IsolationUnavailable, SandboxUnavailable, WrongRequest
from sandbox_client.limiter import Limiter
from sandbox_client.types import ImageStatus, SandboxSpec

__all__ = ["DockerBackend"]

logger = logging.getLogger(__name__)

SERVICE_LABEL = "dev.tailrace.service"
"""On everything that a service makes, with the service's id as its value."""
SANDBOX_LABEL = "dev.tailrace.sandbox"

# The first process: ends, and with it the container, when the service closes the pipe, by dying if
# nothing else. Its shell collects the processes that commands leave behind.
_KEEPER = f"cat {PIPES_FOLDER}/life & wait"
_KEEPER_PIDS = 3


class DockerBackend:
    """Makes sandboxes through a daemon; see `Backend`."""

    name = "docker"
    idle_bytes = 32 * MIB

    def __init__(self, config: SandboxServiceConfig) -> None:
        self._config = config
        self._docker = config.docker
        self._state = config.state_dir
        self._folder = self._state / "docker"
        self._mounts = self._folder / "sandboxes"
        self._pipes = self._folder / "pipes"
        self._ids = Ids(config.docker.uid, config.docker.gid, rootless=False)
        self._store, self._snapshots = open_stores(config, self._ids)
        self._snapshot_images: dict[str, str] = {}
        self._engine = Engine(config.docker)
        elsewhere = config.docker.pull_budget
        self._budget: PullBudget = (
            OwnBudget(config.docker.image_pulls_per_hour)
            if elsewhere is None
            else SharedBudget(elsewhere)
        )
        self._images = Images(
            self._engine,
            config.docker,
            folder=self._folder,
            store=self._store,
            budget=self._budget,
            labels={SERVICE_LABEL: self.service_id},
            retry_after_s=config.limits.retry_after_s,
        )
        self._prefetcher = Prefetcher(self._images.pull, self._images.is_present)
        self._starts = Limiter("docker.concurrent_starts", config.docker.concurrent_starts)
        self._info = EngineInfo("", Path(), ())
        self._lock: IO[bytes] | None = None
        self._sandboxes: dict[str, DockerSandbox] = {}

    # -- life of the back-end

    async def start(self) -> None:
        """Takes the state folder, finds the daemon, removes leftovers."""
        lacking = lacking_capabilities()
        # An ordinary user may be able to isolate sandboxes, but not to look into containers.
        as_root = {f"the service lacks {', '.join(lacking)}": "run it as root"}
        problems = as_root if lacking else host.isolation_problems()
        if problems:
            text = "; ".join(f"{what} ({fix})" for what, fix in problems.items())
            raise IsolationUnavailable(f"this host cannot prepare containers' files: {text}")
        self._lock = take_lock(self._state)
        allow_many_open_files()
        self._info = await self._engine.open()
        for folder in (self._mounts, self._pipes):
            folder.mkdir(parents=True, exist_ok=True)
        # Containers look into their own folders of pipes, and into nothing else.
        self._pipes.chmod(0o711)
        await self._remove_leftovers()
        self._images.open(self._info.root_dir)
        if self._docker.network:
            open_to = await self._engine.ensure_network(self._docker.network, SERVICE_LABEL)
            self._info = replace(self._info, missing=self._info.missing + open_to)
        await asyncio.to_thread(self._store.open)
        await asyncio.to_thread(self._snapshots.open)
        await self._prefetcher.ask(self._docker.prefetch)

    async def stop(self) -> None:
        """Ends every sandbox."""
        await self._prefetcher.close()
        await self._images.close()
        await self._budget.close()
        ends = (sandbox.destroy() for sandbox in list(self._sandboxes.values()))
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, Exception):
                # The next service finds it by its label, at the latest.
                logger.warning("a sandbox did not end cleanly: %s", outcome)
        await self._engine.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def service_id(self) -> str:
        """Value of this service's label; it stays with the state folder."""
        return sha256(str(self._state).encode()).hexdigest()[:12]

    async def _remove_leftovers(self) -> None:
        containers = await self._engine.containers(f"{SERVICE_LABEL}={self.service_id}")
        await asyncio.gather(*(self._engine.remove(container) for container in containers))
        folders = leftover_mounts(self._mounts)
        for folder in folders:
            remove_mounts(folder)
        for folder in self._pipes.iterdir():
            _remove_pipes(folder)
        if containers or folders:
            logger.warning(
                "removed what a killed service left behind: %d containers, %d work folders",
                len(containers),
                len(folders),
            )

    def missing_protections(self) -> tuple[str, ...]:
        """Protections that the daemon cannot give."""
        return self._info.missing

    def limiters(self) -> list[LimiterStatus]:
        """Stored environments, starts, pulls, disk."""
        return [
            *self._snapshots.limiters(),
            self._starts.status(),
            *self._budget.limiters(),
            *self._images.limiters(),
        ]

    # -- images

    async def prefetch(self, images: Sequence[str]) -> list[ImageStatus]:
        """Has images pulled in the background."""
        return await self._prefetcher.ask(images)

    async def take_pull(self) -> None:
        """Gives another host one pull from the budget."""
        if not isinstance(self._budget, OwnBudget):
            raise WrongRequest(
                "this service does not keep the budget of pulls itself (docker.pull_budget is set)"
            )
        await self._budget.take("")

    # -- environments

    def missing_environments(self, digests: Sequence[str]) -> list[str]:
        """Which of these environments are not stored."""
        return [digest for digest in digests if digest not in self._store]

    async def put_environment(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores a tree after verifying its digest."""
        return await self._store.put(digest, archive)

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot's layer."""
        image_id = self._snapshot_images.pop(snapshot_id, None)
        if image_id is not None:
            self._images.let_go(image_id)
        await self._snapshots.remove(snapshot_id)

    # -- sandboxes

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> DockerSandbox:
        """Makes a sandbox."""
        self._check(spec)
        environment = spec.environment
        await self._images.require_room()
        reference = environment.image or self._snapshot_images.get(environment.snapshot)
        async with self._images.use(reference or self._docker.base_image) as image:
            if environment.image:
                layers = Layers(await self._images.work_folder(image, environment.workdir))
            else:
                layers = self._snapshots.find(environment)
            self._store.hold(layers.environment)
            try:
                async with self._starts.slot():
                    return await self._create(sandbox_id, spec, image, layers)
            except BaseException:
                self._store.let_go(layers.environment)
                raise

    def _check(self, spec: SandboxSpec) -> None:
        environment = spec.environment
        if environment.template:
            raise WrongRequest(
                "back-end `docker` starts from folder trees and images: set tree_digest or image, "
                "found a template"
            )
        if spec.limits.network and not self._docker.network:
            raise WrongRequest(
                "this service gives no network to sandboxes: set docker.network, or "
                "limits.network to false"
            )
        check_workdir(environment.workdir, self._docker.writable)
        if not environment.image:
            self._snapshots.find(environment)  # before an image is pulled for nothing

    async def _create(
        self, sandbox_id: str, spec: SandboxSpec, image: ImageInfo, layers: Layers
    ) -> DockerSandbox:
        settings = self._docker
        pipes = self._pipes / sandbox_id
        async with contextlib.AsyncExitStack() as undo:
            try:
                undo.callback(_remove_pipes, pipes)
                undo.callback(os.close, _make_pipes(pipes, settings.keeper_uid))
                mounts = make_mounts(
                    self._mounts,
                    sandbox_id,
                    self._origin(image, layers),
                    disk_bytes=spec.limits.disk_bytes,
                    inodes=self._config.sandbox.inodes,
                    owner=(settings.uid, settings.gid),
                )
                undo.callback(remove_mounts, mounts.folder)
            except OSError as error:
                raise SandboxUnavailable(f"cannot prepare the work folder: {error}") from error
            undo.push_async_callback(self._engine.remove, sandbox_id)
            pid, container = await self._start(
                sandbox_id, self._container(sandbox_id, spec, image, mounts, pipes)
            )

            async def keep(snapshot_id: str, upper_fd: int, folders: Sequence[int]) -> int:
                size_bytes = await self._snapshots.keep(snapshot_id, upper_fd, folders, layers)
                self._images.hold(image.image_id)
                self._snapshot_images[snapshot_id] = image.image_id
                return size_bytes

            async def end() -> None:
                self._sandboxes.pop(sandbox_id, None)
                try:
                    await cleanup.aclose()
                finally:
                    self._store.let_go(layers.environment)

            commands = ContainerSettings(
                container,
                spec.environment.workdir,
                self._environ(spec, image),
                settings.uid,
                settings.gid,
                pipes,
                settings.start_timeout_s,
            )
            made = DockerSandbox(
                self._engine,
                SandboxSettings(
                    sandbox_id,
                    settings.user,
                    commands,
                    mounts,
                    self._config.exec.kill_grace_s,
                    self._ids,
                    settings.diff_exclude,
                    self._config.limits.diff_bytes,
                ),
                pid,
                keep,
                end,
            )
            cleanup = undo.pop_all()
        self._sandboxes[sandbox_id] = made
        return made

    def _origin(self, image: ImageInfo, layers: Layers) -> Origin:
        stored = self._store.folder
        # What an image declares to be writable would else be so without bounds.
        writable = tuple(dict.fromkeys((*self._docker.writable, *image.volumes)))
        contents = {n: stored / path for n in layers.mounts if (path := layers.mount(n))}
        return Origin(tuple(stored / path for path in layers.work), writable, contents)

    async def _start(self, sandbox_id: str, settings: dict[str, Any]) -> tuple[int, str]:
        """Makes and starts a container; returns the pid of its first process and its id."""
        try:
            async with asyncio.timeout(self._docker.start_timeout_s):
                # What the daemon has begun it finishes, so that there is something to remove.
                container = await to_its_end(self._engine.create(sandbox_id, settings))
                return await to_its_end(self._engine.start(container)), container
        except TimeoutError:
            raise SandboxUnavailable(
                f"the container did not start within {self._docker.start_timeout_s:g} s"
            ) from None
        except NotThereError as error:
            raise SandboxUnavailable(f"the container could not be started: {error}") from error

    def _environ(self, spec: SandboxSpec, image: ImageInfo) -> dict[str, str]:
        # An image that has a PATH has its programs there.
        path = image.environ.get("PATH", self._config.exec.path)
        return command_environ(self._docker.user, path, spec.environment.env)

    def _container(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        image: ImageInfo,
        mounts: SandboxMounts,
        pipes: Path,
    ) -> dict[str, Any]:
        """A container as the Engine API takes it."""
        limits, keeper = spec.limits, self._docker.keeper_uid
        files = self._config.sandbox.open_files
        binds = {**mounts.binds, spec.environment.workdir: mounts.work}
        bounded = limits.cpus < (os.cpu_count() or 1)
        processes = most_processes()
        return {
            "Image": image.image_id,
            "Entrypoint": ["/bin/sh", "-c", _KEEPER],
            "Cmd": [],
            "User": f"{keeper}:{keeper}",
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {SERVICE_LABEL: self.service_id, SANDBOX_LABEL: sandbox_id},
            "HostConfig": {
                "NetworkMode": self._docker.network if limits.network else "none",
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": limits.memory_bytes,
                "MemorySwap": limits.memory_bytes,
                "PidsLimit": limits.pids + _KEEPER_PIDS,
                "NanoCpus": int(limits.cpus * 1e9) if bounded else 0,
                "Ulimits": [
                    {"Name": "nofile", "Soft": files, "Hard": files},
                    {"Name": "core", "Soft": 0, "Hard": 0},
                    {"Name": "nproc", "Soft": processes, "Hard": processes},
                ],
                "IpcMode": "private",
                "LogConfig": {"Type": "none"},
                "RestartPolicy": {"Name": "no"},
                "Mounts": [
                    *(_bind(source, target) for target, source in binds.items()),
                    _bind(pipes, PIPES_FOLDER, read_only=True),
                ],
            },
        }


def _bind(source: Path, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}


def _make_pipes(folder: Path, keeper_uid: int) -> int:
    """Makes a sandbox's folder of pipes; returns the end that keeps its first process alive."""
    folder.mkdir()
    folder.chmod(0o711)
    life = folder / "life"
    os.mkfifo(life, 0o400)
    os.chown(life, keeper_uid, keeper_uid)
    # Both ends, so that nobody has to wait for anybody; it closes with this process.
    return os.open(life, os.O_RDWR | os.O_CLOEXEC)


def _remove_pipes(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
