"""What drivers of SGLang's HTTP API share: the calls, their deadlines, and the order of an update.

Order matters: the engine is verified while it is still paused, so that not one token is ever made
by weights that are not what the label says.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from weight_sync.core.manifest import Manifest
from weight_sync.drivers.base import Activation, Observation
from weight_sync.errors import ChecksumMismatch, EngineError

_MAX_ERROR_TEXT = 300
_LABEL_HELP = "Set receiver.verify to 'label' for such an engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """How engines are updated. Deadlines in seconds."""

    kv_policy: Literal["keep", "recompute"] = "keep"
    """`keep` pauses in place; `recompute` retracts running requests and flushes the cache."""
    verify: Literal["checksums", "label"] = "checksums"
    observe_timeout_s: float = 5.0
    pause_timeout_s: float = 30.0
    load_timeout_s: float = 300.0
    verify_timeout_s: float = 120.0


class HttpEngine(ABC):
    """One engine behind a base URL. Subclasses say how it loads, and what its checksums are."""

    def __init__(self, url: str, settings: DriverSettings | None = None) -> None:
        self.url = url.rstrip("/")
        self.settings = settings or DriverSettings()
        # A kept-alive connection that the engine closes at the wrong moment would look like an
        # engine that died half way through an update.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    @abstractmethod
    async def expected_checksums(
        self, manifest: Manifest, folder: Path | None
    ) -> Mapping[str, str]:
        """Return what the engine must report for a version, by the engine's names of tensors.

        Args:
            manifest: the version.
            folder: its verified copy on this host; None: there is none.

        Raises:
            EngineError: it cannot be told.
        """

    async def get_ready(self) -> None:  # noqa: B027 -- most engines need nothing
        """Do what an update needs and what need not wait for the pause."""

    async def load(self, folder: Path, manifest: Manifest) -> None:
        """Make the paused engine load a folder under the version's label."""
        await self.call(
            "POST",
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": manifest.version.label,
                "flush_cache": self.flushes,
                "abort_all_requests": False,
            },
            self.settings.load_timeout_s,
        )

    @property
    def flushes(self) -> bool:
        """Whether an update drops the prefix cache."""
        return self.settings.kv_policy == "recompute"

    async def close(self) -> None:
        """Close the HTTP session."""
        await self._session.close()

    async def observe(self) -> Observation:
        """Ask for `/model_info`."""
        info = await self.call("GET", "/model_info", None, self.settings.observe_timeout_s)
        label = info.get("weight_version")
        if not isinstance(label, str):
            raise EngineError(
                f"{self.url}/model_info: expected weight_version as text, found {label!r}"
            )
        base = info.get("tokenizer_path") or info.get("model_path")
        return Observation(label, Path(base) if isinstance(base, str) else None)

    async def activate(self, folder: Path, manifest: Manifest) -> Activation:
        """Pause, load, verify, continue."""
        settings = self.settings
        await self.get_ready()
        expected: Mapping[str, str] = {}
        if settings.verify == "checksums":
            expected = await self.expected_checksums(manifest, folder)
        began_s = time.perf_counter()
        mode = "retract" if self.flushes else "in_place"
        await self.call("POST", "/pause_generation", {"mode": mode}, settings.pause_timeout_s)
        paused_s = time.perf_counter()
        await self.load(folder, manifest)
        loaded_s = time.perf_counter()
        found = await self.observe()
        if found.label != manifest.version.label:
            raise EngineError(
                f"{self.url} loaded version {manifest.version.label} but reports "
                f"{found.label!r}; it needs a full load"
            )
        if settings.verify == "checksums":
            await self.compare(manifest, expected)
        verified_s = time.perf_counter()
        await self.resume()
        return Activation(
            pause_s=time.perf_counter() - began_s,
            load_s=loaded_s - paused_s,
            verify_s=verified_s - loaded_s,
        )

    async def verify(self, manifest: Manifest) -> None:
        """Compare the engine's own weights with a manifest."""
        await self.compare(manifest, await self.expected_checksums(manifest, None))

    async def compare(self, manifest: Manifest, expected: Mapping[str, str]) -> None:
        """Compare `/weights_checker` with what it must say, tensor by tensor.

        Raises:
            ChecksumMismatch: a tensor is not the version's.
            EngineError: the engine names other tensors.
        """
        answer = await self.call(
            "POST", "/weights_checker", {"action": "checksum"}, self.settings.verify_timeout_s
        )
        found = checksums_of(answer, self.url)
        for name, checksum in expected.items():
            held = found.get(name)
            if held is None:
                raise EngineError(
                    f"{self.url}/weights_checker names no tensor {name}: its names are not those "
                    f"expected. {_LABEL_HELP}"
                )
            if len(held) != len(checksum):
                raise EngineError(
                    f"{self.url}/weights_checker: expected checksums of {len(checksum)} hex "
                    f"digits, found {held!r}. {_LABEL_HELP}"
                )
            if held != checksum:
                raise ChecksumMismatch(
                    f"{self.url}: tensor {name} of version {manifest.version.number}: "
                    f"expected checksum {checksum}, the engine holds {held}"
                )

    async def resume(self) -> None:
        """Continue generation."""
        await self.call("POST", "/continue_generation", {}, self.settings.pause_timeout_s)

    async def call(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """Call the engine and return its JSON object.

        Raises:
            EngineError: it refused, answered nonsense, or not in time.
        """
        where = f"{method} {self.url}{path}"
        if self._session.closed:
            raise EngineError(f"{where}: the engine left the registry")
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                if response.status != 200:
                    text = (await response.text())[:_MAX_ERROR_TEXT]
                    raise EngineError(f"{where}: expected 200, found {response.status}: {text}")
                answer = await response.json(content_type=None)
        except TimeoutError as error:
            raise EngineError(f"{where}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{where}: expected a JSON object, found {type(answer).__name__}")
        if answer.get("success") is False:
            raise EngineError(f"{where}: {str(answer.get('message'))[:_MAX_ERROR_TEXT]}")
        return answer


def checksums_of(answer: Mapping[str, Any], url: str) -> dict[str, str]:
    """Return the checksums of all ranks; ranks that hold the same tensor must agree."""
    found: dict[str, str] = {}
    try:
        for rank in answer["ranks"]:
            for name, checksum in rank["checksums"].items():
                if found.setdefault(name, str(checksum)) != checksum:
                    raise ChecksumMismatch(
                        f"{url}: ranks disagree about tensor {name}. If they hold shards of it "
                        f"(tensor parallelism), no checksum can be told. {_LABEL_HELP}"
                    )
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{url}/weights_checker: expected ranks with checksums by name, found {error!r}"
        ) from error
    return found
