"""From what failing tests saw to the text of an issue: a call, its result, the expected one.

An issue never holds a line of the repair, and of the hidden tests no more than the one expression
that it reports. Where even that can't be shown (it is long, or is not the same in two runs) the
words of the test's name remain.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swe_eval.generate.issue import TITLES

__all__ = ["Failure", "added_lines", "chat_messages", "leaks", "stable", "write_report"]

_MIN_LEAK = 10
_WRAPPERS = frozenset(
    {"all", "any", "bool", "dict", "getattr", "hasattr", "int", "isinstance", "iter", "len"}
    | {"list", "next", "repr", "set", "sorted", "str", "sum", "tuple", "type"}
)
_HARNESS = "/tmp/make/"  # noqa: S108 -- inside the sandbox
"""Where the tests' temporary files go while tasks are made."""
_SPACES = re.compile(r"\s+")
_RAISING_TITLES = (
    "`{function}` raises {error}",
    "{error} from `{function}`",
    "Unexpected {error} in `{function}`",
)
_FORMS = ("compared", "not_raised", "raised", "truth", "other")
"""From the most to the least telling."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one failing test saw; the fields are those of `swe_eval.making.witness`."""

    test: str
    form: str = "other"
    error: str = ""
    message: str = ""
    call: str = ""
    got: str = ""
    want: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Failure:
        """From the sandbox's words, of which nothing is believed: all become plain text."""
        texts = {
            name: str(values.get(name) or "")
            for name in ("test", "form", "error", "message", "call", "got", "want")
        }
        if texts["form"] not in _FORMS:
            texts["form"] = "other"
        given = values.get("given")
        if _HARNESS in f"{texts}{given}":
            # `tmp_path` and its like: no such path is where the agent works.
            return cls(test=texts["test"], error=texts["error"])
        pairs = given.items() if isinstance(given, dict) else ()
        return cls(**texts, given={str(name): str(value) for name, value in pairs})

    @property
    def is_telling(self) -> bool:
        """Whether it names a call."""
        return bool(self.call) and self.form in _FORMS[:-1]

    @property
    def words(self) -> str:
        """The test's name as words."""
        name = self.test.partition("[")[0].rpartition("::")[2]
        return name.removeprefix("test").strip("_").replace("_", " ")

    def sentence(self) -> str:
        """What is wrong, in a sentence or two."""
        given = " and ".join(f"`{name} = {value}`" for name, value in self.given.items())
        begin = f"With {given}, `{self.call}`" if given else f"`{self.call}`"
        raised = f"`{self.error}: {self.message}`" if self.message else f"`{self.error}`"
        match self.form if self.call else "other":
            case "compared":
                return f"{begin} gives `{self.got}`, expected `{self.want}`."
            case "truth" if self.got:
                return f"{begin} gives `{self.got}`, which should count as true."
            case "truth":
                return f"{begin} should hold, but does not."
            case "not_raised":
                return f"{begin} should raise `{self.want}`, but raises nothing."
            case "raised" if self.want.startswith("raises "):
                want = self.want.removeprefix("raises ")
                return f"{begin} raises {raised}, expected `{want}`."
            case "raised" if self.want:
                return f"{begin} raises {raised}, expected `{self.want}`."
            case "raised":
                return f"{begin} raises {raised}."
        if self.form == "compared":
            return (
                f"This no longer works: {self.words}. It gives `{self.got}`, expected "
                f"`{self.want}`."
            )
        if self.error in {"AssertionError", "Failed"} or not self.error:
            return f"This no longer works: {self.words}."
        return f"This no longer works: {self.words}. It ends with {raised}."


def stable(runs: Sequence[Iterable[Failure]]) -> list[Failure]:
    """The failures that looked the same in every run, the most telling first."""
    first, *others = [{failure.test: failure for failure in run} for run in runs]
    same = [f for f in first.values() if all(other.get(f.test) == f for other in others)]
    return sorted(same, key=lambda f: (not f.is_telling, _FORMS.index(f.form)))


def write_report(
    chance: random.Random,
    *,
    function: str,
    failures: Sequence[Failure],
    failing: Sequence[str],
    patch: str,
) -> str:
    """A title and a report of one or two failures.

    Args:
        chance: Picks the wording.
        function: Name for the title where no failure names a call.
        failures: The stable ones, the most telling first.
        failing: Tests that fail, if none of them is stable.
        patch: The repair, no line of which may show.
    """
    shown = [f for f in failures if not leaks(f.sentence(), added_lines(patch))]
    telling = [f for f in shown if f.is_telling]
    chosen = telling[:2] or shown[:1] or [Failure(test=chance.choice(list(failing)))]
    subject = _subject(chosen[0]) or _plain(function)
    if chosen[0].is_telling and chosen[0].form == "raised":
        title = chance.choice(_RAISING_TITLES).format(function=subject, error=chosen[0].error)
    else:
        title = chance.choice(TITLES).format(function=f"`{subject}`")
    sentences = list(dict.fromkeys(failure.sentence() for failure in chosen))
    return f"{title}\n\n" + "\n\n".join(sentences)


def _subject(failure: Failure) -> str:
    """The function that a failure is about; of one of the test's own what that one calls."""
    name = _called(failure.call)
    origin = failure.given.get(name.partition(".")[0])
    return name if origin is None else _called(origin)


def _plain(function: str) -> str:
    """The last part of a dotted name that a user would use."""
    parts = [part for part in function.split(".") if not part.startswith("__")]
    return (parts or [function])[-1]


def _called(call: str) -> str:
    """The name of the function that a call is about: of nested ones the innermost in front."""
    names: list[str] = re.findall(r"([A-Za-z_][\w.]*)\(", call)
    plain = [name for name in names if name not in _WRAPPERS]
    return (plain or [""])[0].removeprefix("self.")


def added_lines(patch: str) -> tuple[str, ...]:
    """The lines that a patch adds."""
    return tuple(
        line[1:]
        for line in patch.splitlines()
        if line.startswith("+") and not line.startswith("+++ ")
    )


def leaks(text: str, lines: Collection[str]) -> bool:
    """Whether a text holds one of some lines of code, spaces aside; short ones are no secret."""
    squeezed = _SPACES.sub("", text)
    found = (_SPACES.sub("", line) for line in lines)
    return any(len(line) >= _MIN_LEAK and line in squeezed for line in found)


def chat_messages(report: str, *, repository: str) -> list[dict[str, str]]:
    """The prompt that has a model word an issue: it holds the report, and no code but the report's.

    Neither the repair nor the hidden tests are in it, so that they can't be in the answer.
    """
    system = (
        "You write GitHub issues. You are given a short, true report of a bug in a Python package. "
        "Write the issue that a user of the package would open: a title on the first line, an "
        "empty line, then a short text with the example. Keep every call and value exactly. Do "
        "not guess at the cause, do not suggest a repair, do not mention tests."
    )
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Package: {repository}\n\n{report}"},
    ]
