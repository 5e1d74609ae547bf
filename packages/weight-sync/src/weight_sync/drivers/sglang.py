"""The driver of SGLang itself, as of 0.5.23.

What it must mind, each seen in that release:

* Pausing aborts unless a mode is given, and renaming the version aborts unless told not to.
* It keeps q, k, v and gate, up as one tensor each and hashes with SHA-256 on a CPU, so what it must
  report is computed from the verified copy, before the pause.
* `update_weights_from_distributed` labels the engine after each bucket that carries a label: none
  does; the label is set once, after the last bucket was loaded and verified.
* A session left open by a receiver that died refuses the next: it is ended first, and what was in
  it is overwritten by the full load that follows.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from weight_sync.codecs import Tensor
from weight_sync.core.fused_names import fused_parts
from weight_sync.core.manifest import Manifest
from weight_sync.drivers.http_engine import HttpEngine
from weight_sync.errors import EngineError
from weight_sync.model_files import tensors_in

_CHECKSUM_BYTES = 8
_CHECKED_ON = "cpu"


class SglangDriver(HttpEngine):
    """One SGLang server on this host, which loads the shadow copy from disk."""

    async def expected_checksums(
        self, manifest: Manifest, folder: Path | None
    ) -> Mapping[str, str]:
        """Return SGLang's fused names with the checksums it computes on a CPU."""
        if folder is None:
            raise EngineError(
                f"{self.url}: an SGLang server is compared with the files of a version, not with "
                "its manifest alone; it is loaded anew"
            )
        info = await self.call("GET", "/server_info", None, self.settings.observe_timeout_s)
        device, ranks = info.get("device"), info.get("tp_size")
        if (device, ranks) != (_CHECKED_ON, 1):
            raise EngineError(
                f"{self.url} runs on {device!r} with tp_size {ranks!r}: its checksums can be "
                f"told only on {_CHECKED_ON!r} with tp_size 1. Set receiver.verify to 'label'"
            )
        return await asyncio.to_thread(_checksums, folder)


def _checksums(folder: Path) -> dict[str, str]:
    found = {tensor.name: tensor for tensor in tensors_in(folder)}
    return {
        fused: _checksum([found[name] for name in names])
        for fused, names in fused_parts(found).items()
    }


def _checksum(parts: list[Tensor]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.data)
    return hasher.digest()[:_CHECKSUM_BYTES].hex()
