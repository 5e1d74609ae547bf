"""Who is computed in the next step, and in which row. Pure: no tensors, no clock.

Rows `[0, decoding)` hold sequences that sample one token a step, rows `[decoding, len(running))`
those whose prompt is still being computed. Both ranges stay contiguous, so that the decode loop
works on plain slices of its arrays; the moves that this takes are returned to the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_engine.engines.types import EngineRequest, Finish, FinishKind, LabelSpan

SHARE_TOKENS = 64
"""A prompt that starts like one being computed now waits for it, if so many tokens can be saved."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and what it has come to.

    Attributes:
        tokens: Prompt and output so far. Output of a running sequence is in its row instead.
        computed: How many tokens have their keys and values in the row.
        cached: How many of the prompt's tokens came from the prefix cache, at first admission.
        lead: The prompt's start, by which later requests notice that this one computes it already.
        shared: Another sequence waits for this one's prompt.
        kv_epoch: The oldest weights in its KV cache.
        marks: `(output index, version, oldest KV version)` from that index on.
    """

    request: EngineRequest
    number: int
    seed: int
    submitted_s: float
    tokens: list[int]
    prompt_tokens: int
    stop_ids: frozenset[int]
    max_new: int
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[float, int], ...]] = field(default_factory=list)
    prompt_top_logprobs: list[tuple[tuple[float, int], ...] | None] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    lead: tuple[int, ...] = ()
    shared: bool = False
    kv_epoch: int = 0
    marks: list[tuple[int, str, str]] = field(default_factory=list)
    retractions: int = 0
    finish: Finish | None = None

    @property
    def output(self) -> list[int]:
        """The output, as far as `tokens` has it."""
        return self.tokens[self.prompt_tokens :]

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are asked for."""
        return self.request.return_logprob and self.request.logprob_start_len >= 0

    @property
    def reusable(self) -> int:
        """How many leading tokens may come from the prefix cache: the last must be computed."""
        most = len(self.tokens) - 1
        if self.scores_prompt and not self.prompt_logprobs:
            most = min(most, self.request.logprob_start_len)
        return most

    def spans(self, output_tokens: int) -> tuple[tuple[LabelSpan, ...], tuple[LabelSpan, ...]]:
        """Return the spans of versions and of oldest KV versions over the output."""
        ends = [mark[0] for mark in self.marks[1:]] + [output_tokens]
        pairs = list(zip(self.marks, ends, strict=False))
        return (
            _merged([(version, start, end) for (start, version, _), end in pairs]),
            _merged([(oldest, start, end) for (start, _, oldest), end in pairs]),
        )


def _merged(spans: list[tuple[str, int, int]]) -> tuple[LabelSpan, ...]:
    merged: list[LabelSpan] = []
    for version, start, end in spans:
        if start >= end:
            continue
        if merged and merged[-1].version == version:
            merged[-1] = LabelSpan(version, merged[-1].start, end)
        else:
            merged.append(LabelSpan(version, start, end))
    return tuple(merged)


ABORTED = Finish(FinishKind.ABORT, message="Aborted")


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a row; its first `reused` tokens are in the prefix cache."""

    sequence: Sequence
    row: int
    reused: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, end)` of a row's sequence are computed in this step."""

    sequence: Sequence
    row: int
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the sequence samples its next token in this step."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Move:
    """The content of row `source` goes to row `target`, which is free."""

    source: int
    target: int


class Batch:
    """The queue and the rows.

    Args:
        rows: Sequences computed at once, at most.
        prefill_tokens: Prompt tokens computed in one step, at most.
        keep_tokens: The prefix cache keeps prompts up to this length, so that it pays to wait for
            one that starts alike; 0: none.
    """

    def __init__(self, rows: int, prefill_tokens: int, keep_tokens: int) -> None:
        self._rows = rows
        self._keep_tokens = keep_tokens
        self._prefill_tokens = prefill_tokens
        self.running: list[Sequence] = []
        """By row."""
        self.decoding = 0
        self.waiting: deque[Sequence] = deque()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.running and not self.waiting

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def admit(self, match: Callable[[Sequence], int]) -> list[Admission]:
        """Give free rows to waiting sequences, as long as this step can start on their prompts.

        Args:
            match: How many leading tokens the prefix cache has.

        Returns:
            The sequences that got rows, shortest remaining prompt first.
        """
        free = self._rows - len(self.running)
        if not self.waiting or free <= 0:
            return []
        leaders = {s.lead: s for s in self.running[self.decoding :]}
        budget = self._prefill_tokens - sum(
            len(s.tokens) - s.computed for s in self.running[self.decoding :]
        )
        taken: list[tuple[int, int, Sequence]] = []
        deferred: list[Sequence] = []
        while self.waiting and len(taken) < free and budget > 0 and len(deferred) < self._rows:
            sequence = self.waiting.popleft()
            reused = min(match(sequence), sequence.reusable)
            left = len(sequence.tokens) - reused
            if left > SHARE_TOKENS and len(sequence.tokens) <= self._keep_tokens:
                sequence.lead = tuple(sequence.tokens[: reused + SHARE_TOKENS])
                leader = leaders.setdefault(sequence.lead, sequence)
                if leader is not sequence and sequence.reusable >= len(sequence.lead):
                    leader.shared = True
                    deferred.append(sequence)
                    continue
            taken.append((left, reused, sequence))
            budget -= left
        self.waiting.extendleft(reversed(deferred))
        # Neighbours of like length waste least when their attention is padded to the longest.
        taken.sort(key=lambda item: item[0])
        admissions = []
        for _, reused, sequence in taken:
            admissions.append(Admission(sequence, len(self.running), reused))
            sequence.computed = reused
            if sequence.cached is None:
                sequence.cached = reused
            self.running.append(sequence)
        return admissions

    def chunks(self) -> list[Chunk]:
        """Share the step's prompt tokens out in the order of rows.

        All chunks but the last complete their sequence.
        """
        budget = self._prefill_tokens
        chunks: list[Chunk] = []
        for row in range(self.decoding, len(self.running)):
            if budget == 0:
                break
            sequence = self.running[row]
            end = min(len(sequence.tokens), sequence.computed + budget)
            budget -= end - sequence.computed
            chunks.append(Chunk(sequence, row, sequence.computed, end))
        return chunks

    def computed(self, chunks: list[Chunk]) -> None:
        """Record that the chunks are done: complete sequences decode from the next step on."""
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
            self.decoding += chunk.completes

    def remove(self, row: int) -> list[Move]:
        """Free a row and close the gap. The moves are to be made in their order."""
        moves: list[Move] = []
        hole = row
        if row < self.decoding:
            self.decoding -= 1
            hole = self._fill(moves, row, self.decoding)
        self._fill(moves, hole, len(self.running) - 1)
        self.running.pop()
        return moves

    def _fill(self, moves: list[Move], target: int, source: int) -> int:
        if source != target:
            self.running[target] = self.running[source]
            moves.append(Move(source, target))
        return source

    def reorder(self, order: list[int]) -> None:
        """Give each decoding row the sequence of the row that `order` names for it."""
        self.running[: self.decoding] = [self.running[row] for row in order]

    def clear(self) -> None:
        """Forget every sequence."""
        self.running.clear()
        self.waiting.clear()
        self.decoding = 0

    def retract(self) -> list[Sequence]:
        """Send every running sequence back to the head of the queue, in order of arrival."""
        retracted = sorted(self.running, key=lambda sequence: sequence.number)
        for sequence in retracted:
            if sequence.computed < sequence.prompt_tokens:
                sequence.prompt_logprobs.clear()
                sequence.prompt_top_logprobs.clear()
            sequence.computed = 0
            sequence.lead = ()
            sequence.shared = False
            sequence.retractions += 1
        self.running.clear()
        self.decoding = 0
        self.waiting.extendleft(reversed(retracted))
        return retracted


__all__ = ["ABORTED", "SHARE_TOKENS", "Admission", "Batch", "Chunk", "Move", "Sequence"]
