"""`tailrace up`."""

from __future__ import annotations

import asyncio
import signal

from rich.console import Console

from tailrace_cli.stack.spec import StackSpec
from tailrace_cli.stack.supervisor import Supervisor


async def run_up(spec: StackSpec, console: Console) -> int:
    """Starts the stack, says where everything is, and runs until SIGINT or SIGTERM.

    Raises:
        StackError: the stack cannot start or go on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    console.print(f"starting stack {spec.name}; logs in {spec.state_dir / 'logs'}")
    async with Supervisor(spec).running() as supervisor:
        for process in supervisor.statuses():
            console.print(
                f"  {process.name:10} {process.state:8} {process.address}", highlight=False
            )
        console.print("ready; Ctrl-C stops it")
        await stop.wait()
        console.print("draining")
    return 0
