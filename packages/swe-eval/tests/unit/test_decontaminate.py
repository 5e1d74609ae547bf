import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.decontaminate import (
    OverlapKind,
    TaskFacts,
    contamination,
    defined_functions,
    overlaps,
    repository_key,
)


def facts(task_id: str, repository: str, *functions: str) -> TaskFacts:
    return TaskFacts(task_id=task_id, repository=repository, functions=frozenset(functions))


def test_disjoint_splits_have_no_overlap() -> None:
    assert overlaps([facts("a", "shop", "add_pen")], [facts("b", "farm", "count_hen")]) == []


def test_a_shared_repository_and_a_shared_function_are_both_named_with_witnesses() -> None:
    found = overlaps(
        [facts("a", "Shop", "add_pen"), facts("c", "zoo", "feed_cat")],
        [facts("b", "shop.git", "count_hen"), facts("d", "farm", "feed_cat")],
    )
    assert [(o.kind, o.name, o.training_task, o.heldout_task) for o in found] == [
        (OverlapKind.FUNCTION, "feed_cat", "c", "d"),
        (OverlapKind.REPOSITORY, "shop", "a", "b"),
    ]


def test_a_mirror_pinned_to_a_commit_is_the_same_repository() -> None:
    assert repository_key("pallets__Flask.bc098406") == repository_key("pallets/flask")
    assert repository_key("pallets/flask.git") == repository_key("pallets/flask")


@pytest.mark.parametrize(
    "name",
    [
        "Pallets/Flask",
        "https://github.com/pallets/flask.git",
        "git@github.com:pallets/flask.git",
        "swesmith/pallets__flask.bc098406",
        "pallets/flask/",
    ],
)
def test_every_way_to_write_a_repository_is_one_key(name: str) -> None:
    assert repository_key(name) == "pallets/flask"


def test_functions_methods_and_classes_count_but_tests_and_dunders_do_not() -> None:
    found = defined_functions(
        {
            "a.py": "class Box:\n    def __init__(self): ...\n    async def open_it(self): ...\n",
            "test_a.py": "def test_open(): ...\ndef helper_one(): ...\nclass TestBox: ...\n",
            "broken.py": "def (:",
            "readme.md": "def not_code(): ...",
        }
    )
    assert found == {"Box", "open_it", "helper_one"}


ISSUE = (
    "Calling the parser with an empty list of arguments raises an IndexError instead of printing "
    "the usage. Steps: make a parser, call parse with nothing, and look at the traceback it gives."
)
PATCH = """\
diff --git a/parser.py b/parser.py
--- a/parser.py
+++ b/parser.py
@@ -10,3 +10,5 @@ def parse(arguments):
     found = {}
-    first = arguments[0]
+    if not arguments:
+        return usage(program_name)
+    first = arguments[0].strip()
     return found
"""
HELDOUT = TaskFacts(
    task_id="h", repository="tools/parser", text=ISSUE, patch=PATCH, first_commit="ab12"
)


def kinds(training: TaskFacts, **options: object) -> list[OverlapKind]:
    found = contamination([training], [HELDOUT], **options)  # type: ignore[arg-type]
    assert all((o.training_task, o.heldout_task) == (training.task_id, "h") for o in found)
    return [o.kind for o in found]


def test_a_task_of_its_own_is_clean() -> None:
    other = TaskFacts(
        task_id="t",
        repository="farm/hens",
        text="Hens are counted twice when the gate is open at night, which they should not be.",
        patch=PATCH.replace("arguments", "hens").replace("usage(program_name)", "count(gate)"),
        first_commit="cd34",
    )
    assert kinds(other) == []


def test_a_mirror_and_a_fork_of_a_repository_are_found_by_name() -> None:
    mirror = TaskFacts(task_id="t", repository="swesmith/tools__parser.0123abcd")
    assert kinds(mirror) == [OverlapKind.REPOSITORY]
    assert kinds(TaskFacts(task_id="t", repository="me/parser")) == [OverlapKind.FORK]


def test_a_renamed_repository_is_found_by_its_alias_or_its_first_commit() -> None:
    renamed = TaskFacts(task_id="t", repository="tools/argv")
    assert kinds(renamed) == []
    assert kinds(renamed, aliases={"tools/argv": "Tools/Parser"}) == [OverlapKind.REPOSITORY]
    same = TaskFacts(task_id="t", repository="tools/argv", first_commit="AB12")
    assert kinds(same) == [OverlapKind.FIRST_COMMIT]


def test_unknown_first_commits_are_not_equal() -> None:
    assert (
        contamination(
            [TaskFacts(task_id="t", repository="a/b")], [TaskFacts(task_id="h", repository="c/d")]
        )
        == []
    )


def test_a_text_with_other_words_around_it_is_nearly_equal() -> None:
    text = "Hello! " + ISSUE.replace("Steps", "How to see it").upper() + " Thank you very much."
    assert kinds(TaskFacts(task_id="t", repository="x/y", text=text)) == [OverlapKind.TEXT]


def test_a_few_common_words_are_no_copy() -> None:
    text = ISSUE[:60]
    assert kinds(TaskFacts(task_id="t", repository="x/y", text=text)) == []


def test_a_patch_is_known_in_another_file_with_other_spaces_and_reversed() -> None:
    moved = (
        PATCH.replace("parser.py", "lib/argv.py").replace("    ", "\t").replace("@@ -10", "@@ -9")
    )
    assert kinds(TaskFacts(task_id="t", repository="x/y", patch=moved)) == [OverlapKind.PATCH]
    swapped = str.maketrans("+-", "-+")
    back = "\n".join(line[:1].translate(swapped) + line[1:] for line in PATCH.split("\n")[3:])
    assert kinds(TaskFacts(task_id="t", repository="x/y", patch=back)) == [OverlapKind.PATCH]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text("xy \n+-", max_size=60)), max_size=5))
def test_a_set_that_is_held_out_itself_is_contaminated_through_and_through(
    drawn: list[tuple[str, str]],
) -> None:
    tasks = [
        TaskFacts(task_id=f"{i}", repository=f"o/{name}", text=text, patch=text)
        for i, (name, text) in enumerate(drawn)
    ]
    found = {overlap.training_task for overlap in contamination(tasks, tasks)}
    assert found == {task.task_id for task in tasks}
