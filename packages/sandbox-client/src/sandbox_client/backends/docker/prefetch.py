"""Pulling images ahead of time: one after the other, for as long as the budget makes it wait."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from sandbox_client.errors import QuotaExhausted, ServiceError
from sandbox_client.types import ImageStage, ImageStatus

__all__ = ["Prefetcher"]

logger = logging.getLogger(__name__)


class Prefetcher:
    """A list of images to pull, worked through by one task, so that creates have right of way.

    Args:
        pull: sees to it that an image is there.
        present: tells whether an image is there.
    """

    def __init__(
        self,
        pull: Callable[[str], Awaitable[object]],
        present: Callable[[str], Awaitable[bool]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pull = pull
        self._present = present
        self._sleep = sleep
        self._line: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._work: asyncio.Task[None] | None = None

    async def ask(self, images: Sequence[str]) -> list[ImageStatus]:
        """Puts what is not there in line, in this order; tells how far each is."""
        return [await self._ask(image) for image in images]

    async def _ask(self, image: str) -> ImageStatus:
        if image in self._line:
            return ImageStatus(image, ImageStage.PULLING, self._line[image])
        if await self._present(image):
            self._failed.pop(image, None)
            return ImageStatus(image, ImageStage.PRESENT)
        # A failure is told once; who asks again wants another try.
        failure = self._failed.pop(image, None)
        if failure is not None:
            return ImageStatus(image, ImageStage.FAILED, failure)
        self._line[image] = "in line"
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._work_through())
        return ImageStatus(image, ImageStage.PULLING, self._line[image])

    async def close(self) -> None:
        """Stops pulling."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _work_through(self) -> None:
        while self._line:
            image = next(iter(self._line))
            self._line[image] = "being pulled"
            try:
                await self._pull(image)
            except QuotaExhausted as error:
                # The others would fare no better.
                self._line[image] = error.message
                await self._sleep(error.retry_after_s or 1.0)
                continue
            except ServiceError as error:
                logger.warning("image %s could not be prefetched: %s", image, error.message)
                self._failed[image] = error.message
            except Exception as error:
                logger.exception("image %s could not be prefetched", image)
                self._failed[image] = repr(error)
            del self._line[image]
