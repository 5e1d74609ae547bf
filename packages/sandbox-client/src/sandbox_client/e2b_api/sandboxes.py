"""The sandboxes that were made through the endpoint: E2B's life of a sandbox over our leases."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from service_kit.errors import ServiceError

from sandbox_client.backends.base import BackendSandbox, ExecHooks
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.e2b_api.catalog import EMPTY_TREE, Catalog, Template
from sandbox_client.e2b_api.errors import ApiError, EnvdError, api_error, gone
from sandbox_client.e2b_api.messages import ConnectSandbox, ForkSandbox, NewSandbox, NewSnapshot
from sandbox_client.e2b_api.processes import Processes
from sandbox_client.errors import SandboxGone
from sandbox_client.manager import SandboxManager
from sandbox_client.types import Command, EnvironmentRef, ExecResult, SandboxLimits, SandboxSpec

__all__ = ["ApiSandbox", "Sandboxes"]

_OWNER = "e2b"
_NO_NETWORK: dict[str, object] = {"denyOut": ["0.0.0.0/0"]}


@dataclass
class ApiSandbox:
    """One sandbox as E2B tells it. Times are seconds of the wall clock."""

    sandbox_id: str
    template: Template
    workdir: str
    home: str
    metadata: dict[str, str]
    access_token: str
    network: bool
    started_at: float
    ends_at: float
    processes: Processes
    paused: bool = False


class Sandboxes:
    """All sandboxes of one endpoint."""

    def __init__(
        self,
        manager: SandboxManager,
        config: SandboxServiceConfig,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.catalog = Catalog(config.e2b_api.templates)
        self._manager = manager
        self._config = config
        self._settings = config.e2b_api
        self._clock = clock
        self._known: dict[str, ApiSandbox] = {}

    # -- looking

    def living(self) -> list[ApiSandbox]:
        """Those that are alive, paused ones included."""
        alive = {info.sandbox_id for info in self._manager.sandboxes(_OWNER)}
        self._known = {key: known for key, known in self._known.items() if key in alive}
        return list(self._known.values())

    def find(self, sandbox_id: str) -> ApiSandbox:
        """A living sandbox, paused or not.

        Raises:
            ApiError: there is none.
        """
        known = self._known.get(sandbox_id)
        try:
            if known is not None and not self._manager.get(sandbox_id).lost:
                return known
        except SandboxGone:
            del self._known[sandbox_id]
        raise ApiError(404, f"Sandbox {sandbox_id} not found")

    def running(self, sandbox_id: str) -> ApiSandbox:
        """A sandbox that is up.

        Raises:
            GoneError: there is none, or it is paused.
        """
        try:
            found = self.find(sandbox_id)
        except ApiError:
            raise gone(sandbox_id) from None
        if found.paused:
            raise gone(sandbox_id)
        return found

    def access(self, sandbox: ApiSandbox) -> BackendSandbox:
        """The sandbox itself, for its files."""
        return self._manager.get(sandbox.sandbox_id)

    # -- life

    async def create(self, body: NewSandbox, key: str = "") -> ApiSandbox:
        """Makes a sandbox; the same key gives the same one.

        Raises:
            ApiError: something is asked that is not offered here, or no such template.
            ServiceError: as the manager refuses it.
        """
        _refuse_what_is_not_offered(body)
        network = self._settings.network
        if body.allow_internet_access is not None:
            network = body.allow_internet_access
        if _network_rules(body) == _NO_NETWORK:
            network = False
        made = await self.make(
            self.catalog.get(body.templateID),
            timeout_s=self._timeout_s(body.timeout),
            metadata=body.metadata,
            env=body.envVars,
            network=network,
            key=key,
        )
        return self._known.setdefault(made.sandbox_id, made)

    async def make(
        self,
        template: Template,
        *,
        timeout_s: float,
        metadata: dict[str, str],
        env: dict[str, str],
        network: bool,
        key: str = "",
    ) -> ApiSandbox:
        """Makes a sandbox that no listing shows yet."""
        environment = replace(template.environment, env={**template.environment.env, **env})
        await self._put_if_missing(environment)
        created = await self._manager.create(
            key=key or f"e2b-{secrets.token_hex(16)}",
            owner=_OWNER,
            spec=SandboxSpec(environment, replace(template.limits, network=network)),
            lease_s=timeout_s,
            labels=metadata,
        )
        now = self._clock()
        return ApiSandbox(
            sandbox_id=created.sandbox_id,
            template=template,
            workdir=created.workdir,
            home=environment.env.get("HOME", created.workdir),
            metadata=metadata,
            access_token=secrets.token_hex(16),
            network=network,
            started_at=now,
            ends_at=now + timeout_s,
            processes=Processes(self._settings.processes, self._settings.backlog_bytes),
        )

    async def unmake(self, sandbox: ApiSandbox) -> None:
        """Ends a sandbox of `make`."""
        await self._manager.destroy(sandbox.sandbox_id)

    async def _put_if_missing(self, environment: EnvironmentRef) -> None:
        """Only the empty tree is the endpoint's own; others have been put by whoever named them."""
        digest = EMPTY_TREE.digest
        if environment.tree_digest == digest and self._manager.missing_environments([digest]):
            with self._manager.spool.file() as (archive, _):
                archive.write(EMPTY_TREE.tar_bytes())
                archive.seek(0)
                await self._manager.put_environment(digest, archive)

    async def kill(self, sandbox_id: str) -> None:
        """Ends a sandbox.

        Raises:
            ApiError: there is none.
        """
        self.find(sandbox_id)
        self._known.pop(sandbox_id, None)
        if not await self._manager.destroy(sandbox_id):
            raise ApiError(404, f"Sandbox {sandbox_id} not found")

    async def set_timeout(self, sandbox_id: str, timeout: int) -> None:
        """Lets a sandbox live that many seconds from now; 0 ends it."""
        if timeout == 0:
            await self.kill(sandbox_id)
            return
        self._renew(self.find(sandbox_id), self._timeout_s(timeout))

    async def pause(self, sandbox_id: str, *, memory: bool) -> None:
        """Stops a sandbox's processes where they are, or without `memory` ends them.

        Nothing is written to disk: it goes on holding its memory and its place, for at most
        `lease.max_s`.

        Raises:
            ApiError: it is paused already, or gone.
        """
        sandbox = self.find(sandbox_id)
        if sandbox.paused:
            raise ApiError(409, f"Sandbox {sandbox_id} is already paused")
        sandbox.paused = True
        sandbox.processes.interrupt(EnvdError("unavailable", "the sandbox was paused"))
        try:
            await self._signal_all(sandbox, "STOP" if memory else "KILL")
        except BaseException:
            sandbox.paused = False
            raise
        self._renew(sandbox, self._config.lease.max_s)

    async def connect(self, sandbox_id: str, body: ConnectSandbox) -> tuple[ApiSandbox, bool]:
        """A sandbox that runs, resumed if it was paused; then the second is True.

        A running one's time is only ever prolonged.
        """
        sandbox = self.find(sandbox_id)
        timeout_s = self._timeout_s(body.timeout)
        if not sandbox.paused:
            if self._clock() + timeout_s > sandbox.ends_at:
                self._renew(sandbox, timeout_s)
            return sandbox, False
        await self._signal_all(sandbox, "CONT" if body.memory else "KILL")
        sandbox.paused = False
        self._renew(sandbox, timeout_s)
        return sandbox, True

    async def _signal_all(self, sandbox: ApiSandbox, name: str) -> None:
        # The first process of a sandbox cannot be reached by this, nor can the shell itself.
        await self.run(sandbox, ("/bin/sh", "-c", f"kill -{name} -1; true"))

    def _renew(self, sandbox: ApiSandbox, timeout_s: float) -> None:
        if self._manager.renew([sandbox.sandbox_id], timeout_s):
            raise ApiError(404, f"Sandbox {sandbox.sandbox_id} not found")
        sandbox.ends_at = self._clock() + timeout_s

    def _timeout_s(self, asked: int | None) -> float:
        longest = self._config.lease.max_s
        if asked is None:
            return min(self._settings.default_timeout_s, longest)
        if not 1 <= asked <= longest:
            raise ApiError(
                400, f"Timeout must be between 1 and {longest:g} seconds (lease.max_s), got {asked}"
            )
        return float(asked)

    async def close(self) -> None:
        """Ends all of them, and the commands in them."""
        living = self.living()
        await asyncio.gather(*(self.unmake(sandbox) for sandbox in living))
        await asyncio.gather(*(sandbox.processes.ended() for sandbox in living))

    # -- snapshots

    async def snapshot(self, sandbox_id: str, body: NewSnapshot) -> Template:
        """Keeps the files of a sandbox as something to start from.

        Raises:
            ApiError: the processes were asked for as well, which no snapshot here holds.
        """
        if body.memory:
            raise ApiError(
                400,
                'snapshots hold files, not processes; ask for mode="filesystem"',
                error_code="snapshot_memory_unsupported",
            )
        sandbox = self.find(sandbox_id)
        environment = await self.keep(sandbox, self._config.lease.max_s)
        template = Template(
            environment.snapshot,
            environment,
            names=(body.name,) if body.name else (),
            limits=sandbox.template.limits,
            source=sandbox_id,
        )
        self.catalog.add(template)
        return template

    async def keep(self, sandbox: ApiSandbox, lease_s: float) -> EnvironmentRef:
        """Makes a snapshot, for which nothing in the sandbox moves; returns it as a source."""
        if not sandbox.paused:
            await self._signal_all(sandbox, "STOP")
        try:
            kept = await self._manager.snapshot(
                sandbox.sandbox_id, secrets.token_hex(16), lease_s, stopped=True
            )
        finally:
            if not sandbox.paused:
                await self._signal_all(sandbox, "CONT")
        return EnvironmentRef(
            snapshot=kept.snapshot_id, workdir=kept.workdir, env=sandbox.template.environment.env
        )

    async def forget(self, template: Template) -> None:
        """Lets a made template go; sandboxes that started from it live on."""
        self.catalog.remove(template.template_id)
        await self._manager.destroy_snapshot(template.environment.snapshot)

    async def fork(self, sandbox_id: str, body: ForkSandbox) -> list[ApiSandbox | ApiError]:
        """New sandboxes from one snapshot of a sandbox's files; each may fail by itself."""
        source = self.find(sandbox_id)
        timeout_s = self._timeout_s(body.timeout)
        environment = await self.keep(source, self._config.lease.max_s)
        template = replace(source.template, environment=environment)

        async def one() -> ApiSandbox | ApiError:
            try:
                made = await self.make(
                    template,
                    timeout_s=timeout_s,
                    metadata=source.metadata,
                    env={},
                    network=source.network,
                )
            except ServiceError as error:
                return api_error(error)
            self._known[made.sandbox_id] = made
            return made

        try:
            return await asyncio.gather(*(one() for _ in range(body.count)))
        finally:
            # The forks hold it as long as they need it.
            await self._manager.destroy_snapshot(environment.snapshot)

    async def keep_snapshots_forever(self) -> None:
        """Renews what the catalog holds: runs until it is cancelled."""
        lease_s = self._config.lease.max_s
        while True:
            await asyncio.sleep(lease_s / 3)
            held = {made.environment.snapshot: made for made in self.catalog.made()}
            for lost in self._manager.renew([], lease_s, list(held)):
                self.catalog.remove(held[lost].template_id)

    # -- commands of the endpoint's own

    async def run(self, sandbox: ApiSandbox, argv: Sequence[str]) -> ExecResult:
        """Runs a helper in the sandbox, with its user's rights.

        Raises:
            EnvdError: it says more than `e2b_api.listing_bytes`.
        """
        kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        limit = left = self._settings.listing_bytes
        room = asyncio.Event()
        room.set()

        def collect(stream: str, data: bytes) -> None:
            nonlocal left
            left -= len(data)
            if left >= 0:
                kept[stream].append(data)

        hooks = ExecHooks(on_output=collect, room=room)
        command = Command(argv=tuple(argv))
        result = await self._manager.run(sandbox.sandbox_id, command, hooks)
        if left < 0:
            raise EnvdError(
                "resource_exhausted",
                f"the listing has over {limit} bytes (e2b_api.listing_bytes); ask for less of it",
            )
        return replace(
            result, stdout_bytes=b"".join(kept["stdout"]), stderr_bytes=b"".join(kept["stderr"])
        )

    def now(self) -> float:
        """The wall clock."""
        return self._clock()

    def limits_of(self, sandbox: ApiSandbox) -> SandboxLimits:
        """What the sandbox may use, defaults filled in."""
        asked, defaults = sandbox.template.limits, self._config.sandbox
        return replace(
            asked,
            cpus=asked.cpus or defaults.cpus,
            memory_bytes=asked.memory_bytes or defaults.memory_bytes,
            disk_bytes=asked.disk_bytes or defaults.disk_bytes,
        )


def _refuse_what_is_not_offered(body: NewSandbox) -> None:
    asked = {
        "lifecycle.on_timeout 'pause'": body.autoPause,
        "lifecycle.auto_resume": body.autoResume.enabled,
        "network rules": _network_rules(body) not in ({}, _NO_NETWORK),
        "mcp": body.mcp,
        "iam": body.iam,
        "volume_mounts": body.volumeMounts,
    }
    for what, wanted in asked.items():
        if wanted:
            raise ApiError(400, f"this endpoint does not offer {what}; leave it out")


def _network_rules(body: NewSandbox) -> dict[str, object]:
    return {name: value for name, value in (body.network or {}).items() if value}
