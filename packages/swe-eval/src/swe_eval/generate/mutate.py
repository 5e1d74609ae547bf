# libcst finds these methods by the name of the node.
# ruff: noqa: N802
r"""Procedural bugs for any Python source.

The kinds are those of SWE-smith's procedural generation (operators, constants, chains, conditions,
lines, assignments, loops, wrappers, classes) and a few more that people make: the wrong variable,
the wrong builtin, off by one, a wrong starting value, a slice from the wrong side. They are written
anew on libcst, so that comments and formatting survive.

    for bug in mutate("def add(a, b):\n    return a + b\n"):
        print(bug.kind, bug.line, bug.source)

`mutate` proposes; whether a test notices is the caller's business (`swe_eval.generate.select`).
`swe_eval.generate.places` finds the same bugs without making them, for modules with thousands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import libcst as cst

from swe_eval.generate.expressions import Proposal, propose_for_expression, propose_initial_values
from swe_eval.generate.statements import propose_for_block, propose_for_class, propose_for_if

__all__ = [
    "KINDS",
    "Mutation",
    "Site",
    "cannot_parse",
    "check_kinds",
    "find_sites",
    "mutate",
    "source_with",
]

KINDS: tuple[str, ...] = (
    "operator_change",
    "comparison_change",
    "operand_swap",
    "constant_change",
    "break_chain",
    "invert_condition",
    "boolean_change",
    "wrong_variable",
    "builtin_swap",
    "off_by_one",
    "wrong_initial_value",
    "remove_call",
    "slice_flip",
    "shuffle_lines",
    "remove_assign",
    "remove_conditional",
    "remove_loop",
    "remove_wrapper",
    "class_remove_base",
    "class_remove_method",
    "class_shuffle_methods",
)
"""Every kind of bug, in a fixed order."""


@dataclass(frozen=True)
class Mutation:
    """One way to break a module."""

    kind: str
    """One of `KINDS`."""
    function: str
    """Name of the innermost function, or of the class, that holds the bug; empty at top level."""
    line: int
    """First line of the original that differs, from 1."""
    source: str
    """The whole module with the bug in."""
    single_line: bool
    """Whether exactly one line differs, so that replacing that line undoes it."""


@dataclass(frozen=True)
class Site:
    """A node that a bug replaces, and what by."""

    kind: str
    path: tuple[str, ...]
    """Names of the functions and classes around it."""
    owner: cst.CSTNode | None
    """The innermost of them."""
    node: cst.CSTNode
    replacement: cst.CSTNode

    @property
    def function(self) -> str:
        """Name of the innermost function or class; empty at top level."""
        return self.path[-1] if self.path else ""


class _Scope:
    """Names that a function may use in place of one another: its parameters and locals."""

    def __init__(self, node: cst.FunctionDef) -> None:
        parameters = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
        names = [parameter.name.value for parameter in parameters]
        self.names = [name for name in names if name not in {"self", "cls"}]

    def add(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)


class _Collector(cst.CSTVisitor):
    """Walks a module once and notes each site where a bug of the wanted kinds can go."""

    def __init__(self, kinds: Collection[str], function: str | None) -> None:
        self.sites: list[Site] = []
        self._kinds = kinds
        self._wanted = function
        self._path: list[str] = []
        self._owners: list[cst.CSTNode] = []
        self._scopes: list[_Scope] = []
        self._not_loads: set[int] = set()

    def _inside(self) -> bool:
        return self._wanted is None or self._wanted in self._path

    def _note(self, node: cst.CSTNode, proposals: Iterator[Proposal]) -> None:
        if not self._inside():
            return
        path = tuple(self._path)
        owner = self._owners[-1] if self._owners else None
        for kind, replacement in proposals:
            if kind in self._kinds:
                self.sites.append(Site(kind, path, owner, node, replacement))

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._note(node, propose_for_expression(node))
        return super().on_visit(node)

    # What may hold bugs.

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._path.append(node.name.value)
        self._owners.append(node)
        self._scopes.append(_Scope(node))
        self._skip(node.name)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._path.pop()
        self._owners.pop()
        self._scopes.pop()

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._path.append(node.name.value)
        self._owners.append(node)
        self._skip(node.name)
        self._note(node, propose_for_class(node))

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._path.pop()
        self._owners.pop()

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        if self._scopes:
            self._note(node, propose_for_block(node))

    def visit_If(self, node: cst.If) -> None:
        self._note(node, propose_for_if(node))

    def visit_Assign(self, node: cst.Assign) -> None:
        if self._scopes and isinstance(node.targets[0].target, cst.Name):
            self._note(node, propose_initial_values(node))
            # A starting value is its own kind, not a constant as well.
            self._not_loads.add(id(node.value))

    def visit_Integer(self, node: cst.Integer) -> None:
        if id(node) in self._not_loads:
            self.sites = [site for site in self.sites if site.node is not node]

    def visit_Name(self, node: cst.Name) -> None:
        if not self._scopes or id(node) in self._not_loads:
            return
        names = self._scopes[-1].names
        if node.value in names:
            others = (name for name in names if name != node.value)
            self._note(node, (("wrong_variable", cst.Name(name)) for name in others))

    # Where a name is not a variable being read.

    def _skip(self, *nodes: cst.CSTNode | None) -> None:
        self._not_loads.update(id(node) for node in nodes if node is not None)

    def _bind(self, target: cst.BaseExpression) -> None:
        match target:
            case cst.Name(value=value):
                self._skip(target)
                if self._scopes:
                    self._scopes[-1].add(value)
            case cst.Tuple(elements=elements) | cst.List(elements=elements):
                for element in elements:
                    self._bind(element.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._bind(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._bind(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._bind(node.target)

    def visit_For(self, node: cst.For) -> None:
        self._bind(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._skip(node.target)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._bind(node.target)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._skip(node.attr)

    def visit_Call(self, node: cst.Call) -> None:
        self._skip(node.func)

    def visit_Arg(self, node: cst.Arg) -> None:
        self._skip(node.keyword)

    def visit_Param(self, node: cst.Param) -> None:
        self._skip(node.name)

    def visit_AsName(self, node: cst.AsName) -> None:
        self._skip(node.name)

    def visit_Annotation(self, node: cst.Annotation) -> bool:
        return False

    def visit_Decorator(self, node: cst.Decorator) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Global(self, node: cst.Global) -> bool:
        return False

    def visit_Nonlocal(self, node: cst.Nonlocal) -> bool:
        return False


def _difference(old: list[str], new: list[str]) -> tuple[int, bool]:
    """The first differing line, from 1, and whether it is the only one."""
    first = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    return first + 1, len(old) == len(new) and old[first + 1 :] == new[first + 1 :]


def _compiles(source: str) -> bool:
    try:
        compile(source, "<mutation>", "exec")
    except SyntaxError:
        return False
    return True


def find_sites(
    module: cst.Module, kinds: Collection[str], function: str | None = None
) -> list[Site]:
    """Every site of some kinds, inside the function or class of a name if one is given."""
    collector = _Collector(frozenset(kinds), function)
    module.visit(collector)
    return collector.sites


def source_with(module: cst.Module, source: str, site: Site) -> str | None:
    """The module with a bug in; None if that would be no change, or no valid Python."""
    changed = module.deep_replace(site.node, site.replacement)
    assert isinstance(changed, cst.Module)
    text = changed.code
    return text if text != source and _compiles(text) else None


def check_kinds(kinds: Collection[str]) -> None:
    """Raises ValueError for an unknown kind."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"unknown kinds of bugs {unknown}; known: {', '.join(KINDS)}")


def cannot_parse(error: Exception) -> ValueError:
    """What to raise for a source with such an error."""
    return ValueError(f"cannot mutate source that does not parse: {error}")


def mutate(
    source: str, *, kinds: Collection[str] = KINDS, function: str | None = None
) -> Iterator[Mutation]:
    """Propose bugs for `source`, in a fixed order and without duplicates.

    Args:
        source: Text of a Python module.
        kinds: Which of `KINDS` to propose.
        function: Only bugs inside the function or class of this name.

    Raises:
        ValueError: `source` is no valid Python, or `kinds` names an unknown kind.
    """
    check_kinds(kinds)
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise cannot_parse(error) from error
    old_lines = source.splitlines()
    seen: set[str] = set()
    for site in find_sites(module, kinds, function):
        text = source_with(module, source, site)
        if text is None or text in seen:
            continue
        seen.add(text)
        line, single = _difference(old_lines, text.splitlines())
        yield Mutation(site.kind, site.function, line, text, single)
