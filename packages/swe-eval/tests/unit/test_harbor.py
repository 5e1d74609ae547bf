from pathlib import Path

import pytest
from swe_eval.errors import MalformedTaskError, UnsupportedTaskError
from swe_eval.generate import make_task, to_harbor
from swe_eval.tasks.harbor import (
    EnvironmentMode,
    HarborOptions,
    find_tasks,
    plain_functions,
    read_task,
)
from swe_eval.tasks.task import EnvironmentSource, ScriptGrader, TestGrader, TestRunner

SAMPLES = Path(__file__).parent.parent / "data" / "harbor"
CONFIG = """\
schema_version = "1.4"
[task]
name = "org/sample"
[metadata]
kind = "demo"
[verifier]
timeout_sec = 30
env = { A = "1" }
[environment]
cpus = 2
memory_mb = 512
network_mode = "no-network"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small well-formed task directory."""
    files = {
        "task.toml": CONFIG,
        "instruction.md": "Fix it.",
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY repo/ /app/\n",
        "environment/repo/shop.py": "x = 1\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\ntrue\n",
    }
    for path, text in files.items():
        target = tmp_path / "sample" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return tmp_path / "sample"


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "task.toml").read_text()
    assert old in text
    (folder / "task.toml").write_text(text.replace(old, new))


def malformed(folder: Path) -> MalformedTaskError:
    with pytest.raises(MalformedTaskError) as caught:
        read_task(folder)
    return caught.value


def test_a_task_directory_is_read_whole(folder: Path) -> None:
    task = read_task(folder)
    assert (task.task_id, task.repository, task.kind) == ("org/sample", "sample", "demo")
    assert task.instruction == "Fix it."
    environment = task.environment
    assert environment.source is EnvironmentSource.TREE
    assert environment.workdir == "/app"
    assert {p: f.content for p, f in environment.files.items()} == {"shop.py": b"x = 1\n"}
    assert (environment.memory_bytes, environment.cpus) == (512 * 1024 * 1024, 2.0)
    assert not environment.network
    assert isinstance(task.grader, ScriptGrader)
    assert (task.grader.wall_s, dict(task.grader.env)) == (30.0, {"A": "1"})
    assert list(task.grader.files) == ["test.sh"]
    assert task.reference is not None
    assert list(task.reference.files) == ["solve.sh"]


def test_nothing_of_the_hidden_side_is_in_the_environment(folder: Path) -> None:
    for mode in EnvironmentMode:
        task = read_task(folder, HarborOptions(environment=mode))
        assert not any("solve" in p or "test.sh" in p for p in task.environment.files)


@pytest.mark.parametrize(
    ("name", "source", "workdir"),
    [
        ("hello-world", EnvironmentSource.TREE, "/app"),
        ("hello-workdir", EnvironmentSource.TREE, "/custom-workdir"),
        ("verifier-mode-matrix--shared-default", EnvironmentSource.TREE, "/workspace"),
    ],
)
def test_harbors_own_samples_are_read(name: str, source: EnvironmentSource, workdir: str) -> None:
    task = read_task(SAMPLES / name)
    assert task.task_id.startswith("harbor/")
    assert (task.environment.source, task.environment.workdir) == (source, workdir)
    assert isinstance(task.grader, ScriptGrader)
    assert task.kind == ("test" if "matrix" in name else "programming")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("hello-multi-step-simple", "steps"),
        ("separate-verifier-environment", "artifacts"),
        ("hello-healthcheck", "environment.healthcheck"),
        ("hello-user", "agent.user"),
    ],
)
def test_samples_that_ask_for_more_are_refused_with_the_reason(name: str, field: str) -> None:
    with pytest.raises(UnsupportedTaskError) as caught:
        read_task(SAMPLES / name)
    assert caught.value.field == field
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "field", "expected"),
    [
        ('schema_version = "1.4"', 'schema_version = "2.0"', "schema_version", "1.x"),
        ('schema_version = "1.4"', "schema_version = 1.4", "schema_version", "a string"),
        ('name = "org/sample"', "name = 3", "task.name", "a string"),
        ("timeout_sec = 30", 'timeout_sec = "30"', "verifier.timeout_sec", "a number"),
        ("timeout_sec = 30", "timeout_sec = -1", "verifier.timeout_sec", "above 0"),
        ("timeout_sec = 30", "timeout_sec = inf", "verifier.timeout_sec", "above 0"),
        ("timeout_sec = 30", "timeout_sec = true", "verifier.timeout_sec", "a number"),
        ('env = { A = "1" }', "env = { A = 1 }", "verifier.env.A", "a string"),
        ('env = { A = "1" }', 'env = "A=1"', "verifier.env", "a table"),
        ("memory_mb = 512", "memory_mb = 0", "environment.memory_mb", "above 0"),
        ('"no-network"', '"sometimes"', "environment.network_mode", "one of"),
        ("cpus = 2", 'workdir = "app"', "environment.workdir", "an absolute path"),
        ("cpus = 2", 'allow_internet = "no"\ncpus = 2', "", ""),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found_and_expected(
    folder: Path, old: str, new: str, field: str, expected: str
) -> None:
    edit(folder, old, new)
    if not field:  # the newer field goes first, so the older is not read
        read_task(folder)
        return
    error = malformed(folder)
    assert (error.task, error.file, error.field) == ("sample", "task.toml", field)
    assert expected in error.expected
    assert (
        str(error) == f"sample/task.toml, {field}: expected {error.expected}, found {error.found}"
    )


def test_toml_that_does_not_parse_says_where(folder: Path) -> None:
    (folder / "task.toml").write_text("[task\n")
    error = malformed(folder)
    assert error.file == "task.toml"
    assert "line 1" in error.found


@pytest.mark.parametrize(
    ("path", "content", "file"),
    [
        ("task.toml", b"\xff", "task.toml"),
        ("task.toml", None, "task.toml"),
        ("instruction.md", b"\xff", "instruction.md"),
        ("instruction.md", b"  \n", "instruction.md"),
        ("instruction.md", None, "instruction.md"),
        ("environment/Dockerfile", None, "environment/Dockerfile"),
        ("tests/test.sh", None, "tests/test.sh"),
    ],
)
def test_a_missing_or_unreadable_file_is_named(
    folder: Path, path: str, content: bytes | None, file: str
) -> None:
    if content is None:
        (folder / path).unlink()
    else:
        (folder / path).write_bytes(content)
    assert malformed(folder).file == file


def test_a_link_out_of_the_task_is_refused(folder: Path) -> None:
    (folder / "environment" / "repo" / "passwd").symlink_to("/etc/passwd")
    error = malformed(folder)
    assert (error.file, error.found) == ("environment/repo/passwd", "a link")
    (folder / "environment" / "repo" / "passwd").unlink()
    (folder / "tests" / "etc").symlink_to("/etc")
    assert malformed(folder).file == "tests/etc"


def test_a_task_over_the_size_limit_is_refused(folder: Path) -> None:
    with pytest.raises(MalformedTaskError, match="at most 100 bytes"):
        read_task(folder, HarborOptions(max_task_bytes=100))


def test_a_compose_file_and_an_accelerator_are_unsupported(folder: Path) -> None:
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(UnsupportedTaskError, match="compose"):
        read_task(folder)
    (folder / "environment" / "docker-compose.yaml").unlink()
    edit(folder, "cpus = 2", "gpus = 1")
    with pytest.raises(UnsupportedTaskError, match="gpus"):
        read_task(folder)


def test_a_dockerfile_that_runs_programs_stays_an_image_unless_a_tree_is_asked_for(
    folder: Path,
) -> None:
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN pip install flask\n")
    environment = read_task(folder).environment
    assert environment.source is EnvironmentSource.DOCKERFILE
    assert "repo/shop.py" in environment.files
    forced = read_task(folder, HarborOptions(environment=EnvironmentMode.TREE)).environment
    assert forced.source is EnvironmentSource.TREE
    assert list(forced.files) == ["shop.py"]


def test_a_prebuilt_image_is_named(folder: Path) -> None:
    edit(folder, "cpus = 2", 'docker_image = "ubuntu:24.04"')
    environment = read_task(folder).environment
    assert (environment.source, environment.image) == (EnvironmentSource.IMAGE, "ubuntu:24.04")
    assert environment.forget_history, "what an image holds is not known"
    kept = read_task(folder, HarborOptions(keep_history=True)).environment
    assert not kept.forget_history


def test_a_generated_task_survives_the_way_through_a_harbor_directory(tmp_path: Path) -> None:
    made = make_task("train", 7)
    options = HarborOptions(environment=EnvironmentMode.TREE)
    task = read_task(to_harbor(made, tmp_path), options)
    assert task.task_id == f"tailrace/{made.task_id}"
    assert (task.repository, task.kind) == (made.repository, made.kind)
    assert task.instruction.strip() == made.instruction.strip()
    assert {p: f.content.decode() for p, f in task.environment.files.items()} == dict(made.files)
    assert isinstance(task.grader, TestGrader)
    assert task.grader.runner is TestRunner.FUNCTIONS
    assert dict(task.grader.files) == dict(made.hidden_tests)
    assert task.grader.fail_to_pass == made.fail_to_pass
    assert task.grader.pass_to_pass == made.pass_to_pass
    assert task.reference is not None
    assert task.reference.patch == made.gold_patch.encode()


def test_hidden_tests_with_a_byte_order_mark_are_read_as_any_others(tmp_path: Path) -> None:
    made = make_task("train", 3)
    folder = to_harbor(made, tmp_path)
    for file in (folder / "tests/hidden").rglob("*.py"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    grader = read_task(folder).grader
    assert isinstance(grader, TestGrader)
    assert dict(grader.files) == dict(made.hidden_tests)
    assert grader.runner is TestRunner.FUNCTIONS


def test_named_tests_that_no_hidden_file_has_are_malformed(tmp_path: Path) -> None:
    folder = to_harbor(make_task("train", 7), tmp_path)
    edit(folder, "pass_to_pass = [", 'pass_to_pass = ["nowhere.py::test_x", ')
    error = malformed(folder)
    assert error.field.startswith("metadata.")
    assert "nowhere.py" in error.found


def test_more_tests_than_a_command_can_report_are_refused(tmp_path: Path) -> None:
    folder = to_harbor(make_task("train", 7), tmp_path)
    many = ", ".join(f'"test_hidden.py::test_{i}"' for i in range(20_000))
    edit(folder, "pass_to_pass = [", f"pass_to_pass = [{many}, ")
    assert "at most 20000 tests" in malformed(folder).expected


def test_task_directories_are_found_at_any_depth_in_order(tmp_path: Path) -> None:
    for name in ("b/two", "a/one", "a/one/environment/inner", ".hidden/three"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "task.toml").write_text("")
    assert find_tasks(tmp_path) == [tmp_path / "a/one", tmp_path / "b/two"]
    assert find_tasks(tmp_path / "a/one") == [tmp_path / "a/one"]


def test_plain_functions_have_no_arguments_decorators_or_await() -> None:
    source = (
        "import pytest\ndef test_a(): pass\ndef test_b(tmp_path): pass\n"
        "@pytest.mark.skip\ndef test_c(): pass\nasync def test_d(): pass\n"
        "class TestE:\n    def test_f(self): pass\n"
    )
    assert plain_functions({"t.py": source, "broken.py": "def ("}) == {"t.py::test_a"}
