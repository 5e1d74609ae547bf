from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_engine.engines.cpu.batch import SHARE_TOKENS, Batch, Sequence
from rollout_engine.engines.types import EngineRequest, LabelSpan, SamplingParams


def sequence(number: int, prompt: list[int], **options: int) -> Sequence:
    return Sequence(
        request=EngineRequest(
            rid=str(number),
            input_ids=prompt,
            sampling=SamplingParams(),
            logprob_start_len=options.get("logprob_start_len", -1),
        ),
        number=number,
        seed=0,
        submitted_s=0.0,
        tokens=list(prompt),
        prompt_tokens=len(prompt),
        stop_ids=frozenset(),
        max_new=8,
    )


def nothing_cached(_: Sequence) -> int:
    return 0


def test_long_prompts_are_computed_in_chunks_beside_the_others() -> None:
    batch = Batch(rows=4, prefill_tokens=10, keep_tokens=0)
    batch.submit(sequence(0, [1] * 4))
    batch.submit(sequence(1, [2] * 25))
    batch.admit(nothing_cached)
    first = batch.chunks()
    assert [(c.row, c.start, c.end, c.completes) for c in first] == [
        (0, 0, 4, True),
        (1, 0, 6, False),
    ]
    batch.computed(first)
    assert batch.decoding == 1
    second = batch.chunks()
    assert [(c.row, c.start, c.end) for c in second] == [(1, 6, 16)]
    batch.computed(second)
    batch.computed(batch.chunks())
    assert batch.decoding == 2


def test_no_more_prompts_are_admitted_than_a_step_can_start_on() -> None:
    batch = Batch(rows=8, prefill_tokens=10, keep_tokens=0)
    for number in range(5):
        batch.submit(sequence(number, [number] * 6))
    assert len(batch.admit(nothing_cached)) == 2
    assert batch.admit(nothing_cached) == []
    batch.computed(batch.chunks())
    assert len(batch.admit(nothing_cached)) == 2


def test_the_last_prompt_token_is_computed_even_if_all_of_it_is_cached() -> None:
    batch = Batch(rows=2, prefill_tokens=10, keep_tokens=100)
    batch.submit(sequence(0, [1, 2, 3]))
    (admission,) = batch.admit(lambda _: 3)
    assert admission.reused == 2
    assert admission.sequence.cached == 2


def test_scored_prompt_tokens_do_not_come_from_the_cache() -> None:
    batch = Batch(rows=2, prefill_tokens=10, keep_tokens=100)
    batch.submit(sequence(0, [1, 2, 3, 4], logprob_start_len=1))
    assert batch.admit(lambda _: 3)[0].reused == 1


def test_a_prompt_that_starts_like_one_being_computed_waits_and_shares_it() -> None:
    batch = Batch(rows=8, prefill_tokens=1000, keep_tokens=1000)
    shared = list(range(SHARE_TOKENS + 30))
    cached = 0
    for number in range(3):
        batch.submit(sequence(number, [*shared, 1000 + number]))
    (leader,) = batch.admit(lambda _: cached)
    assert leader.sequence.number == 0
    assert leader.sequence.shared
    assert [s.number for s in batch.waiting] == [1, 2]
    batch.computed(batch.chunks())
    cached = len(shared)
    assert [a.reused for a in batch.admit(lambda _: cached)] == [len(shared)] * 2


def test_prompts_that_can_not_be_kept_are_not_waited_for() -> None:
    batch = Batch(rows=8, prefill_tokens=1000, keep_tokens=50)
    for number in range(3):
        batch.submit(sequence(number, [5] * 100))
    assert len(batch.admit(nothing_cached)) == 3


def test_retracted_sequences_come_back_first_and_in_order() -> None:
    batch = Batch(rows=3, prefill_tokens=100, keep_tokens=0)
    for number in range(5):
        batch.submit(sequence(number, [number] * (5 - number)))
    batch.admit(nothing_cached)
    batch.retract()
    assert [s.number for s in batch.waiting] == [0, 1, 2, 3, 4]
    assert [s.retractions for s in batch.waiting] == [1, 1, 1, 0, 0]


def test_spans_cover_the_output_and_merge_what_is_equal() -> None:
    made = sequence(0, [1])
    made.marks = [(0, "1", "1"), (2, "2", "1"), (2, "2", "2"), (5, "2", "2"), (7, "3", "3")]
    versions, oldest = made.spans(7)
    assert versions == (LabelSpan("1", 0, 2), LabelSpan("2", 2, 7))
    assert oldest == (LabelSpan("1", 0, 2), LabelSpan("2", 2, 7))
    made.marks = [(0, "1", "1")]
    assert made.spans(0) == ((), ())


ROWS, BUDGET = 4, 7


class Steps(RuleBasedStateMachine):
    """Random arrivals, steps and removals; the rows' content must follow the moves."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = Batch(ROWS, BUDGET, keep_tokens=0)
        self.rows: list[int | None] = [None] * ROWS
        self.next_number = 0
        self.gone: set[int] = set()

    @rule(length=st.integers(1, 20))
    def submit(self, length: int) -> None:
        self.batch.submit(sequence(self.next_number, [1] * length))
        self.next_number += 1

    @rule()
    def step(self) -> None:
        for admission in self.batch.admit(nothing_cached):
            assert self.rows[admission.row] is None
            self.rows[admission.row] = admission.sequence.number
        chunks = self.batch.chunks()
        assert sum(c.end - c.start for c in chunks) <= BUDGET
        assert all(c.completes for c in chunks[:-1])
        assert [c.row for c in chunks] == [self.batch.decoding + i for i in range(len(chunks))]
        self.batch.computed(chunks)

    @precondition(lambda self: self.batch.running)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.batch.running) - 1))
        number = self.rows[row]
        assert number is not None
        self.gone.add(number)
        self.rows[row] = None
        for move in self.batch.remove(row):
            assert self.rows[move.target] is None
            self.rows[move.target], self.rows[move.source] = self.rows[move.source], None

    @rule()
    def retract(self) -> None:
        self.batch.retract()
        self.rows = [None] * ROWS

    @invariant()
    def rows_hold_what_the_batch_says(self) -> None:
        running = [s.number for s in self.batch.running]
        assert self.rows == [*running, *[None] * (ROWS - len(running))]

    @invariant()
    def complete_prompts_come_first(self) -> None:
        done = [s.computed == len(s.tokens) for s in self.batch.running]
        assert all(done[: self.batch.decoding])
        assert not any(done[self.batch.decoding :])

    @invariant()
    def nobody_is_lost(self) -> None:
        present = [s.number for s in (*self.batch.running, *self.batch.waiting)]
        assert sorted([*present, *self.gone]) == list(range(self.next_number))


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=40)
