"""SWE-bench's `predictions.jsonl`: what a model submitted for each instance, in and out."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.rows import read_rows


@dataclass(frozen=True, slots=True)
class Prediction:
    """One submission."""

    instance_id: str
    model_name_or_path: str
    model_patch: str
    """Empty when nothing was submitted."""


def read_predictions(location: str) -> Iterator[Prediction | MalformedTaskError]:
    """The predictions of a file, or of a folder of them; lines, a list, or an object by instance.

    An instance that comes a second time is malformed: which of the two is meant can't be told.

    Raises:
        TaskSetError: there is no such file.
    """
    taken: set[str] = set()
    for row in read_rows(location):
        found = row if isinstance(row, MalformedTaskError) else _read(row, taken)
        if isinstance(found, Prediction):
            taken.add(found.instance_id)
        yield found


def _read(row: Fields, taken: set[str]) -> Prediction | MalformedTaskError:
    try:
        # A patch may be null, and yet must be there: a misnamed one is no empty submission.
        needed = ("instance_id", "model_name_or_path", "model_patch")
        row.demand([key for key in needed if key not in row.nulls], "a field of a prediction")
        name = row.filled("instance_id")
        if name in taken:
            row.fail("instance_id", "one prediction for each instance", name)
        return Prediction(name, row.filled("model_name_or_path"), row.text("model_patch"))
    except MalformedTaskError as error:
        return error


def write_predictions(file: Path, predictions: Iterable[Prediction]) -> None:
    """Writes one prediction a line, as SWE-bench's harness reads them."""
    with file.open("w", encoding="utf-8") as stream:
        for prediction in predictions:
            # Escaped to ASCII: some readers take U+2028 for the end of a line.
            values = {
                "instance_id": prediction.instance_id,
                "model_name_or_path": prediction.model_name_or_path,
                "model_patch": prediction.model_patch,
            }
            stream.write(json.dumps(values) + "\n")
