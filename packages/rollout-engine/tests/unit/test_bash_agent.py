"""Messages of the policy are read the same way whatever it writes, and answered in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rollout_engine.agents.base import CommandOutcome, RunCommand, Submit, Unusable
from rollout_engine.agents.bash import ActionFormat, BashAgent, BashAgentConfig
from rollout_engine.agents.template import Message

FORMATS: tuple[ActionFormat, ...] = ("plain", "fenced", "tool_call")


def agent(action_format: ActionFormat = "plain", **options: object) -> BashAgent:
    return BashAgent(BashAgentConfig(action_format=action_format, **options))  # type: ignore[arg-type]


def written(command: str, action_format: ActionFormat) -> str:
    if action_format == "fenced":
        return f"I look first.\n```bash\n{command}\n```"
    if action_format == "tool_call":
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"I look first.\n<tool_call>\n{call}\n</tool_call>"
    return command


@pytest.mark.parametrize("action_format", FORMATS)
@pytest.mark.parametrize("thought", ["", "<think>\nls? no\n</think>\n\n"])
def test_a_command_is_found_in_each_format(action_format: ActionFormat, thought: str) -> None:
    command = "sed -i '4c\\    return a + b' shop.py"
    said = thought + written(command, action_format)
    assert agent(action_format).action(said) == RunCommand(command)


@pytest.mark.parametrize("action_format", FORMATS)
def test_the_submit_command_ends_the_attempt_in_each_format(action_format: ActionFormat) -> None:
    assert agent(action_format).action(written("submit", action_format)) == Submit()
    assert (
        agent(action_format, submit_command="done").action(written("done", action_format))
        == Submit()
    )


def test_submitting_is_also_a_tool() -> None:
    call = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
    assert agent("tool_call").action(call) == Submit()


def test_arguments_may_be_json_in_a_text() -> None:
    call = '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>'
    assert agent("tool_call").action(call) == RunCommand("ls")


@pytest.mark.parametrize(
    ("action_format", "text", "words"),
    [
        ("plain", "  \n", "empty"),
        ("plain", "ls \0", "NUL"),
        ("fenced", "ls", "0 ```bash blocks"),
        ("fenced", "```bash\nls\n```\n```bash\nls\n```", "2 ```bash blocks"),
        ("fenced", "```bash\n\n```", "empty"),
        ("tool_call", "ls", "0 tool calls"),
        ("tool_call", "<tool_call>{}</tool_call>", "no JSON object"),
        ("tool_call", "<tool_call>[1]</tool_call>", "no JSON object"),
        ("tool_call", "<tool_call>{'name'</tool_call>", "no JSON object"),
        ("tool_call", '<tool_call>{"name": "python"}</tool_call>', "no other tool"),
        ("tool_call", '<tool_call>{"name": "bash", "arguments": 3}</tool_call>', "no other tool"),
        ("tool_call", "<tool_call>1</tool_call><tool_call>2</tool_call>", "2 tool calls"),
    ],
)
def test_a_message_without_an_action_is_explained(
    action_format: ActionFormat, text: str, words: str
) -> None:
    action = agent(action_format).action(text)
    assert isinstance(action, Unusable)
    assert words in action.explanation


@given(st.sampled_from(FORMATS), st.text())
def test_any_text_gives_an_action_and_never_an_error(
    action_format: ActionFormat, text: str
) -> None:
    assert isinstance(agent(action_format).action(text), RunCommand | Submit | Unusable)


@given(
    st.sampled_from(["fenced", "tool_call"]),
    st.text(st.characters(exclude_characters="`<\r\n\0", exclude_categories=["Cs", "Cc", "Zl"])),
)
def test_a_written_command_is_read_back(action_format: ActionFormat, command: str) -> None:
    action = agent(action_format).action(written(f"echo {command}!", action_format))
    assert action == RunCommand(f"echo {command}!")


def test_the_plain_format_says_nothing_but_the_instruction_and_the_output() -> None:
    plain = agent("plain", observation="{{ output }}", tell_remaining=False)
    assert plain.opening("Fix it.") == [Message("user", "Fix it.")]
    outcome = CommandOutcome("a.py\n", exit_code=1)
    assert plain.observation(outcome) == Message("user", "a.py")
    assert plain.observation(CommandOutcome("", 0)) == Message("user", "")
    assert plain.tools == ()


def test_tool_calls_come_with_their_schemas_and_are_answered_by_the_tool() -> None:
    calls = agent("tool_call")
    assert [tool["function"]["name"] for tool in calls.tools] == ["bash", "submit"]
    assert calls.observation(CommandOutcome("x", 0)).role == "tool"
    assert calls.correction(Unusable("no"), "") == Message("user", "no")


@pytest.mark.parametrize("action_format", ["fenced", "tool_call"])
def test_other_formats_are_explained_in_the_system_message(action_format: ActionFormat) -> None:
    system, user = agent(action_format).opening("Fix it.")
    assert system.role == "system"
    assert "submit" in system.content
    assert user == Message("user", "Fix it.")
    assert len(agent(action_format, system_prompt="").opening("Fix it.")) == 1


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (CommandOutcome("out\n", 0), "out"),
        (CommandOutcome("out", 2), "out\n[exit code 2]"),
        (CommandOutcome("out", 137, timed_out=True, timeout_s=2.5), "out\n[stopped after 2.5 s]"),
        (CommandOutcome("", 137, out_of_memory=True), "\n[killed: out of memory]"),
        (CommandOutcome("out", 0, remaining="3 turns left"), "out\n[3 turns left]"),
    ],
)
def test_the_default_observation_tells_how_a_command_ended(
    outcome: CommandOutcome, text: str
) -> None:
    assert agent("fenced").observation(outcome).content == text


def test_templates_that_do_not_compile_are_refused_with_the_config() -> None:
    with pytest.raises(ValidationError, match="observation is no Jinja template"):
        BashAgentConfig(observation="{% if %}")
    with pytest.raises(ValidationError, match="could never submit"):
        BashAgentConfig(submit_command=" ")
