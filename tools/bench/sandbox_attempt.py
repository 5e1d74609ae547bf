"""CPU time of one attempt's sandbox work: through the service, and by plain processes.

One attempt: create a sandbox, five commands (grep, sed, an edit, a failing and a passing test), the
diff, a second sandbox for grading (apply the diff, write the hidden test, run it), destroy both.
Counted is the processor time of every process: client, service, fork-server, all that ran inside.
The rivals do the same work without a service: `plain` in processes without any isolation, `bwrap`
(if installed) with each command in a bubblewrap of its own. All run in turn, round by round.

Usage: python tools/bench/sandbox_attempt.py [--rounds 5] [--attempts 40]   (as root)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sandbox_client import EnvironmentTree, SandboxClient
from service_kit.channel import ChannelConfig

REPOSITORY = {
    "shop.py": "".join(f"def item_{n}(a, b):\n    return a + b\n\n\n" for n in range(20)).encode()
    + b"def total(a, b):\n    return a - b\n",
    "test_shop.py": b"from shop import total\n\nassert total(2, 3) == 5\nprint('ok')\n",
    "README.md": b"# Shop\n\nAdds things up.\n",
}
HIDDEN = {
    "unittest": (
        "import unittest\n\nimport shop\n\n\nclass TestTotal(unittest.TestCase):\n"
        "    def test_total(self):\n        self.assertEqual(shop.total(2, 3), 5)\n"
        "        self.assertEqual(shop.total(-1, 1), 0)\n\n\nif __name__ == '__main__':\n"
        "    unittest.main()\n"
    ),
    "asserts": "import shop\n\nassert shop.total(2, 3) == 5\nassert shop.total(-1, 1) == 0\n",
}
COMMANDS = (
    "grep -rn 'def total' .",
    "sed -n '80,90p' shop.py",
    "python test_shop.py",
    "sed -i '82c\\    return a + b' shop.py",
    "python test_shop.py",
)
GRADE = "python test_hidden.py"


def ticks(pid: int, *, children: bool) -> float:
    """Processor seconds of a process, or of the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    chosen = fields[13:15] if children else fields[11:13]
    return sum(map(int, chosen)) / os.sysconf("SC_CLK_TCK")


def sandbox_makers(service: int) -> list[int]:
    """The processes whose children are sandboxes or in them: launcher and warm interpreter."""
    launcher = int(Path(f"/proc/{service}/task/{service}/children").read_text().split()[0])
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    # In the host's own pid namespace: the others' last number is another one.
    status = {int(pid): Path(f"/proc/{pid}/status").read_text() for pid in children}
    return [launcher, *(pid for pid, text in status.items() if f"NSpid:\t{pid}\n" in text)]


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class ServiceUnderTest:
    """The real service as a process of its own."""

    def __init__(self, folder: Path) -> None:
        address = folder / "address"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sandbox_client",
                "serve",
                "--set",
                "server.bind=127.0.0.1:0",
                "--set",
                f"server.address_file={address}",
                "--set",
                f"state_dir={folder / 'state'}",
                "--log-level",
                "warning",
            ]
        )
        while not address.exists():
            if self.process.poll() is not None:
                raise SystemExit("the service did not start")
            time.sleep(0.05)
        self.target = address.read_text().strip()

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far, by who used them."""
        makers = sandbox_makers(self.process.pid)
        return {
            "service": ticks(self.process.pid, children=False),
            "fork_server": sum(ticks(pid, children=False) for pid in makers),
            "sandboxes": sum(ticks(pid, children=True) for pid in makers),
        }

    def stop(self) -> None:
        """End the service and wait for it."""
        self.process.terminate()
        self.process.wait()


async def attempt(client: SandboxClient, tree: EnvironmentTree, hidden: str) -> None:
    async with await client.create(tree) as sandbox:
        codes = [(await sandbox.run(command)).exit_code for command in COMMANDS]
        assert codes == [0, 0, 1, 0, 0], codes
        diff = await sandbox.diff()
    async with await client.create(tree) as grading:
        assert await grading.apply_patch(diff) == ["shop.py"]
        await grading.write("test_hidden.py", hidden)
        result = await grading.run(GRADE)
        assert result.exit_code == 0, result.stderr


async def service_round(
    service: ServiceUnderTest, attempts: int, at_once: int, hidden: str = HIDDEN["unittest"]
) -> tuple[dict[str, float], float]:
    tree = EnvironmentTree(REPOSITORY)
    async with SandboxClient(ChannelConfig(target=service.target)) as client:
        await attempt(client, tree, hidden)  # connection, environment and code are warm from now on
        before = {**service.cpu_s(), "client": own_cpu_s()}
        began = time.perf_counter()
        limit = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with limit:
                await attempt(client, tree, hidden)

        async with asyncio.TaskGroup() as group:
            for _ in range(attempts):
                group.create_task(one())
        wall_s = time.perf_counter() - began
        after = {**service.cpu_s(), "client": own_cpu_s()}
    return {k: (after[k] - before[k]) * 1000 / attempts for k in before}, wall_s / attempts


def process_round(attempts: int, prefix: list[str], hidden: str) -> float:
    """The same work by processes; `prefix` isolates a command, or does not."""
    own, children = own_cpu_s(), children_cpu_s()
    for _ in range(attempts):
        with tempfile.TemporaryDirectory() as folder:
            pristine, work, grading = (Path(folder) / n for n in ("pristine", "work", "grading"))
            for target in (pristine, work, grading):
                target.mkdir()
                for name, content in REPOSITORY.items():
                    (target / name).write_bytes(content)
            codes = [_process(work, command, prefix) for command in COMMANDS]
            assert codes == [0, 0, 1, 0, 0], codes
            diff = subprocess.run(
                ["git", "diff", "--no-index", "pristine", "work"], cwd=folder, capture_output=True
            ).stdout
            subprocess.run(["git", "apply", "-p2", "-"], cwd=grading, input=diff, check=True)
            (grading / "test_hidden.py").write_text(hidden)
            assert _process(grading, GRADE, prefix) == 0
    return (own_cpu_s() - own + children_cpu_s() - children) * 1000 / attempts


def _process(folder: Path, command: str, prefix: list[str]) -> int:
    filled = [part.replace("WORK", str(folder)) for part in prefix]
    return subprocess.run(
        [*filled, "/bin/sh", "-c", command],
        cwd=folder,
        capture_output=True,
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    ).returncode


BWRAP = [
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--cap-drop",
    "ALL",
    "--ro-bind",
    "/",
    "/",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "--tmpfs",
    "/tmp",
    "--bind",
    "WORK",
    "WORK",
    "--chdir",
    "WORK",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attempts", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--hidden-test", choices=HIDDEN, default="unittest")
    options = parser.parse_args()
    hidden = HIDDEN[options.hidden_test]
    rivals: dict[str, list[str]] = {"plain": []}
    if shutil.which("bwrap"):
        rivals["bwrap"] = BWRAP
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        service = ServiceUnderTest(Path(folder))
        try:
            for number in range(options.rounds):
                split, wall_s = asyncio.run(
                    service_round(service, options.attempts, options.at_once, hidden)
                )
                found = {f"service.{k}_cpu_ms": v for k, v in split.items()}
                found["service.cpu_ms"] = sum(split.values())
                found["service.wall_ms"] = wall_s * 1000
                for name, prefix in rivals.items():
                    found[f"{name}.cpu_ms"] = process_round(
                        max(1, options.attempts // 8), prefix, hidden
                    )
                for name, value in found.items():
                    samples.setdefault(name, []).append(value)
                print(number, {k: round(v, 2) for k, v in found.items()}, flush=True)
        finally:
            service.stop()
    figures = {name: round(statistics.median(values), 2) for name, values in samples.items()}
    for name in rivals:
        figures[f"{name}.ratio"] = round(figures[f"{name}.cpu_ms"] / figures["service.cpu_ms"], 2)
    spread = {name: [round(min(v), 2), round(max(v), 2)] for name, v in samples.items()}
    print(
        json.dumps(
            {
                "figures": figures,
                "spread": spread,
                "runs": options.rounds,
                "load_avg": round(os.getloadavg()[0], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
