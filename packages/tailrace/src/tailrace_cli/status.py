"""`tailrace status`: asks every service of a stack how it is doing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import ServiceError
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceStub
from tailrace.rollout.v1 import rollout_service_pb2 as rollout_pb
from tailrace.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from tailrace.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from tailrace.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from tailrace.trainer.v1 import trainer_service_pb2 as trainer_pb
from tailrace.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from tailrace.weight_sync.v1 import weight_service_pb2 as weights_pb
from tailrace.weight_sync.v1.weight_service_pb2_grpc import WeightServiceStub

from tailrace_cli.stack.health import is_serving
from tailrace_cli.stack.spec import ProcessSpec, StackSpec

CALL_S = 3.0

Ask = Callable[[grpc.aio.Channel], Awaitable[Any]]
ASK: Mapping[str, Ask] = {
    "sandbox_client": lambda c: SandboxServiceStub(c).GetStatus(
        sandbox_pb.GetStatusRequest(), timeout=CALL_S
    ),
    "swe_eval": lambda c: EvalServiceStub(c).GetStatus(eval_pb.GetStatusRequest(), timeout=CALL_S),
    "weight_sync": lambda c: WeightServiceStub(c).ListNodes(
        weights_pb.ListNodesRequest(), timeout=CALL_S
    ),
    "rollout_engine": lambda c: RolloutServiceStub(c).GetStatus(
        rollout_pb.GetStatusRequest(), timeout=CALL_S
    ),
    "grpo_trainer": lambda c: TrainerServiceStub(c).GetStatus(
        trainer_pb.GetStatusRequest(), timeout=CALL_S
    ),
}


@dataclass(frozen=True)
class ServiceStatus:
    """One service: whether it serves, and what it says of itself."""

    name: str
    address: str
    serving: bool
    details: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class StackStatus:
    """All services of a stack."""

    services: Sequence[ServiceStatus]

    @property
    def healthy(self) -> bool:
        """True when every service serves."""
        return all(s.serving for s in self.services)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"healthy": self.healthy, "services": [asdict(s) for s in self.services]}


async def collect(stack: StackSpec) -> StackStatus:
    """Asks all services at once; one that does not answer is reported, not raised."""
    return StackStatus(await asyncio.gather(*(_ask(p) for p in stack.processes)))


async def _ask(process: ProcessSpec) -> ServiceStatus:
    if not await is_serving(process):
        return ServiceStatus(process.name, process.address, False, error="does not answer")
    ask = ASK.get(process.module)
    if process.protocol != "grpc" or ask is None:
        return ServiceStatus(process.name, process.address, True)
    channel = open_channel(ChannelConfig(target=process.target))
    try:
        reply = await ask(channel)
    except ServiceError as error:
        return ServiceStatus(process.name, process.address, False, error=str(error))
    finally:
        await channel.close()
    details = MessageToDict(reply, preserving_proto_field_name=True)
    return ServiceStatus(process.name, process.address, True, details)


def limiters(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the limiters that a service reports: in use of limit, and who waits."""
    rows = []
    for limiter in details.get("limiters", []):
        used, limit = limiter.get("in_use", 0), limiter.get("limit", 0)
        waiting = int(limiter.get("waiting", 0))
        text = f"{used:g} of {limit:g}"
        if waiting:
            text += f", {waiting} waiting (median {limiter.get('wait_p50_s', 0):.2f} s)"
        rows.append((limiter["name"], text))
    return rows


def plain(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of everything else, nested values in one line."""
    rows = []
    for name, value in details.items():
        if name == "limiters":
            continue
        if isinstance(value, list):
            text = "; ".join(_inline(item) for item in value)
        else:
            text = _inline(value)
        rows.append((name, text))
    return rows


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k}={_inline(v)}" for k, v in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def show(status: StackStatus, console: Console) -> None:
    """A table a service."""
    for service in status.services:
        state = "[green]serving[/]" if service.serving else f"[red]{service.error}[/]"
        console.print(f"[bold]{service.name}[/] {service.address}  {state}", highlight=False)
        rows = plain(service.details) + limiters(service.details)
        if rows:
            table = Table.grid(padding=(0, 2))
            for name, text in rows:
                table.add_row(f"  {name}", text)
            console.print(table, highlight=False)
