"""Writes a generated task as a Harbor task directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from swe_eval.generate.task import GeneratedTask

__all__ = ["HarborFolderExistsError", "harbor_files", "to_harbor", "write_folder"]

_DOCKERFILE = """\
FROM python:3.11-slim
RUN pip install --no-cache-dir pytest==8.4.2
WORKDIR /app
COPY repo/ /app/
"""

_TEST_SCRIPT = """\
#!/bin/sh
# Copies the hidden tests over whatever the agent left in their place, and writes the reward.
cp /tests/hidden/* /app/
cd /app || exit 1
mkdir -p /logs/verifier
if python -m pytest -q -p no:cacheprovider {ids}; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""

_SOLUTION_SCRIPT = """\
#!/bin/sh
cd /app && patch -p1 < /solution/gold.patch
"""


class HarborFolderExistsError(FileExistsError):
    """The folder for a task is there already; choose another one or remove it first."""


def _toml(task: GeneratedTask) -> str:
    # A JSON string or number is a TOML one too.
    metadata = "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in sorted(task.metadata.items())
    )
    return f"""\
schema_version = "1.4"

[task]
name = {json.dumps(f"tailrace/{task.task_id}")}

[metadata]
{metadata}
fail_to_pass = {json.dumps(list(task.fail_to_pass))}
pass_to_pass = {json.dumps(list(task.pass_to_pass))}

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
environment_mode = "separate"

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
network_mode = "no-network"
workdir = "/app"
"""


def harbor_files(task: GeneratedTask) -> Mapping[str, str]:
    """The files of the task directory, relative path to text."""
    ids = " ".join((*task.fail_to_pass, *task.pass_to_pass))
    return {
        "task.toml": _toml(task),
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_SCRIPT.format(ids=ids),
        "solution/solve.sh": _SOLUTION_SCRIPT,
        "solution/gold.patch": task.gold_patch,
        **{f"environment/repo/{path}": text for path, text in task.files.items()},
        **{f"tests/hidden/{path}": text for path, text in task.hidden_tests.items()},
    }


def to_harbor(task: GeneratedTask, folder: Path) -> Path:
    """Write the task directory `folder / task.task_id`.

    Returns:
        The directory written.

    Raises:
        HarborFolderExistsError: It exists.
    """
    files = {path: text.encode() for path, text in harbor_files(task).items()}
    return write_folder(folder / task.task_id, files)


def write_folder(
    target: Path, files: Mapping[str, bytes], executable: Collection[str] = ()
) -> Path:
    """Write a task directory, whole or not at all; scripts and `executable` files can be run.

    Raises:
        HarborFolderExistsError: It exists.
    """
    # No reader takes a hidden folder for a task, so one that was cut short does no harm.
    partial = target.with_name(f".{target.name}.partial")
    if target.exists():
        raise HarborFolderExistsError(f"{target} exists; choose another folder or remove it first")
    shutil.rmtree(partial, ignore_errors=True)
    for path, content in files.items():
        file = partial / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        if file.suffix == ".sh" or path in executable:
            file.chmod(0o755)
    partial.rename(target)
    return target
