"""A task made from somebody's repository, and its files as a Harbor task directory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from swe_eval.generate.visible import without_tests

__all__ = ["RepositoryTask", "SuiteSetting", "repository_files"]

WORKDIR = "/app"

_TEST_SCRIPT = """\
#!/bin/sh
# Puts the hidden tests over whatever the agent left in their place, and writes the reward.
cp -R /tests/hidden/. /app/
cd /app || exit 1
mkdir -p /logs/verifier
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if python -m pytest -q -p no:cacheprovider --rootdir /app @/tests/required.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""

_SOLUTION_SCRIPT = """\
#!/bin/sh
cd /app && patch -p1 < /solution/gold.patch
"""


@dataclass(frozen=True, kw_only=True)
class SuiteSetting:
    """What a repository's tests need."""

    python: str
    """Version of the interpreter, `3.11`."""
    requirements: Sequence[str]
    """Installed packages, pinned, as pip takes them."""
    python_path: Sequence[str]
    """Folders of the repository that imports start from, beside its top."""
    timeout_s: float
    """Longest time of one run of the suite."""
    memory_mb: int


@dataclass(frozen=True, kw_only=True)
class RepositoryTask:
    """A repository with one bug in it."""

    task_id: str
    repository: str
    kind: str
    instruction: str
    module: str
    """Path of the file with the bug."""
    function: str
    broken: str
    """Its text with the bug in."""
    gold_patch: str
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    defined: Mapping[str, str]
    """Of failing tests whose function is in another file (they are inherited) that one's id."""
    fingerprint: str
    behaviour: str
    source: str
    """Digest of the repository without the bug."""
    seed: int

    @property
    def metadata(self) -> dict[str, str | int]:
        """What reports group by, and what tells a second making of it, as plain values."""
        return {
            "repository": self.repository,
            "kind": self.kind,
            "module": self.module,
            "function": self.function,
            "fingerprint": self.fingerprint,
            "behaviour": self.behaviour,
            "source": self.source,
            "seed": self.seed,
            # The baseline was pytest's, conftest and fixtures included.
            "test_runner": "pytest",
        }


def repository_files(
    task: RepositoryTask,
    files: Mapping[str, bytes],
    tests: Mapping[str, str],
    setting: SuiteSetting,
) -> dict[str, bytes]:
    """The files of the task directory.

    Args:
        task: The task.
        files: The repository without the bug.
        tests: The text of the Python files, those at least that hold required tests.
        setting: What its tests need.
    """
    required = (*task.fail_to_pass, *task.pass_to_pass)
    # What is held back of another file than the tests' own comes back for grading, too.
    hidden = {test.partition("::")[0] for test in (*required, *task.defined.values())}
    seen = {**files, task.module: task.broken.encode()}
    failing: defaultdict[str, list[str]] = defaultdict(list)
    for test in (*task.fail_to_pass, *task.defined.values()):
        path, _, name = test.partition("::")
        failing[path].append(name)
    for path, names in sorted(failing.items()):
        left = without_tests(tests[path], names, partial(_is_in_another, tests, path))
        if left is None:
            del seen[path]
        else:
            seen[path] = left.encode()
    texts = {
        "task.toml": _toml(task, setting),
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": _dockerfile(setting),
        "tests/test.sh": _TEST_SCRIPT,
        "tests/required.txt": "".join(f"{test}\n" for test in required),
        "solution/solve.sh": _SOLUTION_SCRIPT,
        "solution/gold.patch": task.gold_patch,
    }
    return {
        **{path: text.encode() for path, text in texts.items()},
        **{f"environment/repo/{path}": content for path, content in seen.items()},
        **{f"tests/hidden/{path}": tests[path].encode() for path in sorted(hidden)},
    }


def _is_in_another(texts: Mapping[str, str], path: str, name: str) -> bool:
    """Whether another file names both this one and a name of it, as one that imports it does."""
    module = PurePosixPath(path).stem
    others = (text for other, text in texts.items() if other != path)
    return any(name in text and module in text for text in others)


def _dockerfile(setting: SuiteSetting) -> str:
    lines = [f"FROM python:{setting.python}-slim"]
    if setting.requirements:
        lines.append("RUN pip install --no-cache-dir " + " ".join(setting.requirements))
    if setting.python_path:
        folders = ":".join(f"{WORKDIR}/{folder}" for folder in setting.python_path)
        lines.append(f"ENV PYTHONPATH={folders}")
    return "\n".join([*lines, f"WORKDIR {WORKDIR}", f"COPY repo/ {WORKDIR}/"]) + "\n"


def _toml(task: RepositoryTask, setting: SuiteSetting) -> str:
    metadata = "\n".join(f"{key} = {_value(v)}" for key, v in sorted(task.metadata.items()))
    return f"""\
schema_version = "1.4"

[task]
name = {_value(f"tailrace/{task.task_id}")}

[metadata]
{metadata}
fail_to_pass = {_value(list(task.fail_to_pass))}
pass_to_pass = {_value(list(task.pass_to_pass))}

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = {setting.timeout_s}
environment_mode = "separate"

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = {setting.memory_mb}
storage_mb = 1024
network_mode = "no-network"
workdir = "{WORKDIR}"
"""


def _value(value: str | int | list[str]) -> str:
    # A JSON string, number or list of them is a TOML one too, but for pairs of surrogates.
    return json.dumps(value, ensure_ascii=False)
