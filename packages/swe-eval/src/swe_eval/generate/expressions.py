"""Bugs inside one expression: the procedural kinds that replace a node of a libcst tree.

Each function takes a node and yields `(kind, replacement)`. Nothing here runs code or knows about
tests; what does not break a test is dropped later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import libcst as cst

__all__ = ["Proposal", "propose_for_expression", "propose_initial_values", "shifted"]

Proposal = tuple[str, cst.CSTNode]

_Operator = TypeVar("_Operator", bound=cst.CSTNode)

_ARITHMETIC: dict[type[cst.BaseBinaryOp], tuple[type[cst.BaseBinaryOp], ...]] = {
    cst.Add: (cst.Subtract, cst.Multiply),
    cst.Subtract: (cst.Add, cst.Multiply),
    cst.Multiply: (cst.Add, cst.Subtract),
    cst.FloorDivide: (cst.Modulo, cst.Multiply),
    cst.Modulo: (cst.FloorDivide, cst.Subtract),
    cst.Divide: (cst.Multiply, cst.FloorDivide),
    cst.Power: (cst.Multiply,),
    cst.BitAnd: (cst.BitOr,),
    cst.BitOr: (cst.BitAnd,),
    cst.BitXor: (cst.BitOr,),
    cst.LeftShift: (cst.RightShift,),
    cst.RightShift: (cst.LeftShift,),
}

_AUGMENTED: dict[type[cst.BaseAugOp], tuple[type[cst.BaseAugOp], ...]] = {
    cst.AddAssign: (cst.SubtractAssign, cst.MultiplyAssign),
    cst.SubtractAssign: (cst.AddAssign, cst.MultiplyAssign),
    cst.MultiplyAssign: (cst.AddAssign, cst.SubtractAssign),
    cst.DivideAssign: (cst.MultiplyAssign,),
    cst.FloorDivideAssign: (cst.MultiplyAssign,),
}

_COMPARISONS: dict[type[cst.BaseCompOp], tuple[type[cst.BaseCompOp], ...]] = {
    cst.LessThan: (cst.LessThanEqual, cst.GreaterThan, cst.GreaterThanEqual),
    cst.LessThanEqual: (cst.LessThan, cst.GreaterThan, cst.GreaterThanEqual),
    cst.GreaterThan: (cst.GreaterThanEqual, cst.LessThan, cst.LessThanEqual),
    cst.GreaterThanEqual: (cst.GreaterThan, cst.LessThan, cst.LessThanEqual),
    cst.Equal: (cst.NotEqual, cst.LessThanEqual),
    cst.NotEqual: (cst.Equal, cst.LessThan),
    cst.In: (cst.NotIn,),
    cst.NotIn: (cst.In,),
    cst.Is: (cst.IsNot,),
    cst.IsNot: (cst.Is,),
}

_SWAPPED_NAMES: dict[str, tuple[str, ...]] = {
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "sum": ("len", "max"),
    "len": ("sum",),
    "sorted": ("list",),
    "upper": ("lower",),
    "lower": ("upper",),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "lstrip": ("rstrip",),
    "rstrip": ("lstrip",),
    "popleft": ("pop",),
    "append": ("appendleft",),
    "keys": ("values",),
    "values": ("keys",),
}

_WRAPPERS = frozenset(
    {"abs", "sorted", "set", "len", "sum", "int", "str", "list", "round", "tuple", "max", "min"}
)

_CONSTANT_SHIFTS = (1, -1, 2, -2, 3, 5, -5, 7, 10, -10)


def _spaced(operator: type[_Operator], old: cst.CSTNode) -> _Operator:
    """A new operator with the white space of the old one, where both kinds of it agree."""
    new = operator()
    spaces = {
        name: getattr(old, name)
        for name in ("whitespace_before", "whitespace_after")
        if hasattr(old, name) and hasattr(new, name)
    }
    return new.with_changes(**spaces)


def _bracketed(node: cst.BaseExpression) -> cst.BaseExpression:
    """`node` in parentheses, unless it is one term or has them already."""
    compound = (cst.BinaryOperation, cst.BooleanOperation, cst.Comparison, cst.IfExp, cst.Lambda)
    if isinstance(node, compound) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def shifted(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """The expression one off: `e + 1`, `e - 1`, and without its own `+ 1` or `- 1`."""
    match node:
        case cst.BinaryOperation(operator=cst.Add() | cst.Subtract(), right=cst.Integer("1")):
            yield node.left
        case cst.Integer() if not node.lpar:
            for delta in (1, -1):
                if node.evaluated_value + delta >= 0:
                    yield cst.Integer(str(node.evaluated_value + delta))
        case cst.UnaryOperation(operator=cst.Minus()):
            yield cst.BinaryOperation(node, cst.Add(), cst.Integer("1"))
            yield cst.BinaryOperation(node, cst.Subtract(), cst.Integer("1"))
        case _:
            inner = _bracketed(node)
            yield cst.BinaryOperation(inner, cst.Add(), cst.Integer("1"))
            yield cst.BinaryOperation(inner, cst.Subtract(), cst.Integer("1"))


def _keep_parentheses(old: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
    if old.lpar and not new.lpar:
        return new.with_changes(lpar=old.lpar, rpar=old.rpar)
    return new


def _binary(node: cst.BinaryOperation) -> Iterator[Proposal]:
    for operator in _ARITHMETIC.get(type(node.operator), ()):
        yield "operator_change", node.with_changes(operator=_spaced(operator, node.operator))
    yield (
        "operand_swap",
        node.with_changes(left=_bracketed(node.right), right=_bracketed(node.left)),
    )
    for inner, side in ((node.left, "left"), (node.right, "right")):
        if isinstance(inner, cst.BinaryOperation):
            yield "break_chain", _keep_parentheses(node, inner)
            yield "break_chain", node.with_changes(**{side: inner.left})
            yield "break_chain", node.with_changes(**{side: inner.right})


def _boolean(node: cst.BooleanOperation) -> Iterator[Proposal]:
    other = cst.Or if isinstance(node.operator, cst.And) else cst.And
    yield "boolean_change", node.with_changes(operator=_spaced(other, node.operator))
    yield "break_chain", _keep_parentheses(node, node.left)
    yield "break_chain", _keep_parentheses(node, node.right)


def _unary(node: cst.UnaryOperation) -> Iterator[Proposal]:
    if isinstance(node.operator, cst.Not):
        yield "boolean_change", _keep_parentheses(node, node.expression)
    elif isinstance(node.operator, cst.Minus):
        yield "operator_change", _keep_parentheses(node, node.expression)


def _comparison(node: cst.Comparison) -> Iterator[Proposal]:
    for position, target in enumerate(node.comparisons):
        for operator in _COMPARISONS.get(type(target.operator), ()):
            changed = list(node.comparisons)
            changed[position] = target.with_changes(operator=_spaced(operator, target.operator))
            yield "comparison_change", node.with_changes(comparisons=changed)
    if len(node.comparisons) == 1:
        only = node.comparisons[0]
        yield (
            "operand_swap",
            node.with_changes(
                left=only.comparator, comparisons=[only.with_changes(comparator=node.left)]
            ),
        )


def _number(node: cst.Integer | cst.Float) -> Iterator[Proposal]:
    if isinstance(node, cst.Float):
        yield "constant_change", node.with_changes(value=repr(node.evaluated_value + 1.0))
        return
    if not node.value.isdecimal():
        return
    for shift in _CONSTANT_SHIFTS:
        if node.evaluated_value + shift >= 0:
            yield (
                "constant_change",
                cst.Integer(str(node.evaluated_value + shift), lpar=node.lpar, rpar=node.rpar),
            )


def _call(node: cst.Call) -> Iterator[Proposal]:
    name = node.func
    plain = [arg for arg in node.args if arg.keyword is None and not arg.star]
    match name:
        case cst.Name(value):
            for other in _SWAPPED_NAMES.get(value, ()):
                yield "builtin_swap", node.with_changes(func=cst.Name(other))
        case cst.Attribute(attr=cst.Name(value)):
            for other in _SWAPPED_NAMES.get(value, ()):
                renamed = name.with_changes(attr=cst.Name(other))
                yield "builtin_swap", node.with_changes(func=renamed)
    if isinstance(name, cst.Name):
        value = name.value
        single = len(node.args) == 1 and len(plain) == 1
        if single and value in _WRAPPERS and not isinstance(plain[0].value, cst.GeneratorExp):
            yield "remove_call", _bracketed_like(node, plain[0].value)
        if value == "range" and len(plain) == len(node.args) and plain:
            end = 0 if len(plain) == 1 else 1
            for bound in shifted(plain[end].value):
                changed = list(node.args)
                changed[end] = plain[end].with_changes(value=bound)
                yield "off_by_one", node.with_changes(args=changed)
    if len(plain) == len(node.args) == 2:
        first, second = node.args
        swapped = [first.with_changes(value=second.value), second.with_changes(value=first.value)]
        yield "operand_swap", node.with_changes(args=swapped)


def _bracketed_like(call: cst.Call, inner: cst.BaseExpression) -> cst.BaseExpression:
    """The argument of `call` standing where the call stood, without losing precedence."""
    return _bracketed(_keep_parentheses(call, inner)) if call.lpar else inner


def _subscript(node: cst.Subscript) -> Iterator[Proposal]:
    if len(node.slice) != 1:
        return
    element = node.slice[0]
    match element.slice:
        case cst.Index(value=value):
            for other in shifted(value):
                yield "off_by_one", _with_slice(node, cst.Index(other))
        case cst.Slice(lower=lower, upper=upper) as bounds:
            if lower is not None:
                for other in shifted(lower):
                    yield "off_by_one", _with_slice(node, bounds.with_changes(lower=other))
            if upper is not None:
                for other in shifted(upper):
                    yield "off_by_one", _with_slice(node, bounds.with_changes(upper=other))
            if (lower is None) != (upper is None):
                flipped = bounds.with_changes(lower=upper, upper=lower)
                yield "slice_flip", _with_slice(node, flipped)


def _with_slice(node: cst.Subscript, new: cst.BaseSlice) -> cst.Subscript:
    return node.with_changes(slice=[node.slice[0].with_changes(slice=new)])


def _if_expression(node: cst.IfExp) -> Iterator[Proposal]:
    yield "invert_condition", node.with_changes(body=node.orelse, orelse=node.body)
    yield "remove_conditional", _keep_parentheses(node, node.body)
    yield "remove_conditional", _keep_parentheses(node, node.orelse)


def _returned(node: cst.Return) -> Iterator[Proposal]:
    match node.value:
        case cst.Call(func=cst.Name("len")) as length:
            for other in shifted(length):
                yield "off_by_one", node.with_changes(value=other)


def _augmented(node: cst.AugAssign) -> Iterator[Proposal]:
    for operator in _AUGMENTED.get(type(node.operator), ()):
        yield "operator_change", node.with_changes(operator=_spaced(operator, node.operator))


def _truth(node: cst.Name) -> Iterator[Proposal]:
    if node.value in {"True", "False"}:
        yield "constant_change", cst.Name("False" if node.value == "True" else "True")


_BY_NODE: dict[type[cst.CSTNode], Callable[..., Iterator[Proposal]]] = {
    cst.BinaryOperation: _binary,
    cst.BooleanOperation: _boolean,
    cst.UnaryOperation: _unary,
    cst.Comparison: _comparison,
    cst.Integer: _number,
    cst.Float: _number,
    cst.Call: _call,
    cst.Subscript: _subscript,
    cst.IfExp: _if_expression,
    cst.AugAssign: _augmented,
    cst.Return: _returned,
    cst.Name: _truth,
}


def propose_for_expression(node: cst.CSTNode) -> Iterator[Proposal]:
    """Every bug whose site is exactly `node`."""
    handler = _BY_NODE.get(type(node))
    return handler(node) if handler is not None else iter(())


def propose_initial_values(node: cst.Assign) -> Iterator[Proposal]:
    """Other starting values for `name = <small whole number>` or an empty container."""
    match node.value:
        case cst.Integer(value=value) if value.isdecimal():
            number = int(value)
            for other in (0, 1, number + 1, number - 1):
                if other != number and other >= 0:
                    yield "wrong_initial_value", node.with_changes(value=cst.Integer(str(other)))
