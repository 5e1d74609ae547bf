"""What the back-end `e2b` decides by itself: errors, recipes, pacing, changes; and E2B's errors."""

from dataclasses import replace

import httpx
import pytest
from e2b import CommandExitException
from e2b.exceptions import (
    AuthenticationException,
    BuildException,
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxUnreachableException,
    ServiceBusyException,
    TimeoutException,
)
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client import (
    EnvironmentUnknown,
    IdempotencyConflict,
    InjectedFault,
    QuotaExhausted,
    SandboxGone,
    SandboxUnavailable,
    ServiceError,
    TooLarge,
    WrongRequest,
    is_infrastructure,
)
from sandbox_client.backends.e2b.errors import sdk_errors, translated
from sandbox_client.backends.e2b.pacing import CreatePacer
from sandbox_client.backends.e2b.recipe import Recipe, template_size
from sandbox_client.backends.e2b.tree_changes import entries_from_manifest, tree_changes
from sandbox_client.core.trees import TreeEntry
from sandbox_client.e2b_api.errors import api_error, envd_error

MIB = 1 << 20
RATE_LIMIT: Exception = RateLimitException("x")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("theirs", "ours", "retryable", "infrastructure"),
    [
        (SandboxNotRunningException("x"), SandboxGone, False, True),
        (SandboxNotFoundException("x"), SandboxGone, False, True),
        (RATE_LIMIT, QuotaExhausted, True, True),
        (ServiceBusyException("x"), SandboxUnavailable, True, True),
        (SandboxUnreachableException("x"), SandboxUnavailable, True, True),
        (TimeoutException("x"), SandboxUnavailable, True, True),
        (AuthenticationException("x"), SandboxUnavailable, False, True),
        (BuildException("x"), SandboxUnavailable, False, True),
        (httpx.ReadError("x"), SandboxUnavailable, True, True),
        (ConnectionResetError("x"), SandboxUnavailable, True, True),
        (SandboxException("x", status_code=500), SandboxUnavailable, True, True),
        (SandboxException("x", status_code=404), EnvironmentUnknown, False, True),
        (InvalidArgumentException("x"), WrongRequest, False, False),
        (SandboxException("x", status_code=400), WrongRequest, False, False),
        (FileNotFoundException("x"), WrongRequest, False, False),
        (NotEnoughSpaceException("x"), TooLarge, False, False),
        (SandboxException("x", status_code=413), TooLarge, False, False),
    ],
)
def test_the_sdks_errors_are_told_apart(
    theirs: Exception, ours: type[ServiceError], retryable: bool, infrastructure: bool
) -> None:
    found = translated(theirs, "trying")
    assert type(found) is ours
    assert (found.retryable, is_infrastructure(found)) == (retryable, infrastructure)
    assert found.message.startswith("trying: ")


def test_a_rate_limit_says_when_to_come_back() -> None:
    found = translated(RATE_LIMIT, "trying", retry_after_s=7.0)
    assert found is not None
    assert found.retry_after_s == 7.0


def test_a_failed_command_and_a_bug_are_no_errors_of_the_sdks() -> None:
    failed = CommandExitException(stdout="", stderr="", exit_code=1, error=None)
    for error in (failed, KeyError("x")):
        assert translated(error, "trying") is None
        with pytest.raises(type(error)), sdk_errors("trying"):
            raise error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (SandboxGone("x"), 404, "unavailable"),
        (EnvironmentUnknown("x"), 404, "internal"),
        (QuotaExhausted("x"), 429, "resource_exhausted"),
        (IdempotencyConflict("x"), 409, "internal"),
        (WrongRequest("x"), 400, "invalid_argument"),
        (TooLarge("x"), 413, "invalid_argument"),
        (SandboxUnavailable("x"), 503, "unavailable"),
        (InjectedFault("x"), 503, "unavailable"),
    ],
)
def test_our_errors_are_e2bs_at_the_endpoint(error: ServiceError, status: int, code: str) -> None:
    assert (api_error(error).status, envd_error(error).code) == (status, code)


def test_a_time_to_wait_is_whole_seconds_and_never_none() -> None:
    assert api_error(QuotaExhausted("x", retry_after_s=1.2)).headers == {"Retry-After": "2"}
    assert api_error(QuotaExhausted("x", retry_after_s=0.1)).headers == {"Retry-After": "1"}
    assert api_error(QuotaExhausted("x")).headers == {"Retry-After": "1"}
    assert api_error(WrongRequest("x")).headers == {}


def test_a_recipes_name_depends_on_all_that_it_is_made_of() -> None:
    base = Recipe(tree_digest="a", workdir="/w", folders=("/w",), user="u", cpus=2, memory_mb=4096)
    others = [
        Recipe(tree_digest="b", workdir="/w", folders=("/w",), user="u", cpus=2, memory_mb=4096),
        Recipe(tree_digest="a", workdir="/v", folders=("/w",), user="u", cpus=2, memory_mb=4096),
        Recipe(tree_digest="a", workdir="/w", folders=("/w", "/x"), user="u", cpus=2, memory_mb=1),
        Recipe(tree_digest="a", workdir="/w", folders=("/w",), user="v", cpus=2, memory_mb=4096),
        Recipe(tree_digest="a", workdir="/w", folders=("/w",), user="u", cpus=4, memory_mb=4096),
        Recipe(image="a", workdir="/w", folders=("/w",), user="u", cpus=2, memory_mb=4096),
    ]
    same = Recipe(tree_digest="a", workdir="/w", folders=("/w",), user="u", cpus=2, memory_mb=4096)
    assert same.name("p") == base.name("p")
    assert len({recipe.name("p") for recipe in (base, *others)}) == 7
    assert base.name("p").startswith("p-")
    assert base.name("p").replace("-", "").isalnum()


def test_a_recipes_commands_put_the_tree_where_it_belongs() -> None:
    tree = Recipe(tree_digest="a", workdir="/w x", folders=("/w x",), user="u", admin_user="root")
    assert list(tree.commands()) == [
        "mkdir -p '/w x'",
        "tar -xf /tmp/environment.tar -C '/w x'",
        "rm -f /tmp/environment.tar",
        "chown -R u: '/w x'",
    ]
    image = Recipe(image="i", workdir="/w", folders=("/w",), user="u", admin_user="u")
    assert list(image.commands()) == ["mkdir -p /w"]


@pytest.mark.parametrize(
    ("cpus", "memory_bytes", "size"),
    [
        (2.0, 512 * MIB, (2, 4096)),
        (2.5, 4096 * MIB, (3, 4096)),
        (0.5, 4097 * MIB, (2, 4098)),
        (8.0, 8192 * MIB + 1, (8, 8194)),
    ],
)
def test_templates_are_never_smaller_than_asked_for(
    cpus: float, memory_bytes: int, size: tuple[int, int]
) -> None:
    assert template_size((2, 4096), cpus, memory_bytes) == size


def test_creates_are_paced_and_stop_after_a_rate_limit() -> None:
    pacer = CreatePacer(2.0, 2, pause_s=5.0, now=0.0)
    assert [pacer.take(0.0), pacer.take(0.0)] == [0.0, 0.0]
    assert pacer.take(0.0) == pytest.approx(0.5)
    assert pacer.take(0.5) == 0.0
    assert pacer.refused(1.0) == 5.0
    assert pacer.take(2.0) == pytest.approx(4.0)
    assert pacer.refused(2.0) == pytest.approx(5.0)
    assert pacer.take(7.0) == 0.0


PATHS = st.sampled_from(["a", "a/b", "c.pyc", "d/__pycache__/e", "f g", "ü"])
ENTRIES = st.dictionaries(
    PATHS,
    st.one_of(
        st.builds(lambda text: ("file", text), st.sampled_from("xyz")),
        st.builds(lambda text: ("link", text), st.sampled_from("xyz")),
    ),
)
EXCLUDE = ("__pycache__", "*.pyc")


def tree(given_entries: dict[str, tuple[str, str]]) -> dict[str, TreeEntry]:
    return {
        path: replace(TreeEntry(path, kind), sha256=text, target=text)
        for path, (kind, text) in given_entries.items()
    }


@given(ENTRIES, ENTRIES)
def test_changes_are_what_turns_one_tree_into_the_other(
    before: dict[str, tuple[str, str]], after: dict[str, tuple[str, str]]
) -> None:
    changes = tree_changes(tree(before), tree(after), EXCLUDE)
    result = {path: entry for path, entry in before.items() if path not in changes.gone}
    result |= {path: after[path] for path in changes.present}
    counted = {p for p in (*before, *after) if "pyc" not in p}
    assert {p: result[p] for p in result if p in counted} == {
        p: after[p] for p in after if p in counted
    }
    assert all(path in counted for path in (*changes.present, *changes.gone))
    assert all(before.get(path) != after[path] for path in changes.present)


def test_folders_by_themselves_are_no_change() -> None:
    assert tree_changes({"d": TreeEntry("d", "dir")}, {}, ()).gone == ()


def test_a_listing_of_another_form_is_refused() -> None:
    rows = [["a", "file", True, 3, "hash"], ["l", "link", False, 0, "to"]]
    assert entries_from_manifest(rows) == {
        "a": TreeEntry("a", "file", True, 3, "hash"),
        "l": TreeEntry("l", "link", target="to"),
    }
    for wrong in (
        ["a"],
        ["a", "file", "x", 3, "h"],
        ["a", "dir", False, 0, ""],
        [1, "link", 0, 0, ""],
    ):
        with pytest.raises(ValueError, match="unknown form"):
            entries_from_manifest([wrong])
