# ruff: noqa: PTH109, PTH123 -- keeps the fork-server small: no pathlib
"""Work that almost every Python program does, done once beforehand for its caches' sake.

Only caches change: compiled patterns, translations looked up, code that specialises itself. What
would show in a program (signal handlers, cached source lines) is left as it was.
"""

import sys

__all__ = ["prewarm"]


def prewarm() -> None:
    """Exercises what is in `sys.modules`; a module that was not preloaded is left alone."""
    if "argparse" in sys.modules:
        import argparse

        parser = argparse.ArgumentParser(prog="prewarm")
        parser.add_argument("--flag", action="store_true", help="a flag")
        parser.add_argument("names", nargs="*")
        parser.parse_args(["--flag", "name"])
        parser.format_help()
    if "json" in sys.modules:
        import json

        json.loads(json.dumps({"key": [1, 2.5, None, "text"]}, indent=2))
    if "dataclasses" in sys.modules:
        import dataclasses

        dataclasses.make_dataclass("Point", [("x", int), ("y", int, 0)])(1)
    if "unittest" in sys.modules:
        _run_tests()
    if "pytest" in sys.modules:
        _run_pytest()


def _run_tests() -> None:
    import io
    import linecache
    import types
    import unittest

    class Tests(unittest.TestCase):
        def test_right(self) -> None:
            self.assertEqual([1, 2], [1, 2])  # noqa: PT009 -- this is what is warmed

        def test_wrong(self) -> None:
            self.assertEqual("a\nb", "a\nc")  # noqa: PT009

        def test_broken(self) -> None:
            raise ValueError("broken")

    module = types.ModuleType("prewarm")
    module.Tests = Tests  # type: ignore[attr-defined]
    runner = unittest.TextTestRunner(stream=io.StringIO())
    unittest.main(module=module, argv=["prewarm"], testRunner=runner, exit=False)
    linecache.clearcache()


_PYTEST_NAME = "test_prewarm"
_PYTEST_FILE = """\
import pytest

@pytest.fixture
def three():
    return 3

def test_right(three):
    assert three == 3

@pytest.mark.parametrize("number", [1, 2])
def test_each(number):
    assert number in (1, 2)

class TestIt:
    def test_wrong(self):
        assert [1, 2] == [1, 3], "wrong"

def test_broken():
    raise ValueError("broken")
"""


def _run_pytest() -> None:
    """Runs a few tests, and takes back what such a run leaves behind in the process."""
    import io
    import linecache
    import os
    import shutil
    import tempfile

    import pytest

    path, environ, cwd, temporary = list(sys.path), dict(os.environ), os.getcwd(), tempfile.tempdir
    known = set(sys.path_importer_cache)
    streams = sys.stdout, sys.stderr
    folder = tempfile.mkdtemp()
    try:
        with open(f"{folder}/{_PYTEST_NAME}.py", "w", encoding="utf-8") as file:
            file.write(_PYTEST_FILE)
        os.chdir(folder)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.stdout = sys.stderr = io.StringIO()
        pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", "--rootdir", folder, folder])
    finally:
        sys.stdout, sys.stderr = streams
        os.chdir(cwd)
        shutil.rmtree(folder)
        sys.modules.pop(_PYTEST_NAME, None)
        sys.path[:] = path
        for entry in sys.path_importer_cache.keys() - known:
            del sys.path_importer_cache[entry]
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        tempfile.tempdir = temporary
        for name in ("last_type", "last_value", "last_traceback"):
            if hasattr(sys, name):
                delattr(sys, name)
        linecache.clearcache()
