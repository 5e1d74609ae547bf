"""Optimizer steps an hour, asynchronous against synchronous, on one stack in one run.

Usage: python tools/bench/async_vs_sync.py [--steps 8] [--runs 2] [--delay 0.5] [--sigma 0.6]

Commands of the agents wait a heavy-tailed, log-normal time before they run, drawn for each sandbox
and each command, so that two attempts at one task differ about 2.5 times in length, as in the
reference run of docs/architecture.md. Waiting costs no CPU. The policy is the demo's after a short
SFT. Each run trains so many steps in either mode, in turn, on the same running services; the first
step of a stage, which fills the pipeline, counts. The rival is our own `mode = "sync"`: groups
start only on the newest weights, and a step waits for its whole batch. `attempt.max_to_median` is
how long the longest attempt of a step took, in medians.

The last line of output is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tailrace_cli.demo.command import demo_stack
from tailrace_cli.demo.folder import RunFolder
from tailrace_cli.demo.options import DemoOptions
from tailrace_cli.demo.recipes import as_toml, recipes_of
from tailrace_cli.demo.services import Services, StageStep, connect
from tailrace_cli.demo.traces import collector
from tailrace_cli.stack import Supervisor


async def stage(
    services: Services, name: str, kind: str, recipe: dict[str, Any]
) -> tuple[float, list[float]]:
    """Runs a stage; the seconds it took, and of its steps the longest attempt in medians."""
    started = time.monotonic()
    tails: list[float] = []
    async for event in services.follow_stage(name, as_toml(recipe), kind=kind):
        if isinstance(event, StageStep):
            print(f"  {name} step {event.step} at {time.monotonic() - started:.1f} s", flush=True)
            if event.values.get("duration.p50"):
                tails.append(event.values["duration.max"] / event.values["duration.p50"])
    return time.monotonic() - started, tails


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Steps an hour of each run by mode, and the attempts' tails."""
    options = DemoOptions(
        steps=arguments.steps,
        traces=400,
        overrides=(
            f"sandbox.delay.median_s={arguments.delay}",
            f"sandbox.delay.sigma={arguments.sigma}",
            "sandbox.delay.per_sandbox=true",
            "sft.steps=150",
        ),
    )
    run = RunFolder.create(folder / "run", options, time.time)
    stack = demo_stack(run)
    targets = {process.name: process.target for process in stack.processes}
    recipes = recipes_of(options)
    modes = {
        "async": recipes["rl"],
        "sync": recipes_of(options.model_copy(update={"sync": True}))["rl"],
    }
    rates: dict[str, list[float]] = {mode: [] for mode in (*modes, "tail")}
    async with Supervisor(stack).running(), connect(targets) as services:
        await services.publish("base")
        print("expert traces", flush=True)
        await collector(targets, options)(run.path / "traces.jsonl", lambda done, total: None)
        traces = {"traces": [str((run.path / "traces.jsonl").resolve())]}
        await stage(services, "sft", "sft", recipes["sft"] | traces)
        for number in range(arguments.runs):
            for mode, recipe in modes.items():
                await services.publish("sft")
                seconds, tails = await stage(
                    services, f"{mode}-{number}", "rl", recipe | {"start_from": "sft"}
                )
                rates["tail"] += tails
                rates[mode].append(arguments.steps * 3600 / seconds)
                print(f"{mode}: {rates[mode][-1]:.0f} steps an hour", flush=True)
    return rates


def main() -> None:
    """Prints progress, and the figures last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.5, help="median wait of a command, s")
    parser.add_argument("--sigma", type=float, default=0.6, help="width of the waits' logarithm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = asyncio.run(measure(arguments, Path(folder)))
    ratios = [a / s for a, s in zip(rates["async"], rates["sync"], strict=True)]
    series = {
        "async.steps_per_hour": rates["async"],
        "sync.steps_per_hour": rates["sync"],
        "ratio": ratios,
        "attempt.max_to_median": rates["tail"],
    }
    print(
        json.dumps(
            {
                "figures": {k: round(statistics.median(v), 2) for k, v in series.items()},
                "spread": {k: [round(min(v), 2), round(max(v), 2)] for k, v in series.items()},
                "runs": arguments.runs,
                "load_avg": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
