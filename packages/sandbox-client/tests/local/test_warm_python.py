# ruff: noqa: E501 -- programs are easier to read on one line
"""A program run by the warm interpreter behaves as under a fresh one, to the last byte it prints."""

import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, FileContent, Sandbox, SandboxClient
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.packages import copy_pytest
from sandbox_client.testing.service import RunningService

# Programs with their command lines; each runs both ways, in folders that are alike.
SCRIPTS: dict[str, str] = {
    "plain": "print('hello')",
    "fails": "def f():\n    return 1 / 0\n\n\nf()\n",
    "chained": "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('bad') from e\n",
    "syntax": "print('before')\ndef f(:\n    pass\n",
    "indentation": "if True:\nprint(1)\n",
    "null_byte": "print(1)\0",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))\n",
    "exit_none": "raise SystemExit",
    "exit_number": "import sys\nsys.exit(7)",
    "exit_large": "import sys\nsys.exit(1234)",
    "exit_text": "import sys\nprint('out')\nsys.exit('text')",
    "exit_hard": "import os\nprint('lost')\nos._exit(3)",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "main_names": "print(sorted(globals()), __name__, __spec__, __package__, __doc__)\n"
    "print(type(__loader__).__name__, __builtins__, __file__, __cached__)",
    "argv": "import sys\nprint(sys.argv, sys.orig_argv[1:])",
    "path": "import sys\nprint(sys.path, sys.prefix, sys.base_prefix, sys.exec_prefix)",
    "modules": "import sys\nprint(sorted(sys.modules))",
    "modules_after": "import sys, unittest, json\n"
    "print(sorted(m for m in sys.modules if not m.startswith(('encodings', 'locale', '_locale'))))",
    "flags": "import sys\nprint(sys.flags, sys._xoptions, sys.warnoptions, sys.getrecursionlimit())",
    "implementation": "import sys, platform\nprint(sys.version, platform.python_version())",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.fileno())",
    "environ": "import os\nprint(sorted(k for k in os.environ if k != '_'))\nos.putenv('A', '1')\n"
    "os.environ['B'] = '2'\nos.system('echo $A $B')",
    "cwd": "import os\nprint(os.getcwd(), os.listdir('.'))",
    "imports_neighbour": "import helper\nprint(helper.VALUE, helper.__file__)",
    "imports_package": "from pkg.inner import where\nimport pkg\nprint(where, pkg.__path__)",
    "shadowed": "import random, tempfile\nprint(random.__file__, getattr(random, 'MINE', None))",
    "shadow_stdlib_user": "import statistics\nprint(statistics.mean([1, 2]))",
    "missing_module": "import nosuchmodule",
    "missing_name": "from json import nosuchname",
    "stdlib_source": "import inspect, textwrap\nprint(len(inspect.getsource(textwrap)) > 100)\n"
    "print(textwrap.__spec__.origin, textwrap.__loader__.__class__.__name__, textwrap.__file__)",
    "reimport": "import importlib, json\nprint(importlib.reload(json) is json, json.__spec__.name)",
    "unittest": "import unittest\n\n\nclass T(unittest.TestCase):\n"
    "    def test_a(self):\n        self.assertEqual(1, 2)\n\n"
    "    def test_b(self):\n        with self.subTest(1):\n            self.fail('no')\n\n"
    "    @unittest.skip('why')\n    def test_c(self): ...\n\n\nunittest.main()\n",
    "unittest_ok": "import unittest\n\n\nclass T(unittest.TestCase):\n    def test(self): ...\n\n\n"
    "unittest.main(verbosity=2)",
    "logging": "import logging\nlogging.basicConfig(level='INFO', format='%(relativeCreated)d %(message)s')\n"
    "logging.info('x')",
    "logging_default": "import logging\nlogging.warning('careful')\nlogging.info('hidden')",
    "warnings": "import warnings\n\n\ndef f():\n    warnings.warn('old', DeprecationWarning, 2)\n"
    "    warnings.warn('mind')\n\n\nf()\nf()",
    "odd_modules": "import sys\nsys.modules['odd'] = 5\nsys.modules['none'] = None\nimport odd\nprint(odd)",
    "unclosed": "f = open('unclosed.txt', 'w')\nf.write('flushed at the end')",
    "unclosed_in_module": "import opens",
    "finalizer": "class A:\n    def __del__(self):\n        print('gone', done)\n\n\ndone = 1\na = A()\n",
    "finalizer_cycle": "class A:\n    def __del__(self):\n        print('gone')\n\n\na = A()\na.me = a\n",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hi')",
    "atexit_fails": "import atexit\n\n\n@atexit.register\ndef f():\n    1 / 0\n",
    "weakref_finalize": "import weakref\n\n\nclass A: ...\n\n\na = A()\nweakref.finalize(a, print, 'finalized')",
    "threads": "import threading, time\n\n\ndef f():\n    time.sleep(0.05)\n    print('from thread')\n\n\n"
    "threading.Thread(target=f).start()\nprint(threading.current_thread().name)",
    "daemon_thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\nprint('end')",
    "thread_fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()",
    "fork": "import os\npid = os.fork()\nif pid == 0:\n    print('child')\n    raise SystemExit(5)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "subprocess": "import subprocess, sys\n"
    "print(subprocess.run([sys.executable, '-c', 'print(1); exit(4)'], capture_output=True).stdout)",
    "multiprocessing": "import multiprocessing\n\n\ndef f(x):\n    return x * x\n\n\n"
    "if __name__ == '__main__':\n    with multiprocessing.Pool(2) as p:\n        print(p.map(f, [1, 2, 3]))",
    "spawn": "import multiprocessing\n\n\ndef f(x):\n    return x + 1\n\n\nif __name__ == '__main__':\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as p:\n        print(p.map(f, [1]))",
    "asyncio": "import asyncio\n\n\nasync def f():\n    await asyncio.sleep(0)\n    return 3\n\n\nprint(asyncio.run(f()))",
    "pickle": "import pickle\n\n\nclass A: ...\n\n\nprint(pickle.loads(pickle.dumps(A())).__class__)",
    "dataclass": "from dataclasses import dataclass\n\n\n@dataclass\nclass P:\n    x: int = 1\n\n\nprint(P())",
    "typing": "import typing\n\n\nclass A:\n    x: 'int'\n\n\nprint(typing.get_type_hints(A), __annotations__)",
    "annotated": "x: int = 1\nprint(__annotations__)",
    "hash_order": "print({str(n) for n in range(10)}, hash('x'))",
    "signals": "import signal\nprint([signal.getsignal(s) for s in (2, 13, 15, 17)])\n"
    "print(signal.set_wakeup_fd(-1), signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "descriptors": "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:3])\n"
    "print(len(os.listdir('/proc/self/fd')))",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\n1 / 0",
    "long_output": "for n in range(20000): print(n)",
    "stdin": "import sys\nprint(sys.stdin.read())",
    "builtins": "print(exit, quit, copyright, len(dir(__builtins__)))",
    "gc": "import gc\nprint(gc.isenabled(), gc.get_threshold(), gc.get_debug())",
    "locale": "import locale\nprint(locale.getlocale(), locale.getpreferredencoding())",
    "time_zone": "import time\nprint(time.tzname, time.strftime('%z'))",
    "resource": "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrusage(0).ru_utime < 5)",
    "unprintable": "class E(Exception):\n    def __str__(self): raise RuntimeError\n\n\nraise E",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "notes": "e = ValueError('x')\ne.add_note('note')\nraise e",
    "broken_stdout": "import sys\nsys.stdout.close()\n",
    "future": "from __future__ import annotations\nx: undefined = 1\nprint(__annotations__)",
    "dis": "import dis\ndis.dis(lambda: 1)",
    "after_pytest": "import pytest, sys\nprint(sorted(m for m in sys.modules if 'pytest' in m))\n"
    "import linecache, logging, os, tempfile, threading, warnings\n"
    "print(tempfile.tempdir, linecache.cache, logging.root.handlers, sorted(os.environ), sys.path)\n"
    "print(getattr(sys, 'last_value', None), sys.excepthook, sys.unraisablehook)\n"
    "print(threading.excepthook, [str(f) for f in warnings.filters])",
    "runs_pytest": "import pytest, sys\nprint(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_by_pytest.py']))\n"
    "print([m for m in sys.modules if 'prewarm' in m])",
    "code_name": "import sys\nprint(sys._getframe().f_code.co_filename, sys._getframe().f_code.co_name)",
}  # fmt: skip
FILES = {
    "helper.py": "VALUE = 5\n",
    "pkg/__init__.py": "",
    "pkg/inner.py": "where = __name__\n",
    "opens.py": "f = open('opened.txt', 'w')\nf.write('by a module')\n",
    "dir/__main__.py": "print('folder', __name__, __file__)\n",
    "test_found.py": "import unittest\n\n\nclass T(unittest.TestCase):\n    def test(self): ...\n",
}
BY_PYTEST = """\
import logging, warnings
import pytest


@pytest.fixture(params=[1, 2])
def number(request, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBER", str(request.param))
    yield request.param
    print("over", tmp_path.exists())


def test_right(number, capsys):
    print("seen")
    assert capsys.readouterr().out == "seen\\n" and number


class TestMore:
    def test_wrong(self, caplog):
        logging.warning("careful")
        assert [1, {"a": 2}] == [1, {"a": 3}], caplog.messages

    @pytest.mark.skip(reason="why")
    def test_skipped(self): ...

    @pytest.mark.xfail
    def test_expected(self):
        warnings.warn("old", DeprecationWarning)
        raise ValueError("broken")


def test_error(missing): ...
"""
FILES["test_by_pytest.py"] = BY_PYTEST
SHADOWS = {"random.py": "MINE = 1\n", "shadowed.py": SCRIPTS["shadowed"]}
COMMAND_LINES = [
    "PY nosuch.py",
    "PY nosuch/x.py",
    "PY dir",
    "PY -c 'import sys; print(sys.argv, sys.path[0], __name__)' a b",
    "PY -c 'raise ValueError(1)'",
    "PY -c 'def f(:'",
    "PY -c ''",
    "PY -u run_argv.py -x",
    "PY -B ./run_argv.py",
    "PY ./run_fails.py",
    "PY -m run_argv one",
    "PY -m pkg.inner",
    "PY -m pkg",
    "PY -m nosuch",
    "PY -m unittest test_found",
    "PY -m unittest -v test_found.T.test",
    "PY -m pytest -p no:cacheprovider test_by_pytest.py",
    "PY -m pytest -v -rA -p no:cacheprovider test_by_pytest.py::TestMore",
    "PY -m pytest -q -p no:cacheprovider test_found.py",
    "PY -m pytest --version; PY -m pytest --no-such-option; PY -m pytest no_such_file.py",
    "PY -m json.tool < data.json",
    "PY -m timeit -n 1 -r 1 pass > /dev/null",
    "PY - a < run_argv.py",
    "PY < run_argv.py",
    "echo 'print(1); 1/0' | PY",
    "echo 'import sys; print(sys.stdin.read())' | PY -",
    "PY --version",
    "PY -O -c 'print(__debug__)'",
    "PYTHONPATH=pkg:/tmp PY -c 'import sys, inner; print(sys.path[:4], inner.where)'",
    "PYTHONHASHSEED=1 PY -c 'print(hash(\"x\"))'",
    "LC_ALL=C PY -c 'import sys; print(sys.stdout.encoding)'",
    "TZ=America/New_York PY -c 'import time; print(time.tzname)'",
    "PY run_long_output.py | head -1; echo ${PIPESTATUS[*]} | cut -c1-2",
    "cd pkg && PY ../helper.py && PY inner.py",
    "PY run_plain.py > /dev/full; echo $?",
    "PY run_exit_number.py; echo $?; PY run_killed.py; echo $?; PY run_interrupt.py; echo $?",
    "exec 2>&-; PY -c 'import time; time.sleep(60)' & sleep 0.5; kill -TERM $!; wait $!; echo $?",
    "PY -c 'print(1)' >&-; echo $?; PY -c 'import sys; print(sys.stdin)' <&-; echo $?",
    "timeout -s INT 0.5 PY -c 'import time; time.sleep(60)'; echo $?",
    "echo typed | PY run_stdin.py",
    "bash -c 'PY <(echo \"print(3)\") one'",
]


@pytest.fixture(scope="module")
def service(backend: BackendUnderTest) -> Iterator[RunningService]:
    """One whose sandboxes have pytest, which runs warm too."""
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        packages = Path(folder) / "packages"
        copy_pytest(packages)
        settings = ("sandbox.inodes=16384", f"local.site_packages={packages}")
        running = backend.service(Path(folder), *settings)
        running.start()
        yield running
        assert running.stop() == 0, running.log.read_text()


@pytest.fixture
async def both(client: SandboxClient) -> AsyncIterator[Sandbox]:
    # Prefixed, or a script called typing.py would stand in the way of all the others.
    scripts = {f"run_{name}.py": text.encode() for name, text in SCRIPTS.items()}
    files = {name: text.encode() for name, text in FILES.items()} | {"data.json": b"[1]"}
    shadows = {f"shadows/{name}": text.encode() for name, text in SHADOWS.items()}
    async with await client.create(EnvironmentTree(scripts | files | shadows)) as sandbox:
        # The same interpreter by another name, which is never run warm.
        await sandbox.run("mkdir /tmp/real && ln -s /opt/python/bin/python3 /tmp/real/python")
        yield sandbox


def alike(text: str) -> str:
    """Text without what may differ: the interpreter's name, addresses, pids, times."""
    text = text.replace("/tmp/real/python", "PY").replace("/opt/tailrace/bin/python", "PY")
    text = text.replace("/opt/python/bin/python3.11", "PY").replace(
        "/opt/python/bin/python3.12", "PY"
    )
    text = re.sub(r"(?m)^(usage: |)python(3?):? ", r"\1PY: ", text)
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    return re.sub(r"in \d+\.\d+s|^\d+ (?=x$)", "TIME", text)


async def difference(sandbox: Sandbox, line: str, *, shell: bool) -> str:
    """Both results, if they differ."""
    results = []
    for python in ("/tmp/real/python", "python"):
        command = re.sub(r"\bPY\b", python, line)
        if shell:
            command = f"true; {command}"
        result = await sandbox.run(command, timeout_s=60, max_output_bytes=200_000)
        results.append((alike(result.stdout), alike(result.stderr), result.exit_code))
    if results[0] == results[1]:
        return ""
    return f"\n{line}\n  fresh: {results[0]}\n  warm:  {results[1]}\n"


async def test_a_script_cannot_tell_the_difference(both: Sandbox) -> None:
    found = [await difference(both, f"PY run_{name}.py one two", shell=False) for name in SCRIPTS]
    assert "".join(found) == ""


async def test_command_lines_mean_the_same(both: Sandbox) -> None:
    found = [await difference(both, line, shell=False) for line in COMMAND_LINES]
    assert "".join(found) == ""


async def test_the_stand_in_inside_a_shell_behaves_the_same(both: Sandbox) -> None:
    lines = [*COMMAND_LINES, *(f"PY run_{name}.py" for name in ("fails", "unittest", "exit_text"))]
    found = [await difference(both, line, shell=True) for line in lines]
    assert "".join(found) == ""


async def test_a_module_beside_the_script_wins_over_the_standard_one(both: Sandbox) -> None:
    assert await difference(both, "PY shadows/shadowed.py", shell=False) == ""
    # tempfile needs the standard one, and fails as it does under a fresh interpreter.
    result = await both.run("python shadows/shadowed.py")
    assert (
        "cannot import name 'Random' from 'random' (/workspace/shadows/random.py)" in result.stderr
    )
    await both.write("shadows/only.py", "import random; print(random.MINE)")
    assert (await both.run("python shadows/only.py")).stdout == "1\n"


async def test_files_left_open_are_flushed(both: Sandbox) -> None:
    await both.run("python run_unclosed.py; python run_unclosed_in_module.py")
    assert await both.read("unclosed.txt") == b"flushed at the end"
    assert await both.read("opened.txt") == b"by a module"


async def test_python_really_runs_warm(both: Sandbox) -> None:
    """Otherwise every comparison above would be of a thing with itself."""
    seen = "print(open('/proc/self/cmdline').read().split(chr(0))[1])"
    direct = await both.run(f'python -c "{seen}"')
    inside_shell = await both.run(f'true; python -c "{seen}"')
    real = await both.run(f'/tmp/real/python -c "{seen}"')
    assert direct.stdout == "/.tailrace/init\n"
    assert inside_shell.stdout == "/.tailrace/init\n"
    assert real.stdout == "-c\n"


async def test_programs_do_not_see_each_other(both: Sandbox) -> None:
    await both.write(
        "leave.py",
        "import json, os, sys\njson.MARK = 1\nos.environ['MARK'] = '1'\nsys.path.append('MARK')",
    )
    await both.run("python leave.py")
    result = await both.run(
        "python -c \"import json, os, sys; print(hasattr(json, 'MARK'), 'MARK' in os.environ,"
        " 'MARK' in sys.path)\""
    )
    assert result.stdout == "False False False\n"


async def test_random_numbers_differ_between_programs(both: Sandbox) -> None:
    drawn = [
        (await both.run("python -c 'import random; print(random.random())'")).stdout
        for _ in range(3)
    ]
    assert len(set(drawn)) == 3


async def test_a_long_script_argument_list_still_runs(both: Sandbox) -> None:
    await both.write_files([FileContent("count.py", b"import sys; print(len(sys.argv))")])
    result = await both.run("python count.py $(seq 1 30000)")
    assert result.stdout == "30001\n"
