"""The process of the embedded engine."""

from __future__ import annotations

import logging
import os
import time

from service_kit.errors import StartupError

from rollout_engine.engines.api import engine_app
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.errors import WeightUpdateFailed
from rollout_engine.engines.http_server import listen, running, until_signal, url_of

logger = logging.getLogger(__name__)


async def serve_engine(config: CpuEngineConfig) -> None:
    """Load the model and serve it until SIGTERM or SIGINT.

    Raises:
        StartupError: the extra `cpu` is not installed, the model can't be loaded, the KV cache is
            larger than allowed, or the port is taken.
    """
    # Read when torch and numpy start their thread pools, which happens at the import below.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    try:
        import torch

        from rollout_engine.engines.cpu.backend import CpuBackend
        from rollout_engine.engines.cpu.engine import CpuEngine
        from rollout_engine.engines.cpu.spec import read_spec
        from rollout_engine.engines.cpu.weights import load_weights
    except ImportError as error:
        raise StartupError(
            f"the embedded engine needs {error.name}: install rollout-engine[cpu]"
        ) from error
    torch.set_num_threads(config.threads)
    try:
        dtype = getattr(torch, config.dtype)
        weights = load_weights(config.model, read_spec(config.model), dtype)
        backend = CpuBackend(CpuEngine(config, weights, time.monotonic), config.model)
    except (WeightUpdateFailed, ValueError) as error:
        raise StartupError(str(error)) from error
    sock = listen(config.host, config.port)
    logger.info("engine serves %s at %s", config.model, url_of(sock))
    app = engine_app(backend)
    grace_s = config.drain_grace_s
    async with running(app, sock, background=[backend.run()], grace_s=grace_s) as stopped:
        await until_signal(stopped)


__all__ = ["serve_engine"]
