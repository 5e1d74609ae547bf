"""What the decode loop must know of each running sequence, as arrays with one entry a row.

A step updates all rows with a handful of array operations; Python touches a single sequence only
when it comes, goes or is streamed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout_engine.engines.cpu.batch import Sequence
from rollout_engine.engines.cpu.noise import noise_state


class Rows:
    """State by row.

    Attributes:
        computed: Tokens whose keys and values are in the cache.
        last: The last token, which the next step computes.
        generated: Length of the output.
        max_new: The output ends at this length.
        min_new: Stop tokens are not sampled before this length.
        stops: `[rows, vocab]`, whether a token ends the output.
        outputs: `[rows, positions]`.
        logprobs: `[rows, positions]`.
        noise: State of the sequence's random numbers.
        inverse_temperature: 1 for greedy rows.
        filtered: Rows with top-k, top-p or min-p.
        filters: `[rows, 3]`, top-k, top-p and min-p; all pass in rows without a filter.
        top_logprobs: How many to report.
        plain: Rows sampled at temperature 1 without anything special.
    """

    def __init__(self, rows: int, vocab: int, positions: int, dtype: np.dtype[Any]) -> None:
        self.computed = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int64)
        self.generated = np.zeros(rows, np.int64)
        self.max_new = np.zeros(rows, np.int64)
        self.min_new = np.zeros(rows, np.int64)
        self.stops = np.zeros((rows, vocab), np.bool_)
        self.outputs = np.zeros((rows, positions), np.int64)
        self.logprobs = np.zeros((rows, positions), dtype)
        self.noise = np.zeros(rows, np.uint64)
        self.inverse_temperature = np.ones(rows, dtype)
        self.greedy = np.zeros(rows, np.bool_)
        self.filtered = np.zeros(rows, np.bool_)
        self.filters = np.zeros((rows, 3), np.float64)
        self.top_logprobs = np.zeros(rows, np.int64)
        self.plain = np.ones(rows, np.bool_)
        self._columns = [value for value in vars(self).values() if value.ndim == 1]
        self.arange = np.arange(rows)

    def load(self, row: int, sequence: Sequence) -> None:
        """Put a sequence that is about to compute its prompt into a row."""
        sampling = sequence.request.sampling
        output = sequence.output
        self.computed[row] = sequence.computed
        self.generated[row] = len(output)
        self.outputs[row, : len(output)] = output
        self.logprobs[row, : len(output)] = sequence.logprobs
        self.max_new[row] = sequence.max_new
        self.min_new[row] = sampling.min_new_tokens
        self.stops[row] = False
        self.stops[row, list(sequence.stop_ids)] = True
        self.noise[row] = noise_state(sequence.seed, len(output))
        self.greedy[row] = sampling.greedy
        self.inverse_temperature[row] = 1.0 if sampling.greedy else 1.0 / sampling.temperature
        self.filtered[row] = sampling.filtered and not sampling.greedy
        top_k = np.inf if sampling.top_k == -1 else sampling.top_k
        self.filters[row] = (top_k, sampling.top_p, sampling.min_p)
        self.top_logprobs[row] = sequence.request.top_logprobs_num
        self.plain[row] = not (
            sampling.greedy
            or sampling.filtered
            or sampling.temperature != 1.0
            or sampling.min_new_tokens
            or sequence.request.top_logprobs_num
        )

    def unload(self, row: int, sequence: Sequence) -> None:
        """Write a row's output into its sequence."""
        count = int(self.generated[row])
        sequence.tokens[sequence.prompt_tokens :] = self.outputs[row, :count].tolist()
        sequence.logprobs = self.logprobs[row, :count].tolist()

    def move(self, source: int, target: int) -> None:
        """Copy one row to another."""
        for column in self._columns:
            column[target] = column[source]
        count = int(self.generated[source])
        self.outputs[target, :count] = self.outputs[source, :count]
        self.logprobs[target, :count] = self.logprobs[source, :count]
        self.stops[target] = self.stops[source]
        self.filters[target] = self.filters[source]

    def reorder(self, order: list[int]) -> None:
        """Give each of the first rows the content of the row that `order` names for it."""
        targets = [target for target, source in enumerate(order) if target != source]
        sources = [order[target] for target in targets]
        for column in self._columns:
            column[targets] = column[sources]
        longest = int(self.generated[targets].max(initial=0))
        self.outputs[targets, :longest] = self.outputs[sources, :longest]
        self.logprobs[targets, :longest] = self.logprobs[sources, :longest]
        self.stops[targets] = self.stops[sources]
        self.filters[targets] = self.filters[sources]


__all__ = ["Rows"]
