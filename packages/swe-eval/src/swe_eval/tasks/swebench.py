"""Rows of SWE-bench and of data sets in its form, such as SWE-Gym and SWE-rebench.

Two generations of columns are about. Those of version 4 hold the problem, and leave image, test
command and log parser to constants of the harness that made them; version 5 has these as columns.
`read_row` takes both; `read_task` needs version 5 and says which of its columns are missing.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from swe_eval.grading.parsers import PARSERS
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.task import MAX_TESTS, Environment, LogGrader, Reference, Task

TESTBED = "/testbed"
"""Where the images of SWE-bench and SWE-smith hold the repository."""
COLUMNS = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
"""What every version has."""
COLUMNS_OF_5 = ("image", "log_parser", "eval_type", "eval_script")
_NAMED = re.compile(r"^(?:--- a|\+\+\+ b)/([^\t\n]+)", re.MULTILINE)
_PROGRESS = re.compile(r"\[ *\d+%\]")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SwebenchRow:
    """The columns that all versions have, checked."""

    instance_id: str
    repo: str
    """`owner/name`."""
    base_commit: str
    problem_statement: str
    patch: str
    """The gold patch."""
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    hints_text: str = ""
    created_at: str = ""
    version: str = ""
    difficulty: str = ""
    """A human's estimate of the time a fix takes; SWE-bench Verified alone has it."""


def read_row(fields: Fields) -> SwebenchRow:
    """Checks a row of any version.

    Raises:
        MalformedTaskError: a column is missing or holds what it should not.
    """
    fields.demand(COLUMNS, "a column of SWE-bench")
    commit = fields.text("base_commit")
    if not _COMMIT.fullmatch(commit):
        fields.fail("base_commit", "a commit's hash", commit)
    repo = fields.text("repo")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        fields.fail("repo", "owner/name", repo)
    fail_to_pass, pass_to_pass = required_tests(fields)
    return SwebenchRow(
        instance_id=fields.filled("instance_id"),
        repo=repo,
        base_commit=commit,
        problem_statement=fields.filled("problem_statement"),
        patch=patch_of(fields, "patch"),
        test_patch=patch_of(fields, "test_patch"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        hints_text=fields.text("hints_text"),
        created_at=str(fields.values.get("created_at", "")),  # text here, a date there
        version=fields.text("version"),
        difficulty=fields.text("difficulty"),
    )


def read_task(fields: Fields, *, wall_s: float = 1800.0) -> Task:
    """Reads a row of version 5.

    Args:
        fields: The row.
        wall_s: Longest time its tests may take.

    Raises:
        MalformedTaskError: a column is missing or holds what it should not.
        UnsupportedTaskError: its tests are judged in a way that can't be had here.
    """
    row = read_row(fields)
    fields.demand(
        COLUMNS_OF_5,
        "a column of SWE-bench 5 (a row of version 4 does not say how its tests are run; take the "
        "data set's newer revision)",
    )
    kind = fields.choice("eval_type", "pass_and_fail", ("pass_and_fail", "fail_only"))
    if kind == "fail_only":
        fields.unsupported("eval_type", "pass_and_fail: a test that did not run has failed", kind)
    return Task(
        task_id=row.instance_id,
        repository=row.repo,
        kind=row.difficulty,
        columns={"difficulty": row.difficulty, "version": row.version},
        instruction=row.problem_statement,
        environment=Environment(image=fields.filled("image"), workdir=TESTBED, forget_history=True),
        grader=LogGrader(
            script=_without_history(fields.filled("eval_script"), row.base_commit),
            parser=_parser(fields),
            fail_to_pass=row.fail_to_pass,
            pass_to_pass=row.pass_to_pass,
            protected=frozenset(_NAMED.findall(row.test_patch)),
            wall_s=wall_s,
        ),
        reference=Reference(patch=row.patch.encode()),
    )


def _without_history(script: str, base_commit: str) -> str:
    """The script for a repository whose only commit is what the base commit held."""
    return re.sub(rf"\b{re.escape(base_commit)}\b", "HEAD", script) if base_commit else script


def _parser(fields: Fields) -> str:
    name = fields.filled("log_parser")
    if name not in PARSERS:
        fields.unsupported("log_parser", "one of " + ", ".join(sorted(PARSERS)), name)
    return name


def patch_of(fields: Fields, key: str) -> str:
    """A column that holds a patch in git's format, ending with a newline."""
    text = fields.filled(key)
    if not re.search(r"^diff --git ", text, re.MULTILINE):
        fields.fail(key, "a patch in git's format", text)
    return text if text.endswith("\n") else text + "\n"


def required_tests(fields: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """FAIL_TO_PASS, which must name a test, and PASS_TO_PASS.

    Either may be a list or, as some publish it, a string that holds a JSON list.
    """
    fail_to_pass, pass_to_pass = (_tests(fields, key) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if not fail_to_pass:
        fields.fail("FAIL_TO_PASS", "at least one test", fields.values["FAIL_TO_PASS"])
    if len(fail_to_pass) + len(pass_to_pass) > MAX_TESTS:
        fields.fail("PASS_TO_PASS", f"at most {MAX_TESTS} tests", f"{len(pass_to_pass)} more")
    return fail_to_pass, pass_to_pass


def _tests(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.values[key]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            fields.fail(key, "a list of tests, or one written as JSON", value)
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        fields.fail(key, "a list of tests", value)
    # Some lists hold a piece of pytest's progress, which their maker took for a test.
    return tuple(name for name in value if not _PROGRESS.fullmatch(name))


def is_row(values: Mapping[str, object]) -> bool:
    """Whether a row looks like one of this form, though perhaps a broken one."""
    return {"instance_id", "repo"} <= values.keys() and "messages" not in values
