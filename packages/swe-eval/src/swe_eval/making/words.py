"""Has a language model word an issue, over an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import aiohttp

from swe_eval.generate.failure import chat_messages, leaks

__all__ = ["ChatWriter"]

logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 4000
_ANSWER_BYTES = 1024 * 1024
_MAX_TOKENS = 600
_FAILURES = (aiohttp.ClientError, OSError)

Post = Callable[[str, bytes, dict[str, str], float], Awaitable[bytes]]


@dataclass(frozen=True, kw_only=True)
class ChatWriter:
    """Words issues; the template stays where the endpoint fails or says too much.

    Attributes:
        url: Up to `/v1`, as OpenAI's clients take it.
        model: Name of the model.
        key: Bearer token; may be empty.
        timeout_s: Longest time of an answer.
        post: Sends a request: address, body, headers, seconds; for tests.
    """

    url: str
    model: str
    key: str = ""
    timeout_s: float = 60.0
    post: Post | None = None

    async def reword(
        self, report: str, *, repository: str, secret: Collection[str], seed: int
    ) -> str:
        """The issue in the model's words, or the report itself.

        Args:
            report: The template's text, all that the model is told.
            repository: Name of the package.
            secret: Lines of the repair and of the hidden tests, which must not show.
            seed: Sent along; whether it makes answers repeatable is the endpoint's business.
        """
        body = {
            "model": self.model,
            "messages": chat_messages(report, repository=repository),
            "temperature": 0.0,
            "seed": seed,
            "max_tokens": _MAX_TOKENS,
        }
        try:
            text = await self._ask(json.dumps(body).encode())
        except (*_FAILURES, ValueError, KeyError, IndexError, TypeError) as error:
            logger.warning("the endpoint worded no issue, the template stands: %r", error)
            return report
        if not text or len(text) > _MAX_CHARACTERS:
            logger.warning("an issue of %d characters is not taken", len(text))
            return report
        if leaks(text, [line for line in secret if not leaks(report, [line])]):
            logger.warning("an issue that holds a line of the repair or of a test is not taken")
            return report
        return text

    async def _ask(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        url = self.url.rstrip("/") + "/chat/completions"
        answer = json.loads(await (self.post or _post)(url, body, headers, self.timeout_s))
        return str(answer["choices"][0]["message"]["content"]).strip()


async def _post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> bytes:
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
        session.post(url, data=body, headers=headers, raise_for_status=True) as response,
    ):
        data = bytearray()
        async for part in response.content.iter_any():
            data += part
            if len(data) > _ANSWER_BYTES:
                raise ValueError(f"an answer of more than {_ANSWER_BYTES} bytes")
        return bytes(data)
