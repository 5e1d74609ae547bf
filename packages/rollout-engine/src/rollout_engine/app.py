"""Putting the service together."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from sandbox_client.client import SandboxClient
from service_kit.channel import open_channel
from service_kit.cli import run_until_signal
from service_kit.errors import ServiceError, StartupError
from service_kit.server import Server
from tailrace.eval.v1 import eval_service_pb2

from rollout_engine.agents.bash import BashAgent
from rollout_engine.agents.template import ChatTemplate
from rollout_engine.config import RolloutConfig
from rollout_engine.engine import RolloutEngine
from rollout_engine.engines.fleet import Fleet
from rollout_engine.errors import LedgerError
from rollout_engine.evaluation import EvalPeer
from rollout_engine.ledger.store import Ledger
from rollout_engine.patience import Patience
from rollout_engine.registration import Endpoint, Node, keep_registered
from rollout_engine.workspaces import SandboxWorkspaces

logger = logging.getLogger(__name__)


async def serve(config: RolloutConfig) -> None:
    """Serve until SIGTERM or SIGINT. What runs then is made again in the next life.

    The command line sets telemetry up around it.

    Raises:
        StartupError: The model folder, the ledger's folder or the address cannot be used.

    """
    agent = BashAgent(config.agent)
    template = ChatTemplate.from_folder(
        config.model, variables=config.template_variables, tools=agent.tools
    )
    ledger = await _open_ledger(config)
    try:
        async with AsyncExitStack() as stack:
            await _serve(config, agent, template, ledger, stack)
    finally:
        await ledger.close()


async def _serve(
    config: RolloutConfig,
    agent: BashAgent,
    template: ChatTemplate,
    ledger: Ledger,
    stack: AsyncExitStack,
) -> None:
    deadlines = config.deadlines
    patience = Patience(deadlines.patience_s)
    evaluation = await stack.enter_async_context(
        open_channel(config.evaluation, contracts=[eval_service_pb2.DESCRIPTOR])
    )
    peer = EvalPeer(
        evaluation,
        patience=patience,
        task_timeout_s=deadlines.task_s,
        grade_timeout_s=deadlines.grade_s,
    )
    sandboxes = await stack.enter_async_context(
        SandboxClient(config.sandbox, owner=f"rollout-{ledger.ledger_id}")
    )
    workspaces = SandboxWorkspaces(
        sandboxes,
        peer,
        patience=patience,
        start_timeout_s=deadlines.sandbox_start_s,
        destroy_timeout_s=deadlines.destroy_s,
        life=str(ledger.boot),
    )
    fleet = await stack.enter_async_context(Fleet(config.engines))
    engine = RolloutEngine(
        config,
        ledger=ledger,
        tasks=peer,
        workspaces=workspaces,
        grader=peer,
        policy=fleet,
        template=template,
        agent=agent,
        model_context_tokens=model_context_tokens(config.model),
        more_limiters=fleet.limiters,
    )
    server = Server(config.server, [engine.service])
    background = [engine.run(), _destroy_leftovers(workspaces)]
    if config.weights is not None:
        weights = await stack.enter_async_context(open_channel(config.weights))
        node = config.node

        async def register() -> None:
            # Only now is the port known.
            await keep_registered(
                weights,
                Node(
                    node_id=node.node_id or ledger.ledger_id,
                    host=node.host or socket.gethostname(),
                    rollout_target=node.advertise or server.address,
                    engines=[Endpoint(url, node.engine_kind) for url in config.engines.urls],
                    lease_s=node.lease_s,
                ),
            )

        background.append(register())
    await run_until_signal(server, background)


def model_context_tokens(folder: Path) -> int:
    """Read the longest context that a model takes; 0 if its config.json does not say.

    Raises:
        StartupError: The file is no JSON.

    """
    path = folder / "config.json"
    if not path.is_file():
        return 0
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    # Models of several modalities keep it with the text's part.
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings", 0))


async def _open_ledger(config: RolloutConfig) -> Ledger:
    try:
        return await Ledger.open(
            config.ledger.folder,
            file_bytes=config.ledger.file_bytes,
            keep_committed=config.ledger.keep_committed,
        )
    except StartupError:
        raise
    except LedgerError as error:
        raise StartupError(str(error)) from error


async def _destroy_leftovers(workspaces: SandboxWorkspaces) -> None:
    try:
        count = await workspaces.destroy_leftovers()
    except ServiceError as error:
        logger.info("sandboxes of an earlier life are left to their leases: %s", error)
    else:
        if count:
            logger.info("destroyed %d sandboxes of an earlier life", count)


__all__ = ["model_context_tokens", "serve"]
