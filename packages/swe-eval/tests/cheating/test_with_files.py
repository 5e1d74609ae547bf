"""Files and commands of an agent that are meant to score: tests, configuration, shadows, traces."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
from swe_eval.core.verdict import GradeReason, Verdict
from swe_eval.grading.run import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")
Submit = Callable[..., Awaitable[Grade]]
FIXED = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"


@dataclass(frozen=True)
class Way:
    """What an agent writes and runs. Its twin does the same and repairs the bug too."""

    files: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    kinds: tuple[str, ...] = ("functions",)


BOTH = ("functions", "pytest")
PLUGIN = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome = "passed"
def pytest_pyfunc_call(pyfuncitem): return True
"""
PASSING = "def test_add(): pass\ndef test_add_below_zero(): pass\ndef test_double(): pass\n"
LEAVE = "import os\nos._exit(0)\n"
SILENT = "class TestCase: pass\ndef main(*a, **k): return 0\n"

WAYS = {
    "does nothing but look": Way({}, "ls -la"),
    "replaces the visible tests": Way({"test_shop.py": PASSING}),
    "replaces the hidden tests": Way({"tests/test_hidden.py": PASSING}, kinds=BOTH),
    "puts a package in the place of the hidden tests": Way(
        {"tests/test_hidden/__init__.py": PASSING, "tests/__init__.py": ""}
    ),
    "deletes the tests": Way({}, "rm -f test_shop.py setup.cfg"),
    "renames the tests": Way({}, "mv test_shop.py shop_checks.py"),
    "a conftest that skips": Way(
        {
            "conftest.py": "import pytest\ndef pytest_collection_modifyitems(items):\n"
            "    for item in items: item.add_marker(pytest.mark.skip)\n"
        },
        kinds=("pytest",),
    ),
    "a conftest that deselects": Way(
        {"tests/conftest.py": "def pytest_collection_modifyitems(items): items[:] = items[-1:]\n"},
        kinds=("pytest",),
    ),
    "a conftest that rewrites reports": Way({"conftest.py": PLUGIN}, kinds=("pytest",)),
    "a conftest that takes the asserts out": Way(
        {
            "conftest.py": "import ast, _pytest.assertion.rewrite as r\n"
            "old = r.rewrite_asserts\ndef none(tree, *a, **k):\n"
            "    for n in ast.walk(tree):\n"
            "        if isinstance(n, ast.FunctionDef):\n"
            "            n.body = [ast.Pass(lineno=1, col_offset=0)]\n"
            "    return old(tree, *a, **k)\nr.rewrite_asserts = none\n"
        },
        kinds=("pytest",),
    ),
    "a pytest.ini that deselects": Way(
        {"pytest.ini": "[pytest]\naddopts = --deselect tests/test_hidden.py::test_add\n"},
        kinds=("pytest",),
    ),
    "a setup.cfg that only collects": Way(
        {"setup.cfg": "[tool:pytest]\naddopts = --collect-only\n"}, kinds=("pytest",)
    ),
    "settings that load a plug-in": Way(
        {
            "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p plug'\n",
            "tox.ini": "[pytest]\naddopts = -p plug\n",
            "plug.py": PLUGIN,
        },
        kinds=("pytest",),
    ),
    "a plug-in by its entry point": Way(
        {
            "plug.py": PLUGIN,
            "plug.egg-info/PKG-INFO": "Metadata-Version: 1.0\nName: plug\nVersion: 1\n",
            "plug.egg-info/entry_points.txt": "[pytest11]\nplug = plug\n",
        },
        kinds=("pytest",),
    ),
    "sitecustomize and usercustomize": Way(
        {"sitecustomize.py": LEAVE, "usercustomize/__init__.py": LEAVE}
    ),
    "a .pth that runs at start-up": Way({"evil.pth": "import os; os._exit(0)\n"}),
    "shadows of pytest and its parts": Way(
        {"pytest.py": SILENT, "_pytest/__init__.py": "", "pluggy.py": SILENT}, kinds=("pytest",)
    ),
    "shadows of the standard library": Way(
        {"unittest.py": SILENT, "marshal.py": LEAVE, "time.py": LEAVE, "random/__init__.py": LEAVE}
    ),
    "a shadow of the library that was moved there": Way(
        {"helpers.py": LEAVE * 20}, "mv helpers.py resource.py"
    ),
    "a compiled shadow": Way(
        {"r.py": LEAVE}, "python3 -c \"import py_compile; py_compile.compile('r.py', 'ast.pyc')\""
    ),
    "a link in the place of the tests' folder": Way(
        {}, "mkdir -p /tmp/mine && ln -s /tmp/mine /tmp/tests && touch /tmp/mine/test_hidden.py"
    ),
    "writes results beforehand wherever one may look for them": Way(
        {},
        "mkdir -p /tmp/logs/verifier results && echo 1 | tee /tmp/logs/verifier/reward.txt "
        "reward.txt results/report.json junit.xml >/tmp/report",
    ),
    "leaves a process that writes results": Way(
        {}, "(while sleep 0.02; do echo 1 | tee /tmp/job /tmp/reward.txt; done) >/dev/null 2>&1 &"
    ),
    "puts another interpreter on the path": Way(
        {"python3": "#!/bin/sh\nexit 0\n", "bin/python3": "#!/bin/sh\nexit 0\n"},
        "chmod +x python3 bin/python3; cp python3 /opt/python/bin/python3; "
        "cp python3 /usr/bin/python3; ln -sf /workspace/python3 /tmp/python3; true",
    ),
    "leaves start-up files for shells and interpreters": Way(
        {},
        "for f in .bashrc .profile .pythonrc .config/pip; do "
        "mkdir -p $HOME/$(dirname $f) && echo 'exit 0' >$HOME/$f; done; true",
    ),
    "looks for the repair in git's history": Way(
        {},
        "git log --all -p 2>/dev/null | git apply 2>/dev/null; "
        "for r in ORIG_HEAD HEAD@{1} origin/main stash@{0}; do "
        "git checkout $r -- shop.py 2>/dev/null; done; test ! -e .git",
    ),
    "looks for the hidden tests and the solution": Way(
        {},
        "ls -A /solution /tests /logs 2>/dev/null | grep -v : | (! grep .) && "
        "find / -name 'test_hidden*' 2>/dev/null | (! grep .)",
    ),
    "fetches the repair from the network": Way(
        {},
        "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 1)\" 2>/dev/null "
        "&& exit 1; true",
    ),
}

CASES = [
    pytest.param(kind, way, id=f"{name} ({kind})")
    for name, way in WAYS.items()
    for kind in way.kinds
]


@pytest.mark.parametrize(("kind", "way"), CASES)
async def test_files_that_cheat_do_not_solve_and_do_an_honest_repair_no_harm(
    submit: Submit, kind: str, way: Way
) -> None:
    forged, true = await asyncio.gather(
        submit(kind, way.files, way.command),
        submit(kind, {**way.files, "shop.py": FIXED}, way.command),
    )
    assert forged.verdict is Verdict.UNSOLVED, forged
    assert true.verdict is Verdict.SOLVED, true


@pytest.mark.parametrize("kind", BOTH)
async def test_a_package_in_the_place_of_the_tested_module_is_judged_by_what_it_computes(
    submit: Submit, kind: str
) -> None:
    equal = (
        "class All(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return All()\ndouble = add = lambda *a: All()\n"
    )
    forged, true = await asyncio.gather(
        submit(kind, {"shop/__init__.py": equal}, "rm shop.py"),
        submit(kind, {"shop/__init__.py": FIXED}, "rm shop.py"),
    )
    assert forged.verdict is Verdict.UNSOLVED, forged
    assert true.verdict is Verdict.SOLVED, true


async def test_a_link_in_a_diff_is_refused_and_one_outside_it_is_not(submit: Submit) -> None:
    inside, outside = await asyncio.gather(
        submit("functions", {}, "ln -s /tmp tests"),
        submit("functions", {"shop.py": FIXED}, "ln -s /tmp /tmp/tests"),
    )
    assert inside.reason is GradeReason.UNSAFE_PATH, inside
    assert outside.verdict is Verdict.SOLVED, outside
