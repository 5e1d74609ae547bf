"""Stand-in for what torchvision and CUDA's runtime do on a GPU host. Loaded at interpreter start.

It waits for the first import of torchvision and acts once:

* A torchvision that was built for CUDA cannot load its library into a torch that was not, and then
  stumbles over its own missing operators: they are declared here. Where the two builds agree,
  torchvision declares them itself.
* Where there is no GPU, `torch.cuda.cudart()` raises; SGLang calls it to pin a buffer of routed
  experts. Here pinning does nothing and succeeds.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

_OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _NoCudart:
    def cudaHostRegister(self, *_args: object) -> int:  # noqa: N802 -- CUDA's name
        return 0

    def cudaHostUnregister(self, *_args: object) -> int:  # noqa: N802 -- CUDA's name
        return 0

    def cudaGetErrorString(self, _code: int) -> str:  # noqa: N802 -- CUDA's name
        return "no CUDA here"


class _Torchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; only notices the import."""

    def __init__(self) -> None:
        self._done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname != "torchvision" or self._done:
            return
        self._done = True
        import torch

        if torch.version.cuda is None:
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", _OPERATOR)
        if not torch.cuda.is_available():
            torch.cuda.cudart = _NoCudart


sys.meta_path.insert(0, _Torchvision())
