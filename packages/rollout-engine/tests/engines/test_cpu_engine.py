"""Behaviour of the engine without its shell: queue, stops, aborts, updates, faults."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_engine.engines.cpu.batch import Sequence
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import Weights, load_weights
from rollout_engine.engines.errors import (
    EngineBusy,
    EnginePoisoned,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.types import (
    EngineRequest,
    Finish,
    FinishKind,
    LabelSpan,
    PauseMode,
    SamplingParams,
)
from safetensors.torch import load_file, save_file


def load(folder: Path, dtype: str = "float32") -> Weights:
    return load_weights(folder, read_spec(folder), getattr(torch, dtype))


def engine(folder: Path, **settings: Any) -> CpuEngine:
    config = CpuEngineConfig(model=folder, **({"context_tokens": 64, "seed": 0} | settings))
    return CpuEngine(config, load(folder, config.dtype), time.monotonic)


def submit(made: CpuEngine, tokens: list[int], rid: str = "r", **sampling: Any) -> Sequence:
    options = {"max_new_tokens": 8, "ignore_eos": True} | sampling
    return made.submit(EngineRequest(rid=rid, input_ids=tokens, sampling=SamplingParams(**options)))


def run(made: CpuEngine, *, steps: int = 1000) -> list[Sequence]:
    finished: list[Sequence] = []
    while made.busy and steps > 0:
        finished += made.step()
        steps -= 1
    return finished


def test_a_stop_token_ends_the_output_and_stays_in_it(dense: Path) -> None:
    made = engine(dense)
    free = submit(made, [1, 2, 3], sampling_seed=3)
    run(made)
    stop = free.output[2]
    first = free.output.index(stop)
    stopped = submit(made, [1, 2, 3], sampling_seed=3, stop_token_ids=(stop,))
    run(made)
    assert stopped.output == free.output[: first + 1]
    assert stopped.finish == Finish(FinishKind.STOP, matched=stop)
    assert len(stopped.logprobs) == first + 1


def test_the_models_own_end_token_stops_unless_it_is_to_be_ignored(
    write_model: Callable[..., Path], dense: Path
) -> None:
    made = engine(dense)
    free = submit(made, [1, 2, 3], sampling_seed=3)
    run(made)
    folder = write_model("dense", 0, eos_token_id=[free.output[1], 96])
    made = engine(folder)
    stopped = submit(made, [1, 2, 3], sampling_seed=3, ignore_eos=False)
    ignored = submit(made, [1, 2, 3], sampling_seed=3)
    run(made)
    assert stopped.finish == Finish(FinishKind.STOP, matched=free.output[1])
    assert ignored.output == free.output


def test_stop_tokens_can_not_come_before_the_least_length(dense: Path) -> None:
    made = engine(dense)
    likely = tuple(range(90))
    sequence = submit(made, [1], stop_token_ids=likely, min_new_tokens=5)
    run(made)
    assert len(sequence.output) >= 6 or sequence.finish == Finish(FinishKind.LENGTH)
    assert not set(sequence.output[:5]) & set(likely)


def test_output_ends_at_its_limit_or_where_the_context_does(dense: Path) -> None:
    made = engine(dense)
    short = submit(made, [1, 2], max_new_tokens=3)
    full = submit(made, [1] * 60, max_new_tokens=50)
    nothing = submit(made, [1, 2], max_new_tokens=0)
    run(made)
    assert len(short.output) == 3
    assert len(full.output) == 4
    assert nothing.output == []
    assert {s.finish for s in (short, full, nothing)} == {Finish(FinishKind.LENGTH)}


def test_a_prompt_that_can_never_be_served_is_refused(dense: Path) -> None:
    made = engine(dense)
    for tokens, words in (
        ([], "empty"),
        ([1] * 64, r"The input \(64 tokens\) is longer than the model's context length \(64"),
        ([1, 97], r"in \[0, 97\), found 1 to 97"),
        ([-1], "found -1"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            submit(made, tokens)
    assert made.in_flight == 0


def test_a_full_queue_refuses_and_recovers(dense: Path) -> None:
    made = engine(dense, max_running_requests=1, max_queued_requests=2)
    for _ in range(2):
        submit(made, [1])
    with pytest.raises(EngineBusy, match="queue is full"):
        submit(made, [1])
    run(made)
    submit(made, [1])


def test_an_abort_returns_what_there_is_and_leaves_the_others_alone(dense: Path) -> None:
    quiet = engine(dense)
    expected = [submit(quiet, [n + 1], str(n), sampling_seed=n) for n in range(3)]
    run(quiet)
    made = engine(dense, max_running_requests=2)
    sequences = [submit(made, [n + 1], str(n), sampling_seed=n) for n in range(3)]
    run(made, steps=3)
    assert made.abort("0") == [sequences[0]]
    assert sequences[0].finish == Finish(FinishKind.ABORT, message="Aborted")
    assert sequences[0].output == expected[0].output[:3]
    assert made.abort("2") == [sequences[2]]
    assert sequences[2].output == []
    assert made.abort("unknown") == []
    run(made)
    assert sequences[1].output == expected[1].output


def test_a_pause_that_aborts_ends_everything(dense: Path) -> None:
    made = engine(dense)
    sequences = [submit(made, [1], str(n)) for n in range(3)]
    run(made, steps=2)
    assert made.pause(PauseMode.ABORT) == sequences
    assert made.in_flight == 0
    later = submit(made, [1])
    assert run(made) == []
    made.resume()
    assert run(made) == [later]


def test_the_prefix_cache_is_flushed_only_when_nothing_is_in_flight(dense: Path) -> None:
    made = engine(dense)
    first = submit(made, [1, 2, 3, 4])
    run(made, steps=2)
    assert not made.flush()
    run(made)
    second = submit(made, [1, 2, 3, 4])
    run(made)
    assert first.cached == 0
    assert second.cached == 3
    assert made.flush()
    third = submit(made, [1, 2, 3, 4])
    run(made)
    assert third.cached == 0


def test_samples_of_one_request_differ(dense: Path) -> None:
    made = engine(dense)
    request = EngineRequest(
        rid="r", input_ids=[1, 2], sampling=SamplingParams(sampling_seed=4, max_new_tokens=8)
    )
    sequences = [made.submit(request, index) for index in range(4)]
    run(made)
    assert len({tuple(s.output) for s in sequences}) == 4


def test_requests_without_a_seed_repeat_only_with_the_engines_own(dense: Path) -> None:
    outputs = []
    for settings in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": None}, {"seed": None}):
        made = engine(dense, **settings)
        sequences = [submit(made, [1, 2]) for _ in range(2)]
        run(made)
        assert sequences[0].output != sequences[1].output
        outputs.append([s.output for s in sequences])
    assert outputs[0] == outputs[1]
    assert outputs[3] != outputs[4]
    assert outputs[0] != outputs[2]


def test_a_relabel_changes_the_label_and_nothing_else(dense: Path) -> None:
    made = engine(dense, weight_version="1")
    sequence = submit(made, [1, 2], max_new_tokens=6)
    run(made, steps=2)
    made.relabel("2")
    run(made)
    assert sequence.spans(6)[0] == (LabelSpan("1", 0, 2), LabelSpan("2", 2, 6))
    # The same bytes made the cache: under its new name it is of the same version.
    assert sequence.spans(6)[1] == (LabelSpan("1", 0, 2), LabelSpan("2", 2, 6))
    assert sequence.retractions == 0


def test_a_swap_that_fails_poisons_the_engine_until_a_whole_one_succeeds(
    dense: Path, dense_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(dense)
    submit(made, [1, 2])
    run(made, steps=2)

    def fail(label: str) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(made, "_set_label", fail)
        with pytest.raises(EnginePoisoned, match=r"power cut.*full load"):
            made.swap(load(dense_b), "2")
    assert made.label == "default"
    assert "half way" in made.poisoned
    assert not made.busy
    assert made.step() == []
    with pytest.raises(EnginePoisoned):
        submit(made, [1, 2])
    lost = made.drop_all(Finish(FinishKind.ABORT, message="poisoned", status_code=503))
    assert [s.finish and s.finish.status_code for s in lost] == [503]
    made.swap(load(dense_b), "3")
    assert made.poisoned == ""
    sequence = submit(made, [1, 2])
    assert run(made) == [sequence]
    assert sequence.spans(8)[0] == (LabelSpan("3", 0, 8),)


def test_logits_that_are_not_finite_end_their_request_alone(dense: Path) -> None:
    made = engine(dense)
    reference = submit(made, [1, 2], sampling_seed=5)
    run(made)
    made.flush()
    bad = load(dense)
    bad.embed[50].fill_(float("nan"))
    made.swap(bad, "2")
    broken = submit(made, [1, 50], "broken")
    healthy = submit(made, [1, 2], "healthy", sampling_seed=5)
    run(made)
    assert broken.finish is not None
    assert broken.finish.status_code == 500
    assert "not finite" in broken.finish.message
    assert broken.output == []
    assert healthy.output == reference.output
    # Nothing of the broken row leaks into who gets it next.
    made.swap(load(dense), "3")
    again = [submit(made, [1, 2], sampling_seed=5) for _ in range(4)]
    run(made)
    assert [s.output for s in again] == [reference.output] * 4


def test_the_load_counts_what_is_there(dense: Path) -> None:
    made = engine(dense, max_running_requests=2)
    for _ in range(3):
        submit(made, [1, 2, 3])
    run(made, steps=2)
    status = made.load(1.0)
    assert (status.running, status.waiting, status.max_running) == (2, 1, 2)
    assert status.used_tokens == 2 * 4
    assert status.tokens_generated == 4
    made.pause(PauseMode.IN_PLACE)
    assert made.load(0.0).paused == 2


def test_a_kv_cache_larger_than_allowed_is_refused_with_the_sum(dense: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_max_bytes is 1,000\. Lower"):
        engine(dense, kv_cache_max_bytes=1000)


def test_a_kv_cache_takes_twice_the_bytes_in_float64(dense: Path) -> None:
    tokens = 64 * 64 + 65536
    limit = tokens * 4 * (2 * 2 * 2 * 16)  # layers, keys and values, heads, their width
    engine(dense, kv_cache_max_bytes=limit)
    with pytest.raises(ValueError, match=f"may need {2 * limit:,} bytes"):
        engine(dense, kv_cache_max_bytes=limit, dtype="float64")
    engine(dense, kv_cache_max_bytes=2 * limit, dtype="float64")


def test_weights_in_another_dtype_than_the_engines_are_refused(dense: Path, dense_b: Path) -> None:
    config = CpuEngineConfig(model=dense, dtype="float64")
    with pytest.raises(ValueError, match=r"float64, but the weights were loaded in .*float32"):
        CpuEngine(config, load(dense), time.monotonic)
    made = engine(dense)
    with pytest.raises(ValueError, match=r"float32, but the weights were loaded in .*float64"):
        made.swap(load(dense_b, "float64"), "2")
    assert made.label == "default"
    assert not made.poisoned


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_checksum_is_that_of_the_checkpoint(
    dense: Path, moe: Path, write_model: Callable[..., Path], dtype: str
) -> None:
    manifest = pytest.importorskip("weight_sync.core.manifest")
    folders = [dense, moe, write_model("dense", 0, torch.bfloat16)]
    if dtype == "float64":
        folders.append(write_model("dense", 0, torch.float64))
        tensors = load_file(folders[-1] / "model.safetensors")
        save_file({n: t / 3 for n, t in tensors.items()}, folders[-1] / "model.safetensors")
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}
    for folder in folders:
        checksum = load(folder, dtype).checksum()
        entries = [
            manifest.TensorEntry(
                name,
                names[tensor.dtype],
                tuple(tensor.shape),
                manifest.digest(tensor.contiguous().view(torch.uint8).numpy()),
            )
            for name, tensor in sorted(load_file(folder / "model.safetensors").items())
        ]
        assert checksum.tensors == {entry.name: entry.checksum for entry in entries}
        assert checksum.root_hash == manifest.root_hash(entries)


def test_the_checksum_notices_a_changed_bit_in_memory(dense: Path) -> None:
    weights = load(dense)
    before = weights.checksum()
    assert weights.checksum() == before
    weights.layers[1].qkv[3, 5] += 1e-3
    after = weights.checksum()
    changed = {name for name, value in after.tensors.items() if value != before.tensors[name]}
    assert len(changed) == 1
    assert changed.pop().startswith("model.layers.1.self_attn.")
    assert after.root_hash != before.root_hash


def broken_copy(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read .*config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot read .*model.safetensors"),
        (truncate, "cut off"),
        (edit_config(model_type="llama"), "model_type must be one of"),
        (edit_config(use_sliding_window=True), "use_sliding_window must be False"),
        (edit_config(rope_scaling={"rope_type": "yarn"}), "rope_type must be default"),
        (edit_config(num_key_value_heads=3), "must be a multiple"),
        (edit_tensors(lambda t: t.pop(NORM)), r"missing \['model.norm.weight'\], unknown \[\]"),
        (edit_tensors(lambda t: t.update(extra=torch.ones(1))), r"unknown \['extra'\]"),
        (edit_tensors(lambda t: t.update({NORM: torch.ones(31)})), "must have shape"),
        (
            edit_tensors(lambda t: t.update({NORM: torch.ones(32, dtype=torch.float64)})),
            "found .* and F64",
        ),
        (
            edit_tensors(lambda t: t.update({NORM: torch.full((32,), float("inf"))})),
            "not finite",
        ),
        (
            edit_tensors(lambda t: t.update({"lm_head.weight": torch.ones(97, 32)})),
            "lm_head.weight differs",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused_by_what_is_wrong_with_it(
    dense: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = broken_copy(dense, tmp_path / "broken", change)
    with pytest.raises(WeightUpdateFailed, match=words):
        load(folder)


def test_a_checkpoint_in_several_files_is_read(dense: Path, tmp_path: Path) -> None:
    def split(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        weight_map: dict[str, str] = {}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))

    folder = broken_copy(dense, tmp_path / "split", split)
    assert load(folder).checksum() == load(dense).checksum()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightUpdateFailed, match="no readable weight_map"):
        load(folder)


def test_tied_weights_may_come_with_an_equal_head(dense: Path, tmp_path: Path) -> None:
    embed = "model.embed_tokens.weight"
    folder = broken_copy(
        dense,
        tmp_path / "both",
        edit_tensors(lambda t: t.update({"lm_head.weight": t[embed].clone()})),
    )
    weights = load(folder)
    tensors = weights.checksum().tensors
    assert tensors["lm_head.weight"] == tensors[embed]


def test_config_refuses_an_address_that_others_can_reach(dense: Path) -> None:
    for host in ("0.0.0.0", "192.168.0.1", "example.org", "::"):
        with pytest.raises(ValueError, match="loopback"):
            CpuEngineConfig(model=dense, host=host)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert CpuEngineConfig(model=dense, host=host).host == host
