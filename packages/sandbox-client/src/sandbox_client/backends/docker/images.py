"""The images of sandboxes: pulled once, within a budget; removed when the disk fills up."""

import asyncio
import contextlib
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import IO, Any

from sandbox_client.backends.docker.budget import PullBudget
from sandbox_client.backends.docker.engine import Engine, ImageInfo, NotThereError
from sandbox_client.backends.local.store import EMPTY_DIGEST, EnvironmentStore
from sandbox_client.config import DockerConfig
from sandbox_client.core.images import DiskUse, KnownImage, removal_order
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import QuotaExhausted, SandboxUnavailable, TooLarge
from sandbox_client.limiter import Limiter

__all__ = ["Images"]

logger = logging.getLogger(__name__)


class Images:
    """The images of one daemon, as far as sandboxes need them.

    Args:
        folder: remembers which images this service has pulled; only those are ever removed.
        store: gets the work folders of images.
        labels: put on the containers that are made to look into images.
    """

    def __init__(
        self,
        engine: Engine,
        config: DockerConfig,
        *,
        folder: Path,
        store: EnvironmentStore,
        budget: PullBudget,
        labels: Mapping[str, str],
        retry_after_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._config = config
        self._record = folder / "images.json"
        self._store = store
        self._budget = budget
        self._labels = dict(labels)
        self._retry_after_s = retry_after_s
        self._now = now
        self._root = folder
        self._pulls = Limiter("docker.concurrent_pulls", config.concurrent_pulls)
        self._tasks: dict[object, asyncio.Task[Any]] = {}
        self._wanted: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}
        self._folders: dict[tuple[str, str], str] = {}
        self._making_room = asyncio.Lock()

    def open(self, root: Path) -> None:
        """Remembers what it has pulled; `root` is where the daemon keeps its images."""
        self._root = root
        if self._record.exists():
            self._used_at = json.loads(self._record.read_text())

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def limiters(self) -> list[LimiterStatus]:
        """Pulls at once and the disk."""
        share = self.disk_use().share
        return [
            self._pulls.status(),
            LimiterStatus("docker.disk_watermark", self._config.disk_watermark, share),
        ]

    def disk_use(self) -> DiskUse:
        """The file system of the daemon's images."""
        found = os.statvfs(self._root)
        return DiskUse(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    @contextlib.asynccontextmanager
    async def use(self, reference: str) -> AsyncIterator[ImageInfo]:
        """An image, pulled if need be; it is not removed meanwhile.

        Raises:
            WrongRequest: there is no such image.
            QuotaExhausted: the budget of pulls or the disk is used up, or the pull takes a while.
            SandboxUnavailable: it could not be pulled; a later try can help.
        """
        image = await self._engine.image(reference)
        if image is None:
            try:
                async with asyncio.timeout(self._config.pull_wait_s):
                    await self._once(reference, lambda: self._pull(reference))
            except TimeoutError:
                raise QuotaExhausted(
                    f"image {reference!r} is still being pulled", retry_after_s=self._retry_after_s
                ) from None
            image = await self._engine.image(reference)
            if image is None:
                raise SandboxUnavailable(f"image {reference!r} was removed as soon as it was there")
        self.hold(image.image_id)
        try:
            if image.image_id in self._used_at:
                self._remember(image.image_id)
            yield image
        finally:
            self.let_go(image.image_id)

    def hold(self, image_id: str) -> None:
        """Keeps an image from being removed."""
        self._wanted[image_id] += 1

    def let_go(self, image_id: str) -> None:
        """Counts one less who needs an image."""
        self._wanted[image_id] -= 1

    async def is_present(self, reference: str) -> bool:
        """Whether an image is there."""
        return await self._engine.image(reference) is not None

    async def pull(self, reference: str) -> None:
        """Sees to it that an image is there."""
        if not await self.is_present(reference):
            await self._once(reference, lambda: self._pull(reference))

    async def work_folder(self, image: ImageInfo, workdir: str) -> str:
        """Digest of an image's work folder, which is put into the store on its first use."""
        key = (image.image_id, workdir)
        digest = self._folders.get(key, "")
        while digest not in self._store:
            digest = await self._once(key, lambda: self._extract(image, workdir))
            self._folders[key] = digest
        return digest

    async def require_room(self) -> None:
        """Removes unused images if the disk is too full; raises `QuotaExhausted` if it still is."""
        limit = self._config.disk_watermark
        if self.disk_use().share <= limit:
            return
        async with self._making_room:
            busy = await self._engine.images_in_use()
            known = [
                KnownImage(image, at, image in busy or self._wanted[image] > 0)
                for image, at in self._used_at.items()
            ]
            for image_id in removal_order(known):
                if self.disk_use().share <= limit:
                    break
                logger.info("removing image %s: the disk is too full", image_id)
                if await self._engine.remove_image(image_id):
                    del self._used_at[image_id]
                    self._write_record()
        share = self.disk_use().share
        if share > limit:
            raise QuotaExhausted(
                f"the disk of the daemon's images ({self._root}) is {share:.0%} full, "
                f"docker.disk_watermark allows {limit:.0%}; remove images or files",
                retry_after_s=self._retry_after_s,
                metadata={"limit": "docker.disk_watermark"},
            )

    async def _once(self, key: object, work: Callable[[], Any]) -> Any:
        """One piece of work for all who ask for it; it goes on if they go away."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(work())
            task.add_done_callback(lambda task: self._done(key, task))
        return await asyncio.shield(task)

    def _done(self, key: object, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        if not task.cancelled() and task.exception() is not None:
            # Who asked may have gone away meanwhile.
            logger.info("image work for %s failed: %s", key, task.exception())

    async def _pull(self, reference: str) -> None:
        async with self._pulls.slot():
            await self.require_room()
            await self._budget.take(reference)
            began = time.monotonic()
            await self._engine.pull(reference)
            logger.info("pulled image %s in %.1f s", reference, time.monotonic() - began)
        image = await self._engine.image(reference)
        if image is not None:
            self._remember(image.image_id)

    async def _extract(self, image: ImageInfo, workdir: str) -> str:
        container = await self._engine.create(
            "", {"Image": image.image_id, "Cmd": ["/"], "Labels": self._labels}
        )
        try:
            with tempfile.TemporaryFile(dir=self._record.parent) as spool:
                try:
                    await self._spool(container, workdir, spool)
                except NotThereError:
                    return EMPTY_DIGEST
                spool.seek(0)
                return await self._store.put_image_folder(spool)
        finally:
            await self._engine.remove(container)

    async def _spool(self, container: str, workdir: str, spool: IO[bytes]) -> None:
        limit = self._store.max_bytes
        async with contextlib.aclosing(self._engine.archive(container, workdir)) as chunks:
            async for chunk in chunks:
                await asyncio.to_thread(spool.write, chunk)
                if spool.tell() > limit:
                    raise TooLarge(
                        f"{workdir} of the image has over {limit} bytes, which is all that stored "
                        "environments may take (limits.environments_bytes)"
                    )

    def _remember(self, image_id: str) -> None:
        self._used_at[image_id] = self._now()
        self._write_record()

    def _write_record(self) -> None:
        partial = self._record.with_suffix(".partial")
        partial.write_text(json.dumps(self._used_at))
        partial.replace(self._record)
