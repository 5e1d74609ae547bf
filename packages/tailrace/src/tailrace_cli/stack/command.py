"""`tailrace up`."""

from __future__ import annotations

import asyncio

from rich.console import Console

from tailrace_cli.signals import unless_interrupted
from tailrace_cli.stack.spec import StackSpec
from tailrace_cli.stack.supervisor import Supervisor


async def run_up(spec: StackSpec, console: Console) -> int:
    """Starts the stack, says where everything is, and runs until SIGINT or SIGTERM.

    Raises:
        StackError: the stack cannot start or go on.
    """
    console.print(
        f"starting stack {spec.name}; logs in {spec.state_dir / 'logs'}",
        highlight=False,
        soft_wrap=True,
    )

    async def keep() -> None:
        async with Supervisor(spec).running() as supervisor:
            for process in supervisor.statuses():
                console.print(
                    f"  {process.name:10} {process.state:8} {process.address}", highlight=False
                )
            console.print("ready; Ctrl-C stops it")
            await asyncio.Event().wait()

    await unless_interrupted(keep(), lambda: console.print("draining"))
    console.print("stopped")
    return 0
