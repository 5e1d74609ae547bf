"""A patch turned round undoes what git made it of."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swe_eval.tasks.patches import MalformedPatchError, reverse_patch

Tree = dict[str, str]
TREES = st.dictionaries(
    st.sampled_from(["a.py", "b c.py", "d/e.py"]),
    st.lists(st.sampled_from(["x", "y", "", "-- z", "++ w", "@@ -1 +1 @@"]), max_size=6).map(
        "\n".join
    ),
    min_size=1,
)


def fill(folder: Path, tree: Tree) -> None:
    for path, text in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def read(folder: Path) -> Tree:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def git(folder: Path, *arguments: str, text: str = "") -> str:
    done = subprocess.run(
        ["git", "-c", "core.quotePath=false", *arguments],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1 if arguments[0] == "diff" else 0), done.stderr
    return done.stdout


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(before=TREES, after=TREES)
def test_the_reverse_of_a_patch_leads_back(
    tmp_path_factory: pytest.TempPathFactory, before: Tree, after: Tree
) -> None:
    root = tmp_path_factory.mktemp("patch")
    for name, tree in (("a", before), ("b", after)):
        (root / name).mkdir()
        fill(root / name, tree)
    patch = git(root, "diff", "--no-index", "--no-prefix", "--no-renames", "a", "b")
    fill(root / "work", after)
    if patch:
        git(root / "work", "apply", "--whitespace=nowarn", text=reverse_patch(patch))
        assert read(root / "work") == before
        assert reverse_patch(reverse_patch(patch)) == patch


def test_renames_and_modes_are_turned_round() -> None:
    patch = (
        "diff --git a/old.py b/new.py\nold mode 100644\nnew mode 100755\nsimilarity index 90%\n"
        "rename from old.py\nrename to new.py\nindex 1111111..2222222\n"
        "--- a/old.py\n+++ b/new.py\n@@ -1,2 +1 @@ def f():\n-a\n-b\n+c\n"
        "\\ No newline at end of file\n"
    )
    turned = reverse_patch(patch)
    assert turned == (
        "diff --git a/new.py b/old.py\nnew mode 100644\nold mode 100755\nsimilarity index 90%\n"
        "rename to old.py\nrename from new.py\nindex 2222222..1111111\n"
        "--- a/new.py\n+++ b/old.py\n@@ -1 +1,2 @@ def f():\n+a\n+b\n-c\n"
        "\\ No newline at end of file\n"
    )


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("@@ -1,2 +1 @@\n-a\n", "cut off"),
        ("@@ -1 +1 @@\n*a\n", "line 2"),
        ("@@ -1 +1 @@\n-a\n-b\n", "line 3"),
        ("diff --git a/x b/x\nGIT binary patch\nliteral 0\n", "line 2 can't be turned round"),
        ("diff --git a/x b/y\ncopy from x\ncopy to y\n", "copy from"),
    ],
)
def test_what_can_not_be_turned_round_is_refused(patch: str, words: str) -> None:
    with pytest.raises(MalformedPatchError, match=words):
        reverse_patch(patch)
