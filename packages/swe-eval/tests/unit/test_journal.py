import dataclasses
import errno
import os
from pathlib import Path

import pytest
from service_kit.errors import AlreadyExists, DataLoss, InvalidArgument, Reason, ServiceError
from swe_eval.core.evaluation import GroupScore, Plan, VersionTokens
from swe_eval.journal import Journal, check_name

PLAN = Plan(
    name="base",
    task_set="heldout",
    task_ids=("a", "b"),
    strata=("x", "y"),
    stratified_by=("kind",),
    task_seed=0,
    attempts=4,
    version=1,
    temperature=1.0,
    top_p=1.0,
    sampling_seed=0,
    list_digest="sha256:0",
)
SCORE = GroupScore(
    task_id="a",
    epoch=0,
    solved=1,
    valid=4,
    outcomes={"SOLVED": 1},
    version_tokens=(VersionTokens(version=1, oldest_kv_version=1, tokens=9),),
)


def opened(folder: Path, plan: Plan = PLAN) -> Journal:
    return Journal.open(folder, plan, new_identity=lambda: "id")


def test_scores_survive_and_each_life_has_a_higher_number(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert (first.life, first.scores, first.cursors) == (1, [], {})
    first.append(SCORE, target="e1", cursor=5, elapsed_s=2.0)
    other = dataclasses.replace(SCORE, task_id="b")
    first.append(other, target="e2", cursor=3, elapsed_s=3.5)
    first.close()
    second = opened(tmp_path)
    assert (second.life, second.identity) == (2, "id")
    assert second.delivered == [(SCORE, "e1"), (other, "e2")]
    assert second.cursors == {"e1": 5, "e2": 3}
    assert second.spent_s == 3.5
    second.close()
    third = opened(tmp_path)
    assert (third.life, third.spent_s) == (3, 3.5)
    third.close()


def test_two_journals_have_identities_of_their_own(tmp_path: Path) -> None:
    made = [Journal.open(tmp_path / str(i), PLAN) for i in range(2)]
    for journal in made:
        journal.close()
    assert made[0].identity != made[1].identity


def test_a_last_line_cut_off_by_a_crash_never_counted(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append(SCORE, target="e1", cursor=5, elapsed_s=1.0)
    journal.close()
    path = tmp_path / "base.jsonl"
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole + whole.splitlines(keepends=True)[-1][:-cut])
        again = opened(tmp_path)
        again.append(dataclasses.replace(SCORE, task_id="b"), target="e1", cursor=6, elapsed_s=1)
        again.close()
        last = opened(tmp_path)
        last.close()
        assert [s.task_id for s in last.scores] == ["a", "b"]


def test_a_line_in_the_middle_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.close()
    path = tmp_path / "base.jsonl"
    path.write_bytes(path.read_bytes() + b'{"score": {}}\n')
    with pytest.raises(DataLoss, match="line 3"):
        opened(tmp_path)


def test_a_name_stands_for_one_plan(tmp_path: Path) -> None:
    opened(tmp_path).close()
    other = dataclasses.replace(PLAN, version=2, list_digest="sha256:1")
    with pytest.raises(AlreadyExists, match="version is 1, not 2"):
        opened(tmp_path, other)


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a" * 101, "ü"])
def test_names_that_are_no_plain_file_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_name(name)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ServiceError, match="No space left") as caught:
        journal.append(SCORE, target="e", cursor=1, elapsed_s=0.0)
    monkeypatch.undo()
    assert caught.value.reason is Reason.DISK_FULL
    journal.close()
