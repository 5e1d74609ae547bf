"""tools/affected.py decides what CI runs: too little is worse than too much."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from affected import affected, dependents, workspace_requirements

NEEDS = {"protos": set(), "kit": {"protos"}, "sandbox": {"kit"}, "eval": {"sandbox", "kit"}}


def test_dependents_are_found_through_several_steps() -> None:
    assert dependents(NEEDS)["protos"] == {"kit", "sandbox", "eval"}
    assert dependents(NEEDS)["eval"] == set()


def test_a_change_in_a_package_affects_it_and_what_needs_it() -> None:
    assert affected(["packages/sandbox/src/a.py"], NEEDS) == ["eval", "sandbox"]


def test_a_change_outside_packages_affects_everything() -> None:
    assert affected(["packages/eval/a.py", "uv.lock"], NEEDS) == sorted(NEEDS)


def test_documentation_alone_affects_nothing() -> None:
    assert affected(["docs/architecture.md", "README.md"], NEEDS) == []


def test_an_unknown_package_folder_affects_everything() -> None:
    assert affected(["packages/new/src/a.py"], NEEDS) == sorted(NEEDS)


def test_the_workspace_s_own_graph_has_no_cycle_and_ends_in_the_command() -> None:
    needs = workspace_requirements()
    assert "tailrace" in dependents(needs)["protos"]
    assert all(name not in dependents(needs)[name] for name in needs)
