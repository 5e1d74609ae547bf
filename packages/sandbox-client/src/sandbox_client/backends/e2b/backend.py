"""Back-end `e2b`: sandboxes made by E2B's official SDK."""

import asyncio
import hashlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, Any

from e2b import E2B, AsyncSandbox, SandboxQuery
from service_kit.auth import read_token
from service_kit.errors import StartupError

from sandbox_client.backends.base import Recovered
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.backends.e2b.guest import Guest
from sandbox_client.backends.e2b.pacing import CreatePacer
from sandbox_client.backends.e2b.recipe import DOCKERFILE, Recipe, template_size
from sandbox_client.backends.e2b.sandbox import E2BSandbox
from sandbox_client.backends.e2b.tags import SANDBOX_TAG, SERVICE_TAG, Tags
from sandbox_client.backends.e2b.templates import TemplateShelf
from sandbox_client.backends.e2b.trees import TreeShelf
from sandbox_client.backends.local.jail.python_args import BASE_ENVIRON
from sandbox_client.backends.local.store import EnvironmentStore
from sandbox_client.backends.setup import check_workdir, require_environment, take_lock
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.errors import QuotaExhausted, SandboxGone, SandboxUnavailable, ServiceError
from sandbox_client.types import EnvironmentRef, SandboxLimits, SandboxSpec

__all__ = ["E2BBackend"]

logger = logging.getLogger(__name__)

_CALLS_AT_ONCE = 8
_MIN_FILE_KEY = 16
_TMP = "/tmp"  # noqa: S108 -- inside the sandbox


class E2BBackend:
    """Makes sandboxes at E2B; see `Backend`."""

    name = "e2b"

    def __init__(
        self, config: SandboxServiceConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._settings = config.e2b
        self._clock = clock
        self._state = config.state_dir
        self._scratch = self._state / "e2b"
        self._client = _client(config)
        self._shelf = TemplateShelf(self._client, self._settings, self._scratch)
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
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life of the back-end

    async def start(self) -> None:
        """Takes the state folder; ends what an earlier run left, unless it is taken over."""
        self._lock = take_lock(self._state)
        self._scratch.mkdir(exist_ok=True)
        self._service_id = _lasting_id(self._scratch / "service-id")
        await asyncio.to_thread(self._trees.store.open)
        if not self._settings.reattach:
            left = await self._remote_ids({SERVICE_TAG: self._service_id})
            if left:
                logger.warning("ending %d sandboxes that an earlier run left", len(left))
            await self._at_most(_CALLS_AT_ONCE, [self._kill(remote_id) for remote_id in left])
        self._own(self._keep_alive_forever())

    async def stop(self) -> None:
        """Ends every sandbox."""
        living = list(self._sandboxes.values())
        await self._at_most(_CALLS_AT_ONCE, [sandbox.destroy() for sandbox in living])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shelf.close()
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
                await self._kill(remote_id)
                return
            try:
                with sdk_errors(f"connecting to sandbox {remote_id}"):
                    remote = await self._client.AsyncSandbox.connect(
                        remote_id, timeout=self._settings.sandbox_timeout_s
                    )
                sandbox = await self._finish(remote, tags)
            except ServiceError as error:
                logger.warning("sandbox %s of an earlier run is lost: %s", remote_id, error)
                await self._kill(remote_id)
                return
            found.append(Recovered(tags.sandbox_id, tags.claim, tags.environment, sandbox))

        listed = await self._remote({SERVICE_TAG: self._service_id})
        await self._at_most(_CALLS_AT_ONCE, [take(*one) for one in listed])
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

    def gauges(self) -> dict[str, tuple[float, float]]:
        """Stored trees, builds and creates."""
        builds, store = self._shelf.status(), self._trees.store
        limit = float(self._config.limits.environments_bytes)
        return {
            "environments_bytes": (limit, float(store.size_bytes)),
            builds.name: (builds.limit, builds.in_use + builds.waiting),
            "e2b.creates_per_s": (
                self._settings.creates_per_s,
                self._pacer.used(self._clock()),
            ),
        }

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
        remote = await self._create_remote(template, tags, network=spec.limits.network)
        try:
            return await self._finish(remote, tags)
        except BaseException:
            self._own(self._kill(remote.sandbox_id))
            raise

    async def _template(
        self, environment: EnvironmentRef, limits: SandboxLimits
    ) -> tuple[str, str]:
        """The template to start from, and the digest of the tree that is in its work folder."""
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
            return await self._shelf.name_of(recipe, None), ""
        with self._trees.store.reserve(environment.tree_digest):
            name = await self._shelf.name_of(recipe, context)
        return name, "" if dockerfile else environment.tree_digest

    @property
    def _folders(self) -> tuple[str, ...]:
        return tuple(path for path in self._settings.writable if path != _TMP)

    async def _create_remote(self, template: str, tags: Tags, *, network: bool) -> AsyncSandbox:
        """Asks for one sandbox, and makes sure that it is one: E2B may have made it unheard."""
        name = f"{tags.service}/{tags.sandbox_id}".encode()
        key = f"tailrace-{hashlib.sha256(name).hexdigest()[:40]}"

        async def ask() -> AsyncSandbox:
            with sdk_errors("making a sandbox", retry_after_s=self._settings.retry_after_s):
                return await self._client.AsyncSandbox.create(
                    template,
                    timeout=self._settings.sandbox_timeout_s,
                    metadata=tags.metadata(),
                    allow_internet_access=network,
                    idempotency_key=key,
                )

        try:
            try:
                return await ask()
            except SandboxUnavailable as error:
                if not error.retryable:
                    raise
                made = await self._find(tags.sandbox_id)
                return made if made is not None else await ask()
        except QuotaExhausted as error:
            error.retry_after_s = self._pacer.refused(self._clock())
            raise
        except BaseException:
            # Nobody will ask for it: the caller has gone away, or is told that there is none.
            self._own(self._end_by_tag(tags.sandbox_id))
            raise

    async def _find(self, sandbox_id: str) -> AsyncSandbox | None:
        """The sandbox with this tag, if E2B has made it."""
        for remote_id in await self._remote_ids({SANDBOX_TAG: sandbox_id}):
            with sdk_errors(f"connecting to sandbox {remote_id}"):
                return await self._client.AsyncSandbox.connect(
                    remote_id, timeout=self._settings.sandbox_timeout_s
                )
        return None

    async def _end_by_tag(self, sandbox_id: str) -> None:
        for remote_id in await self._remote_ids({SANDBOX_TAG: sandbox_id}):
            await self._kill(remote_id)

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
            await self._at_most(_CALLS_AT_ONCE, [renew(sandbox) for sandbox in living])

    async def _kill(self, remote_id: str) -> None:
        try:
            with sdk_errors(f"ending sandbox {remote_id}"):
                await self._client.AsyncSandbox.kill(remote_id)
        except ServiceError as error:
            # E2B ends it by itself after e2b.sandbox_timeout_s.
            logger.warning("%s", error)

    async def _remote(self, metadata: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Ids and metadata of the sandboxes at E2B that carry these tags."""
        found: list[tuple[str, dict[str, str]]] = []
        pages = self._client.AsyncSandbox.list(query=SandboxQuery(metadata=metadata))
        with sdk_errors("listing sandboxes"):
            while pages.has_next:
                found += [(i.sandbox_id, dict(i.metadata)) for i in await pages.next_items()]
        return found

    async def _remote_ids(self, metadata: dict[str, str]) -> list[str]:
        return [remote_id for remote_id, _ in await self._remote(metadata)]

    async def _at_most(self, count: int, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Runs all of the work, so many at once; failures are logged and hold nothing up."""
        slots = asyncio.Semaphore(count)

        async def one(coroutine: Coroutine[Any, Any, None]) -> None:
            async with slots:
                await coroutine

        outcomes = await asyncio.gather(*map(one, work), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                logger.warning("at E2B: %s", outcome)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work that ends with the back-end at the latest."""

        async def logged() -> None:
            try:
                await work
            except ServiceError as error:
                logger.warning("at E2B: %s", error)

        task = asyncio.get_running_loop().create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _client(config: SandboxServiceConfig) -> E2B:
    settings = config.e2b
    if settings.api_key is not None or settings.api_key_file is not None:
        key = read_token(settings.api_key, settings.api_key_file)
    else:
        key = os.environ.get("E2B_API_KEY")
    if not key:
        raise StartupError(
            "back-end `e2b` needs a key: set e2b.api_key_file, or the variable E2B_API_KEY"
        )
    params: dict[str, object] = {
        "api_key": key,
        "retries": settings.retries,
        "request_timeout": settings.request_timeout_s,
    }
    for name in ("domain", "api_url", "sandbox_url"):
        if value := getattr(settings, name):
            params[name] = value
    return E2B(**params)  # type: ignore[arg-type]


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
