"""Which snapshots may go, and which may not."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from sandbox_client.core.snapshots import KeptSnapshot, SnapshotTable


def kept(table: SnapshotTable, snapshot_id: str, parent: str = "", *, until: float = 10) -> None:
    assert table.claim(f"sb-{snapshot_id}", "k", new_id=snapshot_id, now=0).is_new
    table.hold_parent(parent)
    table.keep(snapshot_id, KeptSnapshot("/w", {}, 1, parent))
    assert table.grant(snapshot_id, lease_s=until, now=0) is not None


def test_it_goes_once_its_lease_is_over_and_not_before() -> None:
    table = SnapshotTable()
    kept(table, "s")
    assert table.renew(["s", "x"], lease_s=10, now=5) == ["x"]
    assert table.take_removable(14) == []
    assert table.take_removable(15) == ["s"]
    assert len(table) == 0
    assert table.renew(["s"], lease_s=10, now=15) == ["s"]


def test_it_stays_while_a_sandbox_needs_it_but_starts_no_other() -> None:
    table = SnapshotTable()
    kept(table, "s")
    assert table.hold("s", 1) is not None
    assert table.end("s")
    assert not table.end("s")
    assert table.take_removable(2) == []
    assert table.hold("s", 2) is None
    table.let_go("s")
    assert table.take_removable(2) == ["s"]


def test_a_lease_that_is_over_starts_nothing_even_before_it_is_reaped() -> None:
    table = SnapshotTable()
    kept(table, "s", until=10)
    assert table.hold("s", 9) is not None
    assert table.hold("s", 10.5) is None


def test_a_parent_goes_after_its_child() -> None:
    table = SnapshotTable()
    kept(table, "low")
    kept(table, "high", "low")
    table.end("low")
    assert table.take_removable(1) == []
    table.end("high")
    assert table.take_removable(1) == ["high"]
    assert table.take_removable(1) == ["low"]


def test_a_key_finds_its_snapshot_while_that_has_a_lease() -> None:
    table = SnapshotTable()
    kept(table, "s")
    assert table.claim("sb-s", "k", new_id="t", now=1).sandbox_id == "s"
    assert table.claim("sb-other", "k", new_id="u", now=1).is_new
    table.end("s")
    assert table.claim("sb-s", "k", new_id="v", now=1).is_new


def test_one_that_could_not_be_made_frees_its_key_and_place() -> None:
    table = SnapshotTable()
    table.claim("sb", "k", new_id="s", now=0)
    assert len(table) == 1
    table.abandon("s")
    assert len(table) == 0
    assert table.grant("s", lease_s=1, now=0) is None
    assert table.claim("sb", "k", new_id="t", now=0).is_new


class SnapshotMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: nothing that is needed goes, and all else does."""

    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.table = SnapshotTable()
        self.now = 0.0
        self.lease: dict[str, float] = {}
        self.users: dict[str, int] = {}
        self.parent: dict[str, str] = {}
        self.serial = 0

    def needed(self, snapshot: str) -> bool:
        return (
            self.lease[snapshot] > self.now
            or self.users[snapshot] > 0
            or snapshot in self.parent.values()
        )

    @rule(target=snapshots, lease_s=st.floats(1, 50))
    def make(self, lease_s: float) -> str:
        return self._made("", lease_s)

    @rule(target=snapshots, below=snapshots, lease_s=st.floats(1, 50))
    def make_on(self, below: str, lease_s: float) -> str:
        # Only a sandbox that lives on it leads to a snapshot above it.
        return self._made(below if self.users.get(below) else "", lease_s)

    def _made(self, parent: str, lease_s: float) -> str:
        self.serial += 1
        made = f"s{self.serial}"
        self.table.claim(made, "k", new_id=made, now=self.now)
        self.table.hold_parent(parent)
        self.table.keep(made, KeptSnapshot("/w", {}, 1, parent))
        self.table.grant(made, lease_s=lease_s, now=self.now)
        self.lease[made] = self.now + lease_s
        self.users[made] = 0
        self.parent[made] = parent
        return made

    @rule(snapshot=snapshots)
    def hold(self, snapshot: str) -> None:
        held = self.table.hold(snapshot, self.now)
        assert (held is not None) == (self.lease.get(snapshot, 0) > self.now)
        if held is not None:
            self.users[snapshot] += 1

    @rule(snapshot=snapshots)
    def let_go(self, snapshot: str) -> None:
        if self.users.get(snapshot):
            self.table.let_go(snapshot)
            self.users[snapshot] -= 1

    @rule(snapshot=snapshots)
    def end(self, snapshot: str) -> None:
        self.table.end(snapshot)
        if snapshot in self.lease:
            self.lease[snapshot] = self.now

    @rule(passed=st.floats(0.1, 30))
    def wait(self, passed: float) -> None:
        self.now += passed

    @rule()
    def remove(self) -> None:
        while gone := self.table.take_removable(self.now):
            for snapshot in gone:
                assert not self.needed(snapshot)
                for known in (self.lease, self.users, self.parent):
                    known.pop(snapshot)
        assert all(map(self.needed, self.lease))

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.table) == len(self.lease)


TestSnapshotMachine = SnapshotMachine.TestCase
TestSnapshotMachine.settings = settings(max_examples=60)
