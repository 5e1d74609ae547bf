# ruff: noqa: PTH120, PTH123 -- keeps the fork-server small: no pathlib
"""Start of the fork-server: first as a program of the host, then again inside the new root.

With a launcher in C, that is the fork-server, and what starts again is the warm interpreter.

The second start is a plain start of the sandboxes' own interpreter, so that its paths, flags and
modules are those that a program of a sandbox expects.
"""

import json
import os
import shutil
import signal
import socket

from sandbox_client.backends.local.jail.recorder import Recorder

__all__ = ["CODE_FOLDER", "CONTROL_FD", "enter_root", "serve"]

CODE_FOLDER = "/.tailrace"
"""The fork-server's own things, in a mount that no sandbox keeps."""
_START_FILE = f"{CODE_FOLDER}/init"
_SETTINGS_FILE = f"{CODE_FOLDER}/settings.json"
CONTROL_FD = 3
"""Where the service, or the launcher, is."""
# Enough for the interpreter to specialise the code that runs; afterwards it changes no more.
_PREWARM_ROUNDS = 12

# A plain script, so that the process list of a sandbox shows no more than this file's name.
_START = f"""\
import sys
baseline = frozenset(sys.modules)
path = sys.path[1:]
sys.path[0] = {CODE_FOLDER!r}
from sandbox_client.backends.local.jail.recorder import Recorder
recorder = Recorder()
from sandbox_client.backends.local.jail import boot
boot.serve(recorder, baseline, path)
"""


def enter_root(settings_file: str) -> None:
    """First start: builds the template root, moves into it and starts over. Does not return."""
    from sandbox_client.backends.local.jail import kernel, launch, template

    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(settings_file, encoding="utf-8") as file:
        settings = json.load(file)
    root = settings["template"].pop("root")
    if settings["template"]["rootless"]:
        _enter_own_namespaces()
    template.build_template(root, **settings["template"])
    code = __file__
    for _ in range(5):
        code = os.path.dirname(code)
    shutil.copytree(code, root + CODE_FOLDER, dirs_exist_ok=True)
    shutil.copyfile(settings_file, root + _SETTINGS_FILE)
    with open(root + _START_FILE, "w", encoding="utf-8") as file:
        file.write(_START)
    if settings["launcher"]:
        launch.place(root, settings["launcher"], settings["server"])
    template.enter(root)
    python = settings["server"]["python_path"]
    # Symbols are bound once, here, and not again in every forked process.
    environ = {**settings["environ"], "LD_BIND_NOW": "1"}
    if settings["launcher"]:
        launch.become([python, _START_FILE], environ)
    os.execve(python, [python, _START_FILE], environ)  # noqa: S606


def _enter_own_namespaces() -> None:
    """Goes on in a child that has namespaces of this user namespace; this process waits for it.

    The host's own could not be returned to once a sandbox's have been made.
    """
    from sandbox_client.backends.local.jail import kernel

    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    child = os.fork()
    if child:
        os.close(CONTROL_FD)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) and 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(recorder: Recorder, baseline: frozenset[str], path: list[str]) -> None:
    """Second start: serves until the service is gone, or runs a program in a sandbox's process."""
    from sandbox_client.backends.local.jail.stash import Stash

    stash = Stash(baseline)
    del os.environ["LD_BIND_NOW"]
    with open(_SETTINGS_FILE, encoding="utf-8") as file:
        settings = json.load(file)
    stash.preload(settings["preload"])
    import gc

    from sandbox_client.backends.local.jail.forkserver import ForkServer
    from sandbox_client.backends.local.jail.prewarm import prewarm
    from sandbox_client.backends.local.jail.walls import Settings
    from sandbox_client.backends.local.jail.warm_python import rehearse_program, run_program
    from sandbox_client.backends.local.jail.warm_server import WarmServer

    for _ in range(_PREWARM_ROUNDS):
        prewarm()
    recorder.stop()
    stash.close(recorder.edges, keep_out=("sandbox_client",))
    options = settings["server"]
    options["mounts"] = tuple(options["mounts"])
    options["rlimits"] = tuple((kind, limit) for kind, limit in options["rlimits"])
    serving = WarmServer if settings["launcher"] else ForkServer
    server = serving(socket.socket(fileno=CONTROL_FD), Settings(**options))
    server.prepare()
    rehearse_program(stash, path, settings["environ"])
    # Nothing of what is loaded now ever becomes garbage; touching it would copy pages.
    gc.collect()
    gc.disable()
    gc.freeze()
    run = server.serve()
    if run is not None:
        run_program(run, stash, path, settings["environ"], options["python_path"])
