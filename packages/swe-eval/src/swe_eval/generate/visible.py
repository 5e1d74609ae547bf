"""What an agent sees of a test file some of whose tests are held back."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from swe_eval.generate.places import BYTE_ORDER_MARK

__all__ = ["without_tests"]

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def without_tests(
    source: str, tests: Collection[str], is_used: Callable[[str], bool] = lambda _: False
) -> str | None:
    """The file without some of its tests, and without the tables that only these use.

    Args:
        source: Text of a test file.
        tests: Ids within the file: `test`, `Class::test`, either with `[parameters]`. Of a
            parametrised test all cases go.
        is_used: Whether another file may use a name of this one.

    Returns:
        None where the whole file has to be held back: a test is not defined in it as a function
        (it is inherited or made by a call), is used by what would be left, or nothing would be.
    """
    mark = BYTE_ORDER_MARK if source.startswith(BYTE_ORDER_MARK) else ""
    source = source.removeprefix(mark)
    names = {tuple(test.partition("[")[0].split("::")) for test in tests}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    cut: list[ast.stmt] = []
    for name in names:
        found = _find(tree.body, name)
        if not found:
            return None
        cut += found
    cut += _tables(tree, cut, is_used)
    spans = [_lines(node) for node in cut]
    left = _cut(source, spans, filler=None) or _cut(source, spans, filler="pass")
    if left is None:
        return None
    tree, text = left
    if _names(ast.walk(tree)) & {name[-1] for name in names} or not _has_tests(tree):
        return None
    return mark + text


def _find(body: list[ast.stmt], name: tuple[str, ...]) -> list[_Definition]:
    """Every definition by this name: a later one replaces an earlier."""
    found = [node for node in body if isinstance(node, _Definition) and node.name == name[0]]
    if len(name) == 1:
        return [node for node in found if not isinstance(node, ast.ClassDef)]
    classes = [node for node in found if isinstance(node, ast.ClassDef)]
    return [inner for node in classes for inner in _find(node.body, name[1:])]


def _tables(
    tree: ast.Module, tests: Collection[ast.stmt], is_used: Callable[[str], bool]
) -> list[ast.stmt]:
    """The assignments at module level to names that only these tests use, or tables of theirs."""
    gone: list[ast.stmt] = []
    while True:
        inside = {id(node) for part in (*tests, *gone) for node in ast.walk(part)}
        left: defaultdict[str, list[ast.stmt]] = defaultdict(list)
        for part in tree.body:
            for name in _names(node for node in ast.walk(part) if id(node) not in inside):
                left[name].append(part)
        more = [
            part
            for name in _names(node for part in (*tests, *gone) for node in ast.walk(part))
            if name in left and all(_assigned(part, tree) == name for part in left[name])
            if not is_used(name)
            for part in left[name]
        ]
        if not more:
            return gone
        gone += more


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names and attributes that stand there."""
    names = ((getattr(node, "id", None) or getattr(node, "attr", None)) for node in nodes)
    return {name for name in names if name}


def _assigned(part: ast.stmt, tree: ast.Module) -> str:
    """The name that a statement assigns to, if it does that alone and has lines of its own."""
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    plain = isinstance(part, ast.Assign | ast.AnnAssign) and len(targets) == 1
    first, last = _lines(part)
    alone = sum(_lines(p)[0] <= last and first <= _lines(p)[1] for p in tree.body) == 1
    return targets[0].id if plain and alone and isinstance(targets[0], ast.Name) else ""


def _cut(
    source: str, spans: Collection[tuple[int, int]], *, filler: str | None
) -> tuple[ast.Module, str] | None:
    """The text without these lines, and its tree; a class that is left empty needs the filler."""
    lines = source.split("\n")
    for first, last in sorted(spans, reverse=True):
        indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
        lines[first - 1 : last] = [indent + filler] if filler and indent else []
    text = "\n".join(lines)
    try:
        return ast.parse(text), text
    except SyntaxError:
        return None


def _lines(node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]), node.end_lineno


def _has_tests(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        for node in ast.walk(tree)
    )
