# ruff: noqa: PTH100, PTH118, PTH120, PTH123 -- keeps the fork-server small: no pathlib
"""Running a Python program in a forked interpreter so that it cannot tell it from a fresh one."""

import _signal  # type: ignore[import-not-found]
import atexit
import gc
import io
import os
import signal
import sys
import time
import weakref
from types import CodeType, ModuleType
from typing import Any

from sandbox_client.backends.local.jail import boot, kernel
from sandbox_client.backends.local.jail.python_args import PythonRun
from sandbox_client.backends.local.jail.stash import Stash

__all__ = ["rehearse_program", "run_program"]

_OWN_FILES = frozenset(
    {__file__, __file__.replace("warm_python", "boot"), f"{boot.CODE_FOLDER}/init"}
)
_FLUSH_FAILED = 120
_REHEARSALS = 12


def run_program(
    run: PythonRun, stash: Stash, path: list[str], environ: dict[str, str], real_python: str
) -> None:
    """Runs the program and ends the process; never returns.

    Args:
        run: the program.
        stash: the modules that were imported beforehand.
        path: `sys.path` of a fresh interpreter, without the program's folder.
        environ: the variables that this process was started with.
        real_python: executed where only a real interpreter behaves rightly.
    """
    for name in stash.added():
        del sys.modules[name]  # what the first process's own calls have brought back
    _prepare(run, path, environ)
    _finish(_execute(run, real_python), stash)


def rehearse_program(stash: Stash, path: list[str], environ: dict[str, str]) -> None:
    """Runs an empty program in this process and undoes it, for the reason `rehearsal` gives."""
    main, argv, orig_argv = sys.modules["__main__"], list(sys.argv), list(sys.orig_argv)
    executable, old_path = sys.executable, list(sys.path)
    program = PythonRun("command", "pass", ["python", "-c", "pass"], [], environ, "/")
    for _ in range(_REHEARSALS):
        _prepare(program, path, environ)
        _execute(program, executable)
        _flush_all()
        _tear_down(stash)
    sys.modules["__main__"] = main
    sys.argv[:], sys.orig_argv[:] = argv, orig_argv
    sys.executable, sys.path[:] = executable, old_path


def _prepare(run: PythonRun, path: list[str], environ: dict[str, str]) -> None:
    os.chdir(run.cwd)
    _allow_own_proc()
    # Not through `signal`, whose enumerations cost as much as the call.
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    # Only what differs: most programs have the environment that was there before.
    for name in environ.keys() - run.environ.keys():
        del os.environ[name]
    for name, value in run.environ.items():
        if environ.get(name) != value:
            os.environ[name] = value
    if "TZ" in run.environ:
        time.tzset()
    main = ModuleType("__main__")
    builtins = sys.modules["builtins"]
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __spec__=None)
    sys.modules["__main__"] = main
    first = {"module": run.cwd, "script": os.path.dirname(os.path.realpath(run.value))}
    # The interpreter makes these absolute; an empty entry means the current folder.
    extra = run.environ.get("PYTHONPATH")
    added = [os.path.abspath(entry) for entry in extra.split(":")] if extra else []
    sys.path[:] = [first.get(run.kind, ""), *dict.fromkeys([*added, *path])]
    sys.executable = run.executable
    sys.orig_argv[:] = run.argv
    names = {"command": "-c", "module": "-m"}
    sys.argv[:] = [names.get(run.kind, run.value), *run.rest]
    if run.unbuffered:
        sys.stdout = sys.__stdout__ = _unbuffered(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(2)  # type: ignore[misc]
    gc.enable()


def _allow_own_proc() -> None:
    """Lets the program open its own /proc entries, which the first process's are closed to."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    old = sys.__stdout__ if fd == 1 else sys.__stderr__
    assert old is not None
    raw = open(fd, "wb", 0, closefd=False)  # noqa: SIM115 -- stays open
    return io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)


def _execute(run: PythonRun, real_python: str) -> int:
    # Nothing here may keep the program's module alive: its end has to come as a fresh one's does.
    names = sys.modules["__main__"].__dict__
    try:
        if run.kind == "module":
            import runpy

            runpy._run_module_as_main(run.value)  # type: ignore[attr-defined]
        else:
            exec(_load(run, names, real_python), names)  # noqa: S102 -- what an interpreter does
    except BaseException:
        return _report_failure()
    return 0


def _load(run: PythonRun, names: dict[str, object], real_python: str) -> CodeType:
    """Compiles the program; hands over to the real interpreter what is no plain source file."""
    names["__loader__"] = _loader("BuiltinImporter")
    if run.kind == "script":
        name = os.path.join(run.cwd, run.value)
        try:
            source = _read_script(name)
        except FileNotFoundError as error:
            text = f"can't open file {name!r}: [Errno {error.errno}] {error.strerror}"
            sys.stderr.write(f"{run.argv[0]}: {text}\n")
            raise SystemExit(2) from None
        if source is None:
            os.execv(real_python, [real_python, *run.argv[1:]])  # noqa: S606
        loader = _loader("SourceFileLoader")
        names.update(__file__=name, __cached__=None, __loader__=loader("__main__", name))
    elif run.kind == "command":
        name, source = "<string>", (run.value + "\n").encode("utf-8", "surrogateescape")
    else:
        name, source = "<stdin>", sys.stdin.buffer.read()
    return compile(source, name, "exec", dont_inherit=True)


def _loader(name: str) -> Any:
    module = "_frozen_importlib_external" if "File" in name else "_frozen_importlib"
    return getattr(sys.modules[module], name)


def _read_script(name: str) -> bytes | None:
    """The source of a plain script; None for folders, archives, byte code and the like."""
    try:
        with open(name, "rb") as file:
            source = file.read()
    except FileNotFoundError:
        raise
    except OSError:
        return None
    if source[2:4] == b"\r\n" or b"\0" in source:
        return None
    return source


def _report_failure() -> int:
    """Prints the current exception as the interpreter would; returns the exit status.

    A negative status stands for the signal to die by.
    """
    kind, value, trace = sys.exc_info()
    assert kind is not None
    assert value is not None
    if isinstance(value, SystemExit):
        return _exit_status(value.code)
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    value.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = kind, value, trace
    _flush(sys.stdout)
    sys.excepthook(kind, value, trace)
    return -signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    _flush(sys.stdout)
    sys.stderr.write(f"{code}\n")
    return 1


def _finish(status: int, stash: Stash) -> None:
    """What the interpreter does at its end, without tearing down the shared modules."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit._run_exitfuncs()
    if not _flush_all():
        status = _FLUSH_FAILED
    _tear_down(stash)
    # What finalizers have printed; a failure has been told already.
    _flush(sys.stdout)
    _flush(sys.stderr)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _tear_down(stash: Stash) -> None:
    """Drops the program's own modules, so that its files are flushed and finalizers run."""
    sys.last_type = sys.last_value = sys.last_traceback = None
    own = [name for name in stash.added() if not stash.is_own(name)]
    # In the order of their import, as the interpreter does it.
    references = []
    for name in ["__main__", *reversed(own)]:
        module: object = sys.modules.pop(name)
        # A program may have put anything there.
        if isinstance(module, ModuleType):
            references.append(weakref.ref(module))
    module = None
    gc.collect()
    for reference in reversed(references):
        module = reference()
        if module is not None:
            _clear(module.__dict__)
    gc.collect()


def _clear(names: dict[str, object]) -> None:
    """Clears a module as the interpreter does: private names first, builtins last."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") is private:
                names[name] = None


def _flush_all() -> bool:
    """Flushes standard output and error; False if the output could not be written."""
    flushed = _flush(sys.stdout, loud=True)
    _flush(sys.stderr)
    return flushed


def _flush(stream: object, *, loud: bool = False) -> bool:
    if stream is None or getattr(stream, "closed", False):
        return True
    try:
        stream.flush()  # type: ignore[attr-defined]
    except BaseException as error:
        if loud:
            kind = type(error)
            sys.stderr.write(f"Exception ignored in: {stream!r}\n{kind.__name__}: {error}\n")
        return False
    return True
