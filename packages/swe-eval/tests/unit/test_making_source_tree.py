from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from swe_eval.errors import RepositoryError
from swe_eval.making import source_tree
from swe_eval.making.source_tree import matches, read_repository

FILES = {
    "shop/__init__.py": "",
    "shop/sums.py": "def add(a, b):\n    return a + b\n",
    "tests/test_sums.py": "def test_add():\n    pass\n",
    "tests/data.bin": "\x00",
    "docs/conf.py": "x = 1\n",
    "run.sh": "echo\n",
    ".git/config": "secret",
    "shop/__pycache__/sums.pyc": "x",
    ".venv/lib/thing.py": "x = 1\n",
}
KEPT = {"shop/__init__.py", "shop/sums.py", "tests/test_sums.py", "tests/data.bin"}
KEPT |= {"docs/conf.py", "run.sh"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with the things that lie around in one."""
    for path, text in FILES.items():
        file = tmp_path / "My_Shop-1.0" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "My_Shop-1.0/run.sh").chmod(0o755)
    return tmp_path / "My_Shop-1.0"


def test_a_folder_without_what_is_no_source(folder: Path) -> None:
    tree = read_repository(folder)
    assert tree.name == "my-shop-1.0"
    assert set(tree.files) == KEPT
    assert {path for path, file in tree.files.items() if file.executable} == {"run.sh"}


@pytest.mark.parametrize("kind", ["gztar", "zip"])
def test_archives_hold_the_same_tree(folder: Path, tmp_path: Path, kind: str) -> None:
    base = str(tmp_path / "My_Shop-1.0")
    made = shutil.make_archive(base, kind, root_dir=tmp_path, base_dir="My_Shop-1.0")
    tree = read_repository(Path(made))
    assert (tree.name, tree.short_digest) == ("my-shop-1.0", read_repository(folder).short_digest)


def test_links_within_become_files_and_others_are_left_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("secret = 1\n")
    (folder / "inner.py").symlink_to("shop/sums.py")
    (folder / "outer.py").symlink_to(tmp_path / "outside.py")
    (folder / "nowhere.py").symlink_to("absent.py")
    files = read_repository(folder).files
    assert files["inner.py"] == files["shop/sums.py"]
    assert set(files) == KEPT | {"inner.py"}


def test_copies_of_the_sources_are_left_out(folder: Path) -> None:
    for copy in ("build/lib/shop/sums.py", "dist/a.txt", "env/lib/sums.py", "htmlcov/sums.html"):
        add(folder / copy)
    add(folder / "shop.egg-info/SOURCES.txt")
    add(folder / "tools/mine/lib/sums.py")
    add(folder / "tools/mine/pyvenv.cfg")
    assert set(read_repository(folder).files) == KEPT
    # Of a project below the top, too, and what editors and patches leave.
    add(folder / "python/pyproject.toml")
    add(folder / "python/build/lib/shop/sums.py")
    for name in ("sums.py.orig", "sums.py~", ".sums.py.swp", "sums.py.rej"):
        add(folder / "shop" / name)
    assert set(read_repository(folder).files) == KEPT | {"python/pyproject.toml"}
    shutil.rmtree(folder / "python")
    # A package of such a name is a source.
    add(folder / "build/__init__.py")
    add(folder / "shop/env/x.py")
    files = set(read_repository(folder).files)
    added = {"build/__init__.py", "build/lib/shop/sums.py", "shop/env/x.py"}
    assert files == KEPT | added


@pytest.mark.parametrize("archive", [False, True])
def test_tasks_that_were_made_are_left_out(folder: Path, tmp_path: Path, archive: bool) -> None:
    before = read_repository(folder).short_digest
    toml = '[metadata]\nfingerprint = "f"\nsource = "s"\n'
    add(folder / "some/shop-1/task.toml", toml)
    add(folder / "some/shop-1/solution/gold.patch")
    add(folder / "some/.shop-2.partial/task.toml", toml)
    add(folder / "some/.site-packages/pytest.py")
    source = folder
    if archive:
        made = shutil.make_archive(str(tmp_path / "a"), "gztar", root_dir=folder)
        source = Path(made)
    assert read_repository(source).short_digest == before
    add(folder / "tasks/notes.txt")
    assert read_repository(folder, out=folder / "tasks").short_digest == before
    with pytest.raises(RepositoryError, match="is where the tasks go"):
        read_repository(folder, out=folder)


def add(file: Path, text: str = "x") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_bugs_go_where_grading_keeps_a_repair(folder: Path) -> None:
    (folder / "shop/test_utils.py").write_text("def f():\n    return 1\n")
    tree = read_repository(folder)
    assert tree.sources((), ()) == ["docs/conf.py", "shop/__init__.py", "shop/sums.py"]
    assert tree.sources(["shop"], ["*/__init__.py"]) == ["shop/sums.py"]


def test_a_glob_matches_a_path_or_a_folder_above_it() -> None:
    assert matches("a/b/c.py", ["a/b"])
    assert matches("a/b/c.py", ["a/"])
    assert matches("a/b/c.py", ["*.py"])
    assert not matches("a/b/c.py", ["b", "c.py"])
    assert matches("t.py::test_slow[1]", ["*test_slow*"])


def test_what_is_no_repository_is_refused_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RepositoryError, match="is not there"):
        read_repository(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RepositoryError, match="holds no Python"):
        read_repository(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RepositoryError, match="neither a folder nor an archive"):
        read_repository(tmp_path / "notes.txt")
    (tmp_path / "bad.tar.gz").write_text("x")
    with pytest.raises(RepositoryError, match="can't be read as an archive"):
        read_repository(tmp_path / "bad.tar.gz")
    monkeypatch.setattr(source_tree, "MAX_BYTES", 10)
    (tmp_path / "empty/large.py").write_text("x = 1\n" * 10)
    with pytest.raises(RepositoryError, match="larger than 10 bytes"):
        read_repository(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["gztar", "bztar", "xztar"])
def test_a_damaged_archive_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    for number in range(20):
        (folder / f"shop/more{number}.py").write_text(f"x = {number}\n")
    whole = Path(shutil.make_archive(str(tmp_path / "whole"), "tar", root_dir=folder)).read_bytes()
    at = whole.index(b"more7.py")
    suffix = Path(shutil.make_archive(str(tmp_path / "a"), kind, root_dir=folder)).name[1:]
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gztar": gzip.compress,
        "bztar": bz2.compress,
        "xztar": lzma.compress,
    }
    pack = packers[kind]
    packed = pack(whole)
    header = whole[:at] + b"MORE" + whole[at + 4 :]
    half = packed[: len(packed) // 2]
    for damaged in (pack(header), packed[:-6], packed[:-6] + b"\xff" * 6, half):
        (tmp_path / f"bad{suffix}").write_bytes(damaged)
        with pytest.raises(RepositoryError, match="can't be read as an archive"):
            read_repository(tmp_path / f"bad{suffix}")
    (tmp_path / f"good{suffix}").write_bytes(packed)
    assert set(read_repository(tmp_path / f"good{suffix}").files) > KEPT


def test_a_zip_that_is_damaged_encrypted_or_packed_oddly_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.py", "x = 1\n" * 50)
    whole = (tmp_path / "a.zip").read_bytes()
    central = whole.index(b"PK\x01\x02")
    for changes in (
        {6: b"\x01", central + 8: b"\x01"},  # encrypted
        {8: b"\x61", central + 10: b"\x61"},  # a method nobody knows
        {36: b"\xff\xff\xff"},  # what is packed
        {14: b"\0\0\0\0", central + 16: b"\0\0\0\0"},  # the checksum
    ):
        damaged = bytearray(whole)
        for at, value in changes.items():
            damaged[at : at + len(value)] = value
        (tmp_path / "a.zip").write_bytes(damaged)
        with pytest.raises(RepositoryError, match="can't be read as an archive"):
            read_repository(tmp_path / "a.zip")


def test_links_in_an_archive_are_those_of_a_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "tests/inner.py").symlink_to("../shop/sums.py")
    (folder / "again.py").symlink_to("tests/inner.py")
    (folder / "round.py").symlink_to("round.py")
    (folder / "outer.py").symlink_to("../../outside.py")
    (folder / "hard.py").hardlink_to(folder / "shop/sums.py")
    expected = read_repository(folder)
    assert set(expected.files) == KEPT | {"tests/inner.py", "again.py", "hard.py"}
    made = shutil.make_archive(str(tmp_path / "a"), "gztar", tmp_path, folder.name)
    assert read_repository(Path(made)).short_digest == expected.short_digest
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        for path in folder.rglob("*"):
            info = zipfile.ZipInfo(str(path.relative_to(folder)))
            info.external_attr = path.lstat().st_mode << 16
            if path.is_symlink():
                packed.writestr(info, str(path.readlink()))
            elif path.is_file():
                packed.writestr(info, path.read_bytes())
    assert read_repository(tmp_path / "a.zip").short_digest == expected.short_digest


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "top/../../outside.py"])
def test_members_that_leave_an_archive_are_left_out(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for member in ("top/in.py", name):
            info = tarfile.TarInfo(member)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"x\n"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("top/in.py", "x\n")
        packed.writestr(name, "x\n")
    for archive_name in ("a.tar.gz", "a.zip"):
        files = read_repository(tmp_path / archive_name).files
        assert not any(part in {"..", ""} for path in files for part in path.split("/"))
        assert any(path.endswith("in.py") for path in files)
