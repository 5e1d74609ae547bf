"""Losses against formulas written out attempt by attempt, in plain Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from grpo_trainer.losses import (
    AdvantageKind,
    Aggregation,
    CorrectionMask,
    CorrectionWeight,
    RatioKind,
    attempt_weights,
    behaviour_correction,
    effective_sample_size,
    group_advantages,
    kl_to_reference,
    mismatch,
    policy_loss,
    sequence_log_ratio,
    token_logprobs,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = [3, 1, 4]
ATTEMPT = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_attempt(values: Tensor) -> list[list[float]]:
    return [part.tolist() for part in torch.split(values, LENGTHS)]


# --- advantages


def plain_advantages(rewards: list[float], kind: AdvantageKind) -> list[float]:
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    if kind is AdvantageKind.MEAN:
        return [reward - mean for reward in rewards]
    if kind is AdvantageKind.STD:
        return [(reward - mean) / (statistics.pstdev(rewards) + 1e-6) for reward in rewards]
    return [
        reward - statistics.fmean(rewards[:i] + rewards[i + 1 :])
        for i, reward in enumerate(rewards)
    ]


@given(
    groups=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.25]), st.booleans()), min_size=1),
        min_size=1,
        max_size=5,
    ),
    kind=st.sampled_from(AdvantageKind),
)
def test_advantages_are_those_of_the_valid_attempts_of_each_group(
    groups: list[list[tuple[float, bool]]], kind: AdvantageKind
) -> None:
    rewards = doubles(*[reward for group in groups for reward, _ in group])
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    valid = torch.tensor([valid for group in groups for _, valid in group])
    expected: list[float] = []
    for group in groups:
        kept = iter(plain_advantages([reward for reward, valid in group if valid], kind))
        expected += [next(kept) if valid else 0.0 for _, valid in group]
    found = group_advantages(rewards, index, valid, kind=kind)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_reward_that_is_no_number_does_not_touch_the_valid_ones() -> None:
    found = group_advantages(
        doubles(1.0, 0.0, math.nan),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([True, True, False]),
        kind=AdvantageKind.MEAN,
    )
    assert found.tolist() == [0.5, -0.5, 0.0]


# --- ratios and the policy loss


def plain_loss(
    ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("kind", [RatioKind.TOKEN, RatioKind.SEQUENCE])
def test_clipped_loss_is_the_formula(kind: RatioKind, dual: float | None) -> None:
    current, proximal, advantage = random(8), random(8, seed=1), random(8, seed=2)
    if kind is RatioKind.SEQUENCE:
        advantage = advantage[:3][ATTEMPT]
    found = policy_loss(
        current,
        proximal,
        advantage,
        ATTEMPT,
        3,
        kind=kind,
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=dual,
    )
    expected = []
    for now, then, adv in zip(*map(by_attempt, (current, proximal, advantage)), strict=True):
        logs = [a - b for a, b in zip(now, then, strict=True)]
        if kind is RatioKind.SEQUENCE:
            logs = [statistics.fmean(logs)] * len(logs)
        expected += [
            plain_loss(math.exp(log), a, 0.1, 0.3, dual) for log, a in zip(logs, adv, strict=True)
        ]
    assert found.loss.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "dual"), [(RatioKind.TOKEN, None), (RatioKind.TOKEN, 1.5), (RatioKind.SEQUENCE, None)]
)
def test_the_gradient_of_the_loss_is_right(kind: RatioKind, dual: float | None) -> None:
    proximal, advantage = random(8, seed=1), random(8, seed=2)

    def loss(current: Tensor) -> Tensor:
        return policy_loss(current, proximal, advantage, ATTEMPT, 3, kind=kind, dual_clip=dual).loss

    assert torch.autograd.gradcheck(loss, random(8).requires_grad_())


def test_cispo_weighs_the_gradient_of_every_token_by_its_clipped_ratio() -> None:
    current = random(8).requires_grad_()
    proximal, advantage = random(8, seed=1), random(8, seed=2)
    terms = policy_loss(
        current, proximal, advantage, ATTEMPT, 3, kind=RatioKind.CISPO, clip_low=1.0, clip_high=0.3
    )
    (grad,) = torch.autograd.grad(terms.loss.sum(), current)
    ratios = [math.exp(a - b) for a, b in zip(current.tolist(), proximal.tolist(), strict=True)]
    expected = [-min(r, 1.3) * a for r, a in zip(ratios, advantage.tolist(), strict=True)]
    assert grad.tolist() == pytest.approx(expected)
    assert (grad != 0).all()


def test_the_first_update_has_the_gradient_of_the_plain_policy_gradient() -> None:
    current = random(8).requires_grad_()
    advantage = random(8, seed=2)
    for kind in (RatioKind.TOKEN, RatioKind.CISPO):
        loss = policy_loss(current, current.detach(), advantage, ATTEMPT, 3, kind=kind).loss
        (grad,) = torch.autograd.grad(loss.sum(), current)
        assert grad.tolist() == pytest.approx((-advantage).tolist())


def test_clips_are_counted_where_they_decide() -> None:
    ratios = doubles(0.5, 0.5, 1.0, 2.0, 2.0, 9.0)
    advantage = doubles(-1, 1, 1, 1, -1, -1)
    terms = policy_loss(
        ratios.log(),
        torch.zeros(6, dtype=torch.float64),
        advantage,
        torch.arange(6),
        6,
        dual_clip=3.0,
    )
    assert terms.clipped_low.tolist() == [True, False, False, False, False, False]
    assert terms.clipped_high.tolist() == [False, False, False, True, False, False]
    assert terms.clipped_dual.tolist() == [False, False, False, False, False, True]


def test_sequence_log_ratio_is_the_mean_of_the_attempt() -> None:
    values = random(8)
    expected = [statistics.fmean(part) for part in by_attempt(values) for _ in part]
    assert sequence_log_ratio(values, ATTEMPT, 3).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weight", CorrectionWeight)
@pytest.mark.parametrize("mask", CorrectionMask)
def test_correction_is_the_formula(weight: CorrectionWeight, mask: CorrectionMask) -> None:
    proximal, behaviour = 0.6 * random(8), 0.6 * random(8, seed=1)
    found = behaviour_correction(
        proximal,
        behaviour,
        ATTEMPT,
        3,
        weight=weight,
        cap=1.4,
        mask=mask,
        mask_low=0.7,
        mask_high=1.5,
    )
    expected = []
    for now, then in zip(by_attempt(proximal), by_attempt(behaviour), strict=True):
        logs = [a - b for a, b in zip(now, then, strict=True)]
        product, mean = math.exp(sum(logs)), math.exp(statistics.fmean(logs))
        for log in logs:
            value = {"none": 1.0, "token": math.exp(log), "sequence": product}[weight]
            judged = {"none": 1.0, "token": math.exp(log), "sequence": product, "geometric": mean}
            inside = mask is CorrectionMask.NONE or 0.7 <= judged[mask] <= 1.5
            capped = value if weight is CorrectionWeight.NONE else min(value, 1.4)
            expected.append(capped if inside else 0.0)
    assert found.tolist() == pytest.approx(expected)
    if mask is not CorrectionMask.NONE:
        assert 0.0 in expected
        assert set(expected) != {0.0}


def test_no_gradient_flows_through_the_correction() -> None:
    proximal = random(8).requires_grad_()
    found = behaviour_correction(
        proximal, random(8, seed=1), ATTEMPT, 3, weight=CorrectionWeight.TOKEN
    )
    assert not found.requires_grad


def test_kl_to_the_reference_is_k3_and_has_its_gradient() -> None:
    current, reference = random(8), random(8, seed=1)
    expected = [
        math.exp(r - c) - (r - c) - 1
        for c, r in zip(current.tolist(), reference.tolist(), strict=True)
    ]
    assert kl_to_reference(current, reference).tolist() == pytest.approx(expected)
    assert min(expected) >= 0
    assert torch.autograd.gradcheck(
        lambda c: kl_to_reference(c, reference), current.requires_grad_()
    )


def test_a_dual_clip_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="above 1"):
        policy_loss(random(8), random(8), random(8), ATTEMPT, 3, dual_clip=0.9)


# --- aggregation


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Aggregation.TOKEN_MEAN, lambda parts: statistics.fmean(x for part in parts for x in part)),
        (Aggregation.SEQUENCE_MEAN, lambda p: statistics.fmean(map(statistics.fmean, p))),
        (Aggregation.FIXED_LENGTH, lambda parts: sum(map(sum, parts)) / (3 * 20)),
    ],
)
def test_aggregation_is_the_formula(
    kind: Aggregation, expected: Callable[[list[list[float]]], float]
) -> None:
    losses = random(8).float()
    weights = attempt_weights(torch.tensor(LENGTHS), kind, fixed_length=20)
    found = (losses * weights[ATTEMPT]).sum()
    assert float(found) == pytest.approx(expected(by_attempt(losses)), rel=1e-5)


@pytest.mark.parametrize("kind", Aggregation)
def test_attempts_without_tokens_weigh_nothing(kind: Aggregation) -> None:
    with_empty = attempt_weights(torch.tensor([3, 0, 1, 4]), kind, fixed_length=20)
    without = attempt_weights(torch.tensor(LENGTHS), kind, fixed_length=20)
    assert with_empty[[0, 2, 3]].tolist() == pytest.approx(without.tolist())
    assert with_empty[1] == 0


def test_fixed_length_needs_the_length() -> None:
    with pytest.raises(ValueError, match="fixed_length"):
        attempt_weights(torch.tensor([1]), Aggregation.FIXED_LENGTH)


# --- log-probabilities


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_log_probabilities_are_those_of_the_whole_matrix(
    chunk: int, temperature: float
) -> None:
    hidden, weight = random(9, 5), random(11, 5, seed=1)
    targets = torch.arange(9)
    logs = (hidden @ weight.T / temperature).log_softmax(-1)
    logprobs, entropies = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk
    )
    assert torch.allclose(logprobs, logs[torch.arange(9), targets])
    assert torch.allclose(entropies, -(logs.exp() * logs).sum(-1))


def test_log_probabilities_and_entropies_have_the_right_gradients() -> None:
    targets = torch.tensor([0, 3, 3, 6, 2])
    inputs = (random(5, 4).requires_grad_(), random(7, 4, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(
        lambda hidden, weight: token_logprobs(
            hidden, weight, targets, temperature=0.8, chunk_tokens=2
        ),
        inputs,
    )


def test_no_matrix_of_tokens_by_vocabulary_is_made() -> None:
    """The largest tensor of forward and backward is a chunk by the vocabulary."""
    largest = 0

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden, weight = torch.randn(512, 4).requires_grad_(), torch.randn(1000, 4).requires_grad_()
    targets = torch.randint(0, 1000, (512,))
    with Watch():  # type: ignore[no-untyped-call]
        logprobs, entropies = token_logprobs(hidden, weight, targets, chunk_tokens=32)
        torch.autograd.backward(logprobs.sum() + entropies.sum())
    assert largest == 32 * 1000


def test_greedy_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(random(1, 2), random(3, 2), torch.tensor([0]), temperature=0)


# --- figures


def test_mismatch_is_the_mean_over_tokens_and_merges_as_one_set() -> None:
    sampled, scored = random(30), random(30) + 0.1 * random(30, seed=1)
    whole = mismatch(sampled, scored)
    difference = [b - a for a, b in zip(sampled.tolist(), scored.tolist(), strict=True)]
    assert whole.kl == pytest.approx(statistics.fmean(math.exp(d) - 1 - d for d in difference))
    assert whole.mean_abs == pytest.approx(statistics.fmean(map(abs, difference)))
    assert whole.max_abs == pytest.approx(max(map(abs, difference)))
    merged = mismatch(sampled[:7], scored[:7]).merged(mismatch(sampled[7:], scored[7:]))
    assert (merged.tokens, merged.kl, merged.max_abs) == pytest.approx(
        (30, whole.kl, whole.max_abs)
    )


def test_equal_log_probabilities_have_no_mismatch() -> None:
    found = mismatch(random(5), random(5))
    assert (found.kl, found.max_abs) == (0.0, 0.0)
    assert mismatch(random(0), random(0)).tokens == 0


def test_effective_sample_size_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    assert effective_sample_size(torch.full((8,), 3.0)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.zeros(4)) == 0.0
