"""What an agent sees of a test file some of whose tests are held back."""

from __future__ import annotations

import ast
from collections.abc import Collection

from swe_eval.generate.places import BYTE_ORDER_MARK

__all__ = ["without_tests"]

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def without_tests(source: str, tests: Collection[str]) -> str | None:
    """The file without some of its tests.

    Args:
        source: Text of a test file.
        tests: Ids within the file: `test`, `Class::test`, either with `[parameters]`. Of a
            parametrised test all cases go.

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
    spans: list[tuple[int, int]] = []
    for name in names:
        found = _find(tree.body, name)
        if not found:
            return None
        spans += [_lines(node) for node in found]
    left = _cut(source, spans, filler=None) or _cut(source, spans, filler="pass")
    if left is None:
        return None
    tree, text = left
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if used & {name[-1] for name in names} or not _has_tests(tree):
        return None
    return mark + text


def _find(body: list[ast.stmt], name: tuple[str, ...]) -> list[_Definition]:
    """Every definition by this name: a later one replaces an earlier."""
    found = [node for node in body if isinstance(node, _Definition) and node.name == name[0]]
    if len(name) == 1:
        return [node for node in found if not isinstance(node, ast.ClassDef)]
    classes = [node for node in found if isinstance(node, ast.ClassDef)]
    return [inner for node in classes for inner in _find(node.body, name[1:])]


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


def _lines(node: _Definition) -> tuple[int, int]:
    assert node.end_lineno is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first, node.end_lineno


def _has_tests(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        for node in ast.walk(tree)
    )
