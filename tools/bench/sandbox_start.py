"""How fast sandboxes start, one by one and 384 at once: `local`, bubblewrap and a real dockerd.

All run in turn, round by round, on the same machine.

* `local.start_*`: create through the service until a first command (`echo`) has answered, with
  every protection on, a network namespace of its own, no warm pool; `local.create_*` is its create
  alone. `local.launcher_ms_p50` is the back-end alone, in this process: from asking the fork-server
  until the sandbox takes commands. `local.pooled_*` is a start with the warm pool on,
  `local.fork_*` one from a snapshot.
* `local.all_up_s`: 384 at once until each has answered a command; `local.teardown_s`: until all are
  gone. The benchmark fails if anything is left: processes, mounts, cgroups, files.
* `local.idle_mib`: PSS of a sandbox's processes (pages that several share are shared out), after
  its first command. `local.idle_host_mib`: what one more such sandbox costs the host in all, by
  memory cgroups: with kernel memory, and with what service and fork-server need for it.
* `bwrap.*`: all namespaces, all capabilities dropped, until a shell's first output.
* `docker.*`: `docker run --rm --network none` likewise, one by one and four at once, as many as fit
  into --docker-s. Left out, and said so, where no dockerd can run.
* `docker_backend.*`: the same dockerd through the same service and client as `local.*`, by the
  back-end docker.

Each ratio says how many times slower the rival is: `*.start_ratio` and `*.starts_per_s_ratio`
compare with `local` through its service, `*.launcher_ratio` and `*.launcher_starts_per_s_ratio`
with the back-end alone, as rivals without a service are.

Usage: python tools/bench/sandbox_start.py [--rounds 5] [--starts 50] [--docker-s 120]   (as root)
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, repeat, takewhile
from pathlib import Path

from sandbox_client import EnvironmentTree, SandboxClient
from sandbox_client.backends.base import BackendSandbox, ExecHooks
from sandbox_client.backends.local.backend import LocalBackend
from sandbox_client.checks import complete_command, complete_spec
from sandbox_client.config import LimitsConfig, SandboxServiceConfig
from sandbox_client.testing.dockerd import dockerd_missing, running_dockerd
from sandbox_client.testing.host_image import write_host_image
from sandbox_client.testing.leftovers import leftovers, processes_of, service_cgroups
from sandbox_client.testing.service import RunningService
from sandbox_client.types import Command, EnvironmentRef, SandboxSpec
from service_kit.server import MIB

TREE = EnvironmentTree({"shop.py": b"def add(a, b):\n    return a + b\n"})
FIRST = "echo READY"
PROGRAM = ["sh", "-c", "echo READY; read x"]
BWRAP = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
]
IMAGE = "bench:latest"
DOCKER_AT_ONCE = 4
WITHOUT_SERVICE = ("bwrap", "docker")
RIVALS = (*WITHOUT_SERVICE, "docker_backend")

Samples = dict[str, list[float]]


def ms(since: float) -> float:
    return (time.perf_counter() - since) * 1000


# -- local, through the service


async def one_by_one(
    client: SandboxClient, name: str, number: int, found: Samples, *, pause_s: float = 0.0
) -> None:
    """Starts from the tree, each until its first command has answered."""
    for _ in range(number):
        began = time.perf_counter()
        sandbox = await client.create(TREE)
        found[f"{name}create_ms"].append(ms(began))
        await sandbox.run(FIRST)
        found[f"{name}start_ms"].append(ms(began))
        await sandbox.destroy()
        await asyncio.sleep(pause_s)


async def forks(client: SandboxClient, number: int, found: Samples) -> None:
    """Starts from a snapshot of a prepared sandbox."""
    async with await client.create(TREE) as prepared:
        await prepared.run("mkdir build && seq 100000 > build/out")
        async with await prepared.snapshot() as snapshot:
            for _ in range(number):
                began = time.perf_counter()
                fork = await client.create(snapshot=snapshot)
                await fork.run("head -1 build/out")
                found["local.fork_ms"].append(ms(began))
                await fork.destroy()


async def at_once(
    client: SandboxClient, service: RunningService, number: int, found: Samples
) -> None:
    """Many at once; between coming up and going down their memory is read."""
    before, pss_before = memory_bytes(service), pss_bytes(service)

    async def up() -> object:
        sandbox = await client.create(TREE)
        assert (await sandbox.run(FIRST)).stdout == "READY\n"
        return sandbox

    began = time.perf_counter()
    await asyncio.gather(*(up() for _ in range(number)))
    found["local.all_up_s"].append(time.perf_counter() - began)
    assert len(await client.list()) == number
    after = memory_bytes(service)
    if before is not None and after is not None:
        found["local.idle_host_mib"].append((after - before) / number / MIB)
    found["local.idle_mib"].append((pss_bytes(service) - pss_before) / number / MIB)
    began = time.perf_counter()
    await asyncio.gather(*(client.destroy(info.sandbox_id) for info in await client.list()))
    found["local.teardown_s"].append(time.perf_counter() - began)
    busy = [g for g in service_cgroups(service.state_dir) if (g / "cgroup.procs").read_text()]
    if busy or await client.list():
        raise SystemExit(f"something is left after the teardown: {busy}")


def memory_bytes(service: RunningService) -> int | None:
    """What the kernel counts for sandboxes, service and fork-server; None without cgroups."""
    total = 0
    for group in (own_group(service), *bases(service)):
        for name in ("memory.usage_in_bytes", "memory.current"):
            file = group / name if group is not None else Path("/nowhere")
            if file.exists():
                total += int(file.read_text())
    return total or None


def pss_bytes(service: RunningService) -> int:
    """Of all processes of the service but itself."""
    total = 0
    for pid in processes_of(service.state_dir):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
    return total


def bases(service: RunningService) -> set[Path]:
    return {group.parent for group in service_cgroups(service.state_dir)}


def own_group(service: RunningService) -> Path | None:
    for base in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        if (Path(base) / "cgroup.procs").exists():
            return Path(base) / f"sandbox-start-{service.pid}"
    return None


@contextmanager
def serving(
    folder: Path, *settings: str, left_by: Callable[[Path], list[str]] = leftovers
) -> Iterator[RunningService]:
    """A service in a memory cgroup of its own; ends with a look at what it left behind."""
    folder.mkdir()
    service = RunningService(folder, *settings)
    service.start()
    group = own_group(service)
    if group is not None:
        group.mkdir()
        for pid in (service.pid, *processes_of(service.state_dir)):
            (group / "cgroup.procs").write_text(str(pid))
    try:
        yield service
    finally:
        code = service.stop()
        if group is not None:
            group.rmdir()
    left = left_by(service.state_dir)
    if code or left:
        raise SystemExit(f"the service ended with {code} and left {left}")


# -- local, the back-end alone


async def launcher(folder: Path, number: int, at_once: int, found: Samples) -> None:
    config = SandboxServiceConfig(state_dir=folder)
    backend = LocalBackend(config)
    await backend.start()
    try:
        await backend.put_environment(TREE.digest, io.BytesIO(TREE.tar_bytes()))
        spec = complete_spec(config.sandbox, SandboxSpec(EnvironmentRef(tree_digest=TREE.digest)))
        command = complete_command(config.exec, Command(shell=FIRST))
        for at in range(number):
            began = time.perf_counter()
            sandbox = await backend.create(f"sb-{at}", spec)
            found["local.launcher_ms"].append(ms(began))
            await sandbox.run(command, ExecHooks())
            found["local.launcher_start_ms"].append(ms(began))
            await sandbox.destroy()
        await launcher_at_once(backend, spec, command, at_once, found)
    finally:
        await backend.stop()


async def launcher_at_once(
    backend: LocalBackend, spec: SandboxSpec, command: Command, number: int, found: Samples
) -> None:
    turns = asyncio.Semaphore(LimitsConfig().concurrent_starts)

    async def up(at: int) -> BackendSandbox:
        async with turns:
            sandbox = await backend.create(f"once-{at}", spec)
        await sandbox.run(command, ExecHooks())
        return sandbox

    began = time.perf_counter()
    sandboxes = await asyncio.gather(*(up(at) for at in range(number)))
    found["local.launcher_all_up_s"].append(time.perf_counter() - began)
    await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))


# -- the rivals: programs that are started, and answer on a pipe


class Started:
    """A program in a sandbox, which has answered."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_up(self) -> None:
        """Wait for its answer."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"READY\n", "it did not start"

    def end(self) -> None:
        """Let it end, and wait for that."""
        self.process.communicate()


def programs_one_by_one(
    name: str, command: list[str], while_true: Iterable[bool], found: Samples
) -> None:
    """Starts one after the other, until `while_true` ends or gives False."""
    for _ in takewhile(bool, while_true):
        began = time.perf_counter()
        started = Started(command)
        started.wait_up()
        found[f"{name}.start_ms"].append(ms(began))
        started.end()


def programs_at_once(command: list[str], number: int, found: Samples) -> None:
    began = time.perf_counter()
    started = [Started(command) for _ in range(number)]
    for program in started:
        program.wait_up()
    found["bwrap.all_up_s"].append(time.perf_counter() - began)
    for program in started:
        program.end()


def docker_round(command: list[str], seconds: float, found: Samples) -> None:
    until = time.perf_counter() + seconds
    programs_one_by_one("docker", command, (time.perf_counter() < until for _ in count()), found)
    began = time.perf_counter()
    end = began + seconds

    def start(_: int) -> list[Started]:
        mine = []
        while time.perf_counter() < end:
            mine.append(Started(command))
            mine[-1].wait_up()
        return mine

    with ThreadPoolExecutor(DOCKER_AT_ONCE) as threads:
        started = [one for mine in threads.map(start, range(DOCKER_AT_ONCE)) for one in mine]
        found["docker.starts_per_s"].append(len(started) / (time.perf_counter() - began))
        found["docker.started"].append(len(started))
        began = time.perf_counter()
        list(threads.map(Started.end, started))
        found["docker.teardown_s"].append(time.perf_counter() - began)


# -- dockerd through the service


async def through_docker(service: RunningService, seconds: float, found: Samples) -> None:
    async with service.client() as client:
        await client.put_environment(TREE)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            await one_by_one(client, "docker_backend.", 1, found)
        began = time.perf_counter()
        end = began + seconds

        async def start() -> int:
            mine = 0
            while time.perf_counter() < end:
                await (await client.create(TREE)).run(FIRST)
                mine += 1
            return mine

        started = sum(await asyncio.gather(*(start() for _ in range(DOCKER_AT_ONCE))))
        found["docker_backend.starts_per_s"].append(started / (time.perf_counter() - began))
        await asyncio.gather(*(client.destroy(info.sandbox_id) for info in await client.list()))


# -- together


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def summarize(found: Samples, number: int) -> dict[str, float]:
    figures = {}
    for name, values in found.items():
        if name.endswith("_ms"):
            figures[f"{name}_p50"] = percentile(values, 0.5)
            figures[f"{name}_p95"] = percentile(values, 0.95)
        else:
            figures[name] = statistics.median(values)
    figures["local.starts_per_s"] = number / figures["local.all_up_s"]
    figures["local.launcher_starts_per_s"] = number / figures["local.launcher_all_up_s"]
    for rival in RIVALS:
        if f"{rival}.start_ms_p50" in figures:
            figures[f"{rival}.start_ratio"] = (
                figures[f"{rival}.start_ms_p50"] / figures["local.start_ms_p50"]
            )
    if "bwrap.all_up_s" in figures:
        figures["bwrap.starts_per_s"] = number / figures["bwrap.all_up_s"]
    for rival in RIVALS:
        if f"{rival}.starts_per_s" in figures:
            theirs = figures[f"{rival}.starts_per_s"]
            figures[f"{rival}.starts_per_s_ratio"] = figures["local.starts_per_s"] / theirs
    for rival in WITHOUT_SERVICE:
        if f"{rival}.starts_per_s" in figures:
            figures[f"{rival}.launcher_ratio"] = (
                figures[f"{rival}.start_ms_p50"] / figures["local.launcher_start_ms_p50"]
            )
            figures[f"{rival}.launcher_starts_per_s_ratio"] = (
                figures["local.launcher_starts_per_s"] / figures[f"{rival}.starts_per_s"]
            )
    return figures


def measure(options: argparse.Namespace, stack: ExitStack, found: list[Samples]) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    plain = stack.enter_context(serving(folder / "plain", f"limits.sandboxes={options.at_once}"))
    pooled = stack.enter_context(serving(folder / "pooled", "pool.sandboxes=2"))
    docker: list[str] = []
    contained: RunningService | None = None
    if missing := dockerd_missing():
        print(f"docker is left out: {missing}")
    elif options.docker_s > 0:
        dockerd = stack.enter_context(running_dockerd())
        with tempfile.TemporaryFile() as root:
            write_host_image(root)
            root.seek(0)
            dockerd.import_image(root, IMAGE)
        run = ["docker", "-H", f"unix://{dockerd.socket}", "run", "--rm", "-i", "--network", "none"]
        docker = [*run, IMAGE, *PROGRAM]
        contained = stack.enter_context(
            serving(
                folder / "docker",
                "backend=docker",
                f"docker.socket={dockerd.socket}",
                f"docker.base_image={IMAGE}",
                "docker.disk_watermark=1",
                left_by=lambda _: dockerd.containers(),
            )
        )
    if not shutil.which("bwrap"):
        print("bwrap is left out: it is not installed (Debian's package is bubblewrap)")

    async def through_services(now: Samples) -> None:
        async with plain.client() as client:
            await client.put_environment(TREE)
            await one_by_one(client, "local.", options.starts, now)
            await forks(client, options.starts, now)
            await at_once(client, plain, options.at_once, now)
        async with pooled.client() as client:
            await client.put_environment(TREE)
            # The pool is filled again between starts, not within them.
            await one_by_one(client, "local.pooled_", options.starts, now, pause_s=0.02)

    for number in range(options.rounds):
        now: Samples = defaultdict(list)
        found.append(now)
        asyncio.run(through_services(now))
        asyncio.run(launcher(folder / f"launcher-{number}", options.starts, options.at_once, now))
        if shutil.which("bwrap"):
            command = [*BWRAP, *PROGRAM]
            programs_one_by_one("bwrap", command, repeat(True, options.starts), now)
            programs_at_once(command, options.at_once, now)
        if contained is not None:
            seconds = options.docker_s / options.rounds / 4
            docker_round(docker, seconds, now)
            asyncio.run(through_docker(contained, seconds, now))
        shown = {name: round(value, 2) for name, value in summarize(now, options.at_once).items()}
        print(number, f"load {os.getloadavg()[0]:.1f}", shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=50, help="sequential starts a round")
    parser.add_argument("--at-once", type=int, default=384)
    parser.add_argument(
        "--docker-s", type=float, default=120.0, help="all of docker's time; 0: none"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("sandboxes need root; run it as root")
    rounds: list[Samples] = []
    with ExitStack() as stack:
        measure(options, stack, rounds)
    together: Samples = defaultdict(list)
    for one in rounds:
        for name, values in one.items():
            together[name] += values
    figures = summarize(together, options.at_once)
    each = [summarize(one, options.at_once) for one in rounds]
    spread = {
        name: [round(min(values), 2), round(max(values), 2)]
        for name in figures
        if (values := [one[name] for one in each if name in one])
    }
    shown = {name: round(value, 2) for name, value in figures.items()}
    load = round(os.getloadavg()[0], 2)
    print(json.dumps({"figures": shown, "spread": spread, "runs": len(rounds), "load_avg": load}))


if __name__ == "__main__":
    main()
