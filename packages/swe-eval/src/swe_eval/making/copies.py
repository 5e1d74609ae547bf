"""Finds where else in a repository a function stands: its unbroken text would show the repair.

Copies are found whatever stands before their lines (indentation, `>>>`, `+` of a patch, numbers),
whatever the function is called there, with or without its docstring, and within archives.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Generic, TypeVar

from swe_eval.generate.places import BYTE_ORDER_MARK
from swe_eval.making.packed import Reader, View

__all__ = ["Span", "find_copies", "find_copies_of_tests"]

Span = tuple[int, int]
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef

_MIN_BODY = 3
"""Lines: a shorter body by itself is no function's own."""
_BEFORE_CODE = re.compile(r"^[\W\d]+")


_Key = TypeVar("_Key")


@dataclass(frozen=True)
class _Piece(Generic[_Key]):
    """Lines to look for."""

    key: _Key
    lines: tuple[str, ...]
    at_home: frozenset[str]
    """Files of the repository in which they may stand."""


def find_copies(
    files: Mapping[str, bytes], texts: Mapping[str, str], spans: Mapping[str, Collection[Span]]
) -> dict[tuple[str, Span], str]:
    """Functions and classes that stand in another file, too, and in which.

    A class counts as well if one of its methods does: the bug may be a missing method.

    Args:
        files: The repository.
        texts: Text of the files with functions.
        spans: By file the first and last line, from 1, of functions and classes.
    """
    pieces: list[_Piece[tuple[str, Span]]] = []
    for path, wanted in spans.items():
        nodes = _definitions(texts[path])
        lines = texts[path].split("\n")
        for span in wanted:
            wordings = [_plain(lines, *span), *_wordings(lines, nodes.get(span))]
            pieces += [_Piece((path, span), found, frozenset({path})) for found in wordings]
    compiled: dict[str, str] = {}
    found = _search(pieces, _views(files, compiled))
    for path, wanted in spans.items():
        if (at := compiled.get(_module(path))) is not None:
            found |= dict.fromkeys(((path, span) for span in wanted), at)
    return found


def find_copies_of_tests(
    files: Mapping[str, bytes], texts: Mapping[str, str], tests: Iterable[str]
) -> frozenset[str]:
    """The tests whose function stands in a file that none of the tests is in, too.

    Args:
        files: The repository.
        texts: Text of the files with tests.
        tests: Ids of tests, `path::Class::test[parameters]`.
    """
    by_path: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in tests:
        path, _, rest = test.partition("::")
        by_path[path][rest.partition("[")[0].rpartition("::")[2]].append(test)
    at_home = frozenset(by_path)
    pieces: list[_Piece[str]] = []
    for path, names in by_path.items():
        lines = texts[path].split("\n")
        for span, node in _definitions(texts[path]).items():
            found = _plain(lines, *span)
            pieces += [_Piece(test, found, at_home) for test in names.get(node.name, ())]
    return frozenset(_search(pieces, _views(files, {})))


def _definitions(source: str) -> dict[Span, _Definition]:
    try:
        tree = ast.parse(source.removeprefix(BYTE_ORDER_MARK))
    except (SyntaxError, ValueError):
        return {}
    return {_span(node): node for node in ast.walk(tree) if isinstance(node, _Definition)}


def _span(node: ast.stmt) -> Span:
    return node.lineno, node.end_lineno or node.lineno


def _wordings(lines: Sequence[str], node: _Definition | None) -> Iterator[tuple[str, ...]]:
    """What a copy by another name or without its docstring has, and what one of a method has."""
    if node is None:
        return
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        return
    last = node.end_lineno or node.lineno
    first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))])
    inner = _plain(lines, first, last)
    if len(inner) >= _MIN_BODY:
        yield inner
    elif body is not node.body:
        yield _plain(lines, node.lineno, node.body[0].lineno - 1) + inner
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, _Function):
            yield from (found for found in _wordings(lines, method) if len(found) >= _MIN_BODY)


def _views(files: Mapping[str, bytes], compiled: dict[str, str]) -> Iterator[View]:
    """All that is text; compiled modules go to `compiled`, by name."""
    reader = Reader()
    for path, content in files.items():
        for view in reader.views(path, content):
            if view.compiled:
                compiled[_module(view.path)] = view.path
            else:
                yield view


def _module(path: str) -> str:
    """The name that a source and what was compiled from it share; of a package with its folder."""
    at = PurePosixPath(path)
    name = at.name.partition(".")[0]
    folders = [part for part in at.parts[:-1] if part != "__pycache__"]
    return "/".join([*folders[-1:], name]) if name == "__init__" else name


def _plain(lines: Sequence[str], first: int, last: int) -> tuple[str, ...]:
    return tuple(_code(lines[first - 1 : last]))


def _code(lines: Iterable[str]) -> Iterator[str]:
    """Without what may stand before code, and without lines that hold none."""
    for line in lines:
        if plain := _BEFORE_CODE.sub("", " ".join(line.split())):
            yield plain


def _search(pieces: Iterable[_Piece[_Key]], views: Iterable[View]) -> dict[_Key, str]:
    """The pieces that stand somewhere else, and where."""
    # By the longest line, which is the rarest: most lines of the files are none of these.
    by_line: defaultdict[str, list[tuple[int, _Piece[_Key]]]] = defaultdict(list)
    for piece in pieces:
        if piece.lines:
            mark = max(range(len(piece.lines)), key=lambda n, p=piece: len(p.lines[n]))  # type: ignore[misc]
            by_line[piece.lines[mark]].append((mark, piece))
    found: dict[_Key, str] = {}
    for view in views:
        lines = list(_code(view.text.split("\n")))
        for at, line in enumerate(lines):
            for mark, piece in by_line.get(line, ()):
                begin = at - mark
                if (
                    begin >= 0
                    and piece.key not in found
                    and view.file not in piece.at_home
                    and tuple(lines[begin : begin + len(piece.lines)]) == piece.lines
                ):
                    found[piece.key] = view.path
    return found
