"""Runs a small repository's tests in this process, without files, clock or child processes.

Only for repositories that ship with this package and bugs made from them: the code is trusted, but
a bug may loop for ever, so every test has a budget of executed lines.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["StepBudgetExceededError", "TestResult", "load_modules", "run_tests"]


class StepBudgetExceededError(BaseException):
    """The code ran more lines than it may. No `Exception`, so that the code cannot catch it."""


@dataclass(frozen=True)
class TestResult:
    """How one test function ended."""

    __test__ = False

    passed: bool
    error: str
    """Name of the exception that ended it; empty when it passed."""


class _Budget:
    def __init__(self, lines: int) -> None:
        self._left = lines

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise StepBudgetExceededError
        return self._trace

    def run(self, action: Callable[[], object]) -> object:
        previous = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return action()
        finally:
            sys.settrace(previous)


def load_modules(files: Mapping[str, str], *, budget: int = 20_000) -> dict[str, types.ModuleType]:
    """Execute the top-level Python files of a repository as modules that can import one another.

    Args:
        files: Path to text; only `name.py` at top level is loaded, whatever else is there.
        budget: Lines that loading all of them may execute.

    Raises:
        Exception: Whatever a module raises while it loads.
        StepBudgetExceededError: Loading does not end.
    """
    loaded: dict[str, types.ModuleType] = {}

    def find(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: tuple[str, ...] = (),
        level: int = 0,
    ) -> types.ModuleType:
        if f"{name}.py" in files:
            return load(name)
        return builtins.__import__(name, globals_, locals_, fromlist, level)

    def load(name: str) -> types.ModuleType:
        if name not in loaded:
            module = types.ModuleType(name)
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": find}
            loaded[name] = module
            code = compile(files[f"{name}.py"], f"{name}.py", "exec")
            exec(code, module.__dict__)  # noqa: S102 - our own repositories
        return loaded[name]

    def load_all() -> None:
        for path in sorted(files):
            if path.endswith(".py") and "/" not in path:
                load(path.removesuffix(".py"))

    _Budget(budget).run(load_all)
    return loaded


def run_tests(
    files: Mapping[str, str], tests: Mapping[str, str], *, budget: int = 20_000
) -> dict[str, TestResult]:
    """Run every `test_*` function of the test files.

    Args:
        files: The repository.
        tests: The test files, by path; they may import the repository's modules.
        budget: Lines that one test may execute.

    Returns:
        Results by `file::function`. When a module cannot be loaded, every test has that error.
    """
    everything = {**files, **tests}
    names = {
        f"{path}::{line[4:].partition('(')[0]}"
        for path, text in tests.items()
        for line in text.splitlines()
        if line.startswith("def test_")
    }
    try:
        modules = load_modules(everything, budget=budget)
    except (Exception, StepBudgetExceededError) as error:
        return {name: TestResult(False, type(error).__name__) for name in sorted(names)}
    results = {}
    for name in sorted(names):
        path, _, function = name.partition("::")
        test = getattr(modules[path.removesuffix(".py")], function)
        try:
            _Budget(budget).run(test)
        except (Exception, StepBudgetExceededError) as error:
            results[name] = TestResult(False, type(error).__name__)
        else:
            results[name] = TestResult(True, "")
    return results
