"""Reads trajectories in ATIF, the Agent Trajectory Interchange Format, one a line.

A line is one trajectory: `system` and `user` steps open it, `agent` steps follow, each with what
came back as its observation. An error names the file, the line and the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_engine.agents.template import Message

from grpo_trainer.errors import TraceError

SCHEMA_PREFIX = "ATIF-v1."

_ROOT_FIELDS = {
    "schema_version",
    "session_id",
    "trajectory_id",
    "agent",
    "steps",
    "notes",
    "final_metrics",
    "continued_trajectory_ref",
    "subagent_trajectories",
    "extra",
}
_STEP_FIELDS = {
    "step_id",
    "timestamp",
    "source",
    "model_name",
    "reasoning_effort",
    "message",
    "reasoning_content",
    "tool_calls",
    "observation",
    "metrics",
    "is_copied_context",
    "llm_call_count",
    "extra",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """What the agent wrote, and what came back; nothing comes back from the last turn."""

    text: str
    observations: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory.

    Attributes:
        source: File and line, for messages.
        opening: Messages before the agent's first turn.
        turns: At least one.
        solved: The verdict in `extra.solved`; None if there is none.
    """

    source: str
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]
    solved: bool | None


def read_traces(files: Sequence[Path]) -> Iterator[Trace]:
    """Read every trajectory of some files, in order.

    Raises:
        TraceError: A file cannot be read, or a line is not a trajectory to train on.
    """
    for file in files:
        try:
            stream = file.open(encoding="utf-8")
        except OSError as error:
            raise TraceError(
                f"{file}: cannot be read ({error.strerror}); expected a file of ATIF trajectories, "
                "one a line"
            ) from error
        with stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield parse_trace(line, f"{file}:{number}")


def parse_trace(line: str, source: str) -> Trace:
    """Read one trajectory.

    Args:
        line: Its JSON.
        source: Names it in errors.

    Raises:
        TraceError: Says which step, what was expected and what was found.
    """
    try:
        root = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{source}: not JSON: {error}") from error
    fields = _object(root, source, _ROOT_FIELDS)
    version = fields.get("schema_version")
    if not isinstance(version, str) or not version.startswith(SCHEMA_PREFIX):
        raise TraceError(f"{source}: expected schema_version {SCHEMA_PREFIX}x, found {version!r}")
    if fields.get("subagent_trajectories"):
        raise TraceError(f"{source}: trajectories with sub-agents cannot be trained on yet")
    steps = fields.get("steps")
    if not isinstance(steps, list) or not steps:
        raise TraceError(f"{source}: expected steps, a list that is not empty")
    opening: list[Message] = []
    turns: list[Turn] = []
    for number, raw in enumerate(steps, start=1):
        where = f"{source}, step {number}"
        step = _object(raw, where, _STEP_FIELDS)
        if step.get("step_id") != number:
            raise TraceError(f"{where}: expected step_id {number}, found {step.get('step_id')!r}")
        _take_step(step, where, opening, turns)
    if not opening or not turns:
        raise TraceError(f"{source}: expected a user's step and then an agent's")
    if any(not turn.observations for turn in turns[:-1]):
        bare = next(n for n, turn in enumerate(turns, start=1) if not turn.observations)
        raise TraceError(f"{source}: turn {bare} of {len(turns)} has no observation")
    return Trace(source, tuple(opening), tuple(turns), _solved(fields, source))


def _take_step(
    step: Mapping[str, Any], where: str, opening: list[Message], turns: list[Turn]
) -> None:
    source = step.get("source")
    message = step.get("message")
    if not isinstance(message, str):
        raise TraceError(f"{where}: expected message to be text, found {type(message).__name__}")
    if source == "agent":
        if step.get("tool_calls") or step.get("reasoning_content"):
            raise TraceError(
                f"{where}: tool_calls and reasoning_content have no form in the plain chat that is "
                "trained; write the command as the message"
            )
        turns.append(Turn(message, _observations(step, where)))
        return
    if source not in ("system", "user"):
        raise TraceError(f"{where}: expected source system, user or agent, found {source!r}")
    if turns:
        # Between turns a user's words come back like any observation.
        before = turns[-1]
        turns[-1] = Turn(before.text, (*before.observations, Message(source, message)))
        return
    opening.append(Message(source, message))


def _observations(step: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    observation = step.get("observation")
    if observation is None:
        return ()
    results = observation.get("results") if isinstance(observation, dict) else None
    if not isinstance(results, list):
        raise TraceError(f"{where}: expected observation.results to be a list")
    contents = []
    for result in results:
        content = result.get("content") if isinstance(result, dict) else None
        if not isinstance(content, str):
            raise TraceError(f"{where}: expected each result's content to be text")
        contents.append(Message("user", content))
    return tuple(contents)


def _object(value: object, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{where}: expected an object, found {type(value).__name__}")
    unknown = sorted(value.keys() - known)
    if unknown:
        raise TraceError(f"{where}: unknown fields {unknown}; expected some of {sorted(known)}")
    return value


def _solved(fields: Mapping[str, Any], source: str) -> bool | None:
    extra = fields.get("extra") or {}
    solved = extra.get("solved") if isinstance(extra, dict) else None
    if solved is not None and not isinstance(solved, bool):
        raise TraceError(f"{source}: expected extra.solved to be true or false, found {solved!r}")
    return solved
