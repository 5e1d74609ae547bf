"""A scripted explorer that knows the tools and nothing else.

It finds the function an issue names, changes one of its lines at random in a way a programmer
might, sometimes runs the test, sometimes tries again, and submits. Its traces teach a model how to
work in a sandbox; which change repairs which bug is left to reinforcement learning. It sees what
the agent sees: the issue and the output of its own commands. No hidden test, no solution, no kind
of bug.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["SUBMIT", "EditChoice", "Explorer", "ExplorerStyle", "plausible_edits"]

SUBMIT = "submit"

_FUNCTION = re.compile(r"\b([a-z]+_[a-z]+)\b")
_HEADER = re.compile(r"^(?P<path>[\w./]+\.py):(?P<line>\d+):def \w+\((?P<parameters>[^)]*)\):$")
_BODY = re.compile(r"^(?P<path>[\w./]+\.py)-(?P<line>\d+)-(?P<text>.*)$")
_LOCAL = re.compile(r"(?:^ +(?=\w+ =)|\bfor )(\w+)")
_NUMBER = re.compile(r"(?<![\w.])\d+")

_ARITHMETIC = ("+", "-", "*", "//", "%")
_COMPARISON = ("<", ">", "<=", ">=", "==", "!=")
_AUGMENTED = ("+=", "-=", "*=")
_FUNCTIONS = ("max", "min", "sum", "len", "sorted", "any", "all", "abs")
_WRAPPERS = ("abs", "sum", "len", "max", "min", "sorted", "set")
_KEYWORDS = frozenset({"return", "for", "in", "if", "else", "and", "or", "not", "range", "set"})


@dataclass(frozen=True)
class ExplorerStyle:
    """How thorough the explorer is."""

    test_probability: float = 0.7
    """Chance that it runs the test after a change."""
    retry_probability: float = 0.7
    """Chance that it changes the line again after a failed test."""
    max_edits: int = 3
    """Most changes in one attempt."""


@dataclass(frozen=True)
class _Found:
    path: str
    parameters: tuple[str, ...]
    lines: tuple[tuple[int, str], ...]


Rule = Callable[[str, Sequence[str], Sequence[str]], list[str]]


def _each(
    pattern: str, text: str, replacements: Callable[[re.Match[str]], Sequence[str]]
) -> list[str]:
    """`text` with one match of `pattern` replaced, for each match and each replacement."""
    return [
        text[: match.start()] + new + text[match.end() :]
        for match in re.finditer(pattern, text)
        for new in replacements(match)
    ]


def _operators(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(
        r"(?<= )(\+|-|\*|//|%)(?= )", text, lambda m: [op for op in _ARITHMETIC if op != m[0]]
    ) + _each(r"(\+|-|\*)=(?= )", text, lambda m: [op for op in _AUGMENTED if op != m[0]])


def _comparisons(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(
        r"(?<= )(<=|>=|==|!=|<|>)(?= )", text, lambda m: [op for op in _COMPARISON if op != m[0]]
    )


def _connectives(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(r"\b(and|or)\b", text, lambda m: ["or" if m[0] == "and" else "and"])


def _variables(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(
        r"\b[a-z]+\b(?!\()",
        text,
        lambda m: [] if m[0] in _KEYWORDS else [name for name in names if name != m[0]],
    )


def _constants(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    def others(match: re.Match[str]) -> list[str]:
        value = match.group()
        seen = [n for n in numbers if len(n) <= 2]
        near = [str(abs(int(n) + step)) for n in (*seen, value) for step in (1, -1)]
        return [n for n in (*seen * 3, *near) if n != match[0]]

    return _each(r"(?<![\w.])\d+", text, others)


def _starting_values(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(r"(?<=^    total = )\d+$", text, lambda m: [v for v in "01" if v != m[0]])


def _swaps(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    term = r"[\w]+(?:\(\w+\))?"
    return _each(
        rf"({term}) ([-+*%<>]|//|<=|>=|==|!=) ({term})", text, lambda m: [f"{m[3]} {m[2]} {m[1]}"]
    ) + _each(r"\((\w+), (\w+)\)", text, lambda m: [f"({m[2]}, {m[1]})"])


def _arms(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(r"(\w+) if (.+) else (\w+)", text, lambda m: [f"{m[3]} if {m[2]} else {m[1]}"])


def _functions(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(
        r"\b(max|min|sum|len|sorted|any|all|abs|list)(?=\()",
        text,
        lambda m: [name for name in _FUNCTIONS if name != m[0]],
    )


def _wrapped(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    def around(match: re.Match[str]) -> list[str]:
        return [f"{name}({match[0]})" for name in _WRAPPERS]

    return _each(r"(?<=return ).+$", text, around) + _each(r"\bitems\b(?!\[)", text, around)


def _unwrapped(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(r"\b[a-z]+\(([^(),]+)\)", text, lambda m: [m[1]])


def _longer(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    """A term added: an operand after any name, or a second condition at the end."""
    unused = [name for name in names if not re.search(rf"\b{name}\b", text)]
    added = unused or list(names)
    if " < " in text or " > " in text:
        return [
            f"{text} {word} {left} {sign} {right}"
            for word in ("and", "or")
            for sign in "<>"
            for left in names
            for right in added
            if left != right
        ] + [
            text.replace("return ", f"return {left} {sign} {right} {word} ")
            for word in ("and", "or")
            for sign in "<>"
            for left in added
            for right in names
            if left != right
        ]
    return _each(
        r"\b[a-z]+\b(?!\()",
        text,
        lambda m: (
            []
            if m[0] in _KEYWORDS
            else [f"{m[0]} {op} {name}" for op in "+-*" for name in added]
            + [f"{name} {op} {m[0]}" for op in "+-*" for name in added]
        ),
    )


def _shorter(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return _each(r" [-+*] \w+", text, lambda m: [""])


def _off_by_one(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    dropped = _each(r" [-+] 1\b", text, lambda m: [""])
    added = _each(r"(?<=[\[:(, ])-?\w+(?=[\]:)])", text, lambda m: [f"{m[0]} + 1", f"{m[0]} - 1"])
    return dropped * 2 + added


def _slices(text: str, names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    def others(match: re.Match[str]) -> list[str]:
        bound = match[1].strip(":").lstrip("-")
        forms = (f"[:{bound}]", f"[{bound}:]", f"[-{bound}:]", f"[:-{bound}]")
        return [form for form in forms if form != match[0]]

    return _each(r"\[([^\]]*:[^\]]*)\]", text, others)


_RULES: tuple[tuple[Rule, int], ...] = (
    (_operators, 3),
    (_comparisons, 2),
    (_connectives, 2),
    (_variables, 3),
    (_constants, 3),
    (_starting_values, 2),
    (_swaps, 2),
    (_arms, 1),
    (_functions, 3),
    (_wrapped, 2),
    (_unwrapped, 1),
    (_longer, 3),
    (_shorter, 1),
    (_off_by_one, 1),
    (_slices, 3),
)
"""What a programmer may do to a line, and how often relative to the others."""


@dataclass(frozen=True)
class EditChoice:
    """What one rule offers for a line."""

    weight: int
    lines: tuple[str, ...]
    """The changed line; one that comes twice is twice as likely."""


def plausible_edits(
    text: str, names: Sequence[str], numbers: Sequence[str]
) -> tuple[EditChoice, ...]:
    """Ways to change one line, rule by rule; rules that do not apply are left out.

    Args:
        text: The line, indentation included.
        names: Variables that may stand in it.
        numbers: Numbers seen in the issue or in test output.
    """
    found = (
        EditChoice(weight, tuple(new for new in rule(text, names, numbers) if new != text))
        for rule, weight in _RULES
    )
    return tuple(choice for choice in found if choice.lines)


def _read_listing(output: str) -> _Found | None:
    """The definition that `grep -A` showed, up to its first empty line."""
    header: re.Match[str] | None = None
    lines: list[tuple[int, str]] = []
    for row in output.splitlines():
        if header is None:
            header = _HEADER.match(row)
            continue
        body = _BODY.match(row)
        if body is None or not body["text"].strip():
            break
        lines.append((int(body["line"]), body["text"]))
    if header is None or not lines:
        return None
    parameters = tuple(name.strip() for name in header["parameters"].split(",") if name.strip())
    return _Found(header["path"], parameters, tuple(lines))


@dataclass
class Explorer:
    """One attempt at one task, command by command.

    Call `next_command(None)` first, then with the output of each command, until it returns
    `SUBMIT`.

    Args:
        instruction: The issue.
        rng: Source of all its choices.
        style: How thorough it is.
    """

    instruction: str
    rng: random.Random
    style: ExplorerStyle = field(default_factory=ExplorerStyle)
    _found: _Found | None = field(default=None, init=False)
    _target: tuple[int, str] = field(default=(0, ""), init=False)
    _tried: list[str] = field(default_factory=list, init=False)
    _numbers: list[str] = field(default_factory=list, init=False)
    _state: str = field(default="search", init=False)

    def next_command(self, observation: str | None) -> str:
        """The next command, given the output of the last one."""
        match self._state:
            case "search":
                return self._search()
            case "read":
                return self._read(observation or "")
            case "edited":
                return self._after_edit()
            case "tested":
                return self._after_test(observation or "")
            case _:
                return SUBMIT

    def _search(self) -> str:
        function = _FUNCTION.search(self.instruction)
        if function is None:
            return self._submit()
        self._numbers = _NUMBER.findall(self.instruction)
        self._state = "read"
        return f"grep -rn -A3 'def {function[0]}'"

    def _read(self, observation: str) -> str:
        self._found = _read_listing(observation)
        if self._found is None:
            return self._submit()
        editable = [row for row in self._found.lines if self._edits(row[1])]
        if not editable:
            return self._submit()
        self._target = self.rng.choice(editable)
        return self._edit()

    def _edits(self, text: str) -> tuple[EditChoice, ...]:
        assert self._found is not None
        names = dict.fromkeys(self._found.parameters)
        for _, row in self._found.lines:
            names.update(dict.fromkeys(_LOCAL.findall(row)))
        return plausible_edits(text, list(names), self._numbers)

    def _edit(self) -> str:
        assert self._found is not None
        number, text = self._target
        fresh = [
            EditChoice(choice.weight, untried)
            for choice in self._edits(text)
            if (untried := tuple(new for new in choice.lines if new not in self._tried))
        ]
        if not fresh:
            return self._submit()
        [choice] = self.rng.choices(fresh, [choice.weight for choice in fresh])
        new = self.rng.choice(choice.lines)
        self._tried.append(new)
        self._state = "edited"
        return f"sed -i '{number}c\\{new}' {self._found.path}"

    def _after_edit(self) -> str:
        assert self._found is not None
        if self.rng.random() >= self.style.test_probability:
            return self._submit()
        self._state = "tested"
        return f"python test_{self._found.path}"

    def _after_test(self, observation: str) -> str:
        self._numbers += _NUMBER.findall(observation)
        again = len(self._tried) < self.style.max_edits
        if observation == "ok" or not again or self.rng.random() >= self.style.retry_probability:
            return self._submit()
        return self._edit()

    def _submit(self) -> str:
        self._state = "done"
        return SUBMIT
