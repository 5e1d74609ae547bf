"""A finished attempt as ATIF v1.8 (Agent Trajectory Interchange Format), Harbor's trajectory form.

A turn is an `agent` step with its token ids and log-probabilities; what came back is its
observation. The first turn carries the opening's ids as its prompt, each observation its own, so
the attempt's exact tokens can be put together again.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rollout_engine.agents.template import ChatTemplate, Message
from rollout_engine.types import Attempt, Segment, TokenIds

SCHEMA = "ATIF-v1.8"
_MARK = "TAILRACE-TEXT-7c40"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_Frame = tuple[Sequence[str], Sequence[str]]
"""Roles, and the text before, between and after their messages."""


class Decoder:
    """Reads the messages in a conversation's tokens; without a chat template every text is empty.

    Args:
        template: Of the model that spoke.
    """

    def __init__(self, template: ChatTemplate | None = None) -> None:
        self._template = template
        self._openings: list[_Frame] = []
        self._answers: list[_Frame] = []
        if template is None:
            return
        self._end = template.text(np.array([template.end_of_turn_id] * 2, np.int32))
        for roles in (("system", "user"), ("user",)):
            ids = template.prompt([Message(role, _MARK) for role in roles])
            self._openings.append((roles, self._around(ids)))
        for role in ("tool", "user"):
            ids = template.continuation([Message(role, _MARK)])
            self._answers.append(((role,), self._around(ids)))

    @classmethod
    def from_folder(cls, folder: Path | None) -> Decoder:
        """The decoder of a model folder, or one that gives no text.

        Raises:
            TemplateError: a file is missing or unreadable.
        """
        return cls(None if folder is None else ChatTemplate.from_folder(folder))

    def said(self, ids: TokenIds) -> str:
        """What the policy wrote in a turn."""
        return "" if self._template is None else self._template.text(ids)

    def opening(self, ids: TokenIds) -> list[tuple[str, str]]:
        """Role and text of the messages before the first turn."""
        return self._read(ids, self._openings)

    def answer(self, ids: TokenIds) -> str:
        """What came back after a turn."""
        return self._read(ids, self._answers)[0][1]

    def _around(self, ids: TokenIds) -> list[str]:
        parts = self.said(ids).split(_MARK)
        # What follows the end of the last message belongs to the turn after it.
        last = parts[-1]
        parts[-1] = last[: last.find(self._end) + len(self._end)]
        return parts

    def _read(self, ids: TokenIds, frames: Sequence[_Frame]) -> list[tuple[str, str]]:
        text = self.said(ids)
        if self._template is not None:
            # A turn that was cut off is closed by the end-of-turn token that it lacks.
            text = text.removeprefix(self._end)
        for roles, parts in frames:
            found = _between(text, parts)
            if found is not None:
                return list(zip(roles, found, strict=True))
        return [("user", text)]


def _between(text: str, parts: Sequence[str]) -> list[str] | None:
    """The texts between `parts`, in order; None if `text` is not built so."""
    first, *rest = parts
    if not text.startswith(first):
        return None
    found: list[str] = []
    place = len(first)
    for number, part in enumerate(rest, start=1):
        end = text.rfind(part, place) if number == len(rest) else text.find(part, place)
        if end < 0:
            return None
        found.append(text[place:end])
        place = end + len(part)
    return found


def to_atif(attempt: Attempt, decoder: Decoder, *, evaluation: str) -> dict[str, Any]:
    """The trajectory as plain values, ready for JSON.

    Of an attempt with branches, the one that its last segment ends.
    """
    steps: list[dict[str, Any]] = []
    context = 0
    opening: TokenIds | None = None
    for run in _runs(_branch(attempt.segments)):
        if not run.sampled:
            if context == 0:
                opening = run.ids
                opened = decoder.opening(run.ids)
                steps += [{"source": role, "message": text} for role, text in opened]
            else:
                _observe(steps[-1], decoder.answer(run.ids), run.ids)
        else:
            steps.append(_turn(run, decoder, context, opening))
            opening = None
        context += len(run.ids)
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    versions = attempt.policy_versions
    model = {"model_name": f"policy version {versions[0]}"} if len(versions) == 1 else {}
    return {
        "schema_version": SCHEMA,
        "session_id": str(attempt.id),
        "trajectory_id": str(attempt.id),
        "agent": {
            "name": "rollout-engine",
            "version": importlib.metadata.version("rollout-engine"),
            **model,
        },
        # The schema wants at least one.
        "steps": numbered or [{"step_id": 1, "source": "system", "message": ""}],
        "final_metrics": {
            "total_completion_tokens": attempt.sampled_tokens,
            "total_steps": max(1, len(numbered)),
            "extra": asdict(attempt.timing),
        },
        "extra": {
            "evaluation": evaluation,
            "task_id": attempt.task_id,
            "outcome": attempt.outcome.value,
            "reward": attempt.reward,
            "graded": attempt.graded,
            "grade_reason": attempt.grade_reason,
            "limit": attempt.limit.value if attempt.limit else None,
            "versions": list(versions),
            "finished_at_s": attempt.finished_at_s,
            "diff": attempt.diff.decode(errors="replace"),
        },
    }


class _Run:
    """Neighbouring tokens of one kind: a turn, or what the policy was given."""

    def __init__(self, segment: Segment, start: int, end: int) -> None:
        self.sampled = bool(segment.loss_mask[start])
        self.ids = segment.token_ids[start:end]
        self.logprobs = segment.logprobs[start:end]
        self.spans = [
            {
                "start": max(span.start, start) - start,
                "end": min(span.end, end) - start,
                "version": span.version,
                "oldest_kv_version": span.oldest_kv_version,
            }
            for span in segment.versions
            if span.start < end and span.end > start
        ]


def _branch(segments: Sequence[Segment]) -> list[Segment]:
    by_id = {segment.segment_id: segment for segment in segments}
    branch: list[Segment] = []
    segment = segments[-1] if segments else None
    while segment is not None:
        branch.append(segment)
        segment = by_id.get(segment.parent_id)
    return branch[::-1]


def _runs(segments: Sequence[Segment]) -> Iterator[_Run]:
    for segment in segments:
        if not len(segment):
            continue
        edges = np.flatnonzero(np.diff(segment.loss_mask.astype(np.int8))) + 1
        bounds = [0, *edges.tolist(), len(segment)]
        for start, end in pairwise(bounds):
            yield _Run(segment, start, end)


def _turn(run: _Run, decoder: Decoder, context: int, opening: TokenIds | None) -> dict[str, Any]:
    reasoning, closed, said = decoder.said(run.ids).rpartition("</think>")
    metrics: dict[str, Any] = {
        "prompt_tokens": context,
        "completion_tokens": len(run.ids),
        "completion_token_ids": run.ids.tolist(),
        "extra": {"version_spans": run.spans},
    }
    if opening is not None:
        metrics["prompt_token_ids"] = opening.tolist()
    if np.all(np.isfinite(run.logprobs)):
        metrics["logprobs"] = [round(value, 6) for value in run.logprobs.tolist()]
    step: dict[str, Any] = {"source": "agent", "message": said, "metrics": metrics}
    if closed:
        step["reasoning_content"] = reasoning.replace("<think>", "", 1).strip()
    calls = list(_calls(said))
    if calls:
        step["tool_calls"] = calls
        if len(calls) == len(_CALL.findall(said)):
            step["message"] = _CALL.sub("", said).strip()
    return step


def _calls(said: str) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(_CALL.findall(said), start=1):
        try:
            call = json.loads(text)
            name, arguments = str(call["name"]), call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # the policy's mistake; the message keeps its text
        if isinstance(arguments, dict):
            yield {
                "tool_call_id": f"call-{number}",
                "function_name": name,
                "arguments": arguments,
            }


def _observe(step: dict[str, Any], text: str, ids: TokenIds) -> None:
    result: dict[str, Any] = {"content": text, "extra": {"token_ids": ids.tolist()}}
    if "tool_calls" in step:
        result["source_call_id"] = step["tool_calls"][0]["tool_call_id"]
    step.setdefault("observation", {"results": []})["results"].append(result)
