"""Bugs that change statements: lines removed or shuffled, control flow undone, classes damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from swe_eval.generate.expressions import Proposal

__all__ = ["propose_for_block", "propose_for_class", "propose_for_if"]

Statement = cst.BaseStatement


def _is_simple(statement: Statement, *kinds: type[cst.BaseSmallStatement]) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], kinds)
    )


def _is_docstring(statement: Statement) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString())]):
            return True
        case _:
            return False


def _inner(suite: cst.BaseSuite) -> Sequence[Statement]:
    """The statements of an indented body; a body on the header's line counts as none."""
    return suite.body if isinstance(suite, cst.IndentedBlock) else ()


def _rebuilt(block: cst.IndentedBlock, body: Sequence[Statement]) -> cst.IndentedBlock:
    return block.with_changes(body=body or [cst.SimpleStatementLine([cst.Pass()])])


def propose_for_block(block: cst.IndentedBlock) -> Iterator[Proposal]:
    """Bugs made by dropping, unwrapping or reordering statements of one block."""
    body = list(block.body)
    for i, statement in enumerate(body):
        before, after = body[:i], body[i + 1 :]
        if _is_simple(statement, cst.Assign, cst.AugAssign, cst.AnnAssign):
            yield "remove_assign", _rebuilt(block, [*before, *after])
        match statement:
            case cst.If(body=inner, orelse=None):
                yield "remove_conditional", _rebuilt(block, [*before, *after])
                yield "remove_conditional", _rebuilt(block, [*before, *_inner(inner), *after])
            case cst.If(body=inner, orelse=cst.Else(body=other)):
                yield "remove_conditional", _rebuilt(block, [*before, *_inner(inner), *after])
                yield "remove_conditional", _rebuilt(block, [*before, *_inner(other), *after])
            case cst.For() | cst.While():
                yield "remove_loop", _rebuilt(block, [*before, *after])
            case cst.With(body=inner) | cst.Try(body=inner):
                yield "remove_wrapper", _rebuilt(block, [*before, *_inner(inner), *after])
    yield from _shuffles(block)


def _shuffles(block: cst.IndentedBlock) -> Iterator[Proposal]:
    """Neighbouring lines exchanged; a docstring stays first."""
    body = list(block.body)
    first = 1 if _is_docstring(body[0]) else 0
    for i in range(first, len(body) - 1):
        swapped = [*body[:i], body[i + 1], body[i], *body[i + 2 :]]
        yield "shuffle_lines", block.with_changes(body=swapped)


def propose_for_if(node: cst.If) -> Iterator[Proposal]:
    """The two arms of an `if`/`else` exchanged, or the test of a lone `if` negated."""
    if isinstance(node.orelse, cst.Else):
        other = node.orelse
        yield (
            "invert_condition",
            node.with_changes(body=other.body, orelse=other.with_changes(body=node.body)),
        )
    elif node.orelse is None:
        test = node.test
        if not test.lpar:
            test = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield "invert_condition", node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def propose_for_class(node: cst.ClassDef) -> Iterator[Proposal]:
    """A base or a method removed, or the methods in reverse order."""
    for i in range(len(node.bases)):
        rest = [*node.bases[:i], *node.bases[i + 1 :]]
        if rest:
            rest[-1] = rest[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            yield "class_remove_base", node.with_changes(bases=rest)
        else:
            bare = node.with_changes(
                bases=[], lpar=cst.MaybeSentinel.DEFAULT, rpar=cst.MaybeSentinel.DEFAULT
            )
            yield "class_remove_base", bare
    if not isinstance(node.body, cst.IndentedBlock):
        return
    body = list(node.body.body)
    places = [i for i, statement in enumerate(body) if isinstance(statement, cst.FunctionDef)]
    for i in places:
        kept = _rebuilt(node.body, [*body[:i], *body[i + 1 :]])
        yield "class_remove_method", node.with_changes(body=kept)
    if len(places) > 1:
        shuffled = list(body)
        for i, j in zip(places, reversed(places), strict=True):
            shuffled[i] = body[j]
        yield "class_shuffle_methods", node.with_changes(body=node.body.with_changes(body=shuffled))
