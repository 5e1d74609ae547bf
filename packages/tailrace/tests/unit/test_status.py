"""What `tailrace status` makes of the services' replies."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from service_kit.config import ConfigError
from tailrace.rollout.v1 import rollout_service_pb2 as rollout_pb
from tailrace.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from tailrace.weight_sync.v1 import weight_service_pb2 as weights_pb
from tailrace_cli.stack.files import LOCAL_STACK
from tailrace_cli.stack.health import free_ports
from tailrace_cli.stack.spec import dump_stack, load_stack
from tailrace_cli.status import (
    ServiceStatus,
    StackStatus,
    collect,
    fields_of,
    limiters,
    nodes,
    plain,
    show,
)


def shown(status: StackStatus) -> str:
    text = io.StringIO()
    show(status, Console(file=text, width=200))
    return text.getvalue()


def test_json_has_zeros_numbers_as_numbers_and_states_by_their_short_names() -> None:
    reply = weights_pb.ListNodesResponse(
        nodes=[
            weights_pb.Node(
                node_id="n",
                engines=[
                    weights_pb.EngineReport(
                        url="http://e", state=weights_pb.ENGINE_STATE_SERVING, version=7
                    )
                ],
            )
        ]
    )
    fields = fields_of(reply)
    assert fields["newest_version"] == 0
    [node] = fields["nodes"]
    [engine] = node["engines"]
    assert (engine["version"], engine["state"]) == (7, "SERVING")


def test_each_engine_says_what_it_holds_and_how_far_it_is_behind() -> None:
    reply = weights_pb.ListNodesResponse(newest_version=9)
    node = reply.nodes.add(
        node_id="n", host="h", rollout_target="h:7104", lease_left_s=24.6, file_target="h:7103"
    )
    node.copy_numbers.append(9)
    state = weights_pb.ENGINE_STATE_SERVING
    node.engines.add(url="http://a", kind="embedded", state=state, version=9, pause_s=0.0271)
    node.engines.add(
        url="http://b",
        kind="sglang",
        state=weights_pb.ENGINE_STATE_ACTIVATING,
        target_version=9,
        versions_behind=9,
    )
    node.engines.add(
        url="http://c", kind="sglang", state=weights_pb.ENGINE_STATE_POISONED, error="torn"
    )
    assert nodes(fields_of(reply)) == [
        ("node n", "host h, lease 25 s left, rollouts at h:7104, copy of 9 at h:7103"),
        ("  http://a", "embedded SERVING, version 9, last pause 0.027 s"),
        ("  http://b", "sglang ACTIVATING, no version, to 9, 9 behind"),
        ("  http://c", "sglang POISONED, no version, torn"),
    ]
    assert plain(fields_of(reply)) == [("newest_version", "9")]


def test_maps_keep_their_keys() -> None:
    reply = rollout_pb.GetStatusResponse(groups={"RUNNING": 3})
    assert fields_of(reply)["groups"] == {"RUNNING": 3}


def test_a_limiter_says_what_is_in_use_of_what_and_who_waits() -> None:
    reply = sandbox_pb.GetStatusResponse()
    for values in (
        {"name": "sandboxes", "limit": 8.0, "in_use": 8.0, "waiting": 3, "wait_p50_s": 0.5},
        {"name": "starts_per_s"},
        {"name": "environments_bytes", "limit": 2.0 * 2**30, "in_use": 2.0**30},
    ):
        reply.limiters.add(**values)
    assert limiters(fields_of(reply)) == [
        ("sandboxes", "8 of 8, 3 waiting (median 0.50 s)"),
        ("starts_per_s", "0, no limit"),
        ("environments_bytes", "1.0 GiB of 2.0 GiB"),
    ]


def test_items_of_nested_lists_get_rows_of_their_own() -> None:
    details = {"groups": [{"host": "h", "engines": [{"url": "a"}, {"url": "b"}]}], "empty": []}
    assert plain(details) == [
        ("groups", "host h"),
        ("  engines", "url a"),
        ("  engines", "url b"),
    ]


def test_what_does_not_answer_is_named_last() -> None:
    text = shown(
        StackStatus(
            [
                ServiceStatus("eval", "grpc://e", True, {"tasks": 3}),
                ServiceStatus("trainer", "grpc://t", False, error="does not answer [/]"),
            ]
        )
    )
    assert "does not answer [/]" in text
    assert text.splitlines()[-1] == "1 of 2 not serving: trainer"


async def test_against_nothing_every_service_is_reported_and_the_stack_is_not_healthy() -> None:
    names = ("sandbox", "eval", "weights", "rollout", "trainer")
    *ports, engine = free_ports(len(names) + 1)
    addresses = {n: f"127.0.0.1:{p}" for n, p in zip(names, ports, strict=True)}
    stack = load_stack(LOCAL_STACK, variables=addresses | {"engine_port": str(engine)})
    report = await collect(stack)
    assert not report.healthy
    assert {s.name: s.error for s in report.services} == dict.fromkeys(
        [*names, "engine"], "does not answer"
    )


def test_a_stack_written_down_is_the_same_stack_again(tmp_path: Path) -> None:
    ports = {"engine_port": "7300", "trainer": "127.0.0.1:7301"}
    stack = load_stack(LOCAL_STACK, variables=ports, state_dir=tmp_path)
    (tmp_path / "resolved.toml").write_text(dump_stack(stack))
    assert load_stack(tmp_path / "resolved.toml") == stack


def test_a_variable_that_the_file_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no variable treiner"):
        load_stack(LOCAL_STACK, variables={"treiner": "127.0.0.1:1"})
