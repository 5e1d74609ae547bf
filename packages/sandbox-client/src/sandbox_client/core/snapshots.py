"""Which snapshots there are, who needs them, and which may go.

A snapshot is `claimed` (being made; its key is taken), then `kept`, then `over` once its lease has
ended, and removed when nobody needs it any more: no sandbox that started from it, and no snapshot
of such a sandbox.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sandbox_client.core.leases import Claim, LeaseTable

__all__ = ["KeptSnapshot", "SnapshotTable"]


@dataclass
class KeptSnapshot:
    """A snapshot that can be started from."""

    workdir: str
    env: Mapping[str, str]
    size_bytes: int
    parent: str = ""
    """The snapshot that its sandbox had started from, if any."""
    users: int = field(default=0, init=False)


class SnapshotTable:
    """All snapshots of one service. Time is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._leases = LeaseTable()
        self._kept: dict[str, KeptSnapshot] = {}

    def __len__(self) -> int:
        """Those kept and those being made."""
        return len(self._kept) + sum(r.expires_at is None for r in self._leases.records())

    def claim(self, sandbox_id: str, key: str, *, new_id: str, now: float) -> Claim:
        """Takes a key for a snapshot to be made, or finds the one it has made before."""
        return self._leases.claim(owner=sandbox_id, key=key, fingerprint="", new_id=new_id, now=now)

    def abandon(self, snapshot_id: str) -> None:
        """It could not be made."""
        self._leases.release(snapshot_id)

    def keep(self, snapshot_id: str, made: KeptSnapshot) -> None:
        """It is there. `grant` has to follow; its parent was held when it was begun."""
        self._kept[snapshot_id] = made

    def grant(self, snapshot_id: str, *, lease_s: float, now: float) -> KeptSnapshot | None:
        """Starts or prolongs its lease; None if it is gone."""
        if snapshot_id not in self._leases or snapshot_id not in self._kept:
            return None
        self._leases.grant(snapshot_id, lease_s=lease_s, now=now)
        return self._kept[snapshot_id]

    def renew(self, snapshot_ids: Iterable[str], *, lease_s: float, now: float) -> list[str]:
        """Sets leases to end `lease_s` from now; returns the ids that are over or gone."""
        return self._leases.renew(snapshot_ids, lease_s=lease_s, now=now)

    def end(self, snapshot_id: str) -> bool:
        """Ends a lease; False if there was none."""
        return snapshot_id in self._kept and self._leases.release(snapshot_id)

    def hold(self, snapshot_id: str, now: float) -> KeptSnapshot | None:
        """Counts one more that needs it; None if its lease is over or it never was."""
        record = self._leases.get(snapshot_id)
        kept = self._kept.get(snapshot_id)
        if kept is None or record is None or (record.expires_at or now) < now:
            return None
        kept.users += 1
        return kept

    def hold_parent(self, snapshot_id: str) -> None:
        """Counts one more that needs it, on behalf of a sandbox that lives on it."""
        if snapshot_id:
            self._kept[snapshot_id].users += 1

    def let_go(self, snapshot_id: str) -> None:
        """Counts one less that needs it."""
        if snapshot_id:
            self._kept[snapshot_id].users -= 1

    def take_removable(self, now: float) -> list[str]:
        """Takes out what nobody needs; its parents may be removable then."""
        for snapshot_id in self._leases.expired(now):
            self._leases.release(snapshot_id)
        gone = [s for s, k in self._kept.items() if k.users == 0 and s not in self._leases]
        for snapshot_id in gone:
            self.let_go(self._kept.pop(snapshot_id).parent)
        return gone
