"""`tailrace status`: asks every service of a stack how it is doing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
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
    return ServiceStatus(process.name, process.address, True, fields_of(reply))


def fields_of(message: Message) -> dict[str, Any]:
    """A message as plain values: zeros included, integers as integers, enums by short name."""
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(field: Any, value: Any) -> Any:
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        inner = nested.fields_by_name["value"]
        return {str(key): _single(inner, value[key]) for key in value}
    return [_single(field, v) for v in value] if field.is_repeated else _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return fields_of(value)
    if field.enum_type is not None:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", field.enum_type.name).upper() + "_"
        return field.enum_type.values_by_number[value].name.removeprefix(prefix)
    return value


def limiters(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the limiters that a service reports: in use of limit, and who waits."""
    return [(limiter["name"], limiter_text(limiter)) for limiter in details.get("limiters", [])]


def limiter_text(limiter: Mapping[str, Any]) -> str:
    """How much of a limit is in use, and who waits for it."""
    used, limit = limiter["in_use"], limiter["limit"]
    shown = _bytes if limiter["name"].endswith("_bytes") else "{:g}".format
    text = f"{shown(used)} of {shown(limit)}" if limit else f"{shown(used)}, no limit"
    if limiter["waiting"]:
        text += f", {limiter['waiting']} waiting (median {limiter['wait_p50_s']:.2f} s)"
    return text


def nodes(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the registry of engines: a node, and under it what each of its engines holds."""
    rows = []
    for node in details.get("nodes", []):
        copies = ", ".join(map(str, node["copy_numbers"]))
        facts = [f"host {node['host']}", f"lease {node['lease_left_s']:.0f} s left"]
        facts += [f"rollouts at {node['rollout_target']}"] if node["rollout_target"] else []
        facts += [f"copy of {copies} at {node['file_target']}"] if node["file_target"] else []
        rows.append((f"node {node['node_id']}", ", ".join(facts)))
        rows += [(f"  {engine['url']}", _engine(engine)) for engine in node["engines"]]
    return rows


def _engine(engine: Mapping[str, Any]) -> str:
    facts = [f"{engine['kind']} {engine['state']}"]
    facts += [f"version {engine['version']}"] if engine["version"] else ["no version"]
    facts += [f"to {engine['target_version']}"] if engine["target_version"] else []
    facts += [f"{engine['versions_behind']} behind"] if engine["versions_behind"] else []
    facts += [f"last pause {engine['pause_s']:.3f} s"] if engine["pause_s"] else []
    facts += [engine["error"]] if engine["error"] else []
    return ", ".join(facts)


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def plain(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of everything else that says something; one row for each item of a list."""
    rows: list[tuple[str, str]] = []
    for name, value in details.items():
        if name in ("limiters", "nodes"):
            continue
        items = value if isinstance(value, list) else [value]
        for item in items:
            nested = _lists(item)
            text = _inline({k: v for k, v in item.items() if k not in nested} if nested else item)
            if text:
                rows.append((name, text))
            rows += [
                (f"  {k}", _inline(entry)) for k, entries in nested.items() for entry in entries
            ]
    return rows


def _lists(item: Any) -> dict[str, list[Any]]:
    if not isinstance(item, Mapping):
        return {}
    return {key: value for key, value in item.items() if isinstance(value, list)}


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {k: v for k, v in value.items() if v not in ("", [], {}, None)}
        return ", ".join(f"{k} {_inline(v)}" for k, v in shown.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show(status: StackStatus, console: Console) -> None:
    """A table a service, and last what does not answer."""
    for service in status.services:
        state = "[green]serving[/]" if service.serving else f"[red]{escape(service.error)}[/]"
        console.print(f"[bold]{service.name}[/] {service.address}  {state}", highlight=False)
        rows = limiters(service.details) + nodes(service.details) + plain(service.details)
        if rows:
            table = Table.grid(padding=(0, 2))
            for name, text in rows:
                table.add_row(Text(f"  {name}"), Text(text))
            console.print(table)
    silent = [s.name for s in status.services if not s.serving]
    if silent:
        console.print(
            f"{len(silent)} of {len(status.services)} not serving: {', '.join(silent)}",
            style="red",
            highlight=False,
        )
