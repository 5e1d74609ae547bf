"""What a failing test saw, in the words of an issue: the call, what came of it, what should have.

Uploaded into the sandbox beside `warm`: it imports the standard library only. It looks into the
frame of the test that has just failed and evaluates both sides of the assertion once more; a side
that gives something else the second time is no witness.
"""

from __future__ import annotations

import ast
import re
import types
from typing import Any

__all__ = ["describe"]

_MAX_TEXT = 240
_MAX_GIVEN = 4
_EQUAL_CALLS = {"assertEqual", "assertEquals", "assertIs", "assertListEqual", "assertDictEqual"}
_EQUAL_CALLS |= {"assertTupleEqual", "assertSetEqual", "assertSequenceEqual"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_EXPECTED_ERRORS = {"raises", "assertRaises", "assertRaisesRegex"}


class _Scene:
    """A test at the line where it failed: its statement and its variables."""

    def __init__(self, frame: types.FrameType, line: int) -> None:
        with open(frame.f_code.co_filename, "rb") as file:  # noqa: PTH123 -- runs once for every failing test
            tree = ast.parse(file.read())
        around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _spans(n, line)]
        around.sort(key=lambda node: node.lineno)
        self.statement = around[-1] if around else None
        self.expected = next(filter(None, map(_expected_error, around)), None)
        self.names = {n: v for n, v in frame.f_locals.items() if not n.startswith("@")}
        self.scope = {**frame.f_globals, **self.names}
        self._assigned: dict[str, str] = {}
        inner = [n for n in around if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in ast.walk(inner[-1]) if inner else ():
            if isinstance(node, ast.Assign) and node.lineno < line and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    self._assigned[target.id] = _unparse(node.value)

    def evaluate(self, source: str) -> tuple[bool, Any]:
        """Whether an expression of the test can be evaluated once more, and its value."""
        if not source:
            return False, None
        try:
            return True, eval(source, dict(self.scope))  # noqa: S307 -- the test's own expression
        except Exception:
            return False, None

    def value(self, source: str) -> str:
        """The `repr` of an expression; empty if there is none to show."""
        worked, value = self.evaluate(source)
        return _repr(value) if worked else ""

    def call(self, source: str) -> dict[str, Any]:
        """An expression and the test's variables in it, by value or by where they come from.

        Empty where there is neither. A variable by itself is what it was assigned.
        """
        origin = self._assigned.get(source, "")
        if origin and self.value(origin) == self.value(source):
            source = origin
        given: dict[str, str] = {}
        if not source or not self._explain(source, given) or len(given) > _MAX_GIVEN:
            return {"call": ""}
        return {"call": source, "given": given}

    def _explain(self, source: str, given: dict[str, str]) -> bool:
        """Adds the variables that an expression uses, those first that others come from."""
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Name) or node.id in given or node.id not in self.names:
                continue
            name, value = node.id, self.names[node.id]
            if isinstance(value, (types.ModuleType, type)):
                continue
            shown = _repr(value)
            if not shown or _is_object(value):
                shown = self._assigned.pop(name, "")  # once: it may name itself
                if not shown or not self._explain(shown, given):
                    return False
            given[name] = shown
        return True


def describe(error: BaseException, name: str, below: str = "") -> dict[str, Any]:
    """What the test function of this name saw; or, in a fixture, the first below a folder.

    Returns:
        `form`: `compared`, `truth`, `raised`, `not_raised` or `other`; `error`, `message`: the
        exception; and where the form has them `call` (source), `got`, `want`, `given` (names and
        values that the call uses).
    """
    said: dict[str, Any] = {"form": "other", "error": type(error).__name__, "message": ""}
    try:
        said["message"] = _short(str(error).partition("\n")[0])
        frame, line = _test_frame(error, name, below)
        if frame is not None:
            said.update(_look(_Scene(frame, line), error))
    except Exception:  # noqa: S110 -- whatever the tested objects do when looked at
        pass
    return said


def _test_frame(error: BaseException, name: str, below: str) -> tuple[types.FrameType | None, int]:
    """The outermost frame of the test function, in whatever file it is, and its line."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(below) if below else code.co_name == name:
            return trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return None, 0


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _look(scene: _Scene, error: BaseException) -> dict[str, Any]:
    statement = scene.statement
    if statement is None:
        return {}
    failed = isinstance(error, AssertionError)
    if scene.expected is not None:
        call, want = scene.expected
        if type(error).__name__ == "Failed" or failed:
            return {"form": "not_raised", "want": want, **scene.call(call)}
        return {"form": "raised", "want": f"raises {want}", **scene.call(call)}
    sides = _sides(statement)
    if sides is not None:
        return _compare(sides, scene, failed=failed)
    test = _asserted(statement)
    if failed:
        call = _unparse(test) if test is not None else ""
        return {"form": "truth", "got": scene.value(call), **scene.call(call)} if call else {}
    raising = test or _raising(statement)
    return {"form": "raised", **scene.call(_unparse(raising))} if raising is not None else {}


def _compare(sides: tuple[ast.expr, ast.expr], scene: _Scene, *, failed: bool) -> dict[str, Any]:
    left, right = sides
    if (_calls(right) and not _calls(left)) or (_is_literal(left) and not _is_literal(right)):
        left, right = right, left
    call, other = _unparse(left), _unparse(right)
    worked, value = scene.evaluate(call)
    fine, wanted = scene.evaluate(other)
    want = _repr(wanted) if fine else ""
    if not failed:
        if worked or not want:
            return {"form": "raised"}  # it was the other side that raised
        return {"form": "raised", "want": want, **scene.call(call)}
    got = _repr(value) if worked else ""
    if not (got and want) or bool(value == wanted):
        return {}
    return {"form": "compared", "got": got, "want": want, **scene.call(call)}


def _expected_error(statement: ast.stmt) -> tuple[str, str] | None:
    """Of `with raises(E): call` the call and the error."""
    if not isinstance(statement, ast.With) or len(statement.items) != 1:
        return None
    context = statement.items[0].context_expr
    if not isinstance(context, ast.Call) or not context.args or len(statement.body) != 1:
        return None
    function = context.func
    name = getattr(function, "attr", None) or getattr(function, "id", None)
    value = getattr(statement.body[0], "value", None)
    if name not in _EXPECTED_ERRORS or value is None:
        return None
    return _unparse(value), _unparse(context.args[0])


def _sides(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        test = statement.test
        if len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
            return test.left, test.comparators[0]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        named = isinstance(call.func, ast.Attribute) and call.func.attr in _EQUAL_CALLS
        if named and len(call.args) >= 2:
            return call.args[0], call.args[1]
    return None


def _asserted(statement: ast.stmt) -> ast.expr | None:
    if isinstance(statement, ast.Assert):
        return statement.test
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr == "assertTrue" and call.args:
            return call.args[0]
    return None


def _raising(statement: ast.stmt) -> ast.AST | None:
    """What of a statement outside an assertion is worth showing when it raises."""
    if isinstance(statement, (ast.Expr, ast.Return)):
        return statement.value
    if isinstance(statement, ast.Assign):
        plain = all(isinstance(target, (ast.Name, ast.Tuple)) for target in statement.targets)
        return statement.value if plain else statement
    if isinstance(statement, ast.For):
        return statement.iter
    return statement if isinstance(statement, (ast.AugAssign, ast.Delete)) else None


def _calls(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(inner, (ast.Name, ast.Call)) for inner in ast.walk(node))


def _unparse(node: ast.AST) -> str:
    """Source on one line; empty if it is too long to be quoted."""
    text = ast.unparse(node)
    return text if len(text) <= _MAX_TEXT and "\n" not in text else ""


def _repr(value: object) -> str:
    """Its `repr`, without places in memory; empty if it is long."""
    text = _ADDRESS.sub("", repr(value))
    return "" if len(text) > _MAX_TEXT or "\n" in text else text


def _is_object(value: object) -> bool:
    """Whether its `repr` says where it is rather than what it is."""
    text = repr(value)
    return text.startswith("<") or _ADDRESS.search(text) is not None


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
