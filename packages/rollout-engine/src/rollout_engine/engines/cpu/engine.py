"""The embedded engine without its shell: requests in, steps, results out.

Single-threaded and synchronous. Weights are swapped between two steps; reading them from disk is
the caller's business, in whatever thread it likes.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterator

import numpy as np
import torch

from rollout_engine.engines.cpu.batch import ABORTED, Admission, Batch, Chunk, Sequence
from rollout_engine.engines.cpu.cache import KvCache, bytes_per_token
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.decode import Decoder, PromptChunk
from rollout_engine.engines.cpu.limits import Counters, check_dtype, check_memory, check_prompt
from rollout_engine.engines.cpu.noise import derive_seed
from rollout_engine.engines.cpu.prefix import Match, PrefixIndex
from rollout_engine.engines.cpu.prompts import packed, score_prompts
from rollout_engine.engines.cpu.row_order import RowOrder, call_cost_of
from rollout_engine.engines.cpu.rows import Rows
from rollout_engine.engines.cpu.sampling import Sampled, sample
from rollout_engine.engines.cpu.weights import Weights
from rollout_engine.engines.errors import EngineBusy, EnginePoisoned
from rollout_engine.engines.types import EngineLoad, EngineRequest, Finish, FinishKind, PauseMode

_SEED_LIMIT = 1 << 64


class CpuEngine:
    """Continuous batching over one model.

    Args:
        config: Sizes and policies.
        weights: The first version; `config.weight_version` is its label.
        clock: Seconds, for `engine_s` and rates alone.

    Raises:
        ValueError: the configured KV cache is larger than the configuration allows, or the weights
            are not in the configured dtype.
    """

    def __init__(
        self, config: CpuEngineConfig, weights: Weights, clock: Callable[[], float]
    ) -> None:
        spec, dtype = weights.spec, weights.dtype
        check_dtype(config, dtype)
        self.config = config
        self.spec = spec
        self.context_tokens = min(config.context_tokens, spec.max_positions)
        check_memory(config, self.context_tokens, bytes_per_token(spec, dtype))
        self.label = config.weight_version
        self.poisoned = ""
        """Why the engine must not serve; empty if it may."""
        self.paused = False
        self.counters = Counters()
        self._clock = clock
        self._weights = weights
        self._epoch_labels = [self.label]
        rows = config.max_running_requests
        self._cache = KvCache(spec, rows, self.context_tokens, config.prefix_cache_tokens, dtype)
        self._decoder = Decoder(spec, self._cache, config.prefill_tokens)
        self._rows = Rows(rows, spec.vocab, self._cache.positions, self._cache.array_dtype)
        self._batch = Batch(rows, config.prefill_tokens, config.prefix_cache_tokens)
        self._prefixes = PrefixIndex(config.prefix_cache_tokens)
        self._matches: dict[int, Match] = {}
        # Whether values that are not finite may be in the cache: then nothing in it is kept, since
        # what is masked is multiplied by zero, and that doesn't rid of them.
        self._tainted = False
        self._order = RowOrder(self._cache, self._rows, self._batch, call_cost_of(spec, dtype))
        self._numbers = itertools.count()
        self._seed = secrets.randbits(64) if config.seed is None else config.seed

    @property
    def weights(self) -> Weights:
        """The weights that the next step computes with."""
        return self._weights

    @property
    def busy(self) -> bool:
        """Whether `step` would do anything."""
        return not (self.paused or self.poisoned or self._batch.idle)

    @property
    def in_flight(self) -> int:
        """Sequences running or waiting."""
        return len(self._batch.running) + len(self._batch.waiting)

    def streaming(self) -> Iterator[Sequence]:
        """Bring running sequences that are streamed up to date, and yield them."""
        for row, sequence in enumerate(self._batch.running[: self._batch.decoding]):
            if sequence.request.stream:
                self._rows.unload(row, sequence)
                yield sequence

    def submit(self, request: EngineRequest, sample_index: int = 0) -> Sequence:
        """Queue one sample of a request.

        Raises:
            InvalidRequest: the prompt is empty, too long or has tokens outside the vocabulary.
            EngineBusy: the queue is full.
            EnginePoisoned: a weight update failed half way.
        """
        if self.poisoned:
            raise EnginePoisoned(self.poisoned)
        if len(self._batch.waiting) >= self.config.max_queued_requests:
            raise EngineBusy(
                f"The request queue is full: {len(self._batch.waiting)} requests wait, "
                "max_queued_requests allows no more. Retry later."
            )
        check_prompt(request, self.spec.vocab, self.context_tokens)
        number = next(self._numbers)
        sampling = request.sampling
        seed = sampling.sampling_seed
        if seed is None:
            seed = derive_seed(self._seed, number + 1)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(self.spec.eos_token_ids)
        prompt = list(request.input_ids)
        sequence = Sequence(
            request=request,
            number=number,
            seed=derive_seed(seed % _SEED_LIMIT, sample_index),
            submitted_s=self._clock(),
            tokens=prompt,
            prompt_tokens=len(prompt),
            stop_ids=frozenset(stop for stop in stops if 0 <= stop < self.spec.vocab),
            max_new=min(sampling.max_new_tokens, self.context_tokens - len(prompt)),
        )
        self._batch.submit(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Compute one step and return the sequences that it finished."""
        if not self.busy:
            return []
        with torch.inference_mode():
            self._admit()
            return self._advance()

    def abort(self, rid: str | None) -> list[Sequence]:
        """End all samples of a request, or everything if `rid` is None; return what ended."""
        ended: list[Sequence] = []
        for row in reversed(range(len(self._batch.running))):
            sequence = self._batch.running[row]
            if rid is None or sequence.request.rid == rid:
                self._leave(row, ABORTED)
                ended.append(sequence)
        kept = []
        for sequence in self._batch.waiting:
            if rid is None or sequence.request.rid == rid:
                sequence.finish = ABORTED
                ended.append(sequence)
            else:
                kept.append(sequence)
        if len(kept) < len(self._batch.waiting):
            self._batch.waiting.clear()
            self._batch.waiting.extend(kept)
        self.counters.aborted += len(ended)
        return sorted(ended, key=lambda sequence: sequence.number)

    def pause(self, mode: PauseMode) -> list[Sequence]:
        """Stop computing until `resume`; return the sequences that this ended."""
        self.paused = True
        if mode is PauseMode.ABORT:
            return self.abort(None)
        if mode is PauseMode.RETRACT:
            self._retract()
        return []

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def flush(self) -> bool:
        """Drop the prefix cache if nothing is in flight; return whether that was so."""
        if not self._batch.idle:
            return False
        self._prefixes.clear()
        return True

    def swap(self, weights: Weights, label: str, *, flush: bool = True) -> int:
        """Put other weights in place of the present ones, with their label, between two steps.

        Under `kv_policy = "recompute"` running sequences go back to the queue, where they keep
        their output, and kept prefixes are dropped. Under `keep` running sequences go on with the
        caches they have, and kept prefixes are dropped only if `flush` is set.

        Any failure poisons the engine until a later swap succeeds as a whole.

        Returns:
            Sequences in flight.

        Raises:
            EnginePoisoned: the swap failed half way.
        """
        if differences := self.spec.differences(weights.spec):
            raise ValueError(f"weights of another model: {differences}")
        check_dtype(self.config, weights.dtype)
        recompute = self.config.kv_policy == "recompute" or bool(self.poisoned) or self._tainted
        self.poisoned = "weights are being swapped"
        try:
            if recompute:
                self._retract()
            if recompute or flush:
                self._prefixes.clear()
            if self._tainted:
                self._cache.scrub_all()
                self._tainted = False
            self._weights = weights
            self._epoch_labels.append(label)
            self._set_label(label)
        except BaseException as error:
            self.poisoned = (
                f"the swap to weight version {label!r} failed half way ({error!r}): "
                "do a full load with /update_weights_from_disk"
            )
            raise EnginePoisoned(self.poisoned) from error
        self.poisoned = ""
        self.counters.weight_updates += 1
        return self.in_flight

    def relabel(self, label: str) -> None:
        """Give the present weights another label; the weights stay what they are."""
        self._epoch_labels[-1] = label
        self._set_label(label)

    def drop_all(self, finish: Finish) -> list[Sequence]:
        """End everything in flight without touching the cache, whatever state that is in."""
        ended = {s.number: s for s in (*self._batch.running, *self._batch.waiting)}
        for sequence in ended.values():
            sequence.finish = finish
        self._order.changed()
        self._batch.clear()
        self._prefixes.clear()
        self.counters.aborted += len(ended)
        return list(ended.values())

    def load(self, tokens_per_s: float) -> EngineLoad:
        """Return how busy the engine is."""
        batch, counters = self._batch, self.counters
        used = int(self._rows.computed[: len(batch.running)].sum())
        return EngineLoad(
            running=len(batch.running),
            waiting=len(batch.waiting),
            used_tokens=used,
            max_tokens=self.config.max_running_requests * self.context_tokens,
            max_running=self.config.max_running_requests,
            tokens_per_s=tokens_per_s,
            cache_hit_rate=counters.cached_tokens / max(1, counters.prompt_tokens),
            paused=len(batch.running) if self.paused else 0,
            tokens_generated=counters.generated_tokens,
        )

    def _admit(self) -> None:
        for admission in self._batch.admit(self._match):
            self._place(admission)
        self._matches.clear()

    def _match(self, sequence: Sequence) -> int:
        match = self._matches[sequence.number] = self._prefixes.match(sequence.tokens)
        return match.length

    def _place(self, admission: Admission) -> None:
        sequence, row, reused = admission.sequence, admission.row, admission.reused
        sequence.kv_epoch = len(self._epoch_labels) - 1
        if reused > 0:
            match = self._matches[sequence.number]
            self._cache.restore(row, match.slots[:reused])
            sequence.kv_epoch = match.epoch
        if not sequence.marks:
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_tokens += reused
        self._rows.load(row, sequence)
        self._mark(sequence, int(self._rows.generated[row]))

    def _advance(self) -> list[Sequence]:
        batch, rows = self._batch, self._rows
        decoding = batch.decoding
        chunks = batch.chunks()
        parts, prompt_ids = packed(chunks, decoding)
        segments = self._order.segments(self.counters.steps)
        last, computed = rows.last[:decoding], rows.computed[:decoding]
        self._decoder.forward(self._weights, last, computed, segments, parts, prompt_ids)
        rows.computed[:decoding] += 1
        self.counters.steps += 1
        wanted = self._finish_chunks(chunks, parts, decoding) if chunks else None
        if batch.decoding == 0:
            return []
        return self._commit(sample(self._decoder.logits(self._weights, wanted), rows))

    def _finish_chunks(
        self, chunks: list[Chunk], parts: list[PromptChunk], decoding: int
    ) -> list[int]:
        """Account for computed prompt chunks.

        Returns:
            Which packed tokens are followed by a sampled one: those of rows that decoded, and the
            last of each prompt that is complete now.
        """
        score_prompts(self._decoder, self._weights, chunks, parts)
        self._batch.computed(chunks)
        self._order.changed()
        wanted = list(range(decoding))
        for chunk, part in zip(chunks, parts, strict=True):
            self._rows.computed[chunk.row] = chunk.end
            self.counters.computed_prompt_tokens += part.count
            if chunk.completes:
                wanted.append(part.offset + part.count - 1)
                if chunk.sequence.shared:
                    self._keep(chunk.sequence, chunk.row, chunk.sequence.tokens)
        return wanted

    def _commit(self, sampled: Sampled) -> list[Sequence]:
        """Append the sampled tokens to rows `[0, n)` and take out what is finished."""
        rows, count = self._rows, len(sampled.tokens)
        generated = rows.generated[:count]
        index = rows.arange[:count]
        rows.outputs[index, generated] = sampled.tokens
        rows.logprobs[index, generated] = sampled.logprobs
        rows.last[:count] = sampled.tokens
        generated += 1
        self.counters.generated_tokens += count
        for row, top in sampled.top.items():
            self._batch.running[row].top_logprobs.append(top)
        stopped = rows.stops[index, sampled.tokens]
        over = stopped | (generated >= rows.max_new[:count])
        # A NaN in one row's logits shows in the sum; looking at it costs less than at each row.
        broken = not math.isfinite(sampled.logprobs.sum())
        if broken:
            over |= ~np.isfinite(sampled.logprobs)
        if not over.any():
            return []
        finished = []
        # From the last row on: closing a gap then never moves a row that is still to be taken out.
        for row in np.flatnonzero(over)[::-1].tolist():
            sequence = self._batch.running[row]
            finish = Finish(FinishKind.LENGTH)
            if broken and not math.isfinite(sampled.logprobs[row]):
                self._tainted = True
                rows.generated[row] -= 1
                finish = Finish(
                    FinishKind.ABORT,
                    message=f"weight version {self.label!r} gives logits that are not finite",
                    status_code=500,
                )
            elif stopped[row] and sequence.max_new > 0:
                finish = Finish(FinishKind.STOP, matched=int(sampled.tokens[row]))
            elif sequence.max_new == 0:
                rows.generated[row] = 0
            self._leave(row, finish)
            finished.append(sequence)
        self.counters.finished += len(finished)
        return finished[::-1]

    def _leave(self, row: int, finish: Finish) -> None:
        """Take a sequence out of its row, and keep what was computed for it."""
        sequence = self._batch.running[row]
        self._order.changed()
        self._rows.unload(row, sequence)
        sequence.finish = finish
        if self._tainted:
            self._cache.scrub(row)
        else:
            self._keep(sequence, row, sequence.tokens[: int(self._rows.computed[row])])
        for move in self._batch.remove(row):
            self._cache.move(move.source, move.target, int(self._rows.computed[move.source]))
            self._rows.move(move.source, move.target)

    def _keep(self, sequence: Sequence, row: int, tokens: list[int]) -> None:
        start, slots = self._prefixes.insert(tokens, sequence.kv_epoch)
        if slots:
            self._cache.save(row, start, slots)

    def _retract(self) -> None:
        self._order.changed()
        for row, sequence in enumerate(self._batch.running):
            self._rows.unload(row, sequence)
        self._batch.retract()

    def _set_label(self, label: str) -> None:
        self.label = label
        for row, sequence in enumerate(self._batch.running):
            self._mark(sequence, int(self._rows.generated[row]))

    def _mark(self, sequence: Sequence, output_tokens: int) -> None:
        oldest = self._epoch_labels[sequence.kv_epoch]
        sequence.marks.append((output_tokens, self.label, oldest))


__all__ = ["CpuEngine"]
