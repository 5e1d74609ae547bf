"""The budget of image pulls: kept here, or by the one service that keeps it for all hosts."""

import time
from collections.abc import Callable
from typing import Protocol

from service_kit.channel import Channel, ChannelConfig, open_channel
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb
from tailrace.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub

from sandbox_client.connection import typed_errors
from sandbox_client.core.limits import LimiterStatus, WindowBucket
from sandbox_client.errors import QuotaExhausted

__all__ = ["OwnBudget", "PullBudget", "SharedBudget"]

_HOUR_S = 3600.0
_CALL_TIMEOUT_S = 30.0


class PullBudget(Protocol):
    """Who allows pulls."""

    async def take(self, image: str) -> None:
        """Takes one pull; raises `QuotaExhausted` with the time until there is one."""

    def limiters(self) -> list[LimiterStatus]:
        """The budget's gauge, if it is kept here."""

    async def close(self) -> None:
        """Ends connections."""


class OwnBudget:
    """A budget that this service keeps, for itself and for whoever asks."""

    def __init__(self, pulls_per_hour: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = WindowBucket(pulls_per_hour, _HOUR_S)
        self._clock = clock

    async def take(self, image: str) -> None:
        """Takes one pull; raises `QuotaExhausted` with the time until there is one."""
        wait_s = self._bucket.take(self._clock())
        if wait_s > 0:
            raise QuotaExhausted(
                f"docker.image_pulls_per_hour allows {self._bucket.limit} pulls in any hour; all "
                "are used up",
                retry_after_s=wait_s,
                metadata={"limit": "docker.image_pulls_per_hour"},
            )

    def limiters(self) -> list[LimiterStatus]:
        """The budget at this moment."""
        limit, used = self._bucket.limit, self._bucket.used(self._clock())
        return [LimiterStatus("docker.image_pulls_per_hour", float(limit), float(used))]

    async def close(self) -> None:
        """Nothing to end."""


class SharedBudget:
    """A budget that another service keeps."""

    def __init__(self, config: ChannelConfig) -> None:
        self._config = config
        self._channel: Channel | None = None

    async def take(self, image: str) -> None:
        """Takes one pull there; raises what that service raises."""
        if self._channel is None:
            self._channel = open_channel(self._config)
        with typed_errors():
            await SandboxServiceStub(self._channel).TakeImagePull(
                pb.TakeImagePullRequest(image=image), timeout=_CALL_TIMEOUT_S
            )

    def limiters(self) -> list[LimiterStatus]:
        """Its gauge is that service's."""
        return []

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
