"""What a failing test saw, in the words of an issue: the call, what came of it, what should have.

Uploaded into the sandbox beside `warm`: it imports the standard library only. It looks into the
frame of the test that has just failed and evaluates both sides of the assertion once more; a side
that gives something else the second time is no witness.
"""

from __future__ import annotations

import ast
import types
from typing import Any

__all__ = ["describe"]

_MAX_TEXT = 240
_MAX_LOCALS = 3
_EQUAL_CALLS = {"assertEqual", "assertEquals", "assertIs", "assertListEqual", "assertDictEqual"}
_EQUAL_CALLS |= {"assertTupleEqual", "assertSetEqual", "assertSequenceEqual"}
_EXPECTED_ERRORS = {"raises", "assertRaises", "assertRaisesRegex"}


def describe(error: BaseException, path: str) -> dict[str, Any]:
    """What the test in the file `path` saw.

    Returns:
        `form`: `compared`, `truth`, `raised`, `not_raised` or `other`; `error`, `message`: the
        exception; and where the form has them `call` (source), `got`, `want`, `given` (names and
        values that the call uses).
    """
    said: dict[str, Any] = {"form": "other", "error": type(error).__name__, "message": ""}
    try:
        said["message"] = _short(str(error).partition("\n")[0])
        frame, line = _test_frame(error, path)
        if frame is not None:
            statement = _statement(path, line)
            if statement is not None:
                said.update(_look(statement, frame, error))
    except Exception:  # noqa: S110 -- whatever the tested objects do when looked at
        pass
    return said


def _test_frame(error: BaseException, path: str) -> tuple[types.FrameType | None, int]:
    """The outermost frame in the test's own file, and its line."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            return trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return None, 0


def _statement(path: str, line: int) -> ast.stmt | None:
    """The innermost statement on a line of a file."""
    with open(path, "rb") as file:  # noqa: PTH123 -- runs once for every failing test
        tree = ast.parse(file.read())
    best: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            if best is None or node.lineno >= best.lineno:
                best = node
    return best


def _look(statement: ast.stmt, frame: types.FrameType, error: BaseException) -> dict[str, Any]:
    names = {name: v for name, v in frame.f_locals.items() if not name.startswith("@")}
    scope = {**frame.f_globals, **names}
    failed = isinstance(error, AssertionError)
    expected = _expected_error(statement)
    if expected is not None:
        call, want = expected
        if type(error).__name__ == "Failed" or failed:
            return {"form": "not_raised", "call": call, "want": want, **_given(call, names)}
        return {**_raised(call, error, names), "want": f"raises {want}"}
    sides = _sides(statement)
    if sides is not None:
        return _compare(sides, scope, names, error, failed=failed)
    test = _asserted(statement)
    if test is not None and failed:
        call = _unparse(test)
        got = _value(call, scope)
        return {"form": "truth", "call": call, "got": got, **_given(call, names)} if call else {}
    value = getattr(statement, "value", None) or test
    if value is not None and not failed:
        return _raised(_unparse(value), error, names)
    return {}


def _compare(
    sides: tuple[ast.expr, ast.expr],
    scope: dict[str, Any],
    names: dict[str, Any],
    error: BaseException,
    *,
    failed: bool,
) -> dict[str, Any]:
    left, right = sides
    if _calls(right) and not _calls(left):
        left, right = right, left
    call, other = _unparse(left), _unparse(right)
    want = _value(other, scope)
    if not failed:
        said = _raised(call, error, names)
        if _evaluate(call, scope)[0] or not want:
            return {**said, "call": ""}  # it was the other side that raised
        return {**said, "want": want}
    worked, value = _evaluate(call, scope)
    fine, wanted = _evaluate(other, scope)
    if not (worked and fine) or bool(value == wanted):
        return {}
    got = _repr(value)
    if not (call and got and want):
        return {}
    return {"form": "compared", "call": call, "got": got, "want": want, **_given(call, names)}


def _raised(call: str, error: BaseException, names: dict[str, Any]) -> dict[str, Any]:
    return {"form": "raised", "call": call, **_given(call, names)}


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
        if isinstance(call.func, ast.Attribute) and call.func.attr in _EQUAL_CALLS:
            if len(call.args) >= 2:
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


def _calls(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _unparse(node: ast.AST) -> str:
    """Source on one line; empty if it is too long to be quoted."""
    text = ast.unparse(node)
    return text if len(text) <= _MAX_TEXT and "\n" not in text else ""


def _evaluate(source: str, scope: dict[str, Any]) -> tuple[bool, Any]:
    if not source:
        return False, None
    try:
        return True, eval(source, dict(scope))  # noqa: S307 -- the test's own expression
    except Exception:
        return False, None


def _value(source: str, scope: dict[str, Any]) -> str:
    worked, value = _evaluate(source, scope)
    return _repr(value) if worked else ""


def _repr(value: object) -> str:
    """Its `repr`; empty if it is long or names a place in memory."""
    text = repr(value)
    return "" if len(text) > _MAX_TEXT or " at 0x" in text or "\n" in text else text


def _given(call: str, names: dict[str, Any]) -> dict[str, Any]:
    """The test's own variables in a call, by value; none where one has no value to show."""
    if not call:
        return {}
    used = [node.id for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)]
    given = {}
    for name in dict.fromkeys(used):
        if name in names and not isinstance(names[name], (types.ModuleType, type)):
            value = _repr(names[name])
            given[name] = "" if value.startswith("<") else value
    if not all(given.values()) or len(given) > _MAX_LOCALS:
        return {"given": {}, "call": ""}
    return {"given": given}


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
