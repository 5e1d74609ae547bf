import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.verdict import GradeReason
from swe_eval.grading.prepare import (
    PreparedDiff,
    RefusedDiff,
    is_protected,
    prepare_diff,
    unexpected_paths,
)

LIMIT = 100_000


def change(path: str, old: str = "a\n", new: str = "b\n") -> bytes:
    body = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}"
    )
    return (f"diff --git a/{path} b/{path}\n" + "".join(body)).encode()


def new_file(path: str, mode: str = "100644") -> bytes:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
        "@@ -0,0 +1 @@\n+x = 1\n"
    ).encode()


def prepared(diff: bytes, **options: object) -> PreparedDiff:
    found = prepare_diff(diff, max_bytes=LIMIT, **options)  # type: ignore[arg-type]
    assert isinstance(found, PreparedDiff), found
    return found


def refused(diff: bytes, **options: object) -> RefusedDiff:
    found = prepare_diff(diff, **{"max_bytes": LIMIT, **options})  # type: ignore[arg-type]
    assert isinstance(found, RefusedDiff), found
    return found


def test_a_change_of_source_is_kept_byte_for_byte() -> None:
    diff = change("shop.py") + change("pkg/deep/util.py")
    found = prepared(diff)
    assert found.patch == diff
    assert found.paths == {"shop.py", "pkg/deep/util.py"}
    assert found.dropped == ()


def test_changes_of_tests_and_configuration_are_dropped_and_named() -> None:
    diff = change("shop.py") + new_file("conftest.py") + change("tests/helper.py")
    found = prepared(diff)
    assert found.patch == change("shop.py")
    assert found.dropped == ("conftest.py", "tests/helper.py")


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pkg/conftest.py",
        "pytest.ini",
        "setup.cfg",
        "tox.ini",
        "pyproject.toml",
        "test_shop.py",
        "shop_test.py",
        "tests/data.json",
        "pkg/test/data.json",
        "sitecustomize.py",
        "evil.pth",
        ".git/hooks/pre-commit",
        "pytest.toml",
        "bin/runtests.py",
        "shop/tests.py",
        "__pycache__/shop.cpython-311.pyc",
        "shop.pyc",
        "shop.egg-info/entry_points.txt",
        "lib/plug-1.dist-info/entry_points.txt",
    ],
)
def test_what_decides_how_tests_run_is_protected(path: str) -> None:
    assert is_protected(path)


@pytest.mark.parametrize(
    "path", ["shop.py", "contest.py", "latest.py", "protest/a.py", "src/app.py"]
)
def test_source_is_not_protected(path: str) -> None:
    assert not is_protected(path, is_new=True)


def test_the_hidden_tests_own_paths_are_protected_whatever_their_names() -> None:
    assert not is_protected("checks/run.py")
    assert is_protected("checks/run.py", hidden_tests=["checks/run.py"])


@pytest.mark.parametrize(
    "path",
    [
        "pytest.py",
        "unittest/__init__.py",
        "random.py",
        "_pytest/x.py",
        "random.cpython-311-x86_64-linux-gnu.so",
        "sitecustomize/__init__.py",
    ],
)
def test_a_new_module_that_shadows_the_library_is_protected_and_an_existing_one_is_not(
    path: str,
) -> None:
    assert is_protected(path, is_new=True)
    assert not is_protected(path, is_new=False)


def test_nothing_but_tests_is_a_reason_of_its_own() -> None:
    found = refused(change("tests/test_a.py") + change("conftest.py"))
    assert found.reason is GradeReason.ONLY_PROTECTED_FILES
    assert "conftest.py" in found.detail


def test_protection_can_be_switched_off_for_tasks_that_bring_their_own_tests() -> None:
    assert prepared(change("tests/test_a.py"), protect=False).dropped == ()


@pytest.mark.parametrize("diff", [b"", b"  \n\n"])
def test_an_empty_diff_is_refused(diff: bytes) -> None:
    assert refused(diff).reason is GradeReason.EMPTY_DIFF


def test_a_diff_over_the_limit_is_refused_and_one_at_it_is_not() -> None:
    diff = change("shop.py")
    assert refused(diff, max_bytes=len(diff) - 1).reason is GradeReason.DIFF_TOO_LARGE
    assert isinstance(prepare_diff(diff, max_bytes=len(diff)), PreparedDiff)


@pytest.mark.parametrize("diff", [b"hello", b"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"])
def test_what_is_not_gits_format_is_malformed(diff: bytes) -> None:
    assert refused(diff).reason is GradeReason.DIFF_MALFORMED


@pytest.mark.parametrize("path", ["../escape.py", "a/../../b.py", "/etc/passwd"])
def test_paths_outside_the_work_folder_refuse_the_whole_diff(path: str) -> None:
    assert refused(change("shop.py") + change(path)).reason is GradeReason.UNSAFE_PATH


@pytest.mark.parametrize("mode", ["120000", "160000"])
def test_links_and_submodules_are_refused(mode: str) -> None:
    assert refused(new_file("lib", mode)).reason is GradeReason.UNSAFE_PATH


def test_a_file_that_turns_into_a_link_is_refused() -> None:
    diff = b"diff --git a/x b/x\nold mode 100644\nnew mode 120000\nindex 1..2\n--- a/x\n+++ b/x\n"
    assert refused(diff).reason is GradeReason.UNSAFE_PATH


def test_deleting_a_link_is_allowed() -> None:
    diff = (
        b"diff --git a/x b/x\ndeleted file mode 120000\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-y\n"
    )
    assert prepared(diff).paths == {"x"}


def test_text_before_the_first_section_is_dropped() -> None:
    sneaky = b"--- a/conftest.py\n+++ b/conftest.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert prepared(sneaky + change("shop.py")).patch == change("shop.py")


def test_a_rename_into_a_protected_place_is_dropped() -> None:
    diff = (
        b"diff --git a/shop.py b/conftest.py\nsimilarity index 100%\n"
        b"rename from shop.py\nrename to conftest.py\n"
    )
    assert refused(diff).reason is GradeReason.ONLY_PROTECTED_FILES


@pytest.mark.parametrize("how", ["rename", "copy"])
def test_a_move_onto_a_name_of_the_library_is_dropped(how: str) -> None:
    diff = (
        b"diff --git a/shop.py b/random.py\nsimilarity index 100%%\n%s from shop.py\n"
        b"%s to random.py\n" % (how.encode(), how.encode())
    )
    assert refused(diff).reason is GradeReason.ONLY_PROTECTED_FILES


def test_quoted_paths_are_read_as_git_means_them() -> None:
    diff = (
        b'diff --git "a/tests/\\303\\244.py" "b/tests/\\303\\244.py"\n'
        b'--- "a/tests/\\303\\244.py"\n+++ "b/tests/\\303\\244.py"\n@@ -1 +1 @@\n-a\n+b\n'
    )
    assert prepared(diff + change("shop.py")).dropped == ("tests/ä.py",)


def test_a_binary_section_is_known_by_its_first_line() -> None:
    diff = b"diff --git a/my data b/my data\nindex 1..2 100644\nGIT binary patch\nliteral 0\n\n"
    assert prepared(diff).paths == {"my data"}


def test_a_first_line_with_two_names_and_no_other_is_malformed() -> None:
    diff = b"diff --git a/x b/y\nold mode 100644\nnew mode 100755\n"
    assert refused(diff).reason is GradeReason.DIFF_MALFORMED


def test_header_look_alikes_inside_a_hunk_name_no_file() -> None:
    diff = (
        b"diff --git a/x.sql b/x.sql\n--- a/x.sql\n+++ b/x.sql\n"
        b"@@ -1,2 +1,2 @@\n--- conftest.py\n-rename to conftest.py\n+++ tests/a.py\n+ok\n"
    )
    assert prepared(diff).paths == {"x.sql"}


def test_a_path_that_only_the_applying_side_saw_is_unexpected() -> None:
    found = prepared(change("shop.py"))
    assert unexpected_paths(["shop.py"], found) == []
    assert unexpected_paths(["shop.py", "conftest.py"], found) == ["conftest.py"]


@given(st.binary(max_size=300))
def test_any_bytes_give_a_defined_answer(data: bytes) -> None:
    for diff in (data, b"diff --git " + data, change("shop.py") + b"diff --git a" + data):
        found = prepare_diff(diff, max_bytes=LIMIT)
        assert isinstance(found, PreparedDiff | RefusedDiff)
