"""GitHub-style issue text: what a user saw, never what to change."""

from __future__ import annotations

import random

__all__ = ["BODIES", "RAISING_BODIES", "TITLES", "describe_result", "write_issue"]

TITLES: tuple[str, ...] = (
    "Wrong result from {function}",
    "{function} returns the wrong value",
    "{function} is broken",
    "Bug in {function}",
    "Unexpected result of {function}",
    "{function} does not do what it says",
    "Regression in {function}",
    "{function} gives a bad answer",
)

BODIES: tuple[str, ...] = (
    "{call} gives {got}, expected {want}.",
    "{call} returns {got} but should return {want}.",
    "I get {got} for {call}, expected {want}.",
    "For {call} I expect {want}. It gives {got}.",
    "{call} should be {want}, but it is {got}.",
)

RAISING_BODIES: tuple[str, ...] = (
    "{call} {got}, expected {want}.",
    "{call} {got} but should return {want}.",
    "For {call} I expect {want}. It {got}.",
)


def describe_result(result: str) -> str:
    """How reports and test output name a result: `gives 3`, or `raises TypeError` as it is."""
    return result if result.startswith("raises ") else f"gives {result}"


def write_issue(rng: random.Random, *, function: str, call: str, got: str, want: str) -> str:
    """A title and a short report of one failing call.

    Args:
        rng: Picks the wording.
        function: Name that the title mentions.
        call: The failing call as source text.
        got: `repr` of what it returns, or `raises <exception>`.
        want: `repr` of what it should return.
    """
    bodies = RAISING_BODIES if got.startswith("raises ") else BODIES
    title = rng.choice(TITLES).format(function=function)
    return f"{title}\n\n{rng.choice(bodies).format(call=call, got=got, want=want)}"
