"""Harbor task directories: `task.toml` (schema 1.x), instruction, environment, tests, solution.

Read natively, without Harbor. A folder that can't be read raises `MalformedTaskError` with the file
and field at fault; one that asks for more than diff-based grading can give raises
`UnsupportedTaskError`.
"""

import ast
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from swe_eval.errors import MalformedTaskError, UnsupportedTaskError
from swe_eval.tasks.dockerfile import TreeImage, read_as_tree
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.task import (
    MAX_TESTS,
    Environment,
    EnvironmentSource,
    FileTree,
    Grader,
    Reference,
    ScriptGrader,
    Task,
    TestGrader,
    TestRunner,
    TreeFile,
)

MIB = 1024 * 1024
MAX_TASK_BYTES = 64 * MIB
_SCHEMA = re.compile(r"1(\.\d+)*")
_HIDDEN = "hidden/"


class EnvironmentMode(StrEnum):
    """How a task's Dockerfile becomes an environment."""

    AUTO = "auto"
    """A folder tree if the Dockerfile only copies files, else an image to be built."""
    TREE = "tree"
    """Always a folder tree: RUN and other instructions are left out."""
    IMAGE = "image"
    """Always an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborOptions:
    """How to read task directories."""

    environment: EnvironmentMode = EnvironmentMode.AUTO
    max_task_bytes: int = MAX_TASK_BYTES
    keep_history: bool = False
    """Leave git's history where it is: the tasks are about it."""


def find_tasks(folder: Path) -> list[Path]:
    """Task directories under `folder`: itself, or every folder below that holds a `task.toml`.

    Directories of tasks are not searched for further tasks. The order is that of the paths.
    """
    if (folder / "task.toml").is_file():
        return [folder]
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        if "task.toml" in files:
            found.append(Path(place))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def read_task(folder: Path, options: HarborOptions | None = None) -> Task:
    """Reads one task directory.

    Raises:
        MalformedTaskError: it can't be read; the error names file, field, found and expected.
        UnsupportedTaskError: it is well formed but needs several steps, a compose file, artifacts
            outside the work folder or an accelerator.
    """
    options = options or HarborOptions()
    config = _read_config(folder)
    _refuse_unsupported(folder, config)
    files = _read_files(folder, options.max_task_bytes)
    parts = {
        part: {
            path[len(part) + 1 :]: file
            for path, file in files.items()
            if path.startswith(part + "/")
        }
        for part in ("environment", "tests", "solution")
    }
    environment = _environment(config, parts["environment"], options.environment)
    metadata = config.table("metadata")
    name = config.table("task").text("name") or folder.name
    return Task(
        task_id=name,
        repository=metadata.text("repository") or name.rpartition("/")[2],
        kind=metadata.text("kind") or metadata.text("category"),
        columns={
            name: str(value)
            for name, value in metadata.values.items()
            if isinstance(value, str | int | float) and str(value)
        },
        instruction=_instruction(folder, files),
        environment=replace(
            environment, forget_history=not options.keep_history and _may_have_history(environment)
        ),
        grader=_grader(config, parts["tests"]),
        reference=_reference(config, parts["solution"]),
    )


def _read_config(folder: Path) -> Fields:
    def malformed(expected: str, found: str) -> MalformedTaskError:
        return MalformedTaskError(
            task=folder.name, file="task.toml", expected=expected, found=found
        )

    try:
        raw = (folder / "task.toml").read_bytes()
    except FileNotFoundError:
        raise malformed("a file", "nothing") from None
    except OSError as error:
        raise malformed("a readable file", str(error.strerror)) from error
    try:
        values = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise malformed("UTF-8 text", f"an invalid byte at {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise malformed("valid TOML", str(error)) from error
    fields = Fields(folder.name, "task.toml", values)
    key = "schema_version" if "schema_version" in values else "version"
    version = fields.text(key, "1.0")
    if not _SCHEMA.fullmatch(version):
        fields.fail(key, "a schema version 1.x", version)
    return fields


def _refuse_unsupported(folder: Path, config: Fields) -> None:
    if "steps" in config.values or (folder / "steps").is_dir():
        config.unsupported("steps", "a task of one step", "several steps")
    for artifact in config.values.get("artifacts", []):
        config.unsupported("artifacts", "none: only the work folder's diff is graded", artifact)
    environment = config.table("environment")
    if environment.values.get("gpus", 0) not in {0, None}:
        environment.unsupported("gpus", "0", environment.values["gpus"])
    if environment.values.get("healthcheck"):
        environment.unsupported(
            "healthcheck", "an environment without services of its own", "a health check"
        )
    agent = config.table("agent")
    if agent.text("user") not in {"", "root"}:
        agent.unsupported("user", "no user of its own", agent.text("user"))
    for name in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml"):
        if (folder / "environment" / name).exists():
            raise UnsupportedTaskError(
                task=folder.name,
                file=f"environment/{name}",
                expected="one Dockerfile",
                found="a compose file",
            )


def _read_files(folder: Path, max_bytes: int) -> dict[str, TreeFile]:
    """All files of the task; refuses links and special files, and more than `max_bytes`."""
    files: dict[str, TreeFile] = {}
    total = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *(f for f in folders if Path(place, f).is_symlink())]):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise MalformedTaskError(
                        task=folder.name,
                        file=relative,
                        expected="a regular file",
                        found="a link" if stat.S_ISLNK(status.st_mode) else "a special file",
                    )
                total += status.st_size
                if total > max_bytes:
                    raise MalformedTaskError(
                        task=folder.name,
                        file=relative,
                        expected=f"at most {max_bytes} bytes in all",
                        found="more",
                    )
                files[relative] = TreeFile(path.read_bytes(), bool(status.st_mode & 0o100))
            except OSError as error:
                raise MalformedTaskError(
                    task=folder.name,
                    file=relative,
                    expected="a readable file",
                    found=str(error.strerror),
                ) from error
    return files


def _instruction(folder: Path, files: FileTree) -> str:
    text = _text_of(folder.name, "instruction.md", files.get("instruction.md"))
    if not text.strip():
        raise MalformedTaskError(
            task=folder.name, file="instruction.md", expected="an instruction", found="no text"
        )
    return text


def _text_of(task: str, path: str, file: TreeFile | None) -> str:
    if file is None:
        raise MalformedTaskError(task=task, file=path, expected="a file", found="nothing")
    try:
        # Without a byte order mark, which a parser of text doesn't take.
        return file.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedTaskError(
            task=task, file=path, expected="UTF-8 text", found=f"an invalid byte at {error.start}"
        ) from error


def _environment(config: Fields, context: FileTree, mode: EnvironmentMode) -> Environment:
    fields = config.table("environment")
    workdir = fields.text("workdir")
    if workdir and not workdir.startswith("/"):
        fields.fail("workdir", "an absolute path", workdir)
    image = fields.text("docker_image")
    dockerfile = ""
    if "Dockerfile" in context:
        dockerfile = _text_of(config.task, "environment/Dockerfile", context["Dockerfile"])
    elif not image:
        raise MalformedTaskError(
            task=config.task,
            file="environment/Dockerfile",
            expected="a file, or environment.docker_image in task.toml",
            found="neither",
        )
    common: dict[str, Any] = {
        "memory_bytes": int(fields.positive("memory_mb", 0) * MIB),
        "cpus": fields.positive("cpus", 0),
        "network": _network(fields),
    }
    env = fields.text_table("env")
    tree: TreeImage = read_as_tree(dockerfile, context, workdir=workdir or None)
    # A prebuilt image holds more than its name says, so only an explicit TREE drops it.
    exact = bool(dockerfile) and not image and not tree.skipped
    if mode is EnvironmentMode.TREE or (mode is EnvironmentMode.AUTO and exact):
        return Environment(
            files=tree.files, workdir=tree.workdir, env={**tree.env, **env}, **common
        )
    if image:
        return Environment(image=image, workdir=tree.workdir, env=env, **common)
    return Environment(
        files=context, dockerfile=dockerfile, workdir=tree.workdir, env=env, **common
    )


def _may_have_history(environment: Environment) -> bool:
    """Whether there can be a repository: an image's files are not known."""
    return environment.source is not EnvironmentSource.TREE or any(
        ".git" in path.split("/") for path in environment.files
    )


def _network(fields: Fields) -> bool:
    if "network_mode" not in fields.values:
        # The older field; its default is that of the schema that had it, but a closed network is
        # ours.
        return fields.flag("allow_internet", False)
    options = ("no-network", "public", "allowlist")
    mode = fields.choice("network_mode", "no-network", options)
    if mode == "allowlist":
        fields.unsupported("network_mode", "no-network or public", mode)
    return mode == "public"


def _grader(config: Fields, tests: FileTree) -> Grader:
    fields = config.table("verifier")
    fields.choice("environment_mode", "shared", ("shared", "separate"))
    wall_s = fields.positive("timeout_sec", 600.0)
    if "Dockerfile" in tests or fields.values.get("environment"):
        fields.unsupported(
            "environment", "a verifier that runs in the task's environment", "one of its own"
        )
    structured = _test_grader(config, tests, wall_s)
    if structured is not None:
        return structured
    if "test.sh" not in tests:
        raise MalformedTaskError(
            task=config.task, file="tests/test.sh", expected="a file", found="nothing"
        )
    return ScriptGrader(files=tests, env=fields.text_table("env"), wall_s=wall_s)


def _test_grader(config: Fields, tests: FileTree, wall_s: float) -> TestGrader | None:
    """The structured grader of a task whose metadata names its tests, else None."""
    metadata = config.table("metadata")
    fail_to_pass = metadata.text_list("fail_to_pass")
    pass_to_pass = metadata.text_list("pass_to_pass")
    files = {
        path[len(_HIDDEN) :]: _text_of(config.task, f"tests/{path}", file)
        for path, file in tests.items()
        if path.startswith(_HIDDEN)
    }
    if not fail_to_pass or not files:
        return None
    for name in (*fail_to_pass, *pass_to_pass):
        path, separator, _ = name.partition("::")
        if not separator or path not in files:
            metadata.fail("fail_to_pass", "ids `path::test` of files in tests/hidden", name)
    if len(fail_to_pass) + len(pass_to_pass) > MAX_TESTS:
        metadata.fail("pass_to_pass", f"at most {MAX_TESTS} tests", f"{len(pass_to_pass)} more")
    plain = plain_functions(files).issuperset((*fail_to_pass, *pass_to_pass))
    runner = metadata.choice(
        "test_runner",
        (TestRunner.FUNCTIONS if plain else TestRunner.PYTEST).value,
        tuple(runner.value for runner in TestRunner),
    )
    return TestGrader(
        runner=TestRunner(runner),
        files=files,
        fail_to_pass=tuple(fail_to_pass),
        pass_to_pass=tuple(pass_to_pass),
        wall_s=wall_s,
        cpu_s=max(1, round(wall_s)),
    )


def plain_functions(files: Mapping[str, str]) -> frozenset[str]:
    """Ids of the tests that run without pytest: functions without arguments and decorators."""
    found: set[str] = set()
    for path, source in files.items():
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        for node in body:
            plain = isinstance(node, ast.FunctionDef) and not (
                node.decorator_list or ast.unparse(node.args)
            )
            if plain and isinstance(node, ast.FunctionDef):
                found.add(f"{path}::{node.name}")
    return frozenset(found)


def _reference(config: Fields, solution: FileTree) -> Reference | None:
    env = config.table("solution").text_table("env")
    patch = solution.get("gold.patch")
    if patch is not None:
        return Reference(patch=patch.content, env=env)
    if "solve.sh" in solution:
        return Reference(files=solution, env=env)
    return None
