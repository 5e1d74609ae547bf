"""Publishing through weight-sync, with the patience that a restart of that service needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
from service_kit.errors import ServiceError
from weight_sync.client import WeightClient
from weight_sync.core.manifest import PolicyVersion
from weight_sync.errors import Fenced, StoreFull, WeightSyncError
from weight_sync.publisher import PublishConfig, Publisher, TensorLike

from grpo_trainer.errors import FencedOff

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_MAX_RETRY_S = 5.0


class WeightsPublisher(Protocol):
    """What a stage needs of weight-sync."""

    @property
    def incarnation(self) -> int:
        """Of the run's publisher."""
        ...

    async def publish(
        self, tensors: Mapping[str, TensorLike], *, step: int, parent: int
    ) -> PolicyVersion:
        """Write, commit and announce a version."""
        ...

    async def await_everywhere(self, number: int) -> None:
        """Return once every engine serves a version at least this new."""
        ...


class WeightSyncPublisher:
    """One incarnation of the run's publisher.

    Args:
        publisher: Acquired for the run.
        client: Of the same service.
        timeout_s: Longest that publishing may take, retries included.
        clock: Monotonic seconds.
        sleep: For tests.
    """

    def __init__(
        self,
        publisher: Publisher,
        client: WeightClient,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._publisher = publisher
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep

    @classmethod
    async def acquire(
        cls,
        channel: grpc.aio.Channel,
        *,
        run: str,
        known_number: int,
        acquire_timeout_s: float,
        publish_timeout_s: float,
        config: PublishConfig | None = None,
    ) -> WeightSyncPublisher:
        """Take over publishing for a run.

        Args:
            channel: To WeightService.
            run: Name of the run.
            known_number: Highest version number in the run's checkpoints; 0: none.
            acquire_timeout_s: For this.
            publish_timeout_s: For each version later, retries included.
            config: How versions are written; None: whole.

        Raises:
            ServiceError: The service refused, or could not be reached in time.
        """
        publisher = await Publisher.acquire(
            channel,
            run=run,
            config=config,
            known_number=known_number,
            timeout_s=acquire_timeout_s,
        )
        return cls(publisher, WeightClient(channel), timeout_s=publish_timeout_s)

    @property
    def incarnation(self) -> int:
        """Of the run's publisher."""
        return self._publisher.incarnation

    async def publish(
        self, tensors: Mapping[str, TensorLike], *, step: int, parent: int
    ) -> PolicyVersion:
        """Write, commit and announce a version; goes on trying while the service restarts.

        Raises:
            FencedOff: A newer incarnation publishes.
            ServiceError, WeightSyncError, TimeoutError: It failed for good, or for too long.
        """
        deadline_s = self._clock() + self._timeout_s
        wait_s = _RETRY_S
        while True:
            left_s = deadline_s - self._clock()
            try:
                return await self._publisher.publish(
                    tensors, step=step, parent=parent, timeout_s=max(1.0, left_s)
                )
            except Fenced as error:
                raise FencedOff(str(error)) from error
            except (ServiceError, WeightSyncError) as error:
                if not error.retryable or isinstance(error, StoreFull) or left_s <= wait_s:
                    raise
                logger.warning("publishing step %d failed: %s; trying again", step, error)
            await self._sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_RETRY_S)

    async def await_everywhere(self, number: int) -> None:
        """Return once every engine serves a version at least this new.

        Raises:
            TimeoutError: They do not in time.
            ServiceError: The service could not be asked.
        """
        deadline_s = self._clock() + self._timeout_s
        while (left_s := deadline_s - self._clock()) > 0:
            found = await self._client.await_version(number, timeout_s=left_s)
            if found.engines and found.oldest_version >= number:
                return
            await self._sleep(0.05)
        raise TimeoutError(
            f"not every engine serves version {number} after {self._timeout_s:g} s; look at "
            "weight-sync's nodes for engines that are poisoned or behind"
        )


class RecordedPublisher:
    """A publisher that also tells someone each version that it has published."""

    def __init__(self, inner: WeightsPublisher, published: Callable[[PolicyVersion], None]) -> None:
        self._inner = inner
        self._tell = published

    @property
    def incarnation(self) -> int:
        """Of the run's publisher."""
        return self._inner.incarnation

    async def publish(
        self, tensors: Mapping[str, TensorLike], *, step: int, parent: int
    ) -> PolicyVersion:
        """Write, commit and announce a version."""
        version = await self._inner.publish(tensors, step=step, parent=parent)
        self._tell(version)
        return version

    async def await_everywhere(self, number: int) -> None:
        """Return once every engine serves a version at least this new."""
        await self._inner.await_everywhere(number)
