"""The torch back-end: packing, kernels, model, optimizer, refusal, saving."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from grpo_trainer.backends.base import PolicyAttempt, PolicySequence, WeightedSequence
from grpo_trainer.backends.torch import TorchBackend, qwen3
from grpo_trainer.backends.torch.folder import WEIGHTS_FILE, read_model
from grpo_trainer.backends.torch.kernels import rms_norm, rotate
from grpo_trainer.backends.torch.optim import Optimizer, orthogonalise
from grpo_trainer.backends.torch.packing import pack
from grpo_trainer.config import OptimizerConfig, PolicyLossConfig, TorchConfig
from grpo_trainer.errors import CheckpointInvalid, ModelError
from grpo_trainer.testing.models import DENSE, MOE, write_model
from safetensors.torch import load_file
from torch import Tensor
from weight_sync.publisher import RawTensor

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def sequences(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 61, length).astype(np.int32) for length in lengths]


def attempt(
    ids: np.ndarray, *, advantage: float = 1.0, behaviour: float = -3.0, every: int = 2
) -> PolicyAttempt:
    trained = np.zeros(len(ids), np.bool_)
    trained[2::every] = True
    logprobs = np.full(len(ids), behaviour, np.float32)
    return PolicyAttempt((PolicySequence(ids, trained, logprobs),), advantage)


def attempts(*lengths: int, seed: int = 0) -> list[PolicyAttempt]:
    rng = np.random.default_rng(seed)
    return [attempt(ids, advantage=float(rng.normal())) for ids in sequences(*lengths, seed=seed)]


def backend(folder: Path, **torch_settings: Any) -> TorchBackend:
    made = TorchBackend(folder, TorchConfig(**torch_settings))
    made.start_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0))
    return made


def held(model: TorchBackend) -> dict[str, Tensor]:
    with TemporaryDirectory() as folder:
        model.save(Path(folder))
        return load_file(Path(folder) / WEIGHTS_FILE)


def same(first: TorchBackend, second: TorchBackend) -> bool:
    ours, theirs = held(first), held(second)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- kernels


def test_rms_norm_and_its_gradient_are_exact() -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.rms_norm(x, (6,), weight, 1e-6)
    assert torch.allclose(rms_norm(x, weight, 1e-6), expected)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))


def test_rotation_and_its_gradient_are_exact() -> None:
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(5, 1, 3, dtype=torch.float64)
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angle), angle)
    found = rotate(x, angle.cos(), angle.sin())
    assert torch.allclose(found, torch.cat([pairs.real, pairs.imag], -1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, angle.cos(), angle.sin()), (x,))


# --- model


class Float64Torch:
    """torch for transformers' modules: where they lower to float32, they go on in float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@DTYPES
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], dtype: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_model(tmp_path / "model", config)
    precision: torch.dtype = getattr(torch, dtype)
    if dtype == "float64":
        kind = config["model_type"]
        target = f"transformers.models.{kind}.modeling_{kind}.torch"
        monkeypatch.setattr(target, Float64Torch())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=precision,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no float64
    )
    shape = qwen3.Qwen3Shape.from_folder(folder)
    stored = read_model(folder, qwen3.parameter_shapes(shape))
    weights = {name: tensor.to(precision) for name, tensor in stored.items()}
    packed = pack(sequences(5, 17, 9), CPU)
    everywhere = torch.arange(len(packed.token_ids))
    hidden = qwen3.hidden_states(shape, weights, packed, everywhere)
    logits = hidden @ qwen3.output_weight(shape, weights).T
    with torch.no_grad():
        expected = torch.cat(
            [
                theirs(input_ids=torch.from_numpy(ids[None].astype(np.int64))).logits[0]
                for ids in sequences(5, 17, 9)
            ]
        )
    tolerance = {"float32": 3e-5, "float64": 1e-12}[dtype]
    assert torch.allclose(logits, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_packed_sequences_do_not_see_each_other(tmp_path: Path, config: dict[str, object]) -> None:
    model = backend(write_model(tmp_path / "m", config), micro_batch_tokens=10_000)
    together = attempts(30, 7, 64, 12, 30)
    packed = model.logprobs(together)
    for member, found in zip(together, packed, strict=True):
        (alone,) = model.logprobs([member])
        assert np.abs(found - alone).max() < 1e-5


def test_log_probabilities_are_of_the_token_that_follows(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (ids,) = sequences(12)
    shape = qwen3.Qwen3Shape.from_folder(folder)
    weights = read_model(folder, qwen3.parameter_shapes(shape))
    hidden = qwen3.hidden_states(shape, weights, pack([ids], CPU), torch.arange(12))
    logs = (hidden @ qwen3.output_weight(shape, weights).T).log_softmax(-1)
    expected = [float(logs[at - 1, ids[at]]) for at in range(2, 12, 2)]
    (found,) = backend(folder).logprobs([attempt(ids)])
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_training_the_first_token_is_refused(tmp_path: Path) -> None:
    (ids,) = sequences(4)
    whole = PolicySequence(ids, np.ones(4, np.bool_), np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="first token"):
        backend(write_model(tmp_path / "m")).logprobs([PolicyAttempt((whole,))])


# --- updates


@DTYPES
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_micro_batches_do_not_change_an_update(
    tmp_path: Path, aggregation: str, ratio: str, dtype: str
) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    loss = PolicyLossConfig(aggregation=aggregation, ratio=ratio)  # type: ignore[arg-type]
    batch = attempts(30, 7, 64, 12, 30)
    results = []
    for tokens in (10_000, 40):
        model = backend(folder, micro_batch_tokens=tokens, dtype=dtype)
        results.append(model.policy_update(batch, loss))
    relative, absolute = {"float32": (1e-4, 1e-6), "float64": (1e-12, 1e-14)}[dtype]
    assert results[0].loss == pytest.approx(results[1].loss, rel=relative, abs=absolute)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=relative)
    assert results[0].trained_tokens == results[1].trained_tokens == 67


def test_in_float64_an_updates_loss_is_exact(tmp_path: Path) -> None:
    batch = attempts(30, 7, 64)
    model = backend(write_model(tmp_path / "m", scale=0.05), dtype="float64")
    found = model.policy_update(batch, PolicyLossConfig()).loss
    # At the proximal policy itself each ratio is 1.
    counts = [member.trained_tokens for member in batch]
    gained = sum(m.advantage * n for m, n in zip(batch, counts, strict=True))
    assert found == pytest.approx(-gained / sum(counts), rel=1e-13)


def test_an_update_makes_good_attempts_likelier_and_bad_ones_less(tmp_path: Path) -> None:
    model = backend(write_model(tmp_path / "m", scale=0.05))
    good, bad = (
        attempt(ids, advantage=advantage)
        for ids, advantage in zip(sequences(20, 20), (1.0, -1.0), strict=True)
    )
    before = model.logprobs([good, bad])
    result = model.policy_update([good, bad], PolicyLossConfig())
    after = model.logprobs([good, bad])
    assert result.applied
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()
    assert [part.tolist() for part in result.logprobs] == [part.tolist() for part in before]


def test_tokens_that_branches_share_count_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    (ids,) = sequences(20)
    whole = attempt(ids)
    again = PolicySequence(ids, np.zeros(20, np.bool_), np.zeros(20, np.float32))
    branched = PolicyAttempt((*whole.sequences, again), whole.advantage)
    norms = [
        backend(folder).policy_update([member], PolicyLossConfig()).grad_norm
        for member in (whole, branched)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_proximal_policy_is_clipped_around(tmp_path: Path) -> None:
    model = backend(write_model(tmp_path / "m", scale=0.05))
    member = attempt(sequences(20)[0], advantage=1.0)
    far = [model.logprobs([member])[0] - 1.0]
    result = model.policy_update([member], PolicyLossConfig(), proximal=far)
    assert result.values["clip.high"] == 1.0
    assert result.grad_norm == pytest.approx(0.0, abs=1e-9)


def test_kl_holds_the_policy_to_the_reference(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    batch = [attempt(ids, advantage=0.0) for ids in sequences(20, 30)]
    model = backend(folder)
    model.keep_reference()
    for _ in range(3):
        model.policy_update([attempt(ids) for ids in sequences(20, 30)], PolicyLossConfig())
    loss = PolicyLossConfig(kl_coefficient=0.5)
    reference = model.logprobs(batch, reference=True)
    found = [model.policy_update(batch, loss, reference=reference) for _ in range(5)]
    kls = [result.values["kl.reference"] for result in found]
    assert kls[0] > 1e-3
    assert kls[-1] < kls[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_refused_and_leaves_everything_alone(
    tmp_path: Path, bad: float
) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    model, untouched = backend(folder), backend(folder)
    broken = [attempt(ids, advantage=bad) for ids in sequences(20)]
    result = model.policy_update(broken, PolicyLossConfig())
    assert not result.applied
    assert result.nonfinite > 0
    assert same(model, untouched)
    # Its gradients are gone too: the next update is as if nothing had been.
    batch = attempts(20, 9)
    model.policy_update(batch, PolicyLossConfig())
    untouched.policy_update(batch, PolicyLossConfig())
    assert same(model, untouched)


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    batch = attempts(20, 9)
    moved = []
    for clip in (0.0, 1e-3):
        model = TorchBackend(folder)
        # With a large epsilon AdamW's first move is proportional to the gradient.
        model.start_optimizer(
            OptimizerConfig(learning_rate=1.0, epsilon=1e3, gradient_clip=clip, warmup_steps=0)
        )
        before = {name: np.array(value) for name, value in model.weights().items()}
        norm = model.policy_update(batch, PolicyLossConfig()).grad_norm
        after = model.weights()
        moved.append(
            np.sqrt(sum(((np.asarray(after[n]) - before[n]) ** 2).sum() for n in before)) / norm
        )
    assert norm > 1e-2
    assert moved[1] / moved[0] == pytest.approx(1e-3 / norm, rel=0.05)


def test_supervised_training_learns_what_is_weighed_and_reports_the_assistants_part(
    tmp_path: Path,
) -> None:
    model = TorchBackend(write_model(tmp_path / "m", scale=0.05))
    model.start_optimizer(OptimizerConfig(kind="muon", learning_rate=5e-3, gradient_clip=1.0))
    ids = sequences(24, 30)
    batch = []
    for each in ids:
        assistant = np.zeros(len(each), np.bool_)
        assistant[10:] = True
        batch.append(
            WeightedSequence(each, np.where(assistant, 1, 0.3).astype(np.float32), assistant)
        )
    results = [model.supervised_update(batch) for _ in range(40)]
    assert results[0].values["assistant_loss"] == pytest.approx(np.log(61), rel=0.2)
    assert results[-1].values["assistant_loss"] < 0.3
    assert results[0].trained_tokens == 52


def test_supervised_loss_is_the_weighted_mean(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (ids,) = sequences(12)
    weights = np.linspace(0.1, 1.2, 12, dtype=np.float32)
    weights[5] = 0
    trained = np.arange(12) > 0
    member = PolicyAttempt((PolicySequence(ids, trained, np.zeros(12, np.float32)),))
    model = backend(folder)
    (logprobs,) = model.logprobs([member])
    expected = float((-logprobs * weights[1:]).sum() / weights[1:].sum())
    result = model.supervised_update([WeightedSequence(ids, weights, trained)])
    assert result.loss == pytest.approx(expected, rel=1e-4)


# --- optimizers


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    ours = torch.randn(4, 3, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.2, epsilon=1e-3)
    optimizer = Optimizer({"w": ours}, config)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.2)
    for step in range(5):
        grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step(1.0)
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_moves_a_matrix_by_near_equal_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_muon_leaves_embeddings_and_vectors_to_adamw() -> None:
    def parameter(*shape: int) -> Tensor:
        return torch.randn(*shape).requires_grad_()

    names = ["model.embed_tokens.weight", "lm_head.weight", "a.q_proj.weight", "norm.weight"]
    shapes = [(5, 3), (5, 3), (4, 3), (3,)]
    parameters = {name: parameter(*shape) for name, shape in zip(names, shapes, strict=True)}
    state = Optimizer(parameters, OptimizerConfig(kind="muon")).state()
    assert [name for name in state if name.startswith("momentum.")] == ["momentum.a.q_proj.weight"]


# --- folders


@DTYPES
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_saving_and_loading_goes_on_bit_for_bit(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    config = OptimizerConfig(kind=kind, learning_rate=1e-2)  # type: ignore[arg-type]
    original = backend(folder, dtype=dtype)
    original.start_optimizer(config)
    original.keep_reference()
    batch = attempts(20, 9, 31)
    for _ in range(3):
        original.policy_update(batch, PolicyLossConfig())
    saved = tmp_path / "saved"
    saved.mkdir()
    original.save(saved)
    resumed = backend(folder, dtype=dtype)
    resumed.load(saved, optimizer=config)
    assert {str(tensor.dtype) for tensor in held(resumed).values()} == {f"torch.{dtype}"}
    assert same(original, resumed)
    for model in (original, resumed):
        for _ in range(3):
            model.policy_update(batch, PolicyLossConfig(), scale=0.5)
    assert same(original, resumed)
    scores = [model.logprobs(batch, reference=True) for model in (original, resumed)]
    assert all(np.array_equal(a, b) for a, b in zip(*scores, strict=True))


def test_a_saved_folder_is_a_model_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    saved = tmp_path / "saved"
    saved.mkdir()
    backend(folder).save(saved)
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert same(TorchBackend(saved), TorchBackend(folder))


@DTYPES
def test_weights_go_out_in_the_folders_dtype_and_are_kept_in_the_trainers(
    tmp_path: Path, dtype: str
) -> None:
    folder = write_model(tmp_path / "m", dtype=torch.bfloat16)
    model = backend(folder, dtype=dtype)
    assert held(model)["model.norm.weight"].dtype is getattr(torch, dtype)
    out = model.weights()["model.norm.weight"]
    assert isinstance(out, RawTensor)
    assert out.dtype == "BF16"
    stored = read_model(folder, qwen3.parameter_shapes(qwen3.Qwen3Shape.from_folder(folder)))
    expected = stored["model.norm.weight"].view(torch.uint16).numpy()
    assert np.array_equal(np.asarray(out.bits), expected)


@pytest.mark.parametrize(("written", "trained"), [("float32", "float64"), ("float64", "float32")])
def test_a_checkpoint_of_another_dtype_gives_its_weights_but_is_not_resumed(
    tmp_path: Path, written: str, trained: str
) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    original = backend(folder, dtype=written)
    original.policy_update(attempts(20), PolicyLossConfig())
    saved = tmp_path / "saved"
    saved.mkdir()
    original.save(saved)
    model, untouched = backend(folder, dtype=trained), backend(folder, dtype=trained)
    with pytest.raises(CheckpointInvalid, match=rf"{written} and .* trains in torch\.{trained};"):
        model.load(saved, optimizer=OptimizerConfig())
    assert same(model, untouched)
    model.load(saved, optimizer=None)
    expected = {n: t.to(getattr(torch, trained)) for n, t in held(original).items()}
    found = held(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for published in (model.weights(), model.weights_of(saved)):
        assert {np.asarray(tensor).dtype for tensor in published.values()} == {np.dtype("float32")}


def test_published_weights_are_a_copy(tmp_path: Path) -> None:
    model = backend(write_model(tmp_path / "m", scale=0.05))
    before = model.weights()
    kept = np.array(before["model.norm.weight"])
    model.policy_update(attempts(20), PolicyLossConfig())
    assert np.array_equal(np.asarray(before["model.norm.weight"]), kept)


def test_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    saved = tmp_path / "saved"
    saved.mkdir()
    backend(folder).save(saved)
    with pytest.raises(CheckpointInvalid, match="other tensors"):
        backend(folder).load(saved, optimizer=OptimizerConfig(kind="muon"))


def test_a_folder_that_is_no_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json.*cannot be read"):
        TorchBackend(tmp_path)
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        TorchBackend(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "'llama'.*trains"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type.*yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_hidden_layers": 3}, r"missing \['model\.layers\.2"),
        ({"intermediate_size": 40}, r"shape \[48, 32\], expected \[40, 32\]"),
    ],
)
def test_models_that_are_not_computed_right_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(DENSE | change))
    with pytest.raises(ModelError, match=words):
        TorchBackend(folder)
