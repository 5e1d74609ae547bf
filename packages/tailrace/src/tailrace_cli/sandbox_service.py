"""A sandbox service for one command: a running one, or one of the stack's by itself."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tailrace_cli.sandboxes import targets
from tailrace_cli.stack import StackSpec, Supervisor
from tailrace_cli.stack.health import free_ports

__all__ = ["sandbox_alone", "sandbox_service"]


@contextlib.asynccontextmanager
async def sandbox_service(
    target: str | None, stack: StackSpec, local: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """The address of a sandbox service, which is started as the stack says unless one is given.

    Args:
        target: A running one.
        stack: Has a sandbox service.
        local: Settings of its back-end `local`, beside the stack's.

    Raises:
        ConfigError, StackError: there is none to be had.
    """
    if target is not None:
        yield target
        return
    name = next(iter(targets(stack, None)))
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="tailrace-sandboxes-") as folder:
        alone = sandbox_alone(stack, name, f"127.0.0.1:{port}", Path(folder), local=local)
        async with Supervisor(alone).running():
            yield alone.processes[0].target


def sandbox_alone(
    stack: StackSpec,
    name: str,
    target: str,
    folder: Path,
    *,
    local: Mapping[str, str] | None = None,
) -> StackSpec:
    """Of a stack one sandbox service, at another address and in another folder."""
    (process,) = (p for p in stack.processes if p.name == name)
    server = {**process.config.get("server", {}), "bind": target}
    config = {**process.config, "server": server, "state_dir": str(folder / "sandbox")}
    if local:
        config["local"] = {**process.config.get("local", {}), **local}
    moved = process.model_copy(
        update={"address": f"grpc://{target}", "after": (), "config": config}
    )
    return stack.model_copy(update={"state_dir": folder, "processes": (moved,)})
