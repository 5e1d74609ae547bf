"""`tailrace sandbox`: what lives in a stack's sandbox services, how to end it, and their limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from sandbox_client import LimiterStatus, SandboxClient, SandboxInfo
from service_kit.channel import ChannelConfig
from service_kit.config import ConfigError

from tailrace_cli.shell import checked_address
from tailrace_cli.stack.spec import StackSpec
from tailrace_cli.status import limiter_text

__all__ = ["Services", "as_rows", "show_limits", "show_sandboxes", "targets"]

_CALL_S = 10.0


def targets(stack: StackSpec, target: str | None) -> dict[str, str]:
    """Name and address of every sandbox service: the one given, or those of the stack.

    Raises:
        ConfigError: the stack has none, or the address is none.
    """
    if target is not None:
        return {"sandbox": checked_address("--target", target)}
    found = {p.name: p.target for p in stack.processes if p.module == "sandbox_client"}
    if not found:
        raise ConfigError(
            f"stack {stack.name!r} has no sandbox service (module sandbox_client); name one by "
            "--target host:port"
        )
    return found


class Services:
    """The sandbox services by name."""

    def __init__(self, clients: Mapping[str, SandboxClient]) -> None:
        self._clients = clients

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, targets: Mapping[str, str], owner: str = ""
    ) -> AsyncIterator[Services]:
        """Connects to them; an empty owner stands for all owners."""
        async with AsyncExitStack() as stack:
            clients = {}
            for name, target in targets.items():
                config = ChannelConfig(target=target)
                client = SandboxClient(config, owner=owner, call_timeout_s=_CALL_S)
                clients[name] = await stack.enter_async_context(client)
            yield cls(clients)

    async def sandboxes(self) -> list[tuple[str, SandboxInfo]]:
        """Service and sandbox, for every living one."""
        return [
            (name, info) for name, client in self._clients.items() for info in await client.list()
        ]

    async def kill(self, ids: Sequence[str]) -> dict[str, bool]:
        """Ends sandboxes; which of them were there."""
        ended = dict.fromkeys(ids, False)
        for client in self._clients.values():
            for sandbox_id in ids:
                ended[sandbox_id] |= await client.destroy(sandbox_id)
        return ended

    async def limits(self) -> list[tuple[str, LimiterStatus]]:
        """Service and limiter, for every one."""
        return [
            (name, limiter)
            for name, client in self._clients.items()
            for limiter in (await client.status()).limiters
        ]


def as_rows(found: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [{"service": name, **asdict(item)} for name, item in found]


def show_sandboxes(found: Sequence[tuple[str, SandboxInfo]], console: Console) -> None:
    """A table, the oldest first."""
    table = Table(
        "sandbox", "service", "owner", "age", "lease left", "commands", "labels", box=None
    )
    for name, info in found:
        labels = " ".join(f"{key}={value}" for key, value in sorted(info.labels.items()))
        ages = (f"{info.age_s:.0f} s", f"{info.lease_left_s:.0f} s")
        row = (info.sandbox_id, name, info.owner, *ages, str(info.running_commands), labels)
        table.add_row(*map(Text, row))
    console.print(table if found else "no sandbox is alive")


def show_limits(found: Sequence[tuple[str, LimiterStatus]], console: Console) -> None:
    """A table: how much of every limit is used up, and who waits."""
    table = Table("limit", "service", "in use", "share", box=None)
    for name, limiter in found:
        share = f"{limiter.in_use / limiter.limit:.0%}" if limiter.limit else ""
        table.add_row(*map(Text, (limiter.name, name, limiter_text(asdict(limiter)), share)))
    console.print(table)
