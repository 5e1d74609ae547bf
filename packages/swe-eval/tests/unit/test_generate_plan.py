from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.generate.mutate import KINDS, mutate
from swe_eval.generate.places import Place, find_places
from swe_eval.generate.plan import (
    Candidate,
    Known,
    Outcome,
    Selection,
    SuiteRun,
    Trial,
    behaviour_of,
    fingerprint_of,
    in_turn,
    judge,
    run_limit,
)

SOURCE = '''\
"""A module."""

LIMIT = 3


def long(a, b):
    total = a + b
    total = total + a + b
    total = total - a - b
    return total if total > 3 and a < b else a


def short(a):
    return a + 1


class Counter:
    def add(self, a):
        self.value = a * 2
'''
TESTS = ("t::one", "t::two", "t::three")


def candidates(source: str = SOURCE, path: str = "m.py") -> list[Candidate]:
    return [Candidate(path, place, TESTS) for place in find_places(source)]


def place_in(function: str) -> Place:
    return next(place for place in find_places(SOURCE) if place.function == function)


# -- places


def test_a_byte_order_mark_stays_where_it_is() -> None:
    marked = [place.make() for place in find_places("\ufeff" + SOURCE)]
    plain = [place.make() for place in find_places(SOURCE)]
    assert [b and b.source for b in marked] == [b and "\ufeff" + b.source for b in plain]
    assert [b and b.before for b in marked] == [b and b.before for b in plain]


def test_places_are_those_of_mutate_within_functions() -> None:
    made = {bug.source for place in find_places(SOURCE) if (bug := place.make())}
    wanted = {bug.source for bug in mutate(SOURCE) if bug.function}
    assert made == wanted


def test_a_place_names_the_innermost_function_and_its_lines() -> None:
    source = "x = 1\n\n\n@cached\ndef f(a):\n    def g(b):\n        return b - 1\n    return g(a)\n"
    found = {(p.function, p.first_line, p.last_line) for p in find_places(source)}
    assert ("f.g", 6, 7) in found
    assert ("f", 5, 8) in found


def test_lines_are_counted_as_python_counts_them() -> None:
    source = 'a = "\x0c \x1c"\n\ndef f(x):\n    return x + 1\n'
    (bug,) = [p.make() for p in find_places(source, kinds=("operand_swap",))]
    assert bug is not None
    assert bug.source == source.replace("x + 1", "1 + x")


def test_places_refuse_what_mutate_refuses() -> None:
    with pytest.raises(ValueError, match="does not parse"):
        find_places("def f(:\n")
    with pytest.raises(ValueError, match="no_such_kind"):
        find_places("x = 1\n", kinds=("no_such_kind",))


# -- order


def test_kinds_take_turns_and_within_a_kind_functions_do() -> None:
    order = in_turn(candidates(), seed="0")
    kinds = {candidate.place.kind for candidate in order}
    first = [candidate.place.kind for candidate in order[: len(kinds)]]
    assert sorted(first) == sorted(kinds)
    changes = [c.place.function for c in order if c.place.kind == "operator_change"]
    assert len(set(changes[:3])) == 3


@given(seed=st.text(max_size=5), shuffle=st.integers())
def test_order_is_the_seeds_whatever_the_order_before(seed: str, shuffle: int) -> None:
    places = find_places(SOURCE)
    files = {"a.py": places, "b.py": places}
    paths = sorted(files)
    random.Random(shuffle).shuffle(paths)
    found = [
        [
            (c.path, id(c.place))
            for c in in_turn(
                (Candidate(path, place, TESTS) for path in names for place in files[path]),
                seed=seed,
            )
        ]
        for names in (sorted(files), paths)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == 2 * len(places)


def test_another_seed_is_another_order() -> None:
    orders = [[c.place.make() for c in in_turn(candidates(), seed=seed)] for seed in "ab"]
    assert orders[0] != orders[1]


# -- what runs say


def finished(letters: str) -> SuiteRun:
    return SuiteRun(end="finished", letters=letters)


def test_a_test_that_ends_two_ways_is_required_by_nobody() -> None:
    trial = judge(TESTS, [finished("fpf"), finished("epp")])
    assert trial == Trial(outcome=Outcome.KEPT, fail_to_pass=("t::one",), pass_to_pass=("t::two",))


@pytest.mark.parametrize(
    ("runs", "outcome"),
    [
        ([SuiteRun(end="unnoticed")], Outcome.UNNOTICED),
        ([SuiteRun(end="timeout")], Outcome.TIMEOUT),
        ([SuiteRun(end="died")], Outcome.DIED),
        ([SuiteRun(end="broken")], Outcome.BROKE_SUITE),
        ([finished("fpp"), SuiteRun(end="timeout")], Outcome.TIMEOUT),
        ([finished("fpp"), finished("ppp")], Outcome.FLAKY),
        ([finished("fff"), finished("fff")], Outcome.BROKE_SUITE),
        # Nothing that an agent could mend a skipped or a vanished test by.
        ([finished("sp-"), finished("sp-")], Outcome.FLAKY),
    ],
)
def test_what_becomes_no_task(runs: list[SuiteRun], outcome: Outcome) -> None:
    assert judge(TESTS, runs) == Trial(outcome=outcome)


@given(
    st.lists(st.text("pfes-", min_size=4, max_size=4), min_size=1, max_size=3),
)
def test_lists_are_disjoint_and_hold_in_every_run(letters: list[str]) -> None:
    tests = ("a", "b", "c", "d")
    trial = judge(tests, [finished(text) for text in letters])
    assert not set(trial.fail_to_pass) & set(trial.pass_to_pass)
    for text in letters:
        for test, letter in zip(tests, text, strict=True):
            assert test not in trial.fail_to_pass or letter in "fe"
            assert test not in trial.pass_to_pass or letter == "p"
    assert (trial.outcome is Outcome.KEPT) == bool(trial.fail_to_pass and trial.pass_to_pass)


def test_the_limit_of_a_run_does_not_follow_the_suites_time_closely() -> None:
    assert {run_limit(suite_s, 60.0) for suite_s in (0.1, 0.3, 0.9, 2.5)} == {10.0}
    assert run_limit(2.6, 60.0) == 30.0
    assert run_limit(25.0, 60.0) == 60.0


# -- identity


def test_layout_does_not_change_a_fingerprint_and_all_else_does() -> None:
    def prints(source: str, path: str = "m.py") -> set[str]:
        places = find_places(source, kinds=("operator_change",))
        return {fingerprint_of(path, bug) for p in places if (bug := p.make())}

    one = prints("def f(a, b):\n    return a + b\n")
    assert one == prints("X = 1\n\ndef f(a, b):  # sum\n    return (a +\n            b)\n")
    assert len(one) == 2
    assert not one & prints("def f(a, b):\n    return b + a\n")
    assert not one & prints("def f(a, b):\n    return a + b\n", "n.py")


def test_behaviour_is_place_failing_tests_and_what_is_seen() -> None:
    candidate = Candidate("m.py", place_in("short"), TESTS)
    other = Candidate("m.py", place_in("long"), TESTS)
    trial = Trial(outcome=Outcome.KEPT, fail_to_pass=("t::one",))
    two = Trial(outcome=Outcome.KEPT, fail_to_pass=("t::one", "t::two"))
    known = behaviour_of(candidate, trial, "3")
    assert known == behaviour_of(candidate, trial, "3")
    others = {
        behaviour_of(other, trial, "3"),
        behaviour_of(candidate, two, "3"),
        behaviour_of(candidate, trial, "4"),
    }
    assert len(others | {known}) == 4


# -- selection


def test_functions_and_files_are_capped_and_stay_it() -> None:
    selection = Selection(count=9, per_function=1, per_file=2)
    short, long = (Candidate("m.py", place_in(name), TESTS) for name in ("short", "long"))
    elsewhere = Candidate("n.py", place_in("short"), TESTS)
    assert selection.keep(short, "1")
    assert selection.is_capped(short)
    assert not selection.is_capped(long)
    assert selection.keep(long, "2")
    third = Candidate("m.py", place_in("Counter.add"), TESTS)
    assert selection.is_capped(third)
    assert not selection.is_capped(elsewhere)


def test_the_same_behaviour_is_kept_once_and_not_again_beside_anothers_task() -> None:
    known = {"f": Known(ours=False, behaviour="theirs"), "g": Known(ours=True, behaviour="own")}
    selection = Selection(count=2, known=known)
    (candidate, *_) = candidates()
    assert not selection.keep(candidate, "theirs")
    selection.keep_known(candidate, "g")
    assert not selection.keep(candidate, "own")
    complete = [selection.complete]
    assert selection.keep(candidate, "new")
    assert [*complete, selection.complete] == [False, True]
    assert selection.outcomes == Counter({Outcome.KEPT: 2, Outcome.DUPLICATE: 2})
    assert sum(selection.kinds.values()) == 2


def test_tasks_that_are_there_count_whether_or_not_their_turn_comes() -> None:
    known = {str(n): Known(ours=True, behaviour=f"own {n}") for n in range(3)}
    selection = Selection(count=4, known={**known, "x": Known(ours=False, behaviour="theirs")})
    first, second, *_ = candidates()
    assert (selection.kept, selection.complete) == (3, False)
    selection.keep_known(first, "1")
    assert not selection.keep(second, "own 2")  # there already, under another bug
    assert (selection.kept, selection.complete) == (3, False)
    assert selection.keep(second, "new")
    assert (selection.kept, selection.complete) == (4, True)


def test_all_kinds_have_their_turn_early() -> None:
    order = [candidate.place.kind for candidate in in_turn(candidates(), seed="x")]
    assert set(order) <= set(KINDS)
    # Where a kind comes twice in a row, all others are used up.
    for n, (one, two) in enumerate(pairwise(order)):
        if one == two:
            assert set(order[n:]) == {one}
            break
