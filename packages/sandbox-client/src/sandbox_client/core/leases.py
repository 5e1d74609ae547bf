"""Who may live until when: leases of sandboxes and the keys that make creating idempotent.

The table is a plain state machine. Time is an argument in seconds of any monotonic clock.

A sandbox is `claimed` (being created; its key is taken), then `granted` (alive until its lease
ends), then released. A key is free again once its sandbox is released.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Claim", "KeyConflictError", "LeaseRecord", "LeaseTable"]


class KeyConflictError(ValueError):
    """An idempotency key came again with a different request."""


@dataclass(frozen=True)
class Claim:
    """What `LeaseTable.claim` decided: which sandbox the key stands for and whether it is new."""

    sandbox_id: str
    is_new: bool


@dataclass
class LeaseRecord:
    """One sandbox's lease. `expires_at` is None while the sandbox is being created."""

    sandbox_id: str
    owner: str
    key: str
    fingerprint: str
    created_at: float
    expires_at: float | None = None
    labels: dict[str, str] = field(default_factory=dict)


class LeaseTable:
    """All leases of one service."""

    def __init__(self) -> None:
        self._by_id: dict[str, LeaseRecord] = {}
        self._by_key: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._by_id

    def claim(
        self,
        *,
        owner: str,
        key: str,
        fingerprint: str,
        new_id: str,
        now: float,
        labels: dict[str, str] | None = None,
    ) -> Claim:
        """Takes a key for a sandbox to be created, or finds the one it created before.

        `fingerprint` stands for the rest of the request: the same key with another one is an error.

        Raises:
            KeyConflictError: the key is in use for a different request.
        """
        known = self._by_key.get((owner, key))
        if known is not None:
            record = self._by_id[known]
            if record.fingerprint != fingerprint:
                raise KeyConflictError(
                    f"idempotency key {key!r} of owner {owner!r} created sandbox {known} from a "
                    "different request; use a new key for a new request"
                )
            return Claim(known, is_new=False)
        self._by_id[new_id] = LeaseRecord(new_id, owner, key, fingerprint, now, None, labels or {})
        self._by_key[(owner, key)] = new_id
        return Claim(new_id, is_new=True)

    def grant(self, sandbox_id: str, *, lease_s: float, now: float) -> None:
        """Starts the lease of a claimed sandbox that is now up, or prolongs a granted one."""
        record = self._by_id[sandbox_id]
        end = now + lease_s
        # A retried create must not shorten what a renewal has promised since.
        record.expires_at = end if record.expires_at is None else max(record.expires_at, end)

    def renew(self, sandbox_ids: Iterable[str], *, lease_s: float, now: float) -> list[str]:
        """Sets leases to end `lease_s` from now; returns the ids that are gone."""
        gone = []
        for sandbox_id in sandbox_ids:
            record = self._by_id.get(sandbox_id)
            if record is None or (record.expires_at is not None and record.expires_at <= now):
                gone.append(sandbox_id)
            elif record.expires_at is not None:
                record.expires_at = now + lease_s
        return gone

    def expired(self, now: float) -> list[str]:
        """Ids of granted sandboxes whose lease has ended."""
        return [
            record.sandbox_id
            for record in self._by_id.values()
            if record.expires_at is not None and record.expires_at <= now
        ]

    def release(self, sandbox_id: str) -> bool:
        """Forgets a sandbox and frees its key; False if it was not there."""
        record = self._by_id.pop(sandbox_id, None)
        if record is None:
            return False
        del self._by_key[(record.owner, record.key)]
        return True

    def get(self, sandbox_id: str) -> LeaseRecord | None:
        """The record of a sandbox, or None."""
        return self._by_id.get(sandbox_id)

    def records(self, owner: str | None = None) -> list[LeaseRecord]:
        """All records, or those of one owner, oldest first."""
        return [r for r in self._by_id.values() if owner is None or r.owner == owner]
