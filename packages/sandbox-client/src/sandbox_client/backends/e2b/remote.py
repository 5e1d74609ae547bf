"""Sandboxes at E2B: asking for them, finding them by their tags, ending them."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from e2b import E2B, AsyncSandbox, SandboxQuery
from service_kit.auth import read_token
from service_kit.errors import StartupError

from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.backends.e2b.tags import SANDBOX_TAG, Tags
from sandbox_client.errors import QuotaExhausted, SandboxUnavailable, ServiceError

__all__ = ["RemoteSandboxes", "e2b_client"]

logger = logging.getLogger(__name__)

_CALLS_AT_ONCE = 8
_KEY_CHARS = 40


def e2b_client(settings: E2BConfig) -> E2B:
    """The SDK, bound to the configured account and addresses.

    Raises:
        StartupError: there is no key.
    """
    if settings.api_key is not None or settings.api_key_file is not None:
        key = read_token(settings.api_key, settings.api_key_file)
    else:
        key = os.environ.get("E2B_API_KEY")
    if not key:
        raise StartupError(
            "back-end `e2b` needs a key: set e2b.api_key_file, or the variable E2B_API_KEY"
        )
    given: dict[str, object] = {
        "api_key": key,
        "retries": settings.retries,
        "request_timeout": settings.request_timeout_s,
        "domain": settings.domain,
        "api_url": settings.api_url,
        "sandbox_url": settings.sandbox_url,
    }
    return E2B(**{name: value for name, value in given.items() if value != ""})  # type: ignore[arg-type]


class RemoteSandboxes:
    """The sandboxes of one E2B account, as far as a service's tags tell them apart."""

    def __init__(self, client: E2B, settings: E2BConfig) -> None:
        self._client = client
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(self, template: str, tags: Tags, *, network: bool) -> AsyncSandbox:
        """Asks for one sandbox, and sees to it that it is one: E2B may have made it unheard.

        Raises:
            QuotaExhausted: E2B's rate limit, after as many tries as the SDK makes.
            SandboxUnavailable: E2B cannot be reached or has no place; nothing is left behind.
            EnvironmentUnknown: there is no such template.
        """
        name = f"{tags.service}/{tags.sandbox_id}".encode()
        key = f"tailrace-{hashlib.sha256(name).hexdigest()[:_KEY_CHARS]}"

        async def ask() -> AsyncSandbox:
            with sdk_errors("making a sandbox", retry_after_s=self._settings.retry_after_s):
                return await self._client.AsyncSandbox.create(
                    template,
                    timeout=self._settings.sandbox_timeout_s,
                    metadata=tags.metadata(),
                    allow_internet_access=network,
                    idempotency_key=key,
                )

        try:
            try:
                return await ask()
            except SandboxUnavailable as error:
                if not error.retryable:
                    raise
                made = await self.listed({SANDBOX_TAG: tags.sandbox_id})
                return await self.connect(made[0][0]) if made else await ask()
        except QuotaExhausted:
            raise
        except BaseException:
            # Nobody will ask for it: the caller has gone away, or is told that there is none.
            self.own(self.end_tagged(SANDBOX_TAG, tags.sandbox_id))
            raise

    async def connect(self, remote_id: str) -> AsyncSandbox:
        """A living sandbox."""
        with sdk_errors(f"connecting to sandbox {remote_id}"):
            return await self._client.AsyncSandbox.connect(
                remote_id, timeout=self._settings.sandbox_timeout_s
            )

    async def listed(self, metadata: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Ids and metadata of the sandboxes that carry these tags."""
        found: list[tuple[str, dict[str, str]]] = []
        query = SandboxQuery(metadata=dict(metadata))
        pages = self._client.AsyncSandbox.list(query=query)
        with sdk_errors("listing sandboxes"):
            while pages.has_next:
                found += [(i.sandbox_id, dict(i.metadata)) for i in await pages.next_items()]
        return found

    async def end_tagged(self, tag: str, value: str) -> None:
        """Ends the sandboxes that carry a tag."""
        left = await self.listed({tag: value})
        await self.each(self.kill(remote_id) for remote_id, _ in left)

    async def kill(self, remote_id: str) -> None:
        """Ends a sandbox; where that fails, E2B does it after `e2b.sandbox_timeout_s`."""
        try:
            with sdk_errors(f"ending sandbox {remote_id}"):
                await self._client.AsyncSandbox.kill(remote_id)
        except ServiceError as error:
            logger.warning("%s", error)

    async def each(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Runs all of the work, a few at once; failures are logged and hold nothing up."""
        slots = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def one(coroutine: Coroutine[Any, Any, None]) -> None:
            async with slots:
                await coroutine

        for outcome in await asyncio.gather(*map(one, work), return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.warning("at E2B: %s", outcome)

    def own(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work that ends with this at the latest."""
        task = asyncio.get_running_loop().create_task(self.each([work]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up what `own` has started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
