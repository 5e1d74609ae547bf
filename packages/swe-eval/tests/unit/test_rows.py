"""Rows from every kind of file, and those that can't be read in their place."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from swe_eval.errors import MalformedTaskError, TaskSetError
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.rows import read_rows, row_files

ROWS: list[dict[str, Any]] = [{"instance_id": "a", "n": 1}, {"instance_id": "b", "n": None}]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        path.write_text(json.dumps(ROWS))
    return path


def names(location: str, split: str = "") -> list[str]:
    return [row.task for row in read_rows(location, split=split)]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    first, second = read_rows(str(path))
    assert isinstance(first, Fields)
    assert isinstance(second, Fields)
    assert (first.task, first.file, first.line) == ("a", str(path), 1)
    assert dict(first.values) == {"instance_id": "a", "n": 1}
    assert dict(second.values) == {"instance_id": "b"}
    assert [first.nulls, second.nulls] == [frozenset(), frozenset({"n"})]


def test_one_object_and_an_object_by_id_are_rows_too(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(ROWS[0]))
    assert names(str(tmp_path / "x.json")) == ["a"]
    (tmp_path / "x.json").write_text(json.dumps({row["instance_id"]: row for row in ROWS}))
    assert names(str(tmp_path / "x.json")) == ["a", "b"]


def test_a_row_that_can_not_be_read_never_stops_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"instance_id": "a"}\n\n{"cut": \n[1]\n"\xff"\n{"instance_id": "b"}\n')
    found = list(read_rows(str(path)))
    assert [row.line for row in found] == [1, 3, 4, 5, 6]
    problems = [row for row in found if isinstance(row, MalformedTaskError)]
    assert [problem.line for problem in problems] == [3, 4, 5]
    assert str(problems[1]) == f"{path}:4: expected a JSON object, found [1]"
    assert {problem.expected for problem in problems} == {"a JSON object"}


@pytest.mark.parametrize("name", ["x.json", "x.parquet"])
def test_a_broken_file_is_one_problem_and_the_next_file_follows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{broken")
    write(tmp_path, "y.jsonl")
    broken, *rest = read_rows(str(tmp_path))
    assert isinstance(broken, MalformedTaskError)
    assert (broken.file, broken.line) == (str(tmp_path / name), 0)
    assert [row.task for row in rest] == ["a", "b"]


def test_a_split_is_told_by_file_or_folder(tmp_path: Path) -> None:
    for name in (
        "data/test-00000-of-00001.parquet",
        "train.jsonl",
        "test/0.json",
        ".cache/test.json",
    ):
        write(tmp_path, name)
    assert [path.name for path in row_files(tmp_path, split="test")] == [
        "test-00000-of-00001.parquet",
        "0.json",
    ]
    assert names(str(tmp_path), "train") == ["a", "b"]
    with pytest.raises(TaskSetError, match="of split 'dev'"):
        names(str(tmp_path), "dev")


def test_what_is_not_there_is_an_error_of_the_whole(tmp_path: Path) -> None:
    with pytest.raises(TaskSetError, match=r"absent: no \.json, \.jsonl, \.parquet file"):
        names(str(tmp_path / "absent"))


def test_a_data_set_of_the_hub_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "data/test-00000-of-00001.parquet")
    asked: list[tuple[object, ...]] = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["repo_type"], options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert names("hf:owner/name", "test") == names("hf:owner/name@v1") == ["a", "b"]
    assert asked == [("owner/name", "dataset", None), ("owner/name", "dataset", "v1")]


def test_a_data_set_that_can_not_be_had_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TaskSetError, match="hf:owner/name: the data set can't be had"):
        names("hf:owner/name")
    with pytest.raises(TaskSetError, match="hf:no such name"):
        names("hf:no such name")
