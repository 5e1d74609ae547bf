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
