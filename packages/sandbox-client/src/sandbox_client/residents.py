"""The sandboxes that are up: who holds them until when, what runs in them, how they end."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox_client.backends.base import BackendSandbox, Recovered
from sandbox_client.core.leases import KeyConflictError, LeaseTable
from sandbox_client.errors import SandboxGone
from sandbox_client.types import EnvironmentRef, SandboxInfo

__all__ = ["Resident", "Residents"]

logger = logging.getLogger(__name__)


@dataclass
class Resident:
    """A sandbox that is up."""

    sandbox: BackendSandbox
    key: str
    """Its owner and the owner's key for it."""
    environment: EnvironmentRef
    running: int = 0
    """Commands."""


class Residents:
    """All sandboxes of one service that are up, with their leases.

    Args:
        clock: seconds, as of the leases.
        leaving: told at once of one that is to end, by its id.
        ended: told of one of which nothing is left.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        leaving: Callable[[str, Resident], None],
        ended: Callable[[Resident], None],
    ) -> None:
        self.leases = LeaseTable()
        self._clock = clock
        self._leaving = leaving
        self._ended = ended
        self._living: dict[str, Resident] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """How many are up."""
        return len(self._living)

    @property
    def places(self) -> int:
        """How many count against the limit: ending ones still hold what they used."""
        return len(self.leases) + len(self._ending)

    def add(self, sandbox_id: str, resident: Resident) -> None:
        """One more is up; its lease has been claimed."""
        self._living[sandbox_id] = resident

    def adopt(self, found: Recovered, lease_s: float) -> None:
        """Gives a sandbox of an earlier run a lease, in which its owner can come back."""
        claim, now = found.claim, self._clock()
        try:
            self.leases.claim(
                owner=claim.owner,
                key=claim.key,
                fingerprint=claim.fingerprint,
                new_id=found.sandbox_id,
                now=now,
                labels=dict(claim.labels),
            )
        except KeyConflictError:
            logger.warning("sandbox %s: another one has its key", found.sandbox_id)
            return
        self.leases.grant(found.sandbox_id, lease_s=lease_s, now=now)
        key = f"{claim.owner}/{claim.key}"
        self.add(found.sandbox_id, Resident(found.sandbox, key, found.environment))

    def get(self, sandbox_id: str) -> Resident:
        """One that is up.

        Raises:
            SandboxGone: it is not, or never was.
        """
        resident = self._living.get(sandbox_id)
        if resident is None:
            raise SandboxGone(
                f"no sandbox {sandbox_id!r} is alive: it was destroyed, its lease ran out, or the "
                "service was restarted; create a new one"
            )
        return resident

    def renew(self, sandbox_ids: Sequence[str], lease_s: float) -> list[str]:
        """Prolongs leases; returns the ids that are gone."""
        lost = [
            sandbox_id
            for sandbox_id in sandbox_ids
            if (resident := self._living.get(sandbox_id)) is not None and resident.sandbox.lost
        ]
        alive = [sandbox_id for sandbox_id in sandbox_ids if sandbox_id not in lost]
        return lost + self.leases.renew(alive, lease_s=lease_s, now=self._clock())

    def end(self, sandbox_id: str) -> asyncio.Task[None] | None:
        """Takes a sandbox out of the tables at once, and ends it in a task of its own.

        Returns:
            That task, or the one that ends it already; None if there is no such sandbox.
        """
        if sandbox_id not in self._living:
            return self._ending.get(sandbox_id)
        resident = self._living.pop(sandbox_id)
        self.leases.release(sandbox_id)
        self._leaving(sandbox_id, resident)
        task = asyncio.get_running_loop().create_task(resident.sandbox.destroy())
        self._ending[sandbox_id] = task

        def done(task: asyncio.Task[None]) -> None:
            del self._ending[sandbox_id]
            self._ended(resident)
            if not task.cancelled() and task.exception() is not None:
                logger.error(
                    "sandbox %s did not end cleanly", sandbox_id, exc_info=task.exception()
                )

        task.add_done_callback(done)
        return task

    async def end_all(self) -> None:
        """Ends every one, and waits until nothing is left."""
        for sandbox_id in list(self._living):
            self.end(sandbox_id)
        # A failure has been logged by the task's own callback.
        await asyncio.gather(*self._ending.values(), return_exceptions=True)

    def reap(self) -> list[str]:
        """Ends sandboxes whose lease is over and those that are lost; returns their ids."""
        over = [s for s in self.leases.expired(self._clock()) if s in self._living]
        lost = [s for s, living in self._living.items() if living.sandbox.lost and s not in over]
        for sandbox_id in over:
            logger.info("sandbox %s: its lease was not renewed", sandbox_id)
        for sandbox_id in lost:
            logger.warning("sandbox %s: %s", sandbox_id, self._living[sandbox_id].sandbox.lost)
        for sandbox_id in (*over, *lost):
            self.end(sandbox_id)
        return [*over, *lost]

    def listing(self, owner: str | None = None) -> list[SandboxInfo]:
        """Those that are up, oldest first."""
        now = self._clock()
        return [
            SandboxInfo(
                record.sandbox_id,
                record.owner,
                dict(record.labels),
                now - record.created_at,
                max(0.0, (record.expires_at or now) - now),
                resident.running,
            )
            for record in self.leases.records(owner)
            if (resident := self._living.get(record.sandbox_id)) is not None
        ]
