from weight_sync.core.receiver import Phase
from weight_sync.core.registry import (
    Arrivals,
    EngineEndpoint,
    EngineReport,
    Registry,
    peers_with,
)


def registry() -> Registry:
    return Registry(started_s=0.0, max_lease_s=60.0, report_ttl_s=15.0)


def add(registry: Registry, node: str, *urls: str, now_s: float, lease_s: float = 30.0) -> float:
    return registry.register(
        node_id=node,
        host="host",
        rollout_target="127.0.0.1:7104",
        engines=[EngineEndpoint(url) for url in urls],
        lease_s=lease_s,
        now_s=now_s,
    )


def serving(url: str, number: int) -> EngineReport:
    return EngineReport(url=url, phase=Phase.SERVING, version=number)


def test_a_node_that_stops_renewing_disappears() -> None:
    nodes = registry()
    add(nodes, "a", "http://a", now_s=0)
    add(nodes, "b", "http://b", now_s=0)
    add(nodes, "a", "http://a", now_s=20)
    assert [node.node_id for node in nodes.nodes(now_s=31)] == ["a"]
    assert nodes.nodes(now_s=31)[0].lease_left_s == 19
    assert nodes.nodes(now_s=51) == []


def test_a_lease_is_capped_and_zero_asks_for_the_longest() -> None:
    nodes = registry()
    assert add(nodes, "a", now_s=0, lease_s=1e9) == 60
    assert add(nodes, "a", now_s=0, lease_s=0) == 60
    assert add(nodes, "a", now_s=0, lease_s=5) == 5


def test_an_engine_is_unknown_until_its_receiver_reports() -> None:
    nodes = registry()
    add(nodes, "a", "http://a", now_s=0)
    assert nodes.nodes(now_s=1)[0].engines == (EngineReport(url="http://a", kind="embedded"),)
    nodes.report("host", [serving("http://a", 3)], now_s=1)
    engine = nodes.nodes(now_s=2)[0].engines[0]
    assert (engine.phase, engine.version, engine.kind) == (Phase.SERVING, 3, "embedded")


def test_an_old_report_is_not_passed_on_as_the_present() -> None:
    nodes = registry()
    add(nodes, "a", "http://a", now_s=0)
    nodes.report("host", [serving("http://a", 3)], now_s=1)
    assert nodes.serving(3, now_s=15).engines == 1
    assert nodes.serving(3, now_s=16).engines == 0
    assert nodes.nodes(now_s=16)[0].engines[0].phase is Phase.UNKNOWN


def test_a_report_replaces_the_host_s_last_one() -> None:
    nodes = registry()
    add(nodes, "a", "http://a", "http://b", now_s=0)
    nodes.report("host", [serving("http://a", 3), serving("http://b", 3)], now_s=1)
    nodes.report("host", [serving("http://b", 4)], now_s=2)
    assert [engine.version for engine in nodes.nodes(now_s=3)[0].engines] == [0, 4]


def test_reports_of_another_host_do_not_count() -> None:
    nodes = registry()
    add(nodes, "a", "http://127.0.0.1:7201", now_s=0)
    nodes.report("elsewhere", [serving("http://127.0.0.1:7201", 3)], now_s=1)
    assert nodes.serving(1, now_s=2).engines == 0


def test_counts_engines_that_are_at_least_so_far() -> None:
    nodes = registry()
    add(nodes, "a", "http://a", "http://b", now_s=0)
    add(nodes, "again", "http://b", now_s=0)
    nodes.report("host", [serving("http://a", 3), serving("http://b", 5)], now_s=1)
    found = nodes.serving(4, now_s=2)
    assert (found.engines, found.registered, found.oldest_version) == (1, 2, 3)
    assert nodes.serving(0, now_s=2).engines == 2
    assert registry().serving(0, now_s=2).registered == 0


def test_says_what_live_engines_need_once_receivers_had_time_to_report() -> None:
    nodes = registry()
    add(nodes, "a", "http://a", "http://b", "http://c", now_s=0, lease_s=1e9)
    moving = EngineReport(url="http://b", phase=Phase.READY, version=2, target_version=4)
    nodes.report("host", [serving("http://a", 3), moving], now_s=50)
    early = nodes.needed(now_s=59)
    assert (early.held, early.targets, early.settled) == ((2, 3), (4,), False)
    add(nodes, "a", "http://a", now_s=59)
    late = nodes.needed(now_s=60)
    assert (late.held, late.targets, late.settled) == ((3,), (), True)


def test_a_host_is_stuck_while_its_receiver_says_so() -> None:
    registry = Registry(started_s=0, report_ttl_s=10)
    registry.report("a", [], now_s=0, stuck_at=7)
    registry.report("b", [], now_s=0)
    assert registry.stuck_at(now_s=9) == {"a": 7}
    registry.report("a", [], now_s=9)
    assert registry.stuck_at(now_s=9) == {}
    registry.report("a", [], now_s=9, stuck_at=8)
    assert registry.stuck_at(now_s=19) == {}


def test_peers_are_other_hosts_that_offer_just_that_version() -> None:
    nodes = registry()
    for host, number in {"here": 7, "there": 7, "behind": 6, "shy": 7}.items():
        nodes.register(node_id=host, host=host, rollout_target="", engines=[], lease_s=30, now_s=0)
        target = "" if host == "shy" else f"{host}:7103"
        nodes.report(host, [], now_s=0, file_target=target, copy_numbers=[number])
    # Two nodes of one host are one peer.
    nodes.register(node_id="x", host="there", rollout_target="", engines=[], lease_s=30, now_s=0)
    assert peers_with(nodes.nodes(now_s=1), 7, own_host="here") == ["there:7103"]
    # What a receiver said is not believed for ever.
    assert peers_with(nodes.nodes(now_s=16), 7, own_host="here") == []


def test_the_time_to_the_last_engine_is_told_once_and_not_of_skipped_versions() -> None:
    arrivals = Arrivals()
    for number in (1, 2, 3):
        arrivals.announced(number, now_s=float(number))
    assert arrivals.held(0, now_s=5) == []
    assert arrivals.held(2, now_s=5.5) == [3.5]
    assert arrivals.held(2, now_s=6) == []
    assert arrivals.held(3, now_s=7) == [4]
    # One announced before this service started is unknown.
    assert arrivals.held(9, now_s=8) == []
