import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.evaluation import Book, GroupScore, Plan, Progress, VersionTokens
from swe_eval.core.statistics import Interval


def plan(*tasks: str, attempts: int = 4) -> Plan:
    task_ids = tasks or ("a", "b", "c")
    return Plan(
        name="base",
        task_set="heldout",
        task_ids=task_ids,
        strata=tuple("even" if i % 2 == 0 else "odd" for i in range(len(task_ids))),
        stratified_by=("parity",),
        task_seed=0,
        attempts=attempts,
        version=7,
        temperature=1.0,
        top_p=1.0,
        sampling_seed=3,
        list_digest="sha256:x",
    )


def score(
    task_id: str, solved: int = 0, *, epoch: int = 0, problem: str = "", **more: object
) -> GroupScore:
    return GroupScore(
        task_id=task_id,
        epoch=epoch,
        solved=solved,
        valid=0 if problem else 4,
        outcomes={} if problem else {"SOLVED": solved, "UNSOLVED": 4 - solved},
        problem=problem,
        **more,  # type: ignore[arg-type]
    )


def taken(book: Book) -> list[tuple[str, int]]:
    found = []
    while (item := book.next_task()) is not None:
        found.append(item)
    return found


def test_every_task_is_assigned_once_in_order_and_scored() -> None:
    book = Book(plan(), retries=1)
    assert taken(book) == [("a", 0), ("b", 0), ("c", 0)]
    finished = []
    for task_id in ("c", "a", "b"):
        assert book.record(score(task_id, 1))
        finished.append(book.finished)
    assert finished == [False, False, True]
    assert book.progress == Progress(attempts_done=12, attempts_total=12, solved=3, faults=0)


def test_an_incomplete_group_comes_back_under_the_next_epoch_and_then_is_given_up() -> None:
    book = Book(plan("a"), retries=1)
    assert book.next_task() == ("a", 0)
    assert book.record(score("a", problem="GRADE: down", faults={"GRADE/DISK": 4}))
    assert book.next_task() == ("a", 1)
    assert book.record(score("a", epoch=1, problem="GRADE: still down", faults={"GRADE/DISK": 4}))
    assert book.finished
    report = book.report(wall_s=1.0)
    assert report.tasks == 0
    assert [(q.task_id, q.reason) for q in report.quarantined] == [("a", "GRADE: still down")]
    assert (report.faults, report.outcomes) == ({"GRADE/DISK": 8}, {"FAULT": 8})


def test_faults_are_reported_and_never_counted() -> None:
    book = Book(plan("a", "b"), retries=1)
    taken(book)
    book.record(score("a", problem="SANDBOX: gone", faults={"COMMAND/SANDBOX": 3}))
    book.record(score("b", 4, faults={"COMMAND/SANDBOX": 1, "GRADE/GRADER": 1}))
    book.record(score("a", 2, epoch=1))
    report = book.report(wall_s=2.0)
    assert report.pass_at_1 == pytest.approx((0.5 + 1.0) / 2)
    assert report.pass_at_k == 1.0
    assert report.outcomes == {"SOLVED": 6, "UNSOLVED": 2, "FAULT": 5}
    assert report.faults == {"COMMAND/SANDBOX": 4, "GRADE/GRADER": 1}
    assert [(s.task_id, s.solved, s.attempts) for s in report.by_task] == [
        ("a", 2, 4),
        ("b", 4, 4),
    ]
    assert report.quarantined == ()


def tokens(version: int, oldest: int = 0, count: int = 10) -> VersionTokens:
    return VersionTokens(version=version, oldest_kv_version=oldest or version, tokens=count)


def test_the_report_breaks_down_by_stratum_and_names_the_versions() -> None:
    book = Book(plan("a", "b", "c"), retries=0)
    taken(book)
    for task_id, solved, version in (("a", 4, 7), ("b", 1, 8), ("c", 0, 7)):
        book.record(score(task_id, solved, version_tokens=(tokens(version), tokens(8, 7))))
    report = book.report(wall_s=3.0)
    assert [(s.name, s.tasks, s.attempts, s.pass_rate) for s in report.strata] == [
        ("even", 2, 8, 0.5),
        ("odd", 1, 4, 0.25),
    ]
    assert report.strata[1].ci95 == Interval(low=0.0, high=1.0)
    assert report.versions == (7, 8)
    assert report.version_tokens == (tokens(7, 7, 20), tokens(8, 7, 30), tokens(8))
    assert (report.stratified_by, report.pinned_version) == (("parity",), 7)
    assert [p.k for p in report.pass_at] == [1, 2, 3, 4]
    assert report.pass_at_k == pytest.approx(2 / 3)
    assert all(p.ci95.low <= p.estimate <= p.ci95.high for p in report.pass_at)
    assert report.pass_at_1_ci95.low <= report.pass_at_1 <= report.pass_at_1_ci95.high
    assert (report.attempts, report.tasks, report.list_digest) == (4, 3, "sha256:x")


def test_a_lost_engines_task_is_assigned_again_and_whichever_result_comes_first_counts() -> None:
    book = Book(plan("a"), retries=0)
    assert book.next_task() == ("a", 0)
    book.release("a")
    assert book.next_task() == ("a", 1)
    assert book.record(score("a", 3, epoch=0))
    assert not book.record(score("a", 1, epoch=1))
    assert book.report(wall_s=0.0).by_task[0].solved == 3


def test_a_group_of_an_earlier_life_is_taken_up_and_not_assigned_again() -> None:
    book = Book(plan("a", "b"), retries=0)
    assert book.resume("a", 0)
    assert not book.resume("a", 0)
    assert not book.resume("z", 0)
    assert taken(book) == [("b", 0)]


def test_a_group_older_than_what_is_waiting_is_not_taken_up() -> None:
    book = Book(plan("a"), retries=1, scores=[score("a", problem="x")])
    assert not book.resume("a", 0)
    assert book.resume("a", 1)


def test_recorded_scores_are_not_assigned_again() -> None:
    book = Book(plan("a", "b"), retries=0, scores=[score("a", 2)])
    assert taken(book) == [("b", 0)]
    assert not book.record(score("a", 4))


def test_the_same_incomplete_group_delivered_twice_counts_once() -> None:
    book = Book(plan("a"), retries=1)
    book.next_task()
    assert book.record(score("a", problem="x"))
    assert not book.record(score("a", problem="x"))
    assert not book.finished


def test_plans_and_scores_survive_plain_values() -> None:
    assert Plan.from_json(plan().to_json()) == plan()
    one = score("a", 2, version_tokens=(tokens(1), tokens(2, 1)), faults={"GRADE/DISK": 1})
    assert GroupScore.from_json(one.to_json()) == one


def test_differences_name_the_setting_and_both_values() -> None:
    other = dataclasses.replace(plan(), attempts=8, version=9)
    assert plan().differences(other) == ["attempts is 4, not 8", "version is 7, not 9"]
    assert plan().differences(plan()) == []


actions = st.lists(
    st.tuples(
        st.sampled_from(["take", "score", "problem", "release", "resume"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(actions, st.integers(0, 2))
def test_whatever_happens_each_task_is_settled_at_most_once_and_none_is_lost(
    steps: list[tuple[str, str, int]], retries: int
) -> None:
    book = Book(plan(), retries=retries)
    for action, task_id, epoch in steps:
        wanted = book.wants(task_id)
        match action:
            case "take":
                book.next_task()
            case "score":
                assert book.record(score(task_id, 1, epoch=epoch)) == wanted
            case "problem":
                book.record(score(task_id, epoch=epoch, problem="x"))
            case "release":
                book.release(task_id)
            case "resume":
                book.resume(task_id, epoch)
        report = book.report(wall_s=0.0, resamples=10)
        settled = [s.task_id for s in report.by_task] + [q.task_id for q in report.quarantined]
        assert len(settled) == len(set(settled))
        assert {t for t in "abc" if not book.wants(t)} == set(settled)
        assert book.finished == (len(settled) == 3)
