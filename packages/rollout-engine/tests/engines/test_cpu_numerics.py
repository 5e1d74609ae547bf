"""Log-probabilities and tokens against transformers' forward pass on the same weights."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_engine.engines.cpu.batch import Sequence
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import Weights, load_weights
from rollout_engine.engines.types import EngineRequest, LabelSpan, PauseMode, SamplingParams

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
VOCAB = 97


@cache
def weights_of(folder: Path, dtype: str = "float32") -> Weights:
    return load_weights(folder, read_spec(folder), getattr(torch, dtype))


class Float64Torch:
    """torch for transformers' modules: where they lower to float32, they go on in float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("qwen3", "qwen3_moe"):
            if dtype == "float64":
                target = f"transformers.models.{name}.modeling_{name}.torch"
                patch.setattr(target, Float64Torch())
        yield


@cache
def reference_of(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    with computing_in(dtype):
        made = loader.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",  # the others have no float64
        )
    return made.eval()


@torch.no_grad()
def reference_logprobs(
    folder: Path, tokens: list[int], temperature: float = 1.0, dtype: str = "float32"
) -> torch.Tensor:
    """[tokens, vocab]; row i is the distribution of token i + 1."""
    reference = reference_of(folder, dtype)
    with computing_in(dtype):
        logits = reference(torch.tensor([tokens])).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)


def engine(folder: Path, dtype: str = "float32", **settings: Any) -> CpuEngine:
    options: dict[str, Any] = {"context_tokens": 256, "seed": 0, "dtype": dtype} | settings
    return CpuEngine(
        CpuEngineConfig(model=folder, **options), weights_of(folder, dtype), time.monotonic
    )


def prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(1, VOCAB) for _ in range(length)]


def submit(made: CpuEngine, tokens: list[int], **sampling: Any) -> Sequence:
    options = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 1} | sampling
    start = options.pop("logprob_start_len", -1)
    top = options.pop("top_logprobs_num", 0)
    return made.submit(
        EngineRequest(
            rid=str(time.perf_counter_ns()),
            input_ids=tokens,
            sampling=SamplingParams(**options),
            logprob_start_len=start,
            top_logprobs_num=top,
        )
    )


def run(made: CpuEngine, *, steps: int = 10_000) -> None:
    while made.busy and steps > 0:
        made.step()
        steps -= 1


def assert_exact(
    folder: Path,
    sequence: Sequence,
    start: int = 0,
    end: int | None = None,
    dtype: str = "float32",
) -> None:
    """Check the log-probabilities of output tokens [start, end)."""
    output = sequence.output
    temperature = sequence.request.sampling.temperature
    if sequence.request.sampling.greedy:
        temperature = 1.0
    expected = reference_logprobs(folder, sequence.tokens, temperature, dtype)
    assert len(sequence.logprobs) == len(output)
    for index in range(start, len(output) if end is None else end):
        wanted = expected[sequence.prompt_tokens + index - 1, output[index]].item()
        assert sequence.logprobs[index] == pytest.approx(wanted, abs=TOLERANCE[dtype], rel=0)


KINDS = pytest.mark.parametrize("kind", ["dense", "moe"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


@KINDS
@DTYPES
def test_logprobs_are_exact_whatever_else_is_in_the_batch(
    kind: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    source = random.Random(0)
    made = engine(folder, dtype, max_running_requests=6, prefill_tokens=32)
    sequences = []
    for number in range(20):
        sequences.append(
            submit(
                made,
                prompt(source, source.randrange(1, 90)),
                max_new_tokens=source.randrange(1, 25),
                sampling_seed=number,
                temperature=source.choice([1.0, 1.0, 0.7]),
            )
        )
        if number % 3 == 0:
            made.step()
    run(made)
    for sequence in sequences:
        assert_exact(folder, sequence, dtype=dtype)


def test_rows_of_very_different_lengths_stay_exact_when_they_are_reordered(dense: Path) -> None:
    source = random.Random(10)
    made = engine(dense, max_running_requests=16)
    made._order.call_cost = 20  # so that these small lengths are worth the trouble
    lengths = [source.choice([3, 60, 150]) for _ in range(30)]
    sequences = [
        submit(
            made,
            prompt(source, length),
            max_new_tokens=source.choice([5, 40, 90]),
            sampling_seed=number,
        )
        for number, length in enumerate(lengths)
    ]
    run(made)
    assert made._order.reorders > 0
    for sequence in sequences:
        assert_exact(dense, sequence)


@KINDS
def test_tokens_depend_on_seed_and_prompt_alone(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    source = random.Random(1)
    prompts = [prompt(source, source.randrange(5, 40)) for _ in range(8)]
    alone = []
    for number, tokens in enumerate(prompts):
        made = engine(folder)
        alone.append(submit(made, tokens, sampling_seed=number))
        run(made)
    made = engine(folder, max_running_requests=3, prefill_tokens=7)
    together = [submit(made, tokens, sampling_seed=n) for n, tokens in enumerate(prompts)]
    run(made)
    assert [s.output for s in together] == [s.output for s in alone]
    other = submit(made, prompts[0], sampling_seed=99)
    run(made)
    assert other.output != alone[0].output


@KINDS
@DTYPES
def test_turns_reuse_their_prefix_and_stay_exact(
    kind: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    source = random.Random(2)
    made = engine(folder, dtype, max_running_requests=4)
    histories = [prompt(source, 20) for _ in range(6)]
    observation: list[int] = []
    for turn in range(3):
        sequences = [submit(made, tokens, max_new_tokens=8) for tokens in histories]
        run(made)
        for sequence, tokens in zip(sequences, histories, strict=True):
            assert_exact(folder, sequence, dtype=dtype)
            if turn:
                # All but the token sampled last was computed in the turn before.
                assert sequence.cached == len(tokens) - len(observation) - 1
        observation = prompt(source, 5)
        histories = [sequence.tokens + observation for sequence in sequences]


def test_many_prompts_that_start_alike_are_computed_once(dense: Path) -> None:
    source = random.Random(3)
    shared = prompt(source, 100)
    made = engine(dense, max_running_requests=8, prefill_tokens=64)
    sequences = [submit(made, [*shared, n + 1, n + 2], sampling_seed=n) for n in range(8)]
    run(made)
    assert sequences[0].cached == 0
    assert all(s.cached is not None and s.cached >= 100 for s in sequences[1:])
    assert made.counters.computed_prompt_tokens < 140
    for sequence in sequences:
        assert_exact(dense, sequence)


@KINDS
@DTYPES
def test_the_prompts_own_logprobs_are_exact(
    kind: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    exact = partial(pytest.approx, abs=TOLERANCE[dtype], rel=0)
    source = random.Random(4)
    made = engine(folder, dtype, prefill_tokens=16)
    tokens = prompt(source, 50)
    sequences = [
        submit(made, tokens, logprob_start_len=start, top_logprobs_num=3) for start in (0, 20, 49)
    ]
    run(made)
    expected = reference_logprobs(folder, tokens, dtype=dtype)
    for sequence in sequences:
        start = sequence.request.logprob_start_len
        assert [token for _, token in sequence.prompt_logprobs] == tokens[start:]
        assert sequence.prompt_logprobs[0][0] is None
        for place, (value, token) in enumerate(sequence.prompt_logprobs[1:], start + 1):
            assert value == exact(expected[place - 1, token].item())
        for place, top in enumerate(sequence.prompt_top_logprobs[1:], start + 1):
            assert top is not None
            values, ids = expected[place - 1].topk(3)
            assert [token for _, token in top] == ids.tolist()
            assert [value for value, _ in top] == exact(values.tolist())
        assert_exact(folder, sequence, dtype=dtype)
        assert [len(top) for top in sequence.top_logprobs] == [3] * len(sequence.output)


@DTYPES
def test_greedy_takes_the_most_probable_token(dense: Path, dtype: str) -> None:
    made = engine(dense, dtype)
    sequence = submit(made, [5, 6, 7], temperature=0.0)
    run(made)
    expected = reference_logprobs(dense, sequence.tokens, dtype=dtype)
    assert sequence.output == expected[2:-1].argmax(-1).tolist()
    assert_exact(dense, sequence, dtype=dtype)


def test_samples_follow_the_distribution(dense: Path) -> None:
    made = engine(dense, max_running_requests=64)
    count = 2000
    sequences = [
        submit(made, [5, 6, 7], max_new_tokens=1, sampling_seed=seed, temperature=1.3)
        for seed in range(count)
    ]
    run(made)
    expected = reference_logprobs(dense, [5, 6, 7], 1.3)[-1].exp()
    found = torch.bincount(torch.tensor([s.output[0] for s in sequences]), minlength=VOCAB)
    common = expected * count > 5
    gap = (found - expected * count)[common]
    chi_square = (gap**2 / (expected * count)[common]).sum().item()
    degrees = int(common.sum()) - 1
    assert degrees > 5
    # mean + 5 standard deviations of a chi-square distribution
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.6}]
)
def test_filters_cut_the_tail_and_leave_the_reported_logprobs(
    dense: Path, filters: dict[str, Any]
) -> None:
    made = engine(dense, max_running_requests=64)
    sequences = [
        submit(made, [5, 6, 7], max_new_tokens=1, sampling_seed=seed, **filters)
        for seed in range(300)
    ]
    plain = [submit(made, [5, 6, 7], max_new_tokens=1, sampling_seed=seed) for seed in range(300)]
    run(made)
    probabilities = reference_logprobs(dense, [5, 6, 7])[-1].exp()
    ordered, order = probabilities.sort(descending=True)
    keep = ordered.cumsum(0) - ordered <= filters.get("top_p", 1.0)
    keep &= torch.arange(VOCAB) < filters.get("top_k", VOCAB)
    keep &= ordered >= ordered[0] * filters.get("min_p", 0.0)
    allowed = set(order[keep].tolist())
    assert {s.output[0] for s in sequences} == allowed
    assert not {s.output[0] for s in plain} <= allowed
    for sequence in sequences[:5]:
        assert_exact(dense, sequence)


@KINDS
def test_an_update_recomputes_caches_so_that_every_token_is_of_one_version(
    kind: str, request: pytest.FixtureRequest
) -> None:
    old: Path = request.getfixturevalue(kind)
    new: Path = request.getfixturevalue(f"{kind}_b")
    source = random.Random(5)
    made = engine(old, max_running_requests=5, prefill_tokens=16, kv_policy="recompute")
    sequences = [submit(made, prompt(source, 30), max_new_tokens=16) for _ in range(7)]
    run(made, steps=12)
    assert made.swap(weights_of(new), "2") == 7
    run(made)
    changed = 0
    for sequence in sequences:
        versions, oldest = sequence.spans(len(sequence.output))
        assert versions == oldest
        assert [span.version for span in versions] in (["default", "2"], ["2"])
        for span in versions:
            folder = old if span.version == "default" else new
            assert_exact(folder, sequence, span.start, span.end)
        changed += len(versions) == 2
        assert sequence.retractions == (1 if len(versions) == 2 else sequence.retractions)
    assert changed >= 3
    # A prefix that the old weights computed is not used by the new ones.
    again = submit(made, sequences[0].tokens[:30])
    run(made)
    assert_exact(new, again)


def test_kept_caches_are_reported_with_the_oldest_version_in_them(
    dense: Path, dense_b: Path
) -> None:
    made = engine(dense, kv_policy="keep")
    running = submit(made, prompt(random.Random(6), 30), max_new_tokens=10)
    run(made, steps=4)
    made.swap(weights_of(dense_b), "2", flush=False)
    fresh = submit(made, prompt(random.Random(7), 30), max_new_tokens=4)
    run(made)
    assert running.spans(10) == (
        (LabelSpan("default", 0, 4), LabelSpan("2", 4, 10)),
        (LabelSpan("default", 0, 10),),
    )
    assert running.retractions == 0
    assert_exact(dense, running, 0, 4)
    assert fresh.spans(4) == ((LabelSpan("2", 0, 4),), (LabelSpan("2", 0, 4),))
    assert_exact(dense_b, fresh)
    # The next turn's prefix is the old cache, and says so.
    turn = submit(made, [*running.tokens, 3], max_new_tokens=2)
    run(made)
    assert turn.cached is not None
    assert turn.cached > 30
    assert turn.spans(2) == ((LabelSpan("2", 0, 2),), (LabelSpan("default", 0, 2),))
    # After a swap that flushes, it is new.
    made.swap(weights_of(dense), "3", flush=True)
    turn = submit(made, [*running.tokens, 3], max_new_tokens=2)
    run(made)
    assert turn.cached == 0
    assert_exact(dense, turn)


def test_retraction_and_pause_change_no_token(dense: Path) -> None:
    source = random.Random(8)
    tokens = prompt(source, 30)
    undisturbed = engine(dense)
    expected = submit(undisturbed, tokens, max_new_tokens=20)
    run(undisturbed)
    for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
        made = engine(dense)
        sequence = submit(made, tokens, max_new_tokens=20)
        run(made, steps=6)
        assert made.pause(mode) == []
        assert not made.busy
        assert made.step() == []
        made.resume()
        run(made)
        assert sequence.output == expected.output
        assert sequence.retractions == (mode is PauseMode.RETRACT)
        assert_exact(dense, sequence)


def test_half_precision_checkpoints_compute_in_float32(
    write_model: Callable[..., Path],
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        folder = write_model("dense", 3, dtype)
        made = engine(folder)
        sequence = submit(made, [1, 2, 3])
        run(made)
        assert_exact(folder, sequence)


def test_other_shapes_are_exact_too(write_model: Callable[..., Path]) -> None:
    for changes in (
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "num_hidden_layers": 3},
        {"head_dim": 8, "tie_word_embeddings": False, "rope_theta": 1e6},
    ):
        folder = write_model("dense", 4, **changes)
        made = engine(folder, prefill_tokens=5)
        sequence = submit(made, prompt(random.Random(9), 40), max_new_tokens=30)
        run(made)
        assert_exact(folder, sequence)
    folder = write_model("moe", 5, norm_topk_prob=False, mlp_only_layers=[], num_experts_per_tok=3)
    made = engine(folder)
    sequence = submit(made, prompt(random.Random(9), 40))
    run(made)
    assert_exact(folder, sequence)
