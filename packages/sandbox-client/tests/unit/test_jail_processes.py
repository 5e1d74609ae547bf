"""Who is whose among a sandbox's processes, and in which order they end."""

from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.backends.local.jail.processes import Process, in_killing_order, tree_of


@given(st.sets(st.tuples(st.integers(2, 99), st.integers(0, 9)), max_size=8), st.integers(2, 99))
def test_nobody_of_a_commands_tree_is_killed_before_itself(
    victims: set[tuple[int, int]], root: int
) -> None:
    order = in_killing_order(victims, root)
    assert sorted(order) == sorted(victims)
    own = [victim for victim in order if victim[0] == root]
    assert order[: len(own)] == own


def test_a_tree_holds_descendants_and_who_shares_a_session_of_its_roots() -> None:
    everyone = [
        Process(20, parent=1, session=20, started=0),
        Process(21, parent=20, session=20, started=0),
        Process(22, parent=21, session=22, started=0),  # a session of its own, still a child
        Process(23, parent=1, session=20, started=0),  # an orphan of the same session
        Process(24, parent=1, session=24, started=0),
        Process(25, parent=24, session=24, started=0),
    ]
    assert tree_of([20], everyone) == {20, 21, 22, 23}
