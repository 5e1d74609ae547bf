"""Puts the run, its peers and the server together."""

from __future__ import annotations

from functools import partial

from service_kit.cli import run_until_signal
from service_kit.server import Server, Service
from tailrace.trainer.v1 import trainer_service_pb2_grpc as pb_grpc

from grpo_trainer.backends.base import TrainerBackend
from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import ModelError
from grpo_trainer.peers import GrpcPeers
from grpo_trainer.run import TrainerRun
from grpo_trainer.service import SERVICE_NAME, TrainerServicer


def make_backend(config: TrainerConfig) -> TrainerBackend:
    """Make what the configuration says computes. Blocks: it loads the model.

    Raises:
        ModelError: The model cannot be loaded, or the back-end is not installed.
    """
    try:
        # Heavy, and an extra: only a service that trains needs it.
        from grpo_trainer.backends.torch import TorchBackend
    except ImportError as error:
        raise ModelError(
            f"the torch back-end cannot be imported ({error}); install grpo-trainer[torch]"
        ) from error
    return TorchBackend(config.model, config.torch)


async def serve(config: TrainerConfig) -> None:
    """Serve one run until SIGTERM or SIGINT.

    Raises:
        StartupError: The run folder, the model, a checkpoint or the port cannot be used.
    """
    async with GrpcPeers(config) as peers:
        run = TrainerRun(config, peers, make_backend)
        await run.open()
        servicer = TrainerServicer(run, heartbeat_s=config.heartbeat_s)
        service = Service(
            SERVICE_NAME,
            partial(pb_grpc.add_TrainerServiceServicer_to_server, servicer),
            on_drain=run.stop_active,
        )
        await run_until_signal(Server(config.server, [service]), [run.serve()])
