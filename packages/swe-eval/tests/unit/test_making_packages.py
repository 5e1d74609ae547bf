from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from swe_eval.errors import RepositoryError
from swe_eval.making.packages import copy_pytest, look_into, own_packages


def test_a_copy_of_pytest_runs_without_the_packages_it_came_from(tmp_path: Path) -> None:
    packages = copy_pytest(tmp_path / "packages")
    assert [r.partition("==")[0] for r in packages.requirements] == [
        "iniconfig",
        "packaging",
        "pluggy",
        "pygments",
        "pytest",
    ]
    assert packages.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert True\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pytest; sys.exit(pytest.main(['-q']))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(packages.folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout


def test_a_copy_replaces_another_and_leaves_its_like_alone(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/old.py").write_text("")
    copy_pytest(tmp_path / "packages")
    assert not (tmp_path / "packages/old.py").exists()
    (tmp_path / "packages/in use").write_text("")
    copy_pytest(tmp_path / "packages")
    assert (tmp_path / "packages/in use").exists()


def test_an_environment_is_named_by_its_folder_or_its_interpreter() -> None:
    by_folder, by_file = look_into(Path(sys.prefix)), look_into(Path(sys.executable))
    assert by_folder.folder == by_file.folder
    assert any(r.startswith("pytest==") for r in by_folder.requirements)


@pytest.mark.parametrize("said", ["", "no JSON", '{"version": "3.11", "found": {}, "folder": "/"}'])
def test_what_is_no_environment_with_pytest_is_refused(tmp_path: Path, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{said}'\n")
    python.chmod(0o755)
    with pytest.raises(RepositoryError, match=r"expected an interpreter|no pytest"):
        look_into(python)


def test_copies_of_the_repositorys_packages_are_found(tmp_path: Path) -> None:
    for name in ("shop", "docs", "setup.py", "single.py"):
        (tmp_path / name).mkdir()
    sources = ["setup.py", "docs/conf.py", "src/shop/__init__.py", "src/shop/sums.py", "single.py"]
    assert own_packages(sources, tmp_path) == ["shop", "single.py"]
    assert own_packages(["absent/__init__.py"], tmp_path) == []
