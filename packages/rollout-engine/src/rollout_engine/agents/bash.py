"""The agent that works with shell commands alone: one a turn, and a word to submit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jinja2
import pydantic
from jinja2.sandbox import ImmutableSandboxedEnvironment
from service_kit.config import Config

from rollout_engine.agents.base import Action, CommandOutcome, RunCommand, Submit, Unusable
from rollout_engine.agents.template import Message

ActionFormat = Literal["plain", "fenced", "tool_call"]

_FENCE = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_TASK = (
    "You fix bugs in a code repository. The current folder is the repository. You work by shell "
    "commands, one in each message; each runs in a new shell in that folder, without a terminal. "
    "Find the cause, change the code, and check your change by running it. Your changes in the "
    "folder are what counts."
)
_SYSTEM_PROMPTS: Mapping[str, str] = {
    "plain": "",
    "fenced": (
        f"{_TASK} Think as long as you need, then end your message with exactly one block that "
        "holds the command:\n```bash\nls\n```\nWhen you are done, use the command `{submit}` "
        "alone."
    ),
    "tool_call": (
        f"{_TASK} Call the tool `bash` once in each message. When you are done, call `submit`."
    ),
}
_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command in the repository and get its output.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command."}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Hand in the changes. Nothing can be done afterwards.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


class BashAgentConfig(Config):
    """How the policy is addressed and how its messages are read.

    `instruction` and `observation` are Jinja templates. `observation` knows `output`, `exit_code`,
    `timed_out`, `timeout_s`, `out_of_memory` and `remaining`.
    """

    action_format: ActionFormat = "tool_call"
    """`plain`: the whole message is the command. `fenced`: exactly one ```bash block is.
    `tool_call`: one <tool_call> with JSON, as Qwen3 writes it."""

    submit_command: str = "submit"
    """The command that ends the attempt. In `tool_call` the tool `submit` does the same."""

    system_prompt: str | None = None
    """System message; by default one that explains the action format, and none for `plain`. The
    empty text leaves it out."""

    instruction: str = "{{ instruction }}"
    """First user message."""

    observation: str = (
        "{{ output }}"
        "{% if timed_out %}\n[stopped after {{ '%g' % timeout_s }} s]"
        "{% elif out_of_memory %}\n[killed: out of memory]"
        "{% elif exit_code %}\n[exit code {{ exit_code }}]{% endif %}"
        "{% if remaining %}\n[{{ remaining }}]{% endif %}"
    )
    """What the policy reads after a command. `output` comes without its last line break."""

    observation_role: Literal["user", "tool", ""] = ""
    """Role of observations; empty: `tool` for `tool_call`, else `user`."""

    tell_remaining: bool = True
    """Whether observations are given `remaining`: the turns, tokens and command time left."""

    max_output_bytes: int = pydantic.Field(default=10_000, ge=1)
    """Bytes of a command's output that are kept, half from its head and half from its tail."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("instruction", "observation"):
            try:
                _templates().from_string(getattr(self, name))
            except jinja2.TemplateError as error:
                raise ValueError(f"{name} is no Jinja template: {error}") from error
        if not self.submit_command.strip():
            raise ValueError("submit_command is empty; the policy could never submit")
        return self


class BashAgent:
    """An `Agent` by its config."""

    def __init__(self, config: BashAgentConfig) -> None:
        self._config = config
        environment = _templates()
        self._instruction = environment.from_string(config.instruction)
        self._observation = environment.from_string(config.observation)
        calls = config.action_format == "tool_call"
        self._role = config.observation_role or ("tool" if calls else "user")
        self._tools = _TOOLS if calls else ()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of `bash` and `submit`, for the format `tool_call`."""
        return self._tools

    @property
    def max_output_bytes(self) -> int:
        """How much of a command's output is kept."""
        return self._config.max_output_bytes

    @property
    def tells_remaining(self) -> bool:
        """Whether observations say what is left of the limits."""
        return self._config.tell_remaining

    def opening(self, instruction: str) -> list[Message]:
        """Give the messages before the policy's first turn."""
        config = self._config
        system = config.system_prompt
        if system is None:
            system = _SYSTEM_PROMPTS[config.action_format].replace(
                "{submit}", config.submit_command
            )
        user = Message("user", self._instruction.render(instruction=instruction))
        return [Message("system", system), user] if system else [user]

    def action(self, text: str) -> Action:
        """Read the policy's message; what it thought aloud before is left out."""
        said = text.rpartition("</think>")[2]
        match self._config.action_format:
            case "plain":
                return self._command(said)
            case "fenced":
                return self._fenced(said)
            case "tool_call":
                return self._call(said)

    def observation(self, outcome: CommandOutcome) -> Message:
        """Say what came of a command."""
        text = self._observation.render(
            output=outcome.output.removesuffix("\n"),
            exit_code=outcome.exit_code,
            timed_out=outcome.timed_out,
            timeout_s=outcome.timeout_s,
            out_of_memory=outcome.out_of_memory,
            remaining=outcome.remaining,
        )
        return Message(self._role, text)

    def correction(self, unusable: Unusable, remaining: str) -> Message:
        """Say that the message held no action. Always as the user: no tool has answered."""
        text = unusable.explanation + (f"\n[{remaining}]" if remaining else "")
        return Message("user", text)

    def _command(self, text: str) -> Action:
        command = text.strip()
        if not command:
            return Unusable("The command is empty. Write one shell command.")
        if "\0" in command:
            return Unusable("The command holds a NUL character, which no shell accepts.")
        return Submit() if command == self._config.submit_command else RunCommand(command)

    def _fenced(self, text: str) -> Action:
        blocks = _FENCE.findall(text)
        if len(blocks) != 1:
            return Unusable(
                f"The message holds {len(blocks)} ```bash blocks. Write exactly one, with one "
                "command in it."
            )
        return self._command(blocks[0])

    def _call(self, text: str) -> Action:
        calls = _CALL.findall(text)
        if len(calls) != 1:
            return Unusable(
                f"The message holds {len(calls)} tool calls. Make exactly one call, of `bash` or "
                "`submit`."
            )
        try:
            call = json.loads(calls[0])
            name = call["name"]
            arguments = call.get("arguments", {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Unusable(
                'The tool call is no JSON object of the form {"name": ..., "arguments": {...}}.'
            )
        if name == "submit":
            return Submit()
        command = arguments.get("command") if isinstance(arguments, dict) else None
        if name != "bash" or not isinstance(command, str):
            return Unusable(
                "Call `bash` with a text `command`, or `submit` without arguments; there is no "
                "other tool."
            )
        return self._command(command)


def _templates() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(keep_trailing_newline=True)


__all__ = ["ActionFormat", "BashAgent", "BashAgentConfig"]
