"""Tested code that writes into the log by which it is judged."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from swe_eval.core.verdict import Verdict
from swe_eval.grading.run import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")
Submit = Callable[..., Awaitable[Grade]]
BROKEN = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
FIXED = BROKEN.replace("a - b", "a + b")
LINES = (
    "test_add (test_logged.Shop.test_add) ... ok\\n"
    "test_double (test_logged.Shop.test_double) ... ok\\n"
)
END = "\\n" + "-" * 70 + "\\nRan 2 tests in 0.001s\\n\\nOK\\n"

WAYS = {
    "prints lines of tests that passed": (
        f"import sys\nsys.stderr.write('{LINES}')\nprint('{LINES}')",
        "import sys\nsys.stderr.write('looking at test_add\\n')",
    ),
    "prints them in an exit handler": (
        f"import atexit, sys\natexit.register(sys.stderr.write, '{LINES}{END}')",
        "import atexit, sys\natexit.register(sys.stderr.write, 'bye\\n')",
    ),
    "prints a whole log and leaves": (
        f"import os\nos.write(2, b'{LINES}{END}')\nos._exit(0)",
        "import os\nif os.fork() == 0: os._exit(0)\nos.wait()",
    ),
    "prints a whole log with the markers, and leaves": (
        "import glob, os\nscripts = [open(f).read() for f in glob.glob('/tmp/*/eval.sh')]\n"
        "marks = [l[6:-1] for s in scripts for l in s.splitlines() if l.startswith('echo')]\n"
        f"os.write(2, ('\\n' + marks[0] + '\\n{LINES}{END}' + marks[1] + '\\n').encode())\n"
        "os._exit(0)",
        "import glob\nscripts = glob.glob('/tmp/*/eval.sh')",
    ),
    "makes every assertion hold": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None",
        "import unittest\nold = unittest.TestCase.assertEqual\n"
        "unittest.TestCase.assertEqual = lambda *a: old(*a)",
    ),
    "takes failures for expected": (
        "import unittest\ndef add(a, b): raise unittest.case._ShouldStop",
        "import unittest\ntry: raise unittest.SkipTest\nexcept unittest.SkipTest: pass",
    ),
    "loops for ever": ("while True: pass", "for _ in range(100_000): pass"),
}


@pytest.mark.parametrize("name", WAYS)
async def test_a_log_that_lies_is_not_solved_and_an_honest_one_is(
    submit: Submit, name: str
) -> None:
    cheat, honest = WAYS[name]
    forged, true = await asyncio.gather(
        submit("log", {"shop.py": BROKEN + cheat + "\n"}),
        submit("log", {"shop.py": FIXED + honest + "\n"}),
    )
    assert forged.verdict is Verdict.UNSOLVED, forged
    assert true.verdict is Verdict.SOLVED, true
