"""The driver of engines that speak SGLang's HTTP API and name tensors as the checkpoint does.

Order matters: the engine is verified while it is still paused, so that not one token is ever made
by weights that are not what the label says.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from weight_sync.core.manifest import Manifest
from weight_sync.drivers.base import Activation, Observation
from weight_sync.errors import ChecksumMismatch, EngineError

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_ERROR_TEXT = 300


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


class EmbeddedDriver:
    """One engine behind a base URL."""

    def __init__(self, url: str, settings: DriverSettings | None = None) -> None:
        self._url = url.rstrip("/")
        self._settings = settings or DriverSettings()
        # A kept-alive connection that the engine closes at the wrong moment would look like an
        # engine that died half way through an update.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def close(self) -> None:
        """Close the HTTP session."""
        await self._session.close()

    async def observe(self) -> Observation:
        """Ask for `/model_info`."""
        info = await self._call("GET", "/model_info", None, self._settings.observe_timeout_s)
        label = info.get("weight_version")
        if not isinstance(label, str):
            raise EngineError(
                f"{self._url}/model_info: expected weight_version as text, found {label!r}"
            )
        base = info.get("tokenizer_path") or info.get("model_path")
        return Observation(label, Path(base) if isinstance(base, str) else None)

    async def activate(self, folder: Path, manifest: Manifest) -> Activation:
        """Pause, load from disk, verify, continue."""
        settings = self._settings
        keep = settings.kv_policy == "keep"
        began_s = time.perf_counter()
        await self._call(
            "POST",
            "/pause_generation",
            {"mode": "in_place" if keep else "retract"},
            settings.pause_timeout_s,
        )
        paused_s = time.perf_counter()
        await self._call(
            "POST",
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": manifest.version.label,
                "flush_cache": not keep,
                "abort_all_requests": False,
            },
            settings.load_timeout_s,
        )
        loaded_s = time.perf_counter()
        found = await self.observe()
        if found.label != manifest.version.label:
            raise EngineError(
                f"{self._url} loaded version {manifest.version.label} but reports "
                f"{found.label!r}; it needs a full load"
            )
        if settings.verify == "checksums":
            await self.verify(manifest)
        verified_s = time.perf_counter()
        await self.resume()
        return Activation(
            pause_s=time.perf_counter() - began_s,
            load_s=loaded_s - paused_s,
            verify_s=verified_s - loaded_s,
        )

    async def verify(self, manifest: Manifest) -> None:
        """Compare `/weights_checker` with the manifest, tensor by tensor."""
        answer = await self._call(
            "POST", "/weights_checker", {"action": "checksum"}, self._settings.verify_timeout_s
        )
        found = _checksums(answer, self._url)
        for entry in manifest.tensors:
            checksum = found.get(entry.name)
            if checksum is None:
                raise EngineError(
                    f"{self._url}/weights_checker names no tensor {entry.name}: its names are not "
                    "the checkpoint's. Set receiver.verify to 'label' for such an engine"
                )
            if checksum != entry.checksum:
                raise ChecksumMismatch(
                    f"{self._url}: tensor {entry.name} of version {manifest.version.number}: "
                    f"expected checksum {entry.checksum}, the engine holds {checksum}"
                )

    async def resume(self) -> None:
        """Continue generation."""
        await self._call("POST", "/continue_generation", {}, self._settings.pause_timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        where = f"{method} {self._url}{path}"
        if self._session.closed:
            raise EngineError(f"{where}: the engine left the registry")
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self._url + path, json=body) as response,
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


def _checksums(answer: Mapping[str, Any], url: str) -> dict[str, str]:
    """Return the checksums of all ranks; ranks that hold the same tensor must agree."""
    found: dict[str, str] = {}
    try:
        for rank in answer["ranks"]:
            for name, checksum in rank["checksums"].items():
                if not _DIGEST.fullmatch(checksum):
                    raise EngineError(
                        f"{url}/weights_checker: expected xxh3-128 as 32 hex digits, found "
                        f"{checksum!r}. Set receiver.verify to 'label' for such an engine"
                    )
                if found.setdefault(name, checksum) != checksum:
                    raise ChecksumMismatch(f"{url}: ranks disagree about tensor {name}")
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{url}/weights_checker: expected ranks with checksums by name, found {error!r}"
        ) from error
    return found
