"""The trajectories of an evaluation: one ATIF file for each attempt that counts, in one folder."""

import json
import re
import shutil
from pathlib import Path

from rollout_engine.types import FinishedGroup

from swe_eval.atif import Decoder, to_atif

_CHUNK_BYTES = 256 * 1024


class TrajectoryStore:
    """The files of one evaluation, named so that they sort by the task's place in the list.

    Args:
        folder: Made with the first file.
        decoder: Reads the text of tokens.
        evaluation: Name of the evaluation.
    """

    def __init__(self, folder: Path, decoder: Decoder, *, evaluation: str) -> None:
        self._folder = folder
        self._decoder = decoder
        self._evaluation = evaluation

    def clear(self) -> None:
        """Removes what an evaluation of the same name left, whose journal is gone."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, group: FinishedGroup, *, position: int) -> None:
        """Writes the attempts of a group, whole files or none; the same group again replaces them.

        Raises:
            OSError: the disk is full, or not writable.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", group.task_id)[:100]
        for attempt in group.valid_attempts:
            path = self._folder / f"{position:06d}-{attempt.id.index:04d}-{slug}.json"
            text = json.dumps(
                to_atif(attempt, self._decoder, evaluation=self._evaluation), allow_nan=False
            )
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(path)


def trajectory_files(folder: Path, after: str = "") -> list[Path]:
    """The files of a store in the order of their names, from the one after `after` on."""
    return sorted(path for path in folder.glob("*.json") if path.name > after)


def file_pieces(path: Path) -> list[tuple[bytes, bool]]:
    """A file's bytes in pieces that fit a message, each with whether it is the last."""
    data = path.read_bytes()
    return [
        (data[start : start + _CHUNK_BYTES], start + _CHUNK_BYTES >= len(data))
        for start in range(0, max(1, len(data)), _CHUNK_BYTES)
    ]
