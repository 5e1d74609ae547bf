"""The cgroup code against a real mount of version 2, also where version 1 holds the controllers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# In a mount namespace of its own; the cgroups are real ones, and gone at the end.
PROGRAM = """\
import json, os, subprocess, sys
from pathlib import Path
from sandbox_client.backends.local.cgroups import (
    CgroupLimits, CgroupSetup, SandboxCgroup, detect_cgroups,
)
from sandbox_client.backends.local.jail import kernel

root, parent = Path(sys.argv[1]), sys.argv[2]
kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
try:
    kernel.mount("cgroup2", str(root), "cgroup2")
except OSError as error:
    print(json.dumps({"skip": str(error)}))
    sys.exit()

def start(group):
    def join():
        for fd in group.joins:
            os.write(fd, b"0")
    return subprocess.Popen(["sleep", "60"], preexec_fn=join)

offered = set((root / "cgroup.controllers").read_text().split()) & {"memory", "pids", "cpu"}
setup = detect_cgroups(parent, "service", root=root)
told = {"version": setup.version, "offered": sorted(offered), "usable": sorted(setup.bases)}
told["told"] = sorted(setup.problems)
base = root / parent / "service"
limits = CgroupLimits(memory_bytes=64 << 20, pids=32, cpus=0.5)
if setup.bases:
    group = setup.acquire(limits)
    folder = next(iter(group.folders.values()))
    told["limits"] = {
        file.name: file.read_text().strip()
        for file in folder.iterdir() if file.name in ("memory.max", "pids.max", "cpu.max")
    }
else:
    # What is left of the interface without a controller: joining, looking, killing, removing.
    folder = base / "slot-1"
    folder.mkdir()
    joins = [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)]
    group = SandboxCgroup(2, limits, {"pids": folder}, joins)
process = start(group)
told["joined"] = (folder / "cgroup.procs").read_text().split() == [str(process.pid)]
told["in use"] = not group.is_clean()
told["oom kills"] = group.new_oom_kills()
told["removed in use"] = group.remove()
successor = CgroupSetup(2, {"pids": base})
told["leftovers"] = successor.remove_leftovers()
told["ended"] = process.wait(10)
told["gone"] = not folder.exists()
successor.remove_base()
told["nothing left"] = not (root / parent).exists()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount cgroup2")
    folder = tmp_path_factory.mktemp("cgroup2")
    command = [sys.executable, "-c", PROGRAM, str(folder), f"tailrace-test-{os.getpid()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "skip" in found:
        pytest.skip(f"cgroup2 cannot be mounted here: {found['skip']}")
    assert not list(Path("/sys/fs/cgroup").glob(f"*/tailrace-test-{os.getpid()}"))
    return found


def test_the_version_and_what_it_lacks_are_told(told: dict[str, Any]) -> None:
    assert told["version"] == 2
    assert set(told["usable"]) <= set(told["offered"])
    assert set(told["told"]) == {"memory", "pids", "cpu"} - set(told["usable"])


def test_limits_are_set_where_the_controllers_are(told: dict[str, Any]) -> None:
    wanted = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}
    values = {"memory.max": str(64 << 20), "pids.max": "32", "cpu.max": "50000 100000"}
    names = [wanted[controller] for controller in told["usable"]]
    assert told.get("limits", {}) == {name: values[name] for name in names}


def test_a_process_joins_and_is_found_there(told: dict[str, Any]) -> None:
    assert (told["joined"], told["in use"], told["oom kills"]) == (True, True, 0)
    assert told["removed in use"] is False


def test_a_successor_ends_what_is_left_and_removes_everything(told: dict[str, Any]) -> None:
    assert (told["leftovers"], told["ended"]) == (1, -9)
    assert (told["gone"], told["nothing left"]) == (True, True)
