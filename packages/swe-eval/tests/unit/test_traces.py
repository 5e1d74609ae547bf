"""Traces of Open-SWE-Traces as ATIF."""

from typing import Any

import pytest
from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.traces import Trace, read_trace, to_atif

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "execute_bash", "arguments": '{"command": "ls"}'},
}
ROW: dict[str, Any] = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "license": "MIT",
    "language": "Python",
    "trajectory_id": "t1",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You fix bugs."}]},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "a.py", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Done."},
    ],
    "tools": ["{}"],
    "resolved": 1,
}


def read(**changes: Any) -> Trace:
    return read_trace(Fields("o__r-1", "traces.jsonl", {**ROW, **changes}, line=3))


def test_a_row_is_a_trajectory_with_calls_in_the_text() -> None:
    atif = to_atif(read())
    assert atif == {
        "schema_version": "ATIF-v1.8",
        "session_id": "t1",
        "agent": {"name": "open-swe-traces", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "You fix bugs."},
            {"step_id": 2, "source": "user", "message": "Fix it."},
            {
                "step_id": 3,
                "source": "agent",
                "message": "<think>\nHm.\n</think>\n\n<tool_call>\n"
                '{"name": "execute_bash", "arguments": {"command": "ls"}}\n</tool_call>',
                "observation": {"results": [{"content": "a.py"}]},
            },
            {"step_id": 4, "source": "agent", "message": "Done."},
        ],
        "extra": {"instance_id": "o__r-1", "repository": "o/r", "solved": True},
    }


def test_calls_keep_their_own_fields_where_asked_for() -> None:
    step = to_atif(read(), calls_as_text=False)["steps"][2]
    assert step["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "execute_bash", "arguments": {"command": "ls"}}
    ]
    assert (step["message"], step["reasoning_content"]) == ("", "Hm.")
    assert step["observation"]["results"][0]["source_call_id"] == "c1"


@pytest.mark.parametrize(("resolved", "solved"), [(1, True), (0, False), (-1, None)])
def test_a_verdict_that_is_not_known_is_left_out(resolved: int, solved: bool | None) -> None:
    assert to_atif(read(resolved=resolved))["extra"].get("solved") is solved


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "x", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"resolved": 2}, "resolved"),
        ({"instance_id": ""}, "instance_id"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(MalformedTaskError) as caught:
        read(**changes)
    assert (caught.value.file, caught.value.line, caught.value.field) == ("traces.jsonl", 3, field)


def test_another_makers_trajectory_is_told() -> None:
    with pytest.raises(MalformedTaskError, match="found a trajectory of mini-swe-agent"):
        read(trajectory_format="mini-swe-agent-1.1")


@pytest.mark.parametrize(
    ("instance_id", "repository"),
    [
        ("pandas-dev__pandas.95280573.pr_53652", "pandas-dev__pandas"),
        ("astropy__astropy-12907", "astropy__astropy"),
        ("Some-Owner__a.b-c.1234abcd.func_basic__x1", "Some-Owner__a.b-c"),
        ("task-7", ""),
    ],
)
def test_a_trace_that_names_no_repository_is_known_by_its_id(
    instance_id: str, repository: str
) -> None:
    row = ROW | {"instance_id": instance_id, "repo": ""}
    facts = read_trace(Fields("t", "f", row)).facts
    assert (facts.repository, facts.text) == (repository, "Fix it.")
