"""The prompt's side of a step: its tokens in a row, and their own log-probabilities."""

from __future__ import annotations

import torch

from rollout_engine.engines.cpu.batch import Chunk
from rollout_engine.engines.cpu.decode import Decoder, PromptChunk
from rollout_engine.engines.cpu.sampling import top_of
from rollout_engine.engines.cpu.weights import Weights


def packed(chunks: list[Chunk], decoding: int) -> tuple[list[PromptChunk], list[int]]:
    """Put the chunks' tokens one after the other, behind those of the decoding rows."""
    parts: list[PromptChunk] = []
    prompt_ids: list[int] = []
    for chunk in chunks:
        offset = decoding + len(prompt_ids)
        parts.append(PromptChunk(chunk.row, chunk.start, chunk.end - chunk.start, offset))
        prompt_ids += chunk.sequence.tokens[chunk.start : chunk.end]
    return parts, prompt_ids


def score_prompts(
    decoder: Decoder, weights: Weights, chunks: list[Chunk], parts: list[PromptChunk]
) -> None:
    """Record log-probabilities of prompt tokens for the sequences that asked for them."""
    for chunk, part in zip(chunks, parts, strict=True):
        sequence = chunk.sequence
        if not sequence.scores_prompt:
            continue
        start = sequence.request.logprob_start_len
        first, end = max(chunk.start, start), min(chunk.end, sequence.prompt_tokens - 1)
        scored = sequence.prompt_logprobs
        if len(scored) > first - start + 1:
            continue  # from before a retraction
        count = sequence.request.top_logprobs_num
        if not scored and start < sequence.prompt_tokens:
            scored.append((None, sequence.tokens[start]))
            if count:
                sequence.prompt_top_logprobs.append(None)
        if first >= end:
            continue
        offset = part.offset - chunk.start
        logits = decoder.logits(weights, range(offset + first, offset + end))
        logprobs = torch.log_softmax(logits, -1)
        targets = sequence.tokens[first + 1 : end + 1]
        chosen = logprobs.gather(1, torch.tensor(targets)[:, None]).squeeze(1)
        scored += zip(chosen.tolist(), targets, strict=True)
        if count:
            sequence.prompt_top_logprobs += [top_of(row, count) for row in logprobs]


__all__ = ["packed", "score_prompts"]
