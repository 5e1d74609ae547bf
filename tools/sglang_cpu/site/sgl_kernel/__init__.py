"""Stand-in for SGLang's compiled kernels on a CPU: every name resolves, no call succeeds.

SGLang imports some of them wherever it runs; on a CPU without AMX it then computes in PyTorch.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"  # what SGLang 0.5.23 pins, and checks


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_options: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in: there is no such kernel here")

    missing.__name__ = name
    return missing
