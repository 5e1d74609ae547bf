"""Configuration of the engine. `python -m rollout_engine config` prints every field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import pydantic
from service_kit.channel import ChannelConfig
from service_kit.config import Config
from service_kit.server import ServerConfig
from service_kit.telemetry import TelemetryConfig

from rollout_engine.agents.bash import BashAgentConfig
from rollout_engine.engines.fleet import FleetConfig
from rollout_engine.wire import MAX_CHUNK_BYTES


class LimitConfig(Config):
    """What one attempt may use up, where its assignment does not say."""

    turns: int = pydantic.Field(default=80, ge=1)
    """Generations of the policy."""

    turn_tokens: int = pydantic.Field(default=8192, ge=1)
    """Tokens sampled in one turn."""

    total_tokens: int = pydantic.Field(default=65536, ge=1)
    """Tokens sampled in all turns together."""

    context_tokens: int = pydantic.Field(default=65536, ge=1)
    """Length of prompt and everything appended to it. The model's own limit (config.json) applies
    if it is lower; where the engines hold less than that, say so here."""

    command_time_s: float = pydantic.Field(default=1800.0, gt=0)
    """Summed run time of the attempt's own commands."""

    repeated_actions: int = pydantic.Field(default=5, ge=0)
    """The same cycle of up to 3 actions so many times in a row ends the attempt; 0: never."""

    unusable_turns: int = pydantic.Field(default=3, ge=0)
    """Turns without a usable action so many times in a row end the attempt; 0: never."""


class ConcurrencyConfig(Config):
    """How much is done at once. 0 stands for no limit."""

    attempts: int = pydantic.Field(default=256, ge=0)
    """Attempts that run; the rest wait, oldest group first."""

    engine_requests: int = pydantic.Field(default=0, ge=0)
    """Generations in flight; the engines have queues of their own."""

    sandbox_starts: int = pydantic.Field(default=32, ge=0)
    """Sandboxes that are being made."""

    graders: int = pydantic.Field(default=64, ge=0)
    """Gradings in flight; the evaluator has a queue of its own."""


class DeadlineConfig(Config):
    """How long each thing may take. None of it counts as the policy's time but `command_s`."""

    task_s: float = pydantic.Field(default=60.0, gt=0)
    """Fetching a task or an environment."""

    sandbox_start_s: float = pydantic.Field(default=180.0, gt=0)
    """Making a sandbox, queueing at its service included."""

    generate_s: float = pydantic.Field(default=1800.0, gt=0)
    """One generation, queueing and pauses for weight updates included."""

    command_s: float = pydantic.Field(default=60.0, gt=0)
    """One command of the policy. It is killed then and the policy is told; not a fault. Up to 60 s
    a command is one cheap call; above, it streams heartbeats."""

    grade_s: float = pydantic.Field(default=1800.0, gt=0)
    """One grading, queueing at the evaluator included."""

    destroy_s: float = pydantic.Field(default=20.0, gt=0)
    """Ending a sandbox; after that its lease ends it."""

    patience_s: float = pydantic.Field(default=120.0, ge=0)
    """How long a peer that cannot be reached or is full is waited for before it is a fault. Covers
    its restart."""


class RefillConfig(Config):
    """How often faults are refilled before an attempt is given up and its group quarantined."""

    per_attempt: int = pydantic.Field(default=3, ge=0)
    """Refills of one attempt."""

    per_group: int = pydantic.Field(default=16, ge=0)
    """Faults of a whole group, after which none is refilled any more."""

    backoff_initial_s: float = pydantic.Field(default=0.5, gt=0)
    """Longest wait before the first refill of an attempt; the real one is random below it."""

    backoff_max_s: float = pydantic.Field(default=30.0, gt=0)
    """Longest wait before any refill."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.backoff_max_s < self.backoff_initial_s:
            raise ValueError("backoff_max_s is below backoff_initial_s")
        return self


class ConsumersConfig(Config):
    """What holds for every consumer's stream."""

    credits: int = pydantic.Field(default=64, ge=1)
    """Groups that a consumer may have assigned and not received."""

    max_attempts: int = pydantic.Field(default=256, ge=1)
    """Largest group."""

    heartbeat_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest silence of the engine on a stream."""

    idle_s: float = pydantic.Field(default=30.0, gt=0)
    """A consumer that is silent for longer is disconnected; its groups run on."""

    progress_s: float = pydantic.Field(default=2.0, gt=0)
    """Time between figures."""

    chunk_bytes: int = pydantic.Field(default=MAX_CHUNK_BYTES, ge=1024, le=MAX_CHUNK_BYTES)
    """Largest piece of an attempt in one message."""


class LedgerConfig(Config):
    """Where finished attempts are kept until they are committed."""

    folder: Path = Path("runs/rollout-engine/ledger")
    """Holds the database and the arrays. One engine alone uses it, always the same."""

    file_bytes: int = pydantic.Field(default=64 * 1024 * 1024, ge=1024)
    """Size at which an array file is closed. A file goes once all of it is committed."""

    keep_committed: int = pydantic.Field(default=10_000, ge=0)
    """Committed groups remembered, to refuse late assignments of them."""


class WorkConfig(Config):
    """How attempts are made, whoever the peers are."""

    agent: BashAgentConfig = BashAgentConfig()
    """The agent."""

    limits: LimitConfig = LimitConfig()
    """What an attempt may use up."""

    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    """How much is done at once."""

    deadlines: DeadlineConfig = DeadlineConfig()
    """How long each thing may take."""

    refills: RefillConfig = RefillConfig()
    """How often faults are refilled."""

    consumers: ConsumersConfig = ConsumersConfig()
    """Streams of consumers."""

    ledger: LedgerConfig = LedgerConfig()
    """Where finished attempts are kept."""


class NodeConfig(Config):
    """How this node is announced to the WeightService."""

    node_id: str = ""
    """Empty: the ledger's id, which stays the same over restarts."""

    host: str = ""
    """Engines with the same host share one receiver of weights. Empty: this host's name."""

    advertise: str = ""
    """Where the trainer reaches this service. Empty: the address it is bound to."""

    engine_kind: Literal["embedded", "sglang"] = "embedded"
    """What the engines are: it decides how weights reach them."""

    lease_s: float = pydantic.Field(default=15.0, gt=0)
    """A node that does not renew for so long is forgotten; it renews at a third of it."""


class RolloutConfig(WorkConfig):
    """Everything `python -m rollout_engine serve` can be told."""

    model: Path
    """Model folder; its tokenizer.json, chat_template.jinja, generation_config.json and config.json
    are read, its weights are not."""

    template_variables: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking = false`."""

    server: ServerConfig = ServerConfig(bind="127.0.0.1:7104")
    """Where RolloutService is served."""

    telemetry: TelemetryConfig = TelemetryConfig()
    """Where spans and metrics go."""

    sandbox: ChannelConfig = ChannelConfig(target="127.0.0.1:7101")
    """The SandboxService."""

    evaluation: ChannelConfig = ChannelConfig(target="127.0.0.1:7102")
    """The EvalService: tasks and grading."""

    weights: ChannelConfig | None = ChannelConfig(target="127.0.0.1:7103")
    """The WeightService that this node registers with; None: it registers nowhere."""

    engines: FleetConfig = FleetConfig()
    """The engines of this node."""

    node: NodeConfig = NodeConfig()
    """How this node is announced."""


__all__ = [
    "ConcurrencyConfig",
    "ConsumersConfig",
    "DeadlineConfig",
    "LedgerConfig",
    "LimitConfig",
    "NodeConfig",
    "RefillConfig",
    "RolloutConfig",
    "WorkConfig",
]
