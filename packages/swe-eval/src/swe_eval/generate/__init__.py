"""Coding tasks made to order: small repositories, procedural bugs, issue text, hidden tests.

Everything here is pure and deterministic. A task is named by its split and a number:

    from swe_eval.generate import make_task

    task = make_task("train", 12)
    print(task.instruction)          # the issue
    print(task.files["shop.py"])     # what the agent sees
    print(task.hidden_tests)         # what the grader alone sees

The splits `pretrain`, `train` and `heldout` share no repository, no function name and no bug
(`check_disjoint` proves it for any tasks). Bugs for any other Python source: `mutate`, and
`find_places` where there are thousands; `swe_eval.making` makes tasks of them.
"""

from __future__ import annotations

from swe_eval.generate.grammar import TEMPLATES, VERBS, FunctionSpec, Template
from swe_eval.generate.harbor import HarborFolderExistsError, harbor_files, to_harbor
from swe_eval.generate.issue import describe_result, write_issue
from swe_eval.generate.mutate import KINDS, Mutation, mutate
from swe_eval.generate.names import CONSTANTS, SYLLABLES, Split
from swe_eval.generate.places import Bug, Place, find_places
from swe_eval.generate.repository import (
    BUGS_PER_REPOSITORY,
    GRAMMAR_KINDS,
    HIDDEN_TEST_FILE,
    MODULE_NAMES,
    Repository,
    build_repository,
    visible_test,
)
from swe_eval.generate.select import SplitOverlapError, check_disjoint, make_task, task_at
from swe_eval.generate.task import GeneratedTask, unified_patch
from swe_eval.generate.written import (
    WrittenRepository,
    load_written_repositories,
    tasks_from_repository,
)

__all__ = [
    "BUGS_PER_REPOSITORY",
    "CONSTANTS",
    "GRAMMAR_KINDS",
    "HIDDEN_TEST_FILE",
    "KINDS",
    "MODULE_NAMES",
    "SYLLABLES",
    "TEMPLATES",
    "VERBS",
    "Bug",
    "FunctionSpec",
    "GeneratedTask",
    "HarborFolderExistsError",
    "Mutation",
    "Place",
    "Repository",
    "Split",
    "SplitOverlapError",
    "Template",
    "WrittenRepository",
    "build_repository",
    "check_disjoint",
    "describe_result",
    "find_places",
    "harbor_files",
    "load_written_repositories",
    "make_task",
    "mutate",
    "task_at",
    "tasks_from_repository",
    "to_harbor",
    "unified_patch",
    "visible_test",
    "write_issue",
]
