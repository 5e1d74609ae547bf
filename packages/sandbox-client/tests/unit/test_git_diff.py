"""Diffs made here are applied by git, diffs made by git are applied here."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox_client.core.git_diff import Effort, FileState, file_diff, quote_path
from sandbox_client.core.patch import PatchError, apply_patch

Tree = dict[str, FileState]

lines = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\n", b"d\r\n", b"\n", b"-x\n", b"\\ y\n"]), max_size=14
)
contents = st.tuples(lines, st.sampled_from([b"", b"end", b"\0bin", b"\xff\xfe"])).map(
    lambda parts: b"".join(parts[0]) + parts[1]
)
modes = st.sampled_from(["100644", "100755"])
states = st.builds(FileState, contents, modes) | st.builds(
    FileState, st.sampled_from([b"x", b"d/y"]), st.just("120000")
)
trees = st.dictionaries(
    st.sampled_from(["x", "d/y", "d/z z", "tab\tname", 'quo"te', "ünï", "new\nline"]),
    states,
    max_size=4,
)


def diff_of(old: Tree, new: Tree) -> bytes:
    return b"".join(
        file_diff(path.encode(), old.get(path), new.get(path)) for path in sorted({*old, *new})
    )


def patched(old: Tree, patch: bytes) -> Tree:
    found = {**old, **apply_patch(patch, old.get)}
    return {path: state for path, state in found.items() if state is not None}


@given(trees, trees)
def test_a_diff_applied_to_the_old_tree_gives_the_new_one(old: Tree, new: Tree) -> None:
    assert patched(old, diff_of(old, new)) == new


@given(trees, trees, st.integers(0, 60))
def test_without_effort_a_diff_is_longer_and_still_right(old: Tree, new: Tree, steps: int) -> None:
    effort = Effort(steps)
    paths = sorted({*old, *new})
    diff = b"".join(file_diff(p.encode(), old.get(p), new.get(p), effort) for p in paths)
    assert patched(old, diff) == new


def test_repeated_lines_use_up_the_effort_and_no_more() -> None:
    """Every second line is the same: a comparison to the end takes the cube of their number."""
    old = FileState(b"".join(b"old %d\n\n" % n for n in range(300)))
    new = FileState(b"".join(b"new %d\n\n" % n for n in range(300)))
    effort = Effort(100_000)
    assert file_diff(b"x", old, new, effort).count(b"\n@@") == 1
    assert -100_000 < effort.steps < 0
    # Spent once, it is spent for the files that follow.
    assert file_diff(b"y", FileState(b"a\nb\nc\nd\n"), FileState(b"b\nx\n"), effort).count(b"-") > 2
    much = Effort(100_000_000)
    assert file_diff(b"x", old, new, much).count(b"\n \n") == 300
    assert much.steps < 95_000_000


@given(trees)
def test_equal_trees_have_an_empty_diff(tree: Tree) -> None:
    assert diff_of(tree, dict(tree)) == b""


def lay_out(tree: Tree, folder: Path) -> None:
    for path, state in tree.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if state.mode == "120000":
            target.symlink_to(state.content.decode())
        else:
            target.write_bytes(state.content)
            target.chmod(0o755 if state.mode == "100755" else 0o644)


def take_in(folder: Path) -> Tree:
    tree = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] == ".git":
            continue
        if path.is_symlink():
            tree[name] = FileState(str(path.readlink()).encode(), "120000")
        elif path.is_file():
            executable = path.stat().st_mode & 0o100
            tree[name] = FileState(path.read_bytes(), "100755" if executable else "100644")
    return tree


def git(folder: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(
        ["git", "-c", "core.fileMode=true", "-c", "core.autocrlf=false", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        env={
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin:/usr/local/bin",
            "GIT_CONFIG_NOSYSTEM": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


real_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@real_git
@few
@given(old=trees, new=trees)
def test_git_applies_our_diffs(tmp_path: Path, old: Tree, new: Tree) -> None:
    folder = tmp_path / "tree"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lay_out(old, folder)
    patch = diff_of(old, new)
    if patch:
        git(folder, "apply", "--whitespace=nowarn", "-", stdin=patch)
    assert take_in(folder) == new


@real_git
@few
@given(old=trees, new=trees)
def test_we_apply_gits_diffs(tmp_path: Path, old: Tree, new: Tree) -> None:
    folder = tmp_path / "tree"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lay_out(old, folder)
    git(folder, "init", "-q")
    git(folder, "add", "-A", "-f")
    git(
        folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "old", "--allow-empty"
    )
    for path in old:
        (folder / path).unlink()
    lay_out(new, folder)
    git(folder, "add", "-A", "-f")
    patch = git(folder, "diff", "--cached", "--binary", "-M", "-C", "HEAD")
    assert patched(old, patch) == new


def test_an_unchanged_file_shifted_by_other_lines_still_takes_its_hunk() -> None:
    old = {"f": FileState(b"".join(b"%d\n" % n for n in range(40)))}
    new = {"f": FileState(old["f"].content.replace(b"20\n", b"twenty\n"))}
    shifted = {"f": FileState(b"first\nsecond\n" + old["f"].content)}
    result = patched(shifted, diff_of(old, new))
    assert result["f"].content == b"first\nsecond\n" + new["f"].content


def moved(kind: str, old: str, new: str) -> bytes:
    header = f"diff --git a/{old} b/{new}\nsimilarity index 100%\n"
    return f"{header}{kind} from {old}\n{kind} to {new}\n".encode()


def test_renames_and_copies_speak_of_the_state_before_the_whole_diff() -> None:
    tree = {"a": FileState(b"A"), "b": FileState(b"B")}
    swap = moved("rename", "a", "b") + moved("rename", "b", "a")
    assert patched(tree, swap) == {"a": FileState(b"B"), "b": FileState(b"A")}
    change = file_diff(b"a", tree["a"], FileState(b"C\n"))
    copied = {"a": FileState(b"C\n"), "b": FileState(b"B"), "c": FileState(b"A")}
    assert patched(tree, change + moved("copy", "a", "c")) == copied
    assert patched(tree, moved("copy", "a", "c") + change) == copied
    with pytest.raises(PatchError, match="exists already"):
        apply_patch(moved("copy", "a", "b"), tree.get)


def test_later_changes_of_one_file_build_on_earlier_ones() -> None:
    first = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n"
    second = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-2\n+3\n"
    assert patched({"f": FileState(b"1\n")}, first + second) == {"f": FileState(b"3\n")}
    made = b"--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+1\n"
    unmade = b"--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n"
    assert apply_patch(made + unmade, lambda path: None) == {}


@pytest.mark.parametrize(
    ("files", "patch"),
    [
        ({}, b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"),
        ({"f": b"x\n"}, b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"),
        ({"f": b"a\n"}, b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+b\n"),
        ({"f": b"a\nb\n"}, b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"),
        ({"f": b"a\n"}, b"--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n"),
        ({"f": b"a\n"}, b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n*a\n"),
        ({}, b"--- /dev/null\n+++ b/../f\n@@ -0,0 +1 @@\n+b\n"),
        ({}, b"--- /dev/null\n+++ b//etc/passwd\n@@ -0,0 +1 @@\n+b\n"),
        ({}, b"--- /dev/null\n+++ b/.git/hooks/pre-commit\n@@ -0,0 +1 @@\n+b\n"),
        ({"f": b"\0"}, b"diff --git a/f b/f\nindex 1..2 100644\nBinary files a/f and b/f differ\n"),
        ({"f": b"a"}, b"diff --git a/f b/f\nGIT binary patch\nliteral 9999999999\nAzzzzzz\n\n"),
        ({"f": b"a"}, b"diff --git a/f b/f\nGIT binary patch\ndelta 3\nKc\n\n"),
        ({"f": b"a\n"}, b'diff --git "a/f b/f\nold mode 100644\nnew mode 100755\n'),
    ],
)
def test_a_diff_that_does_not_fit_is_rejected(files: dict[str, bytes], patch: bytes) -> None:
    tree = {name: FileState(content) for name, content in files.items()}
    with pytest.raises(PatchError):
        apply_patch(patch, tree.get)


@given(st.binary(max_size=300))
def test_nonsense_is_rejected_or_ignored_but_never_crashes(noise: bytes) -> None:
    base = {"f": FileState(b"a\nb\nc\n")}
    valid = file_diff(b"f", base["f"], FileState(b"a\nB\nc\n"))
    for patch in (noise, valid[:40] + noise, b"diff --git a/f b/f\nGIT binary patch\n" + noise):
        try:
            apply_patch(patch, base.get)
        except PatchError:
            continue


def test_a_small_binary_part_cannot_unpack_into_a_flood() -> None:
    import base64
    import zlib

    packed = zlib.compress(bytes(1 << 20))
    rows = b"".join(
        bytes([ord("A") + len(packed[i : i + 26]) - 1])
        + base64.b85encode(packed[i : i + 26], pad=True)
        + b"\n"
        for i in range(0, len(packed), 26)
    )
    patch = (
        b"diff --git a/f b/f\nnew file mode 100644\nGIT binary patch\nliteral 10\n" + rows + b"\n"
    )
    with pytest.raises(PatchError, match="announced were 10"):
        apply_patch(patch, lambda path: None)


def test_a_large_rewrite_is_fast_and_still_right() -> None:
    old = FileState(b"".join(b"old %d\n" % n for n in range(5000)))
    new = FileState(b"".join(b"new %d\n" % n for n in range(5000)))
    patch = file_diff(b"f", old, new)
    assert patched({"f": old}, patch) == {"f": new}


def test_only_odd_paths_are_quoted() -> None:
    assert quote_path(b"a/b c.py") == b"a/b c.py"
    assert quote_path("a/ü".encode()) == b'"a/\\303\\274"'
