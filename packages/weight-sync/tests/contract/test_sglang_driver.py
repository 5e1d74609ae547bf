"""The order of calls to SGLang, and what is proven before a token is made; a stand-in answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from weight_sync.core.manifest import Manifest, build_manifest
from weight_sync.drivers import DriverSettings, SglangDriver
from weight_sync.errors import ChecksumMismatch, EngineError
from weight_sync.model_files import tensors_in
from weight_sync.testing import FakeEngine, Fault

Weights = Callable[[int], dict[str, Any]]


def version(folder: Path, weights: dict[str, Any], number: int = 1) -> Manifest:
    folder.mkdir()
    renamed = {name.replace("layer.0.q", "m.q_proj.weight"): w for name, w in weights.items()}
    renamed |= {"m.k_proj.weight": renamed.pop("layer.0.k"), "m.v_proj.weight": renamed["norm"]}
    safetensors.numpy.save_file(renamed, folder / "model.safetensors")
    return build_manifest(
        run="run",
        incarnation=1,
        number=number,
        step=number,
        parent=0,
        codec="dense",
        tensors=[tensor.entry() for tensor in tensors_in(folder)],
        payloads=[],
    )


async def test_fused_tensors_are_proven_while_it_is_paused(
    engine: FakeEngine, weights: Weights, tmp_path: Path
) -> None:
    engine.sglang = True
    driver = SglangDriver(engine.url)
    manifest = version(tmp_path / "v", weights(1))
    took = await driver.activate(tmp_path / "v", manifest)
    assert [path for path, _ in engine.calls] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/weights_checker",
        "/continue_generation",
    ]
    assert engine.calls[0][1] == {"mode": "in_place"}
    assert engine.calls[1][1]["abort_all_requests"] is False
    assert engine.served[-1] == ("1", engine.root())
    assert took.pause_s >= took.load_s + took.verify_s
    await driver.close()


@pytest.mark.parametrize("fault", [Fault.TEAR_SILENTLY, Fault.STALE])
async def test_a_load_that_lies_is_found_out_and_stays_paused(
    engine: FakeEngine, weights: Weights, tmp_path: Path, fault: Fault
) -> None:
    engine.sglang = True
    driver = SglangDriver(engine.url)
    await driver.activate(tmp_path / "v", version(tmp_path / "v", weights(1)))
    engine.faults.append(fault)
    with pytest.raises(ChecksumMismatch, match="of version 2: expected checksum"):
        await driver.activate(tmp_path / "w", version(tmp_path / "w", weights(2), 2))
    assert engine.paused
    assert len(engine.served) == 1
    await driver.close()


@pytest.mark.parametrize(
    "info", [{"device": "cuda", "tp_size": 1}, {"device": "cpu", "tp_size": 2}]
)
async def test_an_engine_whose_checksums_cannot_be_told_is_not_touched(
    engine: FakeEngine, weights: Weights, tmp_path: Path, info: dict[str, object]
) -> None:
    engine.server_info = info
    driver = SglangDriver(engine.url)
    with pytest.raises(EngineError, match=r"Set receiver\.verify to 'label'"):
        await driver.activate(tmp_path / "v", version(tmp_path / "v", weights(1)))
    assert engine.calls == []
    by_label = SglangDriver(engine.url, DriverSettings(verify="label"))
    await by_label.activate(tmp_path / "v", version(tmp_path / "w", weights(1)))
    assert engine.label == "1"
    await driver.close()
    await by_label.close()


async def test_a_manifest_alone_proves_nothing(
    engine: FakeEngine, weights: Weights, tmp_path: Path
) -> None:
    engine.sglang = True
    driver = SglangDriver(engine.url)
    with pytest.raises(EngineError, match="it is loaded anew"):
        await driver.verify(version(tmp_path / "v", weights(1)))
    await driver.close()


async def test_ranks_that_hold_shards_are_told_from_ranks_that_disagree(
    engine: FakeEngine, weights: Weights, tmp_path: Path
) -> None:
    from weight_sync.drivers.http_engine import checksums_of

    ranks = [{"checksums": {"w": "1" * 16}}, {"checksums": {"w": "1" * 16, "x": "2" * 16}}]
    assert checksums_of({"ranks": ranks}, "u") == {"w": "1" * 16, "x": "2" * 16}
    ranks[0]["checksums"]["x"] = "3" * 16
    with pytest.raises(ChecksumMismatch, match="ranks disagree about tensor x"):
        checksums_of({"ranks": ranks}, "u")
    for answer in ({}, {"ranks": [1]}, {"ranks": None}):
        with pytest.raises(EngineError, match="expected ranks with checksums by name"):
            checksums_of(answer, "u")
