"""Trajectories: the form is ATIF's, and the exact tokens can be put together again."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.agents.template import ChatTemplate, Message
from rollout_engine.testing import byte_template
from rollout_engine.types import (
    Attempt,
    AttemptId,
    GroupKey,
    LimitKind,
    Outcome,
    Segment,
    VersionSpan,
)
from swe_eval.atif import Decoder, to_atif

TEMPLATE = byte_template()
DECODER = Decoder(TEMPLATE)
OPENING = [Message("system", "You fix bugs."), Message("user", "Fix <it>.\n")]


def attempt(*segments: Segment, **more: Any) -> Attempt:
    return Attempt(
        AttemptId(GroupKey("g", 0), 2, 1), "owner/task", Outcome.SOLVED, reward=1.0, graded=True,
        turns=2, segments=segments, **more,
    )  # fmt: skip


def linear(
    turns: Sequence[tuple[str, Sequence[Message]]],
    opening: Sequence[Message] = OPENING,
    template: ChatTemplate = TEMPLATE,
) -> Segment:
    """A segment whose first sampled token is of version 3, the others of version 4."""
    whole = template.conversation(opening, turns)
    (sampled,) = np.nonzero(whole.loss_mask)
    first, last = int(sampled[0]), int(sampled[-1])
    return Segment(
        0, -1, whole.token_ids, whole.loss_mask,
        np.where(whole.loss_mask, np.float32(-0.25), np.float32(0)),
        (VersionSpan(first, first + 1, 3, 3), VersionSpan(first + 1, last + 1, 4, 3)),
    )  # fmt: skip


def tokens_of(trajectory: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for step in trajectory["steps"]:
        metrics = step.get("metrics", {})
        found += metrics.get("prompt_token_ids", [])
        found += metrics.get("completion_token_ids", [])
        for result in step.get("observation", {"results": []})["results"]:
            found += result["extra"]["token_ids"]
    return found


def test_turns_are_agent_steps_with_what_came_back() -> None:
    segment = linear([("ls -a", [Message("tool", "a\nb")]), ("submit", [])])
    trajectory = to_atif(attempt(segment), DECODER, evaluation="base")
    assert trajectory["schema_version"] == "ATIF-v1.8"
    steps = trajectory["steps"]
    assert [(s["step_id"], s["source"], s["message"]) for s in steps] == [
        (1, "system", "You fix bugs."),
        (2, "user", "Fix <it>.\n"),
        (3, "agent", "ls -a"),
        (4, "agent", "submit"),
    ]
    assert [r["content"] for r in steps[2]["observation"]["results"]] == ["a\nb"]
    assert "observation" not in steps[3]
    assert steps[3]["metrics"]["prompt_tokens"] == len(segment) - len("submit") - 1
    assert trajectory["final_metrics"]["total_completion_tokens"] == segment.sampled_tokens
    assert trajectory["final_metrics"]["total_steps"] == 4
    assert set(steps[2]["metrics"]["logprobs"]) == {-0.25}


def test_spans_say_which_version_made_which_tokens_of_a_turn() -> None:
    segment = linear([("ls", [Message("user", "a")]), ("submit", [])])
    steps = to_atif(attempt(segment), DECODER, evaluation="base")["steps"]
    assert steps[2]["metrics"]["extra"]["version_spans"] == [
        {"start": 0, "end": 1, "version": 3, "oldest_kv_version": 3},
        {"start": 1, "end": 3, "version": 4, "oldest_kv_version": 3},
    ]
    assert steps[3]["metrics"]["extra"]["version_spans"] == [
        {"start": 0, "end": 7, "version": 4, "oldest_kv_version": 3}
    ]


def test_the_end_of_the_attempt_is_told() -> None:
    done = attempt(
        linear([("submit", [])]), limit=LimitKind.TURNS, grade_reason="x", diff=b"+\xff\n"
    )
    extra = to_atif(done, DECODER, evaluation="base")["extra"]
    assert (extra["evaluation"], extra["task_id"], extra["outcome"]) == (
        "base",
        "owner/task",
        "SOLVED",
    )
    assert (extra["limit"], extra["versions"], extra["diff"]) == ("TURNS", [3, 4], "+\ufffd\n")


def test_thought_and_calls_stand_apart_from_the_message() -> None:
    call = json.dumps({"name": "bash", "arguments": {"command": "ls"}})
    said = f"<think>\nhm\n</think>\nI look.\n<tool_call>\n{call}\n</tool_call>"
    segment = linear([(said, [Message("tool", "a")]), ("<tool_call>[1]</tool_call>", [])])
    steps = to_atif(attempt(segment), DECODER, evaluation="base")["steps"]
    assert (steps[2]["reasoning_content"], steps[2]["message"]) == ("hm", "I look.")
    assert steps[2]["tool_calls"] == [
        {"tool_call_id": "call-1", "function_name": "bash", "arguments": {"command": "ls"}}
    ]
    assert steps[2]["observation"]["results"][0]["source_call_id"] == "call-1"
    # A call that can't be read stays in the message.
    assert "tool_calls" not in steps[3]
    assert steps[3]["message"] == "<tool_call>[1]</tool_call>"


def test_a_turn_that_was_cut_off_is_followed_by_its_observation_alone() -> None:
    opening = TEMPLATE.prompt(OPENING)
    said = TEMPLATE.assistant("ls")[:-1]
    answer = TEMPLATE.continuation([Message("user", "again")], closed=False)
    ids = np.concatenate([opening, said, answer, said])
    mask = np.repeat([False, True, False, True], [len(opening), 2, len(answer), 2])
    segment = Segment(0, -1, ids, mask, np.zeros(len(ids), np.float32))
    steps = to_atif(attempt(segment), DECODER, evaluation="base")["steps"]
    assert steps[2]["observation"]["results"][0]["content"] == "again"
    assert steps[3]["message"] == "ls"


def test_of_a_tree_the_branch_of_the_last_segment_is_told() -> None:
    root = linear([("ls", [Message("user", "a")]), ("dead", [])])
    split = len(TEMPLATE.conversation(OPENING, [("ls", [Message("user", "a")])]).token_ids)
    trunk = Segment(0, -1, root.token_ids[:split], root.loss_mask[:split], root.logprobs[:split])
    leaves = [
        Segment(n, 0, TEMPLATE.assistant(t), np.ones(len(t) + 1, bool), np.zeros(len(t) + 1, "f4"))
        for n, t in ((1, "dead"), (2, "submit"))
    ]
    steps = to_atif(attempt(trunk, *leaves), DECODER, evaluation="base")["steps"]
    assert [s["message"] for s in steps if s["source"] == "agent"] == ["ls", "submit"]


def test_without_a_template_there_are_token_ids_alone() -> None:
    segment = linear([("ls", [Message("user", "a")]), ("submit", [])])
    trajectory = to_atif(attempt(segment), Decoder(), evaluation="base")
    assert {s["message"] for s in trajectory["steps"]} == {""}
    assert tokens_of(trajectory) == segment.token_ids.tolist()


def test_an_attempt_without_tokens_is_a_valid_trajectory() -> None:
    trajectory = to_atif(attempt(), DECODER, evaluation="base")
    assert [s["step_id"] for s in trajectory["steps"]] == [1]


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_log_probabilities_that_json_can_not_hold_are_left_out(value: float) -> None:
    segment = linear([("ls", [])])
    segment.logprobs[-1] = value
    trajectory = to_atif(attempt(segment), DECODER, evaluation="base")
    json.dumps(trajectory, allow_nan=False)
    assert "logprobs" not in trajectory["steps"][-1]["metrics"]


texts = st.text(min_size=1, max_size=30)


@given(
    st.sampled_from([OPENING, OPENING[1:]]),
    st.lists(st.tuples(texts, texts), max_size=4),
    texts,
    st.sampled_from(["tool", "user"]),
)
def test_tokens_and_texts_come_back_whatever_was_said(
    opening: list[Message], turns: list[tuple[str, str]], last: str, role: str
) -> None:
    conversation = [(said, [Message(role, answer)]) for said, answer in turns]
    segment = linear([*conversation, (last, [])], opening)
    trajectory = to_atif(attempt(segment), DECODER, evaluation="base")
    assert tokens_of(trajectory) == segment.token_ids.tolist()
    steps = trajectory["steps"]
    assert [s["step_id"] for s in steps] == list(range(1, len(steps) + 1))
    assert [(s["source"], s["message"]) for s in steps[: len(opening)]] == [
        (m.role, m.content) for m in opening
    ]
    answers = [s["observation"]["results"][0]["content"] for s in steps if "observation" in s]
    assert answers == [answer for _, answer in turns]
