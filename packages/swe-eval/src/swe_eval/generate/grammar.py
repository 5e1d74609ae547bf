"""A grammar of small Python functions: what a function of the generated world may look like.

A template fixes the verb and the shape of the body; the instance draws parameter names, a noun, a
constant and argument tuples. Bodies show their meaning within three lines, and results stay short
enough to read in an issue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from swe_eval.generate.names import CONSTANTS, Split, draw_noun

__all__ = ["TEMPLATES", "VERBS", "FunctionSpec", "Template", "draw_function", "evaluate_call"]

Arguments = tuple[object, ...]

_PARAMETER_SETS = (
    ("a", "b", "c"),
    ("x", "y", "z"),
    ("p", "q", "r"),
    ("u", "v", "w"),
    ("m", "n", "k"),
    ("s", "t", "d"),
)


@dataclass(frozen=True)
class Template:
    """A shape of function.

    `shape` has one letter for each parameter: `n` number, `w` wide number (20 to 60), `d` divisor
    (2 to 9), `k` small count (1 to 3), `s` list of small numbers. `{0}`, `{1}`, `{2}` in the body
    are the parameters (a list is always called `items`), `{c}` is the constant. `edges` are
    argument tuples worth testing, as functions of the constant.
    """

    verb: str
    shape: str
    body: tuple[str, ...]
    edges: Callable[[int], tuple[Arguments, ...]] | None = field(default=None, compare=False)

    @property
    def has_constant(self) -> bool:
        """Whether an instance draws a constant."""
        return any("{c}" in line for line in self.body)


def _around(constant: int) -> tuple[Arguments, ...]:
    return ((constant,), (constant - 1,), (constant + 1,))


def _zero(_: int) -> tuple[Arguments, ...]:
    return ((0,),)


def _one(_: int) -> tuple[Arguments, ...]:
    return ((1,),)


def _equal_pair(constant: int) -> tuple[Arguments, ...]:
    return ((constant, constant),)


def _empty_list(_: int) -> tuple[Arguments, ...]:
    return (([],),)


_LOOP = ("for e in items:",)

TEMPLATES: tuple[Template, ...] = (
    Template("add", "nn", ("return {0} + {1}",)),
    Template("diff", "nn", ("return {0} - {1}",)),
    Template("scale", "nn", ("return {0} * {1}",)),
    Template("ratio", "wd", ("return {0} // {1}",)),
    Template("rest", "wd", ("return {0} % {1}",)),
    Template("gap", "nn", ("return abs({0} - {1})",)),
    Template("most", "nn", ("return max({0}, {1})",)),
    Template("least", "nn", ("return min({0}, {1})",)),
    Template("bigger", "nn", ("return {0} if {0} > {1} else {1}",)),
    Template("smaller", "nn", ("return {0} if {0} < {1} else {1}",)),
    Template("over", "nn", ("return {0} > {1}",), _equal_pair),
    Template("under", "nn", ("return {0} < {1}",), _equal_pair),
    Template("same", "nn", ("return {0} == {1}",), _equal_pair),
    Template("gross", "nnn", ("return {0} + {1} + {2}",)),
    Template("net", "wdd", ("return {0} - {1} - {2}",)),
    Template("blend", "ndn", ("return {0} * {1} + {2}",)),
    Template("trim", "wdd", ("return {0} * {1} - {2}",)),
    Template("charge", "dnn", ("return {0} * ({1} + {2})",)),
    Template("inside", "wnw", ("return {1} < {0} and {0} < {2}",)),
    Template("outside", "wnw", ("return {0} < {1} or {0} > {2}",)),
    Template("fee", "n", ("return {0} + {c}",), _zero),
    Template("cut", "w", ("return {0} - {c}",), _zero),
    Template("times", "d", ("return {0} * {c}",), _one),
    Template("cap", "w", ("return min({0}, {c})",), _around),
    Template("floor", "w", ("return max({0}, {c})",), _around),
    Template("above", "w", ("return {0} > {c}",), _around),
    Template("below", "w", ("return {0} < {c}",), _around),
    Template("atleast", "w", ("return {0} >= {c}",), _around),
    Template("atmost", "w", ("return {0} <= {c}",), _around),
    Template("clip", "w", ("return {0} if {0} < {c} else {c}",), _around),
    Template("lift", "w", ("return {0} if {0} > {c} else {c}",), _around),
    Template("total", "s", ("return sum(items)",)),
    Template("count", "s", ("return len(items)",), _empty_list),
    Template("high", "s", ("return max(items)",)),
    Template("low", "s", ("return min(items)",)),
    Template("span", "s", ("return max(items) - min(items)",)),
    Template("kinds", "s", ("return len(set(items))",)),
    Template("order", "s", ("return sorted(items)",)),
    Template("every", "sd", ("return all(e > {1} for e in items)",)),
    Template("some", "sd", ("return any(e > {1} for e in items)",)),
    Template("first", "sk", ("return items[:{1}]",)),
    Template("skip", "sk", ("return items[{1}:]",)),
    Template("last", "sk", ("return items[-{1}:]",)),
    Template("weigh", "sd", ("return sum(items) * {1}",)),
    Template("spread", "nns", ("return len(items) * {0} + {1}",)),
    Template("price", "dnn", ("fee = {0} * {1}", "return fee + {2}")),
    Template("change", "wdd", ("left = {0} - {1}", "return left * {2}")),
    Template("tally", "s", ("total = 0", *_LOOP, "    total += e", "return total")),
    Template("prod", "s", ("total = 1", *_LOOP, "    total *= e", "return total")),
    Template("drain", "ws", (*_LOOP, "    {0} -= e", "return {0}")),
    Template("steps", "d", ("total = 0", "for i in range({0}):", "    total += i", "return total")),
    Template(
        "runs", "d", ("total = 1", "for i in range(1, {0}):", "    total += i", "return total")
    ),
)
"""Every shape of function, in a fixed order. Verbs are unique."""

VERBS: tuple[str, ...] = tuple(template.verb for template in TEMPLATES)


@dataclass(frozen=True)
class FunctionSpec:
    """One correct function and the calls that pin its behaviour."""

    name: str
    template: Template
    parameters: tuple[str, ...]
    constant: int | None
    arguments: tuple[Arguments, ...]
    """Distinct argument tuples, at least four."""
    expected: tuple[str, ...]
    """`repr` of the result of each argument tuple."""
    source: str
    """The definition, ending in a newline."""

    def call(self, index: int) -> str:
        """The call of case `index` as source text."""
        return f"{self.name}({', '.join(map(repr, self.arguments[index]))})"


_BUILTINS: Mapping[str, object] = MappingProxyType(
    {
        "__builtins__": {
            name: value
            for name, value in vars(__import__("builtins")).items()
            if name
            in {"abs", "all", "any", "len", "list", "max", "min", "range", "reversed", "set"}
            | {"sorted", "sum", "tuple", "int", "round", "str", "float", "bool", "enumerate", "zip"}
        }
    }
)


def evaluate_call(source: str, name: str, arguments: Sequence[Arguments]) -> tuple[str, ...]:
    """Run `name` from `source` on each argument tuple.

    Only for source made by this package: it is executed in this process.

    Returns:
        For each tuple the `repr` of the result, or `"raises "` and the name of the exception.
    """
    namespace = dict(_BUILTINS)
    exec(compile(source, "<generated>", "exec"), namespace)  # noqa: S102 - our own functions
    function = namespace[name]
    assert callable(function)
    results = []
    for values in arguments:
        fresh = [list(value) if isinstance(value, list) else value for value in values]
        try:
            results.append(repr(function(*fresh)))
        except Exception as error:
            results.append(f"raises {type(error).__name__}")
    return tuple(results)


def _draw_value(rng: random.Random, letter: str) -> object:
    match letter:
        case "n":
            return rng.randint(2, 30)
        case "w":
            return rng.randint(20, 60)
        case "d":
            return rng.randint(2, 9)
        case "k":
            return rng.randint(1, 3)
        case _:
            return [rng.randint(1, 9) for _ in range(rng.randint(3, 5))]


def _draw_arguments(
    rng: random.Random, template: Template, constant: int | None, cases: int
) -> tuple[Arguments, ...]:
    edges = template.edges(constant or rng.randint(4, 30)) if template.edges else ()
    drawn = list(edges)
    while len(drawn) < cases + len(edges) // 2:
        values = tuple(_draw_value(rng, letter) for letter in template.shape)
        if values in drawn or (template.shape[:2] == "nn" and values[0] == values[1]):
            continue
        # Both orders of a pair, or a comparison would look right half of the time.
        drawn.append(values)
        if template.shape == "nn" and len(drawn) == len(edges) + 1:
            drawn.append((values[1], values[0]))
    return tuple(drawn)


def draw_function(
    rng: random.Random, split: Split, template: Template, *, cases: int = 5
) -> FunctionSpec:
    """An instance of `template` whose noun and constant belong to `split`."""
    name = f"{template.verb}_{draw_noun(rng, split)}"
    constant = rng.choice(CONSTANTS[split]) if template.has_constant else None
    letters = rng.choice(_PARAMETER_SETS)
    parameters = tuple(
        "items" if letter == "s" else letters[i] for i, letter in enumerate(template.shape)
    )
    body = [line.format(*parameters, c=constant) for line in template.body]
    source = (
        "\n".join([f"def {name}({', '.join(parameters)}):", *(f"    {s}" for s in body)]) + "\n"
    )
    arguments = _draw_arguments(rng, template, constant, cases)
    expected = evaluate_call(source, name, arguments)
    return FunctionSpec(
        name=name,
        template=template,
        parameters=parameters,
        constant=constant,
        arguments=arguments,
        expected=expected,
        source=source,
    )
