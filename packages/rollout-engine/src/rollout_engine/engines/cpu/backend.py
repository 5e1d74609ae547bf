"""The embedded engine in an event loop.

Steps run in the loop's own thread, and the loop gets its turn between two of them. A thread of its
own for them would be a convoy: each of the hundred operations of a step gives up the interpreter
lock and would have to win it back from whoever serves HTTP, while on the one core that an engine
is meant for nothing would run sooner.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from rollout_engine.engines.backend import Report, WeightUpdate
from rollout_engine.engines.cpu.batch import Sequence
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import Weights, load_weights
from rollout_engine.engines.errors import (
    EnginePoisoned,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.types import (
    EngineLoad,
    EngineRequest,
    Finish,
    FinishKind,
    Generation,
    ModelInfo,
    PauseMode,
    WeightsChecksum,
)
from rollout_engine.engines.wire import Json

logger = logging.getLogger(__name__)

POISONED_LABEL = "poisoned"
"""The version that an engine reports whose weights may not be any version's."""


class CpuBackend:
    """Serves `engines.api` from a `CpuEngine`.

    Args:
        engine: The engine; nobody else may touch it while `run` runs.
        model_path: Where its weights came from.
    """

    def __init__(self, engine: CpuEngine, model_path: Path) -> None:
        self._engine = engine
        self._served_name = str(model_path)
        self._model_path = str(model_path)
        self._wake = asyncio.Event()
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._reports: dict[int, Report] = {}
        self._rids: set[tuple[str, int]] = set()
        self._updating = asyncio.Lock()
        self._rate = (time.monotonic(), 0)

    async def run(self) -> None:
        """Compute steps while there is anything to compute, until cancelled."""
        while True:
            if not self._engine.busy:
                self._wake.clear()
                await self._wake.wait()
            self._step()
            # A request needs two turns of the loop from its socket to the queue.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def generate(
        self, request: EngineRequest, sample_index: int, report: Report | None
    ) -> Generation:
        """Queue one sample and wait for its end; a cancelled caller aborts it."""
        key = (request.rid, sample_index)
        if key in self._rids:
            raise InvalidRequest(f"A request with rid {request.rid!r} is in flight already.")
        sequence = self._engine.submit(request, sample_index)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._rids.add(key)
        self._futures[sequence.number] = future
        if report is not None:
            self._reports[sequence.number] = report
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._resolve(self._engine.abort(request.rid))
            raise
        finally:
            self._rids.discard(key)
            self._futures.pop(sequence.number, None)
            self._reports.pop(sequence.number, None)

    def abort(self, rid: str | None) -> None:
        """End a request, or all, with what they have."""
        self._resolve(self._engine.abort(rid))

    def pause(self, mode: PauseMode) -> None:
        """Stop between two steps."""
        self._resolve(self._engine.pause(mode))

    def resume(self) -> None:
        """Go on."""
        self._engine.resume()
        self._wake.set()

    async def update_weights(self, update: WeightUpdate) -> int:
        """Load into fresh memory while steps go on, then swap between two of them."""
        async with self._updating:
            folder = Path(update.model_path)
            weights = await asyncio.to_thread(
                _load, folder, self._engine.weights, update.root_hash, self._engine.config.threads
            )
            if update.abort_all:
                self.abort(None)
            label = self._engine.label if update.label is None else update.label
            paused = self._engine.in_flight if self._engine.paused else 0
            try:
                self._engine.swap(weights, label, flush=update.flush_cache)
            except EnginePoisoned as error:
                self._fail(error.message)
                raise
            self._model_path = update.model_path
            self._wake.set()
            return paused

    def relabel(self, label: str) -> None:
        """Give the present weights another label."""
        self._engine.relabel(label)

    def flush(self) -> bool:
        """Drop kept prefixes if nothing is in flight."""
        return self._engine.flush()

    def ailment(self) -> str:
        """Return why the engine is poisoned, or nothing."""
        return self._engine.poisoned

    def model_info(self) -> ModelInfo:
        """Return what is served. A poisoned engine claims no version."""
        return ModelInfo(
            model_path=self._model_path,
            served_name=self._served_name,
            weight_version=POISONED_LABEL if self._engine.poisoned else self._engine.label,
            model_type=self._engine.spec.model_type,
            architectures=(self._engine.spec.architecture,),
        )

    def load(self) -> EngineLoad:
        """Return how busy the engine is; the rate of tokens is since the last call."""
        now_s, count = time.monotonic(), self._engine.counters.generated_tokens
        then_s, before = self._rate
        self._rate = (now_s, count)
        return self._engine.load((count - before) / max(now_s - then_s, 1e-3))

    def server_info(self) -> Json:
        """Return settings, limits and totals."""
        engine, counters = self._engine, self._engine.counters
        return {
            "engine": "tailrace-cpu",
            "version": metadata.version("rollout-engine"),
            **engine.config.model_dump(mode="json"),
            "context_length": engine.context_tokens,
            "max_req_input_len": engine.context_tokens - 1,
            "max_total_num_tokens": engine.config.max_running_requests * engine.context_tokens,
            "internal_states": [{name: getattr(counters, name) for name in counters.__slots__}],
        }

    async def checksum(self) -> WeightsChecksum:
        """Hash the live weights in a thread, while steps go on: nothing ever writes to them."""
        return await asyncio.to_thread(self._engine.weights.checksum)

    def _step(self) -> None:
        try:
            self._resolve(self._engine.step())
        except Exception as error:
            # A step that fails leaves rows and cache in an unknown state: serve nothing from them.
            logger.exception("a step failed; the engine serves nothing until a full load")
            self._engine.poisoned = (
                f"a step failed ({error!r}): do a full load with /update_weights_from_disk"
            )
            self._fail(self._engine.poisoned)
            return
        if self._reports:
            for sequence in self._engine.streaming():
                if (report := self._reports.get(sequence.number)) is not None:
                    report(self._generation(sequence))

    def _fail(self, message: str) -> None:
        finish = Finish(FinishKind.ABORT, message=message, status_code=503)
        self._resolve(self._engine.drop_all(finish))

    def _resolve(self, ended: Iterable[Sequence]) -> None:
        for sequence in ended:
            future = self._futures.get(sequence.number)
            if future is not None and not future.done():
                future.set_result(self._generation(sequence))

    def _generation(self, sequence: Sequence) -> Generation:
        output = sequence.output
        versions, oldest = sequence.spans(len(output))
        request = sequence.request
        return Generation(
            rid=request.rid,
            output_ids=tuple(output),
            finish=sequence.finish,
            prompt_tokens=sequence.prompt_tokens,
            weight_version=self._engine.label,
            logprobs=tuple(sequence.logprobs) if request.return_logprob else (),
            prompt_logprobs=tuple(sequence.prompt_logprobs),
            top_logprobs=tuple(sequence.top_logprobs[: len(output)]),
            prompt_top_logprobs=tuple(sequence.prompt_top_logprobs),
            version_spans=versions,
            kv_spans=oldest,
            cached_tokens=sequence.cached or 0,
            retractions=sequence.retractions,
            engine_s=time.monotonic() - sequence.submitted_s,
        )


def _load(folder: Path, present: Weights, root_hash: str | None, threads: int) -> Weights:
    import torch

    torch.set_num_threads(threads)  # counts for the calling thread alone
    if differences := present.spec.differences(read_spec(folder)):
        raise WeightUpdateFailed(
            f"Failed to get weights: {folder} holds another model than the one served; they differ "
            f"in {differences}"
        )
    weights = load_weights(folder, present.spec, present.dtype)
    if root_hash is not None and (actual := weights.checksum().root_hash) != root_hash:
        raise WeightUpdateFailed(
            f"{folder}: expected weights with root hash {root_hash}, found {actual}"
        )
    return weights


__all__ = ["POISONED_LABEL", "CpuBackend"]
