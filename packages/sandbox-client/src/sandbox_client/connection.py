"""What the client's classes share: the stub, the time of a call, typed errors."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from service_kit.errors import ServiceError
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb

from sandbox_client.errors import typed

__all__ = ["Connection", "typed_errors"]


@dataclass(frozen=True)
class Connection:
    """An open connection to one service."""

    stub: Any
    timeout_s: float
    """Longest time of a call beside what a command itself may take."""
    lease_s: float = 60.0
    """Lease of what is made."""
    snapshot_ids: set[str] = field(default_factory=set)
    """Snapshots whose leases the client renews."""

    async def destroy(self, sandbox_id: str) -> bool:
        """Ends a sandbox; False if it was gone already."""
        with typed_errors():
            response = await self.stub.DestroySandbox(
                pb.DestroySandboxRequest(sandbox_id=sandbox_id), timeout=self.timeout_s
            )
        return bool(response.existed)

    async def destroy_snapshot(self, snapshot_id: str) -> bool:
        """Ends a snapshot's lease; False if there was none."""
        self.snapshot_ids.discard(snapshot_id)
        with typed_errors():
            response = await self.stub.DestroySnapshot(
                pb.DestroySnapshotRequest(snapshot_id=snapshot_id), timeout=self.timeout_s
            )
        return bool(response.existed)


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raises the errors of a call as the classes of `sandbox_client.errors`."""
    try:
        yield
    except ServiceError as error:
        better = typed(error)
        if better is error:
            raise
        raise better from error
