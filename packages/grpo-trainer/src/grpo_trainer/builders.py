"""Makes stages ready to run: weights, optimizer, data, and where a checkpoint left them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_engine.agents.template import ChatTemplate
from rollout_engine.errors import TemplateError

from grpo_trainer.config import GrpoConfig, SftConfig
from grpo_trainer.errors import CheckpointInvalid, ModelError
from grpo_trainer.held import HeldWeights
from grpo_trainer.peers import Peers
from grpo_trainer.recipes import StageRecipe
from grpo_trainer.registry import RunRegistry, StageRecord
from grpo_trainer.stage import RunningStage, StageContext
from grpo_trainer.weights import WeightsPublisher


@dataclass(slots=True)
class ActiveStage:
    """A stage that is running, or about to.

    Attributes:
        record: As it was when it was started.
        recipe: What it was started with.
        context: Its surroundings.
        ended: Set once its end is written down.
        stage: Itself; None while it is being made ready.
    """

    record: StageRecord
    recipe: StageRecipe
    context: StageContext
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stage: RunningStage | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a stage goes on from."""

    step: int = 0
    state: dict[str, Any] | None = None


async def take_up_weights(
    context: StageContext,
    held: HeldWeights,
    registry: RunRegistry,
    recipe: StageRecipe,
) -> Resumption:
    """Load what a stage trains: its own newest checkpoint, or the weights it starts from.

    Raises:
        CheckpointInvalid: A checkpoint is missing or not whole.
    """
    if context.checkpoints.newest() is not None:
        checkpoint = await held.resume(context.name, recipe.optimizer)
        resumed = Resumption(checkpoint.step, dict(checkpoint.state["stage"]))
        await context.note(f"goes on from the checkpoint of step {checkpoint.step}")
    else:
        await held.hold(recipe.start_from or registry.held())
        backend = held.backend
        await context.compute(lambda: backend.start_optimizer(recipe.optimizer))
        if isinstance(recipe, GrpoConfig) and recipe.loss.kl_coefficient:
            await context.compute(backend.keep_reference)
        resumed = Resumption()
    held.policy.known_number = max(held.policy.known_number, held.known_number)
    context.policy = held.policy
    # From here on the weights are of no checkpoint until the stage writes one.
    held.moved(None)
    return resumed


async def build_sft(
    context: StageContext,
    held: HeldWeights,
    recipe: SftConfig,
    resumed: Resumption,
    *,
    model: Path,
) -> RunningStage:
    """Read the traces and make the stage.

    Raises:
        TraceError: A trace is not valid.
        ModelError: The model folder has no usable chat template.
        CheckpointInvalid: The traces are not those that the checkpoint was written over.
    """
    # Here and not above: training code is heavy to import, and a service may never need it.
    from grpo_trainer.sft.stage import SftStage, load_sequences

    try:
        template = ChatTemplate.from_folder(model)
    except TemplateError as error:
        raise ModelError(str(error)) from error
    context_tokens = held.backend.info.context_tokens
    sequences, left_out = await context.compute(
        lambda: load_sequences(recipe, template, context_tokens=context_tokens)
    )
    if left_out:
        await context.note(left_out)
    if resumed.state is not None and resumed.state["sequences"] != len(sequences):
        raise CheckpointInvalid(
            f"the checkpoint of stage {context.name!r} was written over "
            f"{resumed.state['sequences']} sequences, the traces now give {len(sequences)}; put "
            "the traces back, or start the stage under another name"
        )
    return SftStage(context, held.backend, recipe, sequences, step=resumed.step)


def build_grpo(
    context: StageContext,
    held: HeldWeights,
    recipe: GrpoConfig,
    resumed: Resumption,
    *,
    peers: Peers,
    publisher: WeightsPublisher,
    tasks: tuple[str, ...],
    newest_number: int,
) -> RunningStage:
    """Make the stage.

    Raises:
        CheckpointInvalid: The task set is not the one that the checkpoint was written over.
    """
    from grpo_trainer.loop import GrpoStage

    cursors = {} if resumed.state is None else resumed.state["flow"]["book"]["cursors"]
    source = peers.group_source(
        f"{context.run}-{context.name}", incarnation=publisher.incarnation, cursors=cursors
    )
    try:
        return GrpoStage(
            context,
            held.backend,
            recipe,
            source=source,
            publisher=publisher,
            tasks=tasks,
            step=resumed.step,
            state=resumed.state,
            published=0 < newest_number == context.policy.version,
        )
    except ValueError as error:
        raise CheckpointInvalid(f"stage {context.name!r}: {error}") from error
