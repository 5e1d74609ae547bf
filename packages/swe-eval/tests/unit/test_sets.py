from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_client.environments import EnvironmentTree
from swe_eval.config import DecontaminationConfig, EvalConfig, GeneratedSetConfig, HarborSetConfig
from swe_eval.core.decontaminate import TaskFacts, defined_functions, overlaps
from swe_eval.core.selftest import Decision, Finding, Flaw, Outcome
from swe_eval.errors import TaskSetError
from swe_eval.generate import make_task, to_harbor
from swe_eval.grading.identity import judge_digest
from swe_eval.tasks.digest import task_digest
from swe_eval.tasks.selftest_file import Record, SelfTestFile
from swe_eval.tasks.sets import Catalog, GeneratedSet, ReadSet, TaskSet, open_task_sets
from swe_eval.tasks.task import Environment, Task, TestGrader, TestRunner, TreeFile

SAMPLES = Path(__file__).parent.parent / "data" / "harbor"


def generated(**settings: object) -> GeneratedSet:
    return GeneratedSet(GeneratedSetConfig(name="train", count=30, **settings))  # type: ignore[arg-type]


def test_generated_tasks_are_listed_and_found_by_id() -> None:
    task_set = generated()
    refs = task_set.refs(10, 5)
    assert [ref.task_id for ref in refs] == [make_task("train", i).task_id for i in range(10, 15)]
    task = task_set.find(refs[0].task_id)
    assert task is not None
    made = make_task("train", 10)
    assert (task.repository, task.kind) == (refs[0].repository, refs[0].kind)
    assert isinstance(task.grader, TestGrader)
    assert task.grader.runner is TestRunner.FUNCTIONS
    assert task.grader.fail_to_pass == made.fail_to_pass
    assert task.reference is not None
    assert task.reference.patch == made.gold_patch.encode()


def test_listing_ends_with_the_set() -> None:
    assert len(generated().refs(28, 100)) == 2
    assert generated().refs(30, 100) == []


def test_ids_outside_the_set_are_not_found() -> None:
    task_set = generated()
    inside = make_task("train", 29).task_id
    assert task_set.find(inside) is not None
    for stranger in (
        make_task("train", 30).task_id,
        make_task("heldout", 3).task_id,
        inside.rpartition("-")[0],
        "train-00003-no-such-kind",
        "org/task",
        "",
    ):
        assert task_set.find(stranger) is None


def test_another_seed_or_first_number_gives_other_tasks() -> None:
    ids = {ref.task_id for ref in generated().refs(0, 30)}
    assert ids.isdisjoint(ref.task_id for ref in generated(seed=1).refs(0, 30))
    assert [r.task_id for r in generated(first=5).refs(0, 1)] == [make_task("train", 5).task_id]


def test_tasks_beyond_the_cache_are_made_again_the_same() -> None:
    task_set = generated(cached_tasks=2)
    ids = [ref.task_id for ref in task_set.refs(0, 5)]
    first = [task_set.find(i) for i in ids]
    again = [task_set.find(i) for i in ids]
    assert [t.environment.digest for t in first if t] == [t.environment.digest for t in again if t]


def test_the_digest_is_the_sandbox_services_own() -> None:
    task = generated().find(make_task("train", 0).task_id)
    assert task is not None
    made = make_task("train", 0)
    tree = EnvironmentTree(
        {path: text.encode() for path, text in reversed(list(made.files.items()))}
    )
    assert task.environment.digest == tree.digest


def test_environments_are_found_by_digest_once_their_task_was_asked_for() -> None:
    catalog = Catalog([generated(cached_tasks=1)])
    first, second = (make_task("train", i).task_id for i in (0, 9))
    task = catalog.find(first)
    assert task is not None
    assert catalog.environment("0" * 64) is None
    catalog.find(second)  # pushes the first one out of the cache
    again = catalog.environment(task.environment.digest)
    assert again is not None
    assert again.tar() == task.environment.tar()


def test_the_tar_depends_on_nothing_but_the_files() -> None:
    files = {"b/x.sh": TreeFile(b"x", executable=True), "a.py": TreeFile("ü".encode())}
    packed = Environment(files=files).tar()
    assert packed == Environment(files=dict(reversed(files.items()))).tar()
    assert packed != Environment(files={**files, "b/x.sh": TreeFile(b"x")}).tar()


def test_malformed_harbor_tasks_are_problems_and_never_stop_the_others() -> None:
    task_set = ReadSet(HarborSetConfig(name="samples", path=SAMPLES))
    assert [ref.task_id for ref in task_set.refs(0, 100)] == [
        "harbor/hello-alpine",
        "harbor/hello-skills",
        "harbor/hello-workdir",
        "harbor/hello-world",
        "harbor/verifier-mode-shared-default",
    ]
    assert {problem.task for problem in task_set.problems} == {
        "hello-healthcheck",
        "hello-multi-step-simple",
        "hello-user",
        "separate-verifier-environment",
    }


def test_strata_can_be_made_of_a_harbor_tasks_metadata() -> None:
    task_set = ReadSet(HarborSetConfig(name="samples", path=SAMPLES))
    columns = {ref.task_id: ref.columns for ref in task_set.refs(0, len(task_set))}
    found = columns["harbor/hello-world"]
    assert {name: found[name] for name in ("repository", "difficulty", "author_name")} == {
        "repository": "hello-world",
        "difficulty": "easy",
        "author_name": "Alex Shaw",
    }
    assert "tags" not in found, "a list is no stratum"


def test_a_name_taken_twice_is_a_problem_of_the_second_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        for path in (SAMPLES / "hello-world").rglob("*"):
            target = folder / path.relative_to(SAMPLES / "hello-world")
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                target.write_bytes(path.read_bytes())
    task_set = ReadSet(HarborSetConfig(name="twins", path=tmp_path))
    assert len(task_set) == 1
    assert [(p.task, p.field) for p in task_set.problems] == [("two", "task.name")]


@pytest.mark.parametrize("make", [lambda p: p / "absent", lambda p: p])
def test_a_folder_without_tasks_is_an_error_of_the_set(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TaskSetError, match="task set 'x'"):
        ReadSet(HarborSetConfig(name="x", path=make(tmp_path)))


def test_a_folder_of_broken_tasks_alone_is_an_error_that_says_what_is_wrong(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text("version = \n")
    with pytest.raises(TaskSetError, match=r"none of the 1 tasks .*broken/task\.toml"):
        ReadSet(HarborSetConfig(name="x", path=tmp_path))


def test_several_sets_form_a_catalog() -> None:
    catalog = open_task_sets(
        [
            GeneratedSetConfig(name="train", count=3),
            GeneratedSetConfig(name="heldout", split="heldout", count=3),
            HarborSetConfig(name="samples", path=SAMPLES),
        ]
    )
    assert [s.name for s in catalog.task_sets] == ["train", "heldout", "samples"]
    assert catalog.find("harbor/hello-world") is not None
    assert catalog.find(make_task("heldout", 2).task_id) is not None
    assert catalog.find("nope") is None
    assert catalog.task_set("nope") is None


def test_names_of_sets_are_plain_and_unique() -> None:
    with pytest.raises(ValueError, match="unique"):
        EvalConfig(task_sets=[GeneratedSetConfig(name="a"), GeneratedSetConfig(name="a")])
    with pytest.raises(ValueError, match="use a-z"):
        EvalConfig(task_sets=[GeneratedSetConfig(name="A B")])


def test_the_default_sets_share_no_repository_and_no_function() -> None:
    def facts(task_set: GeneratedSet, count: int) -> list[TaskFacts]:
        found: list[Task] = []
        for ref in task_set.refs(0, count):
            task = task_set.find(ref.task_id)
            assert task is not None
            found.append(task)
        return [
            TaskFacts(
                task_id=task.task_id,
                repository=task.repository,
                functions=defined_functions(
                    {
                        path: file.content.decode()
                        for path, file in task.environment.files.items()
                        if not path.startswith("test_")
                    }
                ),
            )
            for task in found
        ]

    train, heldout = (GeneratedSet(c) for c in EvalConfig().task_sets)  # type: ignore[arg-type]
    assert overlaps(facts(train, 150), facts(heldout, 60)) == []
    assert overlaps(facts(train, 3), facts(train, 3)) != []


@pytest.fixture
def two_sets(tmp_path: Path) -> Callable[..., EvalConfig]:
    """Harbor sets `mine`, of three tasks, and `verified` with the first of them."""
    for name, numbers in (("mine", (0, 60, 61)), ("verified", (0,))):
        for number in numbers:
            to_harbor(make_task("train", number), tmp_path / name)

    def config(**settings: Any) -> EvalConfig:
        return EvalConfig(
            task_sets=[
                HarborSetConfig(name=name, path=tmp_path / name) for name in ("mine", "verified")
            ],
            decontamination=DecontaminationConfig(evaluation_sets=("verified",), **settings),
        )

    return config


def opened(config: EvalConfig) -> dict[str, int]:
    catalog = open_task_sets(config.task_sets, config.decontamination)
    return {task_set.name: len(task_set) for task_set in catalog.task_sets}


def test_a_set_that_shares_a_task_with_an_evaluation_set_is_refused_and_says_which(
    two_sets: Callable[..., EvalConfig],
) -> None:
    shared = make_task("train", 0).task_id
    with pytest.raises(TaskSetError, match=f"{shared}.*{shared} share.*on_overlap"):
        opened(two_sets())


def test_shared_tasks_are_left_out_or_kept_if_that_is_asked_for(
    two_sets: Callable[..., EvalConfig], caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(two_sets(on_overlap="leave_out")) == {"mine": 2, "verified": 1}
    assert opened(two_sets(on_overlap="allow")) == {"mine": 3, "verified": 1}
    assert caplog.text.count("is contaminated") >= 2


def test_nothing_is_compared_without_an_evaluation_set_and_unknown_names_are_refused(
    two_sets: Callable[..., EvalConfig],
) -> None:
    config = two_sets()
    assert len(open_task_sets(config.task_sets).task_sets) == 2
    with pytest.raises(ValueError, match="names \\['verifyed'\\]"):
        EvalConfig(decontamination=DecontaminationConfig(evaluation_sets=("verifyed",)))


# -- quarantine


def quarantined(
    path: Path, *found: tuple[Task, str], outcome: Outcome | None = None, judge: str = ""
) -> None:
    """A self-test's file in which these tasks, by these digests, are quarantined."""
    file = SelfTestFile(path)
    for task, digest in found:
        decision = Decision(
            outcome=outcome or Outcome.QUARANTINED,
            findings=(Finding(flaw=Flaw.FLAKY, detail="flipped"),),
        )
        made_by = judge or judge_digest()
        file.add(
            Record(task_id=task.task_id, digest=digest, repeat=2, decision=decision, judge=made_by)
        )
    file.close()


@pytest.fixture
def harbor_set(tmp_path: Path) -> HarborSetConfig:
    for number in range(3):
        to_harbor(make_task("train", number), tmp_path / "tasks")
    return HarborSetConfig(
        name="mine", path=tmp_path / "tasks", quarantine=tmp_path / "selftest.jsonl"
    )


def generated_set(tmp_path: Path) -> GeneratedSetConfig:
    return GeneratedSetConfig(name="mine", count=3, quarantine=tmp_path / "selftest.jsonl")


def open_sets(config: HarborSetConfig | GeneratedSetConfig, **changes: Any) -> TaskSet:
    (task_set,) = open_task_sets([config.model_copy(update=changes)]).task_sets
    return task_set


@pytest.mark.parametrize("kind", ["harbor", "generated"])
def test_quarantined_tasks_are_not_served(
    tmp_path: Path, harbor_set: HarborSetConfig, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = harbor_set if kind == "harbor" else generated_set(tmp_path)
    tasks = open_sets(config, quarantine=None)
    ids = [ref.task_id for ref in tasks.refs(0, 3)]
    second = tasks.find(ids[1])
    assert second is not None
    stranger = replace(second, task_id="of-another-set")
    quarantined(tmp_path / "selftest.jsonl", (second, task_digest(second)), (stranger, ""))
    left = open_sets(config)
    assert len(left) == 2
    assert [ref.task_id for ref in left.refs(0, 9)] == [ids[0], ids[2]]
    assert [ref.task_id for ref in left.refs(1, 9)] == [ids[2]]
    assert [left.find(name) is None for name in ids] == [False, True, False]
    assert f"leaves out {ids[1]}: flaky: flipped" in caplog.text


def test_a_task_that_has_changed_since_is_served_and_reported(
    tmp_path: Path, harbor_set: HarborSetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = open_sets(harbor_set, quarantine=None)
    first = tasks.find(tasks.refs(0, 1)[0].task_id)
    assert first is not None
    quarantined(tmp_path / "selftest.jsonl", (first, "another"))
    assert len(open_sets(harbor_set)) == 3
    assert f"{first.task_id} or its limits have changed" in caplog.text


def test_what_another_grader_quarantined_stays_out_and_is_reported(
    tmp_path: Path, harbor_set: HarborSetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = open_sets(harbor_set, quarantine=None)
    first = tasks.find(tasks.refs(0, 1)[0].task_id)
    assert first is not None
    quarantined(tmp_path / "selftest.jsonl", (first, task_digest(first)), judge="another")
    assert len(open_sets(harbor_set)) == 2
    assert "1 of these were quarantined by another version of the grader" in caplog.text
    caplog.clear()
    quarantined(tmp_path / "selftest.jsonl", (first, task_digest(first)))
    assert len(open_sets(harbor_set)) == 2
    assert "another version" not in caplog.text


@pytest.mark.parametrize("outcome", [Outcome.KEPT, Outcome.FAULT])
def test_only_quarantined_tasks_are_left_out(
    tmp_path: Path, harbor_set: HarborSetConfig, outcome: Outcome
) -> None:
    tasks = open_sets(harbor_set, quarantine=None)
    first = tasks.find(tasks.refs(0, 1)[0].task_id)
    assert first is not None
    quarantined(tmp_path / "selftest.jsonl", (first, task_digest(first)), outcome=outcome)
    assert len(open_sets(harbor_set)) == 3


def test_a_quarantine_that_is_absent_or_of_everything_is_an_error_of_the_set(
    tmp_path: Path, harbor_set: HarborSetConfig
) -> None:
    with pytest.raises(TaskSetError, match=r"'mine', quarantine: .*selftest\.jsonl: No such file"):
        open_sets(harbor_set)
    tasks = open_sets(harbor_set, quarantine=None)
    all_of_them = [tasks.find(ref.task_id) for ref in tasks.refs(0, 3)]
    found = [(task, task_digest(task)) for task in all_of_them if task]
    quarantined(tmp_path / "selftest.jsonl", *found)
    with pytest.raises(TaskSetError, match="quarantines every task"):
        open_sets(harbor_set)
