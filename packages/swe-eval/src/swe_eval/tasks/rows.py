"""Rows of a data set: from JSON, JSON lines, Parquet, a folder of these, or the Hugging Face hub.

A row that can't be read becomes a `MalformedTaskError` in its place, and the next one follows.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swe_eval.errors import MalformedTaskError, TaskSetError
from swe_eval.tasks.fields import Fields, shown

HUB = "hf:"
"""Start of a location that is a data set's id on the hub."""
_SUFFIXES = (".json", ".jsonl", ".parquet")
_BATCH = 256


def read_rows(location: str, *, split: str = "") -> Iterator[Fields | MalformedTaskError]:
    """The rows at a location, in order.

    Args:
        location: A `.json`, `.jsonl` or `.parquet` file, a folder of them, or
            `hf:OWNER/NAME[@REVISION]`.
        split: Which split of a hub's data set; empty: all of its files.

    Raises:
        TaskSetError: there is nothing of the kind, or a library is missing to read it.
    """
    if location.startswith(HUB):
        location = _from_hub(location.removeprefix(HUB))
    files = row_files(Path(location), split=split)
    if not files:
        of_split = f" of split {split!r}" if split else ""
        raise TaskSetError(f"{location}: no {', '.join(_SUFFIXES)} file{of_split} there")
    for file in files:
        yield from read_file(file)


def row_files(path: Path, *, split: str = "") -> list[Path]:
    """The files of rows at a path, which is one or a folder of them at any depth."""
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    return sorted(
        file
        for file in path.rglob("*")
        if file.suffix in _SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        # As the hub names them: `data/test-00000-of-00001.parquet`, `test.jsonl`, `test/0.parquet`.
        and (not split or split in (file.name.split("-")[0].split(".")[0], file.parent.name))
    )


def read_file(file: Path) -> Iterator[Fields | MalformedTaskError]:
    """The rows of one file."""
    try:
        if file.suffix == ".parquet":
            yield from _from_parquet(file)
        elif file.suffix == ".jsonl":
            yield from _from_lines(file)
        else:
            yield from _from_json(file)
    except OSError as error:
        yield _malformed(file, 0, "a readable file", error.strerror or str(error))


def _from_lines(file: Path) -> Iterator[Fields | MalformedTaskError]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _parsed_row(file, number, line)


def _parsed_row(file: Path, number: int, line: bytes) -> Fields | MalformedTaskError:
    try:
        return _row(file, number, json.loads(line))
    except ValueError as error:  # neither UTF-8 nor JSON
        return _malformed(file, number, "a JSON object", str(error))


def _from_json(file: Path) -> Iterator[Fields | MalformedTaskError]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        yield _malformed(file, 0, "JSON", str(error))
        return
    # The rows of a list have no lines of their own worth naming: they are counted.
    if isinstance(values, dict) and values and all(_is_named(k, v) for k, v in values.items()):
        values = list(values.values())
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        yield _row(file, number, value)


def _is_named(key: str, value: Any) -> bool:
    """Whether it is a row kept under its own id, as predictions often are."""
    return isinstance(value, dict) and value.get("instance_id") == key


def _from_parquet(file: Path) -> Iterator[Fields | MalformedTaskError]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TaskSetError(
            f"{file}: Parquet needs pyarrow; install swe-eval[datasets], or give JSON lines"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield _row(file, number, value)
    except pyarrow.ArrowException as error:
        yield _malformed(file, 0, "a Parquet file", str(error))


def _from_hub(name: str) -> str:
    """Folder of the data set's files: the hub's cache, filled if it has none."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise TaskSetError(
            f"{HUB}{name}: needs huggingface_hub; install swe-eval[datasets], or give a folder"
        ) from error
    patterns = [f"*{suffix}" for suffix in _SUFFIXES]
    repo, _, revision = name.partition("@")
    try:
        return str(
            snapshot_download(
                repo, repo_type="dataset", revision=revision or None, allow_patterns=patterns
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TaskSetError(f"{HUB}{name}: the data set can't be had: {error}") from error


def _row(file: Path, number: int, value: Any) -> Fields | MalformedTaskError:
    if not isinstance(value, dict):
        return _malformed(file, number, "a JSON object", shown(value))
    name = value.get("instance_id")
    # A table's columns are in every row: null says that this one has none.
    filled = {key: item for key, item in value.items() if item is not None}
    return Fields(
        name if isinstance(name, str) else "",
        str(file),
        filled,
        line=number,
        nulls=frozenset(value.keys() - filled.keys()),
    )


def _malformed(file: Path, line: int, expected: str, found: str) -> MalformedTaskError:
    return MalformedTaskError(
        task="", file=str(file), line=line, expected=expected, found=found or "something else"
    )
