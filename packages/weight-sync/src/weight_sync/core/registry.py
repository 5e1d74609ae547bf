"""Which nodes and engines are alive, and what their receivers last said of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weight_sync.core.receiver import Phase


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """An engine as its node registers it."""

    url: str
    """Base URL of SGLang's HTTP API, as seen from the engine's host."""
    kind: str = "embedded"
    """`embedded` or `sglang`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """An engine as its receiver reports it."""

    url: str
    kind: str = ""
    phase: Phase = Phase.UNKNOWN
    version: int = 0
    """The number it holds, proven; 0: none."""
    target_version: int = 0
    prepare_s: float = 0.0
    activate_s: float = 0.0
    pause_s: float = 0.0
    payload_bytes: int = 0
    versions_behind: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node and its engines."""

    node_id: str
    host: str
    rollout_target: str
    engines: tuple[EngineReport, ...]
    lease_left_s: float
    file_target: str = ""
    """Where its host's receiver hands out copies; empty: nowhere."""
    copy_numbers: tuple[int, ...] = ()
    """The versions it has verified copies of."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How far the live engines are."""

    engines: int
    """Engines that hold at least the version asked for."""
    registered: int
    oldest_version: int
    """The lowest version held; 0 while some engine holds none, or there is no engine."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What a publisher must leave in the store."""

    held: tuple[int, ...]
    targets: tuple[int, ...]
    settled: bool
    """False while receivers may exist that have not reported since the service started."""


@dataclass(frozen=True, slots=True)
class _Lease:
    node_id: str
    host: str
    rollout_target: str
    engines: tuple[EngineEndpoint, ...]
    ends_s: float


@dataclass(frozen=True, slots=True)
class _HostReport:
    engines: dict[str, EngineReport]
    ends_s: float
    file_target: str
    copy_numbers: tuple[int, ...]
    stuck_at: int


class Arrivals:
    """When each version was announced, until every live engine holds it or a newer one."""

    def __init__(self) -> None:
        self._announced_s: dict[int, float] = {}

    def announced(self, number: int, *, now_s: float) -> None:
        """Take note of a version."""
        self._announced_s[number] = now_s

    def held(self, oldest_version: int, *, now_s: float) -> list[float]:
        """Return the seconds that versions took which all live engines have reached by now.

        A version that was skipped has been reached by whatever replaced it; it is not counted.
        """
        reached = [number for number in self._announced_s if number <= oldest_version]
        took = {number: now_s - self._announced_s.pop(number) for number in reached}
        return [took[oldest_version]] if oldest_version in took else []


class Registry:
    """Leases of nodes, reports of receivers. All times come from one clock, given by the caller.

    A node that stops renewing disappears; a receiver that stops reporting leaves its engines
    UNKNOWN: an old claim is never passed on as a present one.
    """

    def __init__(
        self,
        *,
        started_s: float,
        fresh: bool = False,
        max_lease_s: float = 60.0,
        report_ttl_s: float = 15.0,
    ) -> None:
        """Start empty.

        Args:
            started_s: now, by the caller's clock.
            fresh: no version was ever announced, so no receiver can be missing its registration.
            max_lease_s: longest lease of a node.
            report_ttl_s: a report is believed for so long.
        """
        self._max_lease_s = max_lease_s
        self._report_ttl_s = report_ttl_s
        self._settled_s = started_s + (0.0 if fresh else max(max_lease_s, report_ttl_s))
        self._leases: dict[str, _Lease] = {}
        self._reports: dict[str, _HostReport] = {}

    def register(
        self,
        *,
        node_id: str,
        host: str,
        rollout_target: str,
        engines: Iterable[EngineEndpoint],
        lease_s: float,
        now_s: float,
    ) -> float:
        """Take in a node, or renew its lease, and return the seconds granted."""
        granted_s = min(lease_s, self._max_lease_s) if lease_s > 0 else self._max_lease_s
        self._leases[node_id] = _Lease(
            node_id, host, rollout_target, tuple(engines), now_s + granted_s
        )
        return granted_s

    def report(
        self,
        host: str,
        engines: Sequence[EngineReport],
        *,
        now_s: float,
        file_target: str = "",
        copy_numbers: Sequence[int] = (),
        stuck_at: int = 0,
    ) -> None:
        """Take a receiver's word on all engines of its host; replaces its last."""
        self._reports[host] = _HostReport(
            {engine.url: engine for engine in engines},
            now_s + self._report_ttl_s,
            file_target,
            tuple(copy_numbers),
            stuck_at,
        )

    def nodes(self, *, now_s: float) -> list[NodeView]:
        """Return the live nodes by id, each engine with its last report if that is fresh."""
        self._expire(now_s)
        return [self._node(lease, now_s) for _, lease in sorted(self._leases.items())]

    def serving(self, number: int, *, now_s: float) -> Serving:
        """Count the live engines that hold version `number` or a newer one."""
        engines = self._engines(now_s)
        return Serving(
            engines=sum(1 for engine in engines if engine.version >= max(number, 1)),
            registered=len(engines),
            oldest_version=min((engine.version for engine in engines), default=0),
        )

    def needed(self, *, now_s: float) -> Needed:
        """Return the versions that live engines hold or are being brought to."""
        engines = self._engines(now_s)
        return Needed(
            held=tuple(sorted({engine.version for engine in engines if engine.version})),
            targets=tuple(
                sorted({engine.target_version for engine in engines if engine.target_version})
            ),
            settled=now_s >= self._settled_s,
        )

    def stuck_at(self, *, now_s: float) -> dict[str, int]:
        """Return the version that a live receiver could not get to, by host."""
        self._expire(now_s)
        return {host: r.stuck_at for host, r in self._reports.items() if r.stuck_at}

    def _engines(self, now_s: float) -> list[EngineReport]:
        # Two nodes may name one engine; it counts once.
        found: dict[tuple[str, str], EngineReport] = {}
        for node in self.nodes(now_s=now_s):
            for engine in node.engines:
                found[node.host, engine.url] = engine
        return list(found.values())

    def _node(self, lease: _Lease, now_s: float) -> NodeView:
        report = self._reports.get(lease.host)
        return NodeView(
            lease.node_id,
            lease.host,
            lease.rollout_target,
            tuple(self._engine(lease.host, endpoint) for endpoint in lease.engines),
            lease.ends_s - now_s,
            report.file_target if report else "",
            report.copy_numbers if report else (),
        )

    def _engine(self, host: str, endpoint: EngineEndpoint) -> EngineReport:
        reports = self._reports.get(host)
        report = reports.engines.get(endpoint.url) if reports else None
        if report is None:
            return EngineReport(url=endpoint.url, kind=endpoint.kind)
        return replace(report, kind=endpoint.kind)

    def _expire(self, now_s: float) -> None:
        self._leases = {k: v for k, v in self._leases.items() if v.ends_s > now_s}
        self._reports = {k: v for k, v in self._reports.items() if v.ends_s > now_s}


def peers_with(nodes: Iterable[NodeView], number: int, *, own_host: str) -> list[str]:
    """Return where other hosts hand out a copy of a version, each address once, in order."""
    return sorted(
        {
            node.file_target
            for node in nodes
            if node.file_target and node.host != own_host and number in node.copy_numbers
        }
    )
