from swe_eval.core.decontaminate import (
    OverlapKind,
    TaskFacts,
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
