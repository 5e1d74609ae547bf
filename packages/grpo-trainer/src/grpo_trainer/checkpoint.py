"""Checkpoints: whole or not there, and checked before they are used.

A checkpoint is a folder that is a model folder too, so that engines and tools can load it:

    step-000040/
        manifest.json  state.json  optimizer.safetensors
        config.json  model.safetensors  tokenizer.json ...

It is written under a temporary name, every file is synced, and the rename is the commit point. The
manifest names every file with its size and checksum.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from grpo_trainer.errors import CheckpointInvalid, DiskFull

FORMAT = 1
"""The format this code writes, and the only one it reads."""
MANIFEST = "manifest.json"
STATE = "state.json"

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_PARTIAL = ".partial-"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was read and checked.

    Attributes:
        folder: Where it is; also a model folder.
        stage: Name of the stage that wrote it.
        step: Steps of that stage.
        state: What the stage saved besides weights and optimizer, JSON values.
    """

    folder: Path
    stage: str
    step: int
    state: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of one stage.

    Args:
        folder: Where they are; made with the first.
        stage: Name of the stage.
        keep: How many of the newest stay.
    """

    def __init__(self, folder: Path, *, stage: str, keep: int) -> None:
        self._folder = folder
        self._stage = stage
        self._keep = keep

    def write(self, step: int, state: Mapping[str, Any], save: Callable[[Path], None]) -> Path:
        """Write a checkpoint, durably, and drop the oldest beyond `keep`. Blocks.

        Args:
            step: Steps of the stage.
            state: JSON values.
            save: Writes weights and optimizer into an empty folder.

        Raises:
            DiskFull: There is no space; nothing but older checkpoints is there then.
        """
        partial = self._folder / f"{_PARTIAL}{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            partial.mkdir()
            save(partial)
            (partial / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
            (partial / MANIFEST).write_text(
                json.dumps(self._manifest(step, partial)), encoding="utf-8"
            )
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
            final = self._free_name(step)
            partial.rename(final)
            _sync(self._folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(
                    f"{self._folder}: no space for a checkpoint of step {step} "
                    f"({error.strerror}); free some and start the stage again"
                ) from error
            raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune()
        return final

    def newest(self) -> Path | None:
        """Return the newest checkpoint's folder; None if there is none."""
        found = self._ordered()
        return found[-1] if found else None

    def read_newest(self) -> Checkpoint:
        """Read and check the newest checkpoint.

        Raises:
            CheckpointInvalid: There is none, or it is not whole.
        """
        folder = self.newest()
        if folder is None:
            raise CheckpointInvalid(
                f"{self._folder}: expected a checkpoint of stage {self._stage!r}, found none. "
                "Start the stage, or name one that has finished"
            )
        return read_checkpoint(folder)

    def _manifest(self, step: int, folder: Path) -> dict[str, Any]:
        files = {
            file.name: [file.stat().st_size, _checksum(file)] for file in sorted(folder.iterdir())
        }
        return {"format": FORMAT, "stage": self._stage, "step": step, "files": files}

    def _free_name(self, step: int) -> Path:
        # A resumed stage saves again at the step it resumed from.
        final = self._folder / f"step-{step:06d}"
        again = 1
        while final.exists():
            again += 1
            final = self._folder / f"step-{step:06d}.{again}"
        return final

    def _ordered(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        found = []
        for entry in self._folder.iterdir():
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                found.append((int(match[1]), int(match[2] or 1), entry))
        return [entry for _, _, entry in sorted(found)]

    def _prune(self) -> None:
        for old in self._ordered()[: -self._keep]:
            # Out of sight first: a kill in the middle must not leave half a checkpoint.
            doomed = old.with_name(f"{_PARTIAL}{old.name}")
            old.rename(doomed)
            shutil.rmtree(doomed)

    def _sweep(self) -> None:
        for entry in self._folder.iterdir():
            if entry.name.startswith(_PARTIAL):
                shutil.rmtree(entry)


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointInvalid(f"{folder}: expected a name such as step-000040")
    return int(match[1])


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's state, and check every file against the manifest.

    Raises:
        CheckpointInvalid: Says which file, what was expected and what was found.
    """
    manifest = _json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointInvalid(
            f"{folder / MANIFEST}: expected format {FORMAT}, found {manifest.get('format')!r}; it "
            "was written by another release. Resume with that release, or start the stage anew"
        )
    for name, (size_bytes, checksum) in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise CheckpointInvalid(f"{file}: missing; the manifest names it.{_NEXT}")
        found_bytes = file.stat().st_size
        if found_bytes != size_bytes:
            raise CheckpointInvalid(
                f"{file}: expected {size_bytes} bytes, found {found_bytes}; it was cut off or "
                f"changed.{_NEXT}"
            )
        if _checksum(file) != checksum:
            raise CheckpointInvalid(f"{file}: its checksum is not the manifest's.{_NEXT}")
    return Checkpoint(folder, manifest["stage"], manifest["step"], _json(folder / STATE))


_NEXT = " Remove this checkpoint's folder to resume from the one before it"


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointInvalid(f"{file}: cannot be read: {error.strerror}.{_NEXT}") from error
    except ValueError as error:
        raise CheckpointInvalid(f"{file}: not JSON: {error}.{_NEXT}") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{file}: expected an object, found {type(value).__name__}.{_NEXT}")
    return value


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
