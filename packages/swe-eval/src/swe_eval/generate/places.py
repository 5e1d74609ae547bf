"""Where bugs can go in a module: found all at once, and each made when it is asked for.

For modules with thousands of possible bugs, of which a few are wanted (`swe_eval.generate.plan`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from swe_eval.generate.mutate import (
    KINDS,
    Site,
    cannot_parse,
    check_kinds,
    find_sites,
    source_with,
)

__all__ = ["BYTE_ORDER_MARK", "Bug", "Place", "find_places"]

BYTE_ORDER_MARK = "\ufeff"
"""What a source may begin with; the parser takes it in bytes, but not in text."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where one bug can go."""

    kind: str
    """One of `KINDS`."""
    function: str
    """Dotted name of the innermost function or class around it."""
    first_line: int
    """Of that function or class, from 1, decorators left out."""
    last_line: int
    _part: _Part
    _site: Site

    def make(self) -> Bug | None:
        """The bug; None if it would be no valid Python or no change."""
        part = self._part
        text = source_with(part.module, part.text, self._site)
        if text is None:
            return None
        return Bug(source=part.before + text + part.after, before=part.text, after=text)


@dataclass(frozen=True)
class Bug:
    """A bug that was made."""

    source: str
    """The whole module with the bug in."""
    before: str
    """The statement at top level that holds it, as it was."""
    after: str
    """The same statement with the bug in."""


@dataclass(frozen=True, eq=False)
class _Part:
    """One statement of a module and what stands around it: bugs are made without all the rest."""

    before: str
    text: str
    after: str
    first_line: int
    module: cst.Module


def _parts(source: str) -> Iterator[_Part]:
    """The statements at top level that hold functions or classes."""
    mark = BYTE_ORDER_MARK if source.startswith(BYTE_ORDER_MARK) else ""
    source = source.removeprefix(mark)
    # As the parser counts lines; `splitlines` also ends them at form feeds and the like.
    lines = [line + "\n" for line in source.split("\n")]
    lines[-1] = lines[-1][:-1]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(source).body:
        if not any(isinstance(inner, definitions) for inner in ast.walk(node)):
            continue
        decorators = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        assert node.end_lineno is not None
        text = "".join(lines[first : node.end_lineno])
        yield _Part(
            before=mark + "".join(lines[:first]),
            text=text,
            after="".join(lines[node.end_lineno :]),
            first_line=first + 1,
            module=cst.parse_module(text),
        )


def find_places(source: str, *, kinds: Collection[str] = KINDS) -> list[Place]:
    """Where bugs can go within functions and classes, in the order of `mutate`.

    Two places may give the same source.

    Raises:
        ValueError: as `mutate`.
    """
    check_kinds(kinds)
    try:
        parts = list(_parts(source))
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        raise cannot_parse(error) from error
    places = []
    for part in parts:
        wrapper = MetadataWrapper(part.module, unsafe_skip_copy=True)
        positions = wrapper.resolve(PositionProvider)
        for site in find_sites(part.module, kinds):
            if site.owner is None:
                continue
            where = positions[site.owner]
            assert isinstance(where, CodeRange)
            offset = part.first_line - 1
            places.append(
                Place(
                    kind=site.kind,
                    function=".".join(site.path),
                    first_line=where.start.line + offset,
                    last_line=where.end.line + offset,
                    _part=part,
                    _site=site,
                )
            )
    return places
