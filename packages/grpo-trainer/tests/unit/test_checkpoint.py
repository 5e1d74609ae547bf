from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from grpo_trainer.checkpoint import CheckpointStore, read_checkpoint, step_of
from grpo_trainer.errors import CheckpointInvalid, DiskFull


def store(folder: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", stage="rl", keep=keep)


def save(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "config.json").write_text("{}")


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = {"numbers": [1, 2.5], "big": 2**100, "text": "x"}
    path = store(tmp_path).write(40, state, save)
    assert path.name == "step-000040"
    found = store(tmp_path).read_newest()
    assert (found.folder, found.stage, found.step, found.state) == (path, "rl", 40, state)
    assert step_of(path) == 40


def test_the_newest_stay_and_the_oldest_go(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=2)
    for step in (0, 10, 20, 110):
        kept.write(step, {"step": step}, save)
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000020", "step-000110"]
    assert kept.read_newest().state == {"step": 110}


def test_saving_at_the_same_step_again_takes_precedence(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=9)
    for life in range(3):
        kept.write(10, {"life": life}, save)
    assert kept.read_newest().state == {"life": 2}
    assert step_of(kept.read_newest().folder) == 10


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.write(1, {}, save)

    def broken(folder: Path) -> None:
        save(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kept.write(2, {}, broken)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_full_disk_is_an_error_of_its_own_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.write(1, {}, save)

    def full(folder: Path) -> None:
        save(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull, match=r"no space for a checkpoint of step 2.*start the stage"):
        kept.write(2, {}, full)
    assert kept.read_newest().step == 1


def test_what_a_kill_left_half_written_is_not_seen_and_swept_by_the_next_write(
    tmp_path: Path,
) -> None:
    kept = store(tmp_path)
    kept.write(1, {}, save)
    half = tmp_path / "checkpoints" / ".partial-123"
    half.mkdir()
    save(half)
    assert kept.read_newest().step == 1
    kept.write(2, {}, save)
    assert not half.exists()


def test_none_at_all_is_an_error(tmp_path: Path) -> None:
    assert store(tmp_path).newest() is None
    with pytest.raises(CheckpointInvalid, match="expected a checkpoint of stage 'rl', found none"):
        store(tmp_path).read_newest()


def damaged(tmp_path: Path) -> Path:
    return store(tmp_path).write(1, {}, save)


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    os.truncate(path / "model.safetensors", 1000)
    with pytest.raises(CheckpointInvalid, match="expected 25600 bytes, found 1000"):
        read_checkpoint(path)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[5000] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors: its checksum"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    path = damaged(tmp_path)
    (path / name).unlink()
    with pytest.raises(CheckpointInvalid, match=name):
        read_checkpoint(path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointInvalid, match="expected format 1, found 99"):
        read_checkpoint(path)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = damaged(tmp_path)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json"):
        read_checkpoint(path)
