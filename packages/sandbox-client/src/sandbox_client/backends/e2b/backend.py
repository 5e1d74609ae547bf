"""Back-end `e2b`: sandboxes made by E2B's official SDK."""

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from e2b import AsyncSandbox

from sandbox_client.backends.base import Recovered
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.backends.e2b.guest import Guest
from sandbox_client.backends.e2b.pacing import CreatePacer
from sandbox_client.backends.e2b.recipe import DOCKERFILE, Recipe, template_size
from sandbox_client.backends.e2b.remote import RemoteSandboxes, e2b_client
from sandbox_client.backends.e2b.sandbox import E2BSandbox
from sandbox_client.backends.e2b.snapshots import SnapshotShelf
from sandbox_client.backends.e2b.tags import SERVICE_TAG, Tags
from sandbox_client.backends.e2b.templates import TemplateShelf
from sandbox_client.backends.e2b.trees import TreeShelf
from sandbox_client.backends.local.jail.python_args import BASE_ENVIRON
from sandbox_client.backends.local.store import EnvironmentStore
from sandbox_client.backends.setup import check_workdir, require_environment, take_lock
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import QuotaExhausted, SandboxGone, ServiceError
from sandbox_client.types import EnvironmentRef, SandboxLimits, SandboxSpec

__all__ = ["E2BBackend"]

logger = logging.getLogger(__name__)

_CALLS_AT_ONCE = 8
_MIN_FILE_KEY = 16
_TMP = "/tmp"  # noqa: S108 -- inside the sandbox


class E2BBackend:
    """Makes sandboxes at E2B; see `Backend`."""

    name = "e2b"
    idle_bytes = 0
    """An idle sandbox takes no memory of this host."""

    def __init__(
        self, config: SandboxServiceConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._settings = config.e2b
        self._clock = clock
        self._state = config.state_dir
        self._scratch = self._state / "e2b"
        client = e2b_client(self._settings)
        self._remote = RemoteSandboxes(client, self._settings)
        self._templates = TemplateShelf(client, self._settings, self._scratch)
        self._snapshots = SnapshotShelf(client, self._settings)
        store = EnvironmentStore(
            self._state / "environments",
            uid=os.getuid(),
            gid=os.getgid(),
            max_bytes=config.limits.environments_bytes,
        )
        self._trees = TreeShelf(store, config.limits.upload_bytes)
        self._pacer = CreatePacer(
            self._settings.creates_per_s,
            self._settings.create_burst,
            pause_s=self._settings.retry_after_s,
            now=clock(),
        )
        self._service_id = ""
        self._lock: IO[bytes] | None = None
        self._sandboxes: dict[str, E2BSandbox] = {}
        self._before: dict[tuple[str, str], str] = {}

    # -- life of the back-end

    async def start(self) -> None:
        """Takes the state folder; ends what an earlier run left, unless it is taken over."""
        self._lock = take_lock(self._state)
        self._scratch.mkdir(exist_ok=True)
        self._service_id = _lasting_id(self._scratch / "service-id")
        await asyncio.to_thread(self._trees.store.open)
        if not self._settings.reattach:
            await self._remote.end_tagged(SERVICE_TAG, self._service_id)
        await self._snapshots.open(self._service_id)
        self._remote.own(self._keep_alive_forever())

    async def stop(self) -> None:
        """Ends every sandbox."""
        await self._remote.each([sandbox.destroy() for sandbox in self._sandboxes.values()])
        await self._remote.close()
        await self._snapshots.close()
        await self._templates.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def reattach(self) -> list[Recovered]:
        """The living sandboxes that an earlier run of this service made, found by their tags."""
        if not self._settings.reattach:
            return []
        found: list[Recovered] = []

        async def take(remote_id: str, metadata: dict[str, str]) -> None:
            tags = Tags.read(metadata)
            if tags is None or tags.claim is None:
                await self._remote.kill(remote_id)
                return
            try:
                sandbox = await self._finish(await self._remote.connect(remote_id), tags)
            except ServiceError as error:
                logger.warning("sandbox %s of an earlier run is lost: %s", remote_id, error)
                await self._remote.kill(remote_id)
                return
            found.append(Recovered(tags.sandbox_id, tags.claim, tags.environment, sandbox))

        listed = await self._remote.listed({SERVICE_TAG: self._service_id})
        await self._remote.each(take(*one) for one in listed)
        if found:
            logger.info("took over %d sandboxes of an earlier run", len(found))
        return found

    def missing_protections(self) -> tuple[str, ...]:
        """What E2B does not offer."""
        return (
            "no limits of processes, disk and inodes but the template's own",
            "commands that gain the administrator's rights inside can bend what is seen of their "
            "own sandbox",
        )

    def limiters(self) -> list[LimiterStatus]:
        """Stored trees, builds and creates."""
        limit = float(self._config.limits.environments_bytes)
        creates = self._settings.creates_per_s
        return [
            LimiterStatus("environments_bytes", limit, float(self._trees.store.size_bytes)),
            self._templates.status(),
            LimiterStatus("e2b.creates_per_s", creates, self._pacer.used(self._clock())),
        ]

    # -- environments

    def missing_environments(self, digests: Sequence[str]) -> list[str]:
        """Which of these environments are not stored."""
        return [digest for digest in digests if digest not in self._trees.store]

    async def put_environment(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores a tree after verifying its digest."""
        return await self._trees.put(digest, archive)

    # -- sandboxes

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> E2BSandbox:
        """Makes a sandbox."""
        environment = spec.environment
        check_workdir(environment.workdir, self._settings.writable)
        template, before = await self._template(environment, spec.limits)
        tags = Tags(
            self._service_id,
            sandbox_id,
            environment.workdir,
            before,
            template,
            environment.env,
            spec.claim,
        )
        wait_s = self._pacer.take(self._clock())
        if wait_s > 0:
            raise QuotaExhausted(
                f"e2b.creates_per_s allows {self._settings.creates_per_s:g} creates a second, or "
                "E2B's own rate limit is used up",
                retry_after_s=wait_s,
            )
        try:
            remote = await self._remote.create(template, tags, network=spec.limits.network)
        except QuotaExhausted as error:
            error.retry_after_s = self._pacer.refused(self._clock())
            raise
        try:
            return await self._finish(remote, tags)
        except BaseException:
            self._remote.own(self._remote.kill(remote.sandbox_id))
            raise

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot of `E2BSandbox.snapshot`."""
        await self._snapshots.remove(snapshot_id)

    async def _template(
        self, environment: EnvironmentRef, limits: SandboxLimits
    ) -> tuple[str, str]:
        """The template to start from, and the digest of the tree that is in its work folder."""
        if environment.snapshot:
            return self._snapshots.template(environment.snapshot), ""
        if environment.template:
            return environment.template, ""
        settings = self._settings
        cpus, memory_mb = template_size(
            (settings.cpus, settings.memory_mb), limits.cpus, limits.memory_bytes
        )
        context: Path | None = None
        dockerfile = False
        if environment.tree_digest:
            require_environment(self._trees.store, environment.tree_digest)
            context = self._trees.store.tree(environment.tree_digest)
            dockerfile = (context / DOCKERFILE).is_file()
        image = environment.image or settings.base_image
        recipe = Recipe(
            tree_digest=environment.tree_digest,
            dockerfile=dockerfile,
            image="" if dockerfile else image,
            base_template="" if dockerfile or image else settings.base_template,
            workdir=environment.workdir,
            folders=(environment.workdir, *self._folders),
            user=settings.user,
            admin_user=settings.admin_user,
            cpus=cpus,
            memory_mb=memory_mb,
        )
        if not environment.tree_digest:
            return await self._templates.name_of(recipe, None), ""
        with self._trees.store.reserve(environment.tree_digest):
            name = await self._templates.name_of(recipe, context)
        return name, "" if dockerfile else environment.tree_digest

    @property
    def _folders(self) -> tuple[str, ...]:
        return tuple(path for path in self._settings.writable if path != _TMP)

    async def _finish(self, remote: AsyncSandbox, tags: Tags) -> E2BSandbox:
        """The sandbox as callers have it, once the tree to compare with is here."""
        limit_bytes = self._config.limits.upload_bytes
        digest = tags.before or await self._pull_before(
            Guest(remote, self._settings, limit_bytes), tags.template, tags.workdir
        )
        require_environment(self._trees.store, digest)
        before = await self._trees.hold(digest)

        def forget() -> None:
            self._sandboxes.pop(tags.sandbox_id, None)
            self._trees.let_go(digest)

        sandbox = E2BSandbox(
            remote,
            self._settings,
            workdir=tags.workdir,
            environ={"TERM": "dumb", **BASE_ENVIRON, **tags.env},
            kill_grace_s=self._config.exec.kill_grace_s,
            limit_bytes=limit_bytes,
            before=before,
            snapshots=self._snapshots,
            forget=forget,
        )
        self._sandboxes[tags.sandbox_id] = sandbox
        return sandbox

    async def _pull_before(self, guest: Guest, template: str, workdir: str) -> str:
        """Digest of what a template has in its work folder, fetched from its first sandbox."""
        known = self._before.get((template, workdir), "")
        if known in self._trees.store:
            return known
        folders = [workdir, *self._folders]
        request = {"folders": folders, "user": self._settings.user}
        (await guest.call("prepare", request)).close()
        wanted = {
            "path": workdir,
            "root": "/",
            "exclude": self._settings.diff_exclude,
            "max_bytes": guest.limit_bytes,
        }
        with await guest.call("pack", wanted) as archive:
            digest = await self._trees.put_unnamed(archive)
        self._before[(template, workdir)] = digest
        return digest

    # -- what goes on beside

    async def _keep_alive_forever(self) -> None:
        """Tells E2B that its sandboxes are still wanted."""
        timeout_s = self._settings.sandbox_timeout_s

        async def renew(sandbox: E2BSandbox) -> None:
            try:
                with sdk_errors("renewing a sandbox"):
                    await sandbox.remote.set_timeout(timeout_s)
            except SandboxGone:
                sandbox.lose("E2B has ended it")
            except ServiceError as error:
                # Two more tries fit into its time.
                logger.warning("sandbox %s was not renewed: %s", sandbox.remote_id, error)

        while True:
            await asyncio.sleep(timeout_s / 3)
            living = [sandbox for sandbox in self._sandboxes.values() if not sandbox.lost]
            await self._remote.each(renew(sandbox) for sandbox in living)


def _lasting_id(file: Path) -> str:
    """A name that no other service has and that outlives this one's restarts."""
    try:
        text = file.read_text().strip()
    except FileNotFoundError:
        text = ""
    if not text:
        text = secrets.token_hex(12)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
            partial.write(text)
        Path(partial.name).replace(file)
    return text
