"""SGLang's distributed update: this host broadcasts the verified copy into the engine's memory.

For engines that cannot read the shadow folder. The engine joins a group of our worker process for
one update and leaves it again, so a receiver that dies leaves at most a paused engine with an open
session, which the next one ends.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.codecs import Tensor, safetensors_file
from weight_sync.config import CollectiveConfig
from weight_sync.core.manifest import Manifest
from weight_sync.drivers.http_engine import DriverSettings
from weight_sync.drivers.sglang import SglangDriver
from weight_sync.errors import EngineError, WeightSyncError
from weight_sync.model_files import mapped, model_files
from weight_sync.transports.worker import CollectiveWorker

_BUCKET_BYTES = 1 << 30
_TORCH_DTYPES: Mapping[str, str] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class _Located:
    tensor: Tensor
    path: Path
    offset: int


class SglangDistributedDriver(SglangDriver):
    """One SGLang server, which receives the shadow copy by broadcast."""

    _names = itertools.count(1)

    def __init__(
        self, url: str, settings: DriverSettings | None, collective: CollectiveConfig
    ) -> None:
        super().__init__(url, settings)
        self._worker = CollectiveWorker(collective)

    async def close(self) -> None:
        """End the worker too."""
        await asyncio.to_thread(self._worker.close)
        await super().close()

    async def get_ready(self) -> None:
        """Start the worker, where members meet."""
        await self._command("serve")

    async def load(self, folder: Path, manifest: Manifest) -> None:
        """Broadcast every tensor; the label follows once all are proven to be there."""
        tensors = list(_located(folder))
        group = f"tailrace-{manifest.version.label}-{next(self._names)}"
        await self._join(group)
        try:
            await self._begin()
            buckets = list(_buckets(tensors))
            for index, bucket in enumerate(buckets):
                flush = self.flushes and index == len(buckets) - 1
                await self._send(group, bucket, flush=flush)
            await self._post("/end_weight_update", {})
        finally:
            await self._leave(group)
        if self.settings.verify == "checksums":
            await self.compare(manifest, await self.expected_checksums(manifest, folder))
        await self._post(
            "/update_weight_version",
            {"new_version": manifest.version.label, "abort_all_requests": False},
        )

    async def _begin(self) -> None:
        try:
            await self._post("/begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})

    async def _join(self, group: str) -> None:
        collective = self._worker.settings
        await self._both(
            self._command("join", key=group, world=2),
            self._post(
                "/init_weights_update_group",
                {
                    "master_address": collective.host,
                    "master_port": collective.port,
                    "rank_offset": 1,
                    "world_size": 2,
                    "group_name": group,
                    "backend": collective.backend,
                },
            ),
        )

    async def _send(self, group: str, bucket: list[_Located], *, flush: bool) -> None:
        parts = [(item.offset, item.tensor.data.nbytes) for item in bucket]
        await self._both(
            self._command("send", path=str(bucket[0].path), parts=parts),
            self._post(
                "/update_weights_from_distributed",
                {
                    "names": [item.tensor.name for item in bucket],
                    "dtypes": [_torch_dtype(item.tensor) for item in bucket],
                    "shapes": [list(item.tensor.shape) for item in bucket],
                    "group_name": group,
                    "flush_cache": flush,
                    "abort_all_requests": False,
                },
            ),
        )

    async def _leave(self, group: str) -> None:
        # Whatever failed before is the error to tell; a group that is gone needs no leaving.
        with suppress(WeightSyncError):
            await self._both(
                self._command("leave"),
                self._post("/destroy_weights_update_group", {"group_name": group}),
            )

    async def _both(self, ours: Any, theirs: Any) -> None:
        """Run both sides of a collective; the first that fails ends the other."""
        worker, engine = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
        done, _ = await asyncio.wait({worker, engine}, return_when=asyncio.FIRST_EXCEPTION)
        if engine in done and engine.exception() is not None and not worker.done():
            # The engine refused: our side would wait for it until the deadline.
            self._worker.interrupt()
        results = await asyncio.gather(engine, worker, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _command(self, op: str, **arguments: object) -> None:
        await asyncio.to_thread(
            self._worker.call, op, timeout_s=self._worker.settings.timeout_s, **arguments
        )

    async def _post(self, path: str, body: Mapping[str, object]) -> None:
        await self.call("POST", path, body, self.settings.load_timeout_s)


def _located(folder: Path) -> Iterator[_Located]:
    for path in model_files(folder):
        file = mapped(path)
        tensors = list(safetensors_file.tensors(file))
        # They stand back to back up to the end of the file.
        offset = file.nbytes - sum(tensor.data.nbytes for tensor in tensors)
        for tensor in tensors:
            yield _Located(tensor, path, offset)
            offset += tensor.data.nbytes


def _buckets(tensors: list[_Located]) -> Iterator[list[_Located]]:
    """Split into buckets of one file and about a GiB each."""
    bucket: list[_Located] = []
    size_bytes = 0
    for item in tensors:
        full = size_bytes + item.tensor.data.nbytes > _BUCKET_BYTES
        if bucket and (full or bucket[0].path != item.path):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(item)
        size_bytes += item.tensor.data.nbytes
    if bucket:
        yield bucket


def _torch_dtype(tensor: Tensor) -> str:
    dtype = _TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise EngineError(
            f"tensor {tensor.name}: expected a dtype of {sorted(_TORCH_DTYPES)} for a distributed "
            f"update, found {tensor.dtype}. Set receiver.sglang_load to 'disk'"
        )
    return dtype
