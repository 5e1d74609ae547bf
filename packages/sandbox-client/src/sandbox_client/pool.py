"""Keeping idle sandboxes for the next creates: `core.pool` decides, this does it."""

import asyncio
import logging
from collections.abc import Callable

from service_kit.errors import ServiceError

from sandbox_client.backends.base import Backend, BackendSandbox
from sandbox_client.config import PoolConfig
from sandbox_client.core.limits import LimiterStatus, TokenBucket
from sandbox_client.core.pool import PoolBounds, WarmPool
from sandbox_client.limiter import Limiter
from sandbox_client.types import SandboxSpec

__all__ = ["PoolKeeper"]

logger = logging.getLogger(__name__)


class PoolKeeper:
    """The warm pool of one service. `keep_forever` has to run beside it.

    Creates come first: an idle sandbox is made only while no create is at work, one at a time,
    and counts as a start of `limits.starts_per_s`.
    """

    def __init__(
        self,
        config: PoolConfig,
        backend: Backend,
        *,
        starts: Limiter,
        rate: TokenBucket,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._backend = backend
        self._starts = starts
        self._rate = rate
        self._clock = clock
        self._new_id = new_id
        self._pool = WarmPool(
            PoolBounds(
                config.sandboxes,
                config.memory_bytes,
                backend.idle_bytes,
                config.per_environment,
                config.demand_s,
            )
        )
        self._specs: dict[str, SandboxSpec] = {}
        self._idle: dict[str, BackendSandbox] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def find(self, spec: SandboxSpec) -> str | None:
        """Id of an idle sandbox for this complete specification; `take` gives that one."""
        if not self._serves(spec):
            return None
        while (found := self._pool.find(repr(spec))) and self._idle[found].lost:
            self._end(found)
        return found

    def take(self, spec: SandboxSpec) -> BackendSandbox | None:
        """An idle sandbox for this specification, which is the caller's from now on."""
        if not self._serves(spec):
            return None
        kind = repr(spec)
        self._specs[kind] = spec
        taken = self._pool.ask(kind, self._clock())
        self._changed.set()
        return self._idle.pop(taken) if taken else None

    def _serves(self, spec: SandboxSpec) -> bool:
        # A snapshot is prepared to be forked at once, and must go when its lease is over.
        return self._pool.bounds.total > 0 and not spec.environment.snapshot

    def wake(self) -> None:
        """A create has ended: there may be time for the pool."""
        self._changed.set()

    async def keep_forever(self) -> None:
        """Makes and ends idle sandboxes until it is cancelled."""
        while True:
            # Ages matter too, so it looks now and then without being woken.
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            while await self.step():
                pass

    async def step(self) -> bool:
        """Ends what is too much and makes one sandbox; False if there is nothing to make now."""
        for sandbox_id in [s for s, sandbox in self._idle.items() if sandbox.lost]:
            self._end(sandbox_id)
        plan = self._pool.plan(self._clock())
        for sandbox_id in plan.end:
            self._end(sandbox_id)
        self._specs = {k: spec for k, spec in self._specs.items() if self._pool.is_asked(k)}
        if plan.make is None or self._starts.busy or self._rate.take(self._clock()) > 0:
            return False
        await self._make(plan.make)
        return True

    async def _make(self, kind: str) -> None:
        sandbox_id = self._new_id()
        self._pool.started(kind)
        try:
            sandbox = await self._backend.create(sandbox_id, self._specs[kind])
        except BaseException as error:
            self._pool.failed(kind)
            if not isinstance(error, ServiceError):
                raise
            logger.warning("no idle sandbox could be made: %s", error)
        else:
            self._pool.made(kind, sandbox_id)
            self._idle[sandbox_id] = sandbox

    def _end(self, sandbox_id: str) -> None:
        self._pool.remove(sandbox_id)
        task = asyncio.get_running_loop().create_task(self._idle.pop(sandbox_id).destroy())
        self._ending.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._ending.discard(task)
            if not task.cancelled() and task.exception() is not None:
                logger.error("an idle sandbox did not end cleanly", exc_info=task.exception())

        task.add_done_callback(done)

    async def stop(self) -> None:
        """Ends every idle sandbox."""
        for sandbox_id in list(self._idle):
            self._end(sandbox_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def status(self) -> list[LimiterStatus]:
        """Idle sandboxes and the memory they are counted with."""
        bounds, count = self._pool.bounds, len(self._pool)
        return [
            LimiterStatus("pool_sandboxes", float(bounds.sandboxes), float(count)),
            LimiterStatus(
                "pool_memory_bytes", float(bounds.memory_bytes), float(count * bounds.idle_bytes)
            ),
        ]
