from pathlib import Path

import pytest
from sandbox_client.backends.local.jail.python_args import BASE_ENVIRON, parse_python


def parse(*arguments: str, **environ: str) -> tuple[str, str, list[str], bool] | None:
    run = parse_python(["python", *arguments], {**BASE_ENVIRON, **environ}, "/workspace")
    return None if run is None else (run.kind, run.value, run.rest, run.unbuffered)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.py", "-x", "1"], ("script", "a.py", ["-x", "1"], False)),
        (["-B", "a.py"], ("script", "a.py", [], False)),
        (["-u", "-B", "a.py"], ("script", "a.py", [], True)),
        (["-Bu", "a.py"], ("script", "a.py", [], True)),
        (["-c", "print(1)", "x"], ("command", "print(1)", ["x"], False)),
        (["-cprint(1)"], ("command", "print(1)", [], False)),
        (["-Bc", "pass"], ("command", "pass", [], False)),
        (["-m", "unittest", "-v"], ("module", "unittest", ["-v"], False)),
        (["-", "x"], ("stdin", "-", ["x"], False)),
        ([], ("stdin", "", [], False)),
    ],
)
def test_the_usual_command_lines_are_understood(
    arguments: list[str], expected: tuple[str, str, list[str], bool]
) -> None:
    assert parse(*arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [["-O", "a.py"], ["-X", "dev", "a.py"], ["-W", "error", "a.py"], ["-V"], ["--help"], ["-i"],
     ["-I", "a.py"], ["-Em", "x"], ["-c"], ["-m"], ["-s", "a.py"]],
)  # fmt: skip
def test_other_options_need_a_real_interpreter(arguments: list[str]) -> None:
    assert parse(*arguments) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONOPTIMIZE": "1"},
        {"PYTHONSTARTUP": "x"},
        {"LC_ALL": "de_DE.UTF-8"},
        {"LANG": "C"},
        {"PYTHONHOME": "/x"},
    ],
)
def test_an_environment_that_changes_the_interpreter_needs_a_real_one(
    environ: dict[str, str],
) -> None:
    assert parse("a.py", **environ) is None


def test_a_module_of_the_interpreters_start_needs_a_real_one_wherever_its_folder_is_named_from(
    tmp_path: Path,
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "sitecustomize.py").touch()
    for folder, cwd in (("sub", tmp_path), (".", tmp_path / "sub"), (tmp_path / "sub", "/")):
        environ = {**BASE_ENVIRON, "PYTHONPATH": f"src:{folder}"}
        assert parse_python(["python", "a.py"], environ, str(cwd)) is None


def test_harmless_variables_do_not() -> None:
    assert parse("a.py", PYTHONPATH="src", HOME="/x") == ("script", "a.py", [], False)
    assert parse("a.py", PYTHONUNBUFFERED="1") == ("script", "a.py", [], True)


def test_an_environment_without_the_warm_ones_variables_needs_a_real_interpreter() -> None:
    assert parse_python(["python", "a.py"], {}, "/") is None
