"""Traces of Open-SWE-Traces, and conversations like them, for supervised fine-tuning.

A row becomes a trajectory in ATIF, which is what training reads.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swe_eval.core.decontaminate import TaskFacts
from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.kinds import kind_of
from swe_eval.tasks.rows import read_rows

ATIF = "ATIF-v1.8"
_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceMessage:
    """One message of a trace."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """Of a tool's message: the call that it answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What an agent did on one instance."""

    instance_id: str
    trajectory_id: str
    repository: str
    resolved: bool | None
    """None when it was not judged."""
    messages: tuple[TraceMessage, ...]
    language: str = ""
    license: str = ""

    @property
    def facts(self) -> TaskFacts:
        """What its task can be known by: the statement is in what the user said first."""
        said = next((message.content for message in self.messages if message.role == "user"), "")
        repository = self.repository or _repository_of(self.instance_id)
        return TaskFacts(task_id=self.trajectory_id, repository=repository, text=said)


def _repository_of(instance_id: str) -> str:
    """From an id of SWE-bench (`owner__name-12`) or SWE-smith (`owner__name.commit.bug`)."""
    match = re.fullmatch(r"([\w.-]+?__[\w.-]+?)(-\d+|\.[0-9a-f]{7,40}\..+)", instance_id)
    return match[1] if match else ""


def read_traces(location: str, *, split: str = "") -> Iterator[Trace | MalformedTaskError]:
    """The traces at a location, as `rows.read_rows` takes it.

    Raises:
        TaskSetError: there is none.
    """
    for row in read_rows(location, split=split):
        try:
            yield row if isinstance(row, MalformedTaskError) else read_trace(row)
        except MalformedTaskError as error:
            yield error


def read_trace(fields: Fields) -> Trace:
    """Reads a row. Rows of other makers, with `instance_id` and `messages` alone, are read too.

    Raises:
        MalformedTaskError: a field is missing or holds what it should not.
    """
    if "messages" not in fields.values or "trajectory_format" in fields.values:
        fields.refuse("a trace with messages", kind_of(fields.values))
    name = fields.filled("instance_id")
    raw = fields.values["messages"]
    if not isinstance(raw, list) or not raw:
        fields.fail("messages", "a list that is not empty", raw)
    messages = tuple(_message(fields, number, value) for number, value in enumerate(raw))
    if not any(message.role == "assistant" for message in messages):
        fields.fail("messages", "at least one of the assistant's", f"{len(messages)} others")
    resolved = fields.values.get("resolved", -1)
    if resolved not in (-1, 0, 1):
        fields.fail("resolved", "-1 (not known), 0 or 1", resolved)
    return Trace(
        instance_id=name,
        trajectory_id=fields.text("trajectory_id", name),
        repository=fields.text("repo"),
        resolved=None if resolved == -1 else bool(resolved),
        messages=messages,
        language=fields.text("language"),
        license=fields.text("license"),
    )


def _message(fields: Fields, number: int, value: Any) -> TraceMessage:
    where = f"messages[{number}]"
    if not isinstance(value, dict):
        fields.fail(where, "an object", value)
    role = value.get("role")
    if role not in (*_SOURCES, "tool"):
        fields.fail(f"{where}.role", "system, user, assistant or tool", role)
    return TraceMessage(
        role=role,
        content=_text(fields, f"{where}.content", value.get("content")),
        reasoning=_text(fields, f"{where}.reasoning_content", value.get("reasoning_content")),
        calls=_calls(fields, f"{where}.tool_calls", value.get("tool_calls") or []),
        call_id=_text(fields, f"{where}.tool_call_id", value.get("tool_call_id")),
    )


def _text(fields: Fields, where: str, value: Any) -> str:
    """Text, or the text of a list of parts; null is none."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    if value is not None and not isinstance(value, str):
        fields.fail(where, "text", value)
    return value or ""


def _calls(fields: Fields, where: str, value: Any) -> tuple[ToolCall, ...]:
    found: list[ToolCall] = []
    for number, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            fields.fail(f"{where}[{number}].function", "an object with a name", call)
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            fields.fail(f"{where}[{number}].function.arguments", "an object", function["arguments"])
        found.append(ToolCall(str(call.get("id") or f"call-{number}"), name, arguments))
    return tuple(found)


def to_atif(trace: Trace, *, calls_as_text: bool = True) -> dict[str, Any]:
    """The trajectory in ATIF.

    Args:
        trace: What to write.
        calls_as_text: Whether calls and thoughts are written into the message, as chat templates
            of Qwen's form do; training reads these. Else they have ATIF's own fields.
    """
    steps: list[dict[str, Any]] = []
    for message in trace.messages:
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            result = {"content": message.content}
            if message.call_id and not calls_as_text:
                result["source_call_id"] = message.call_id
            results.append(result)
            continue
        source = _SOURCES.get(message.role, "user")
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source}
        step["message"] = message.content
        if source == "agent" and calls_as_text:
            step["message"] = as_text(message)
        elif source == "agent":
            step |= _structured(message)
        steps.append(step)
    extra = {
        "instance_id": trace.instance_id,
        "repository": trace.repository,
        **({} if trace.resolved is None else {"solved": trace.resolved}),
    }
    return {
        "schema_version": ATIF,
        "session_id": trace.trajectory_id,
        "agent": {"name": "open-swe-traces", "version": "1"},
        "steps": steps,
        "extra": extra,
    }


def as_text(message: TraceMessage) -> str:
    """A turn with its thoughts and calls in the text."""
    parts: Sequence[str] = [
        f"<think>\n{message.reasoning.strip()}\n</think>\n" if message.reasoning else "",
        message.content.strip(),
        *(
            "<tool_call>\n"
            + json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            + "\n</tool_call>"
            for call in message.calls
        ),
    ]
    return "\n".join(part for part in parts if part)


def _structured(message: TraceMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {
                "tool_call_id": call.call_id,
                "function_name": call.name,
                "arguments": dict(call.arguments),
            }
            for call in message.calls
        ]
    return fields
