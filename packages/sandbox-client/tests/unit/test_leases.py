import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sandbox_client.core.leases import KeyConflictError, LeaseTable


def claim(table: LeaseTable, key: str, new_id: str, now: float = 0.0, mark: str = "x") -> str:
    return table.claim(owner="o", key=key, fingerprint=mark, new_id=new_id, now=now).sandbox_id


def test_the_same_key_gives_the_same_sandbox() -> None:
    table = LeaseTable()
    first = table.claim(owner="o", key="k", fingerprint="x", new_id="a", now=0)
    again = table.claim(owner="o", key="k", fingerprint="x", new_id="b", now=1)
    other = table.claim(owner="p", key="k", fingerprint="x", new_id="c", now=1)
    assert (first.sandbox_id, first.is_new) == ("a", True)
    assert (again.sandbox_id, again.is_new) == ("a", False)
    assert (other.sandbox_id, other.is_new) == ("c", True)


def test_the_same_key_for_another_request_is_a_conflict() -> None:
    table = LeaseTable()
    claim(table, "k", "a", mark="x")
    with pytest.raises(KeyConflictError, match="from a different request"):
        claim(table, "k", "b", mark="y")


def test_a_sandbox_that_is_being_created_never_expires() -> None:
    table = LeaseTable()
    claim(table, "k", "a")
    assert table.expired(now=1e9) == []


def test_a_lease_ends_unless_it_is_renewed() -> None:
    table = LeaseTable()
    claim(table, "k", "a")
    table.grant("a", lease_s=10, now=0)
    assert table.renew(["a", "nobody"], lease_s=10, now=9) == ["nobody"]
    assert table.expired(now=18.9) == []
    assert table.expired(now=19) == ["a"]
    assert table.renew(["a"], lease_s=10, now=20) == ["a"]


def test_a_retried_create_does_not_shorten_a_renewed_lease() -> None:
    table = LeaseTable()
    claim(table, "k", "a")
    table.grant("a", lease_s=5, now=0)
    table.renew(["a"], lease_s=100, now=0)
    table.grant("a", lease_s=5, now=1)
    assert table.expired(now=99) == []


def test_a_key_is_free_again_after_the_end() -> None:
    table = LeaseTable()
    claim(table, "k", "a")
    assert table.release("a")
    assert not table.release("a")
    assert claim(table, "k", "b", mark="other") == "b"


class Leases(RuleBasedStateMachine):
    """The table against a plain model: who is alive, and until when."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.serial = 0
        self.alive: dict[str, float | None] = {}
        self.keys: dict[str, str] = {}

    @rule(key=st.sampled_from("abc"))
    def create(self, key: str) -> None:
        self.serial += 1
        found = self.table.claim(
            owner="o", key=key, fingerprint=key, new_id=f"s{self.serial}", now=self.now
        )
        assert found.is_new == (key not in self.keys)
        self.keys.setdefault(key, f"s{self.serial}")
        assert found.sandbox_id == self.keys[key]
        self.alive.setdefault(found.sandbox_id, None)

    @rule(key=st.sampled_from("abc"), lease=st.integers(1, 20))
    def come_up(self, key: str, lease: int) -> None:
        if key in self.keys:
            sandbox = self.keys[key]
            self.table.grant(sandbox, lease_s=lease, now=self.now)
            self.alive[sandbox] = max(self.alive[sandbox] or 0.0, self.now + lease)

    @rule(lease=st.integers(1, 20))
    def renew(self, lease: int) -> None:
        gone = self.table.renew(list(self.alive), lease_s=lease, now=self.now)
        for sandbox, end in self.alive.items():
            assert (sandbox in gone) == (end is not None and end <= self.now)
            if end is not None and end > self.now:
                self.alive[sandbox] = self.now + lease

    @rule(passed=st.integers(1, 15))
    def wait_and_reap(self, passed: int) -> None:
        self.now += passed
        for sandbox in self.table.expired(self.now):
            self.table.release(sandbox)
            end = self.alive.pop(sandbox)
            assert end is not None
            assert end <= self.now
            self.keys = {k: s for k, s in self.keys.items() if s != sandbox}

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert {r.sandbox_id for r in self.table.records()} == set(self.alive)
        assert len(self.table) == len(self.alive)


TestLeases = Leases.TestCase
