"""A model folder's chat template as tokens, without ever tokenising sampled text again.

A conversation's token sequence is `prompt(opening)`, then for each turn the sampled tokens as they
are, then `continuation(observations)`. Training on written traces uses `conversation`, which
builds the same sequence from text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rollout_engine.errors import TemplateError
from rollout_engine.types import LossMask, TokenIds

# Stands for an assistant's turn while the text around it is rendered.
_MARK = "TAILRACE-TURN-5d1f"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation: role `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, eq=False)
class RenderedConversation:
    """Tokens of a whole conversation.

    Attributes:
        token_ids: int32 [n].
        loss_mask: bool [n], True on what the assistant wrote, its end-of-turn token included.
    """

    token_ids: TokenIds
    loss_mask: LossMask


class ChatTemplate:
    """Turns messages into the exact tokens a model is prompted with.

    Text between special tokens is tokenised alone, so the boundaries of turns are never merged
    away. A special token's text inside a message is defused by a space: output of a command cannot
    end a turn or begin one.

    Args:
        tokenizer: Of the model.
        source: The Jinja template.
        variables: More variables for the template, such as `{"enable_thinking": False}`.
        tools: JSON schemas of tools, for templates that list them.
        stop_token_ids: Tokens that end a generation. The template's own end-of-turn token is added.

    Raises:
        TemplateError: The template does not compile, or does not end an assistant's turn with a
            special token.

    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._tools = [dict(tool) for tool in tools] or None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._special_ids = {
            token.content: index
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._specials = _alternation(self._special_ids)
        self._end_of_turn = self._after_mark([Message("user", "x"), Message("assistant", _MARK)])
        end = self._specials.match(self._end_of_turn) if self._specials else None
        if end is None:
            raise TemplateError(
                "the chat template follows an assistant's turn with "
                f"{self._end_of_turn[:40]!r}; expected a special token of the tokenizer there "
                f"(it has {sorted(self._special_ids)})"
            )
        self.end_of_turn_id = self._special_ids[end.group()]
        """The token that closes an assistant's turn."""
        self.stop_token_ids = tuple(dict.fromkeys((self.end_of_turn_id, *stop_token_ids)))
        """Tokens that end a generation."""
        self._closing = self._end_of_turn[end.end() :]

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatTemplate:
        """Read tokenizer.json, chat_template.jinja and the stop tokens of a model folder.

        The template may also stand in tokenizer_config.json, whose special tokens become variables.

        Raises:
            TemplateError: A file is missing or unreadable.

        """
        tokenizer_file = folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise TemplateError(f"{tokenizer_file} does not exist; is {folder} a model folder?")
        try:
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise TemplateError(f"{tokenizer_file} cannot be read: {error}") from error
        config = _json_file(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        names = {
            name: _token_text(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name) is not None
        }
        stops = _stop_ids(folder, tokenizer, names.get("eos_token"))
        return cls(
            tokenizer,
            source,
            variables={**names, **(variables or {})},
            tools=tools,
            stop_token_ids=stops,
        )

    def prompt(self, messages: Sequence[Message]) -> TokenIds:
        """Give the tokens of a conversation's opening, up to where the assistant speaks.

        Returns:
            int32 [n].

        """
        return self._encode(self._render(messages, add_generation_prompt=True))

    def continuation(self, messages: Sequence[Message], *, closed: bool = True) -> TokenIds:
        """Give the tokens that follow the assistant's sampled ones, up to its next turn.

        Args:
            messages: What came back, such as a command's output; at least one.
            closed: Whether the sampled tokens end with a stop token; else one is put first.

        Returns:
            int32 [n].

        """
        if not messages:
            raise ValueError("a continuation needs at least one message")
        before = [Message("user", "x"), Message("assistant", _MARK)]
        text = self._after_mark([*before, *messages], add_generation_prompt=True)
        if not text.startswith(self._end_of_turn):
            raise TemplateError(
                "the chat template ends an assistant's turn differently when a message follows: "
                f"{text[: len(self._end_of_turn)]!r}, expected {self._end_of_turn!r}"
            )
        ids = self._encode(self._closing + text[len(self._end_of_turn) :])
        if closed:
            return ids
        return np.concatenate([np.array([self.end_of_turn_id], np.int32), ids])

    def assistant(self, text: str) -> TokenIds:
        """Give the tokens an assistant would have sampled to say `text`, end of turn included.

        Returns:
            int32 [n].

        """
        ids = self._tokenizer.encode(self._defused(text), add_special_tokens=False).ids
        return np.array([*ids, self.end_of_turn_id], np.int32)

    def conversation(
        self, opening: Sequence[Message], turns: Sequence[tuple[str, Sequence[Message]]]
    ) -> RenderedConversation:
        """Tokenise a written conversation exactly as the agent loop would have built it.

        Args:
            opening: Messages before the assistant's first turn.
            turns: For each turn what the assistant wrote, and the messages that came back: empty
                for the last turn, and only for that.

        """
        pieces = [self.prompt(opening)]
        sampled = [False]
        for number, (text, observations) in enumerate(turns, start=1):
            pieces.append(self.assistant(text))
            sampled.append(True)
            if observations:
                pieces.append(self.continuation(observations))
                sampled.append(False)
            elif number < len(turns):
                raise ValueError(
                    f"turn {number} of {len(turns)} has no observation; only the last may end so"
                )
        lengths = [len(piece) for piece in pieces]
        return RenderedConversation(
            np.concatenate(pieces), np.repeat(np.array(sampled, np.bool_), lengths)
        )

    def text(self, token_ids: TokenIds) -> str:
        """Decode what the assistant sampled, without its final stop token."""
        end = len(token_ids)
        if end and int(token_ids[end - 1]) in self.stop_token_ids:
            end -= 1
        decoded: str = self._tokenizer.decode(token_ids[:end].tolist(), skip_special_tokens=False)
        return decoded

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        values = [{"role": m.role, "content": self._defused(m.content)} for m in messages]
        try:
            return self._template.render(
                messages=values,
                tools=self._tools,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the chat template refuses roles {[m.role for m in messages]}: {error}"
            ) from error

    def _after_mark(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        text = self._render(messages, add_generation_prompt=add_generation_prompt)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise TemplateError("the chat template drops the assistant's text")
        return after

    def _defused(self, text: str) -> str:
        if self._specials is None:
            return text
        return self._specials.sub(lambda found: found.group()[0] + " " + found.group()[1:], text)

    def _encode(self, text: str) -> TokenIds:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


class _GenerationBlock(Extension):
    """Accepts `{% generation %}` blocks around the assistant's text and renders what they hold."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _alternation(texts: Mapping[str, int]) -> re.Pattern[str] | None:
    long_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in long_first)) if long_first else None


def _json_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise TemplateError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if not isinstance(source, str):
        raise TemplateError(
            f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json"
        )
    return source


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _stop_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> list[int]:
    listed = _json_file(folder / "generation_config.json").get("eos_token_id")
    if listed is None:
        index = None if eos_token is None else tokenizer.token_to_id(eos_token)
        return [] if index is None else [index]
    return [int(index) for index in (listed if isinstance(listed, list) else [listed])]


__all__ = ["ChatTemplate", "Message", "RenderedConversation"]
