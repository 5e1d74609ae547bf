"""Rows of SWE-smith: a bug put into a repository by a patch, on one image a repository.

The row's `patch` makes the bug, so its reverse is the solution. A row does not say how tests are
run: the profiles of repositories do (`read_profiles`), and without one the command that nearly all
of them share is taken. The repository's tests are the grader's: agents see them, and changes to
them are dropped from a diff.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swe_eval.errors import TaskSetError
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.patches import MalformedPatchError, reverse_patch
from swe_eval.tasks.swebench import TESTBED, patch_of, required_tests
from swe_eval.tasks.task import Environment, LogGrader, Reference, Task, TreeFile

COLUMNS = (
    "instance_id",
    "repo",
    "image_name",
    "problem_statement",
    "patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
TEST_COMMAND = "pytest --disable-warnings --color=no --tb=no --verbose"
REGISTRY = "swebench"
"""Where the images are, for names without a registry."""
_BUG = "bug.patch"
# The history below the bug holds the repaired code, so it goes.
_DOCKERFILE = f"""\
FROM {{image}}
COPY {_BUG} /tmp/{_BUG}
RUN cd {TESTBED} && git apply --whitespace=nowarn /tmp/{_BUG} && rm -rf /tmp/{_BUG} .git \\
 && git init -q && git add -A \\
 && git -c user.name=task -c user.email=task@localhost commit -q -m task
"""
_SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
cd {TESTBED}
source /opt/miniconda3/bin/activate
conda activate testbed
: '>>>>> Start Test Output'
{{command}}
: '>>>>> End Test Output'
"""


@dataclass(frozen=True, slots=True)
class Profile:
    """How a repository's tests are run."""

    test_command: str = TEST_COMMAND


def read_profiles(file: Path) -> dict[str, Profile]:
    """Profiles by mirror (`swesmith/owner__name.commit`), from a JSON list of objects.

    Raises:
        TaskSetError: it is none.
    """
    try:
        return {
            entry["mirror"]: Profile(test_command=entry["test_cmd"])
            for entry in json.loads(file.read_bytes())
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TaskSetError(
            f"{file}: expected a list of objects with mirror and test_cmd, found "
            f"{type(error).__name__}: {error}"
        ) from error


def read_task(
    fields: Fields, profiles: Mapping[str, Profile] | None = None, *, wall_s: float = 900.0
) -> Task:
    """Reads a row.

    Raises:
        MalformedTaskError: a column is missing or holds what it should not.
    """
    fields.demand(COLUMNS, "a column of SWE-smith")
    bug = patch_of(fields, "patch")
    try:
        solution = reverse_patch(bug)
    except MalformedPatchError as error:
        fields.fail("patch", "a patch of text files in git's format", str(error))
    fail_to_pass, pass_to_pass = required_tests(fields)
    name, repo = fields.filled("instance_id"), fields.filled("repo")
    profile = (profiles or {}).get(repo, Profile())
    return Task(
        task_id=name,
        repository=repository_of(repo),
        kind=strategy_of(name),
        instruction=fields.filled("problem_statement"),
        environment=Environment(
            files={_BUG: TreeFile(bug.encode())},
            dockerfile=_DOCKERFILE.format(image=image_of(fields.filled("image_name"))),
            workdir=TESTBED,
        ),
        grader=LogGrader(
            script=_SCRIPT.format(
                command=_command(profile.test_command, (*fail_to_pass, *pass_to_pass))
            ),
            parser="pytest",
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            wall_s=wall_s,
        ),
        reference=Reference(patch=solution.encode()),
    )


def image_of(name: str) -> str:
    """The image's reference: the hub has `__`, which it forbids, as `_1776_`."""
    return name if "/" in name else f"{REGISTRY}/{name.replace('__', '_1776_')}"


def repository_of(mirror: str) -> str:
    """`owner/name` of a mirror `swesmith/owner__name.commit`."""
    return mirror.rpartition("/")[2].rpartition(".")[0].replace("__", "/", 1) or mirror


def strategy_of(instance_id: str) -> str:
    """How the bug was made, from `owner__name.commit.strategy__id` or `....pr_number`."""
    last = instance_id.rpartition(".")[2]
    return "pr" if last.startswith("pr_") else last.partition("__")[0]


def _command(command: str, tests: tuple[str, ...]) -> str:
    """Runs the files of the required tests alone, where their names tell them."""
    files = dict.fromkeys(name.partition("::")[0] for name in tests if "::" in name)
    return " ".join([command, *map(shlex.quote, files)])


def is_row(values: Mapping[str, object]) -> bool:
    """Whether a row looks like one of this form, though perhaps a broken one."""
    return {"instance_id", "image_name"} <= values.keys()
