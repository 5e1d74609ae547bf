"""What the client's classes share: the stub, the time of a call, typed errors."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
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

    async def destroy(self, sandbox_id: str) -> bool:
        """Ends a sandbox; False if it was gone already."""
        with typed_errors():
            response = await self.stub.DestroySandbox(
                pb.DestroySandboxRequest(sandbox_id=sandbox_id), timeout=self.timeout_s
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
