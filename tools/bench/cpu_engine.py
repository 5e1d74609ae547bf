"""Generated tokens a CPU-second: the embedded engine against transformers' `generate`.

Both get the same model (0.8M-parameter Qwen3, float32, random weights), the same prompts and for
each of them the same number of new tokens, temperature 1, one thread, no stop tokens. The rival
runs with the cache that is faster for it here, dynamic or static, and is not asked for
log-probabilities, which the engine always returns. The engine's prefix cache is off. Rounds of the
two alternate, so that whatever else the machine does meets both.

* `ratio_N`: engine over rival with N requests in flight, as agents make them: the longest has 2.5
  times the tokens of the shortest. The engine fills a place as soon as it is free; `generate` takes
  N prompts and returns with the longest. All CPU time counts, prompts' computation included.
* `equal_ratio_N`: the same with equally many tokens for all, so that nothing is won by filling
  places: what a step costs. `equal_decode_ratio_N` leaves out the prompts and first tokens.
* `turn_cpu_ms`: CPU of the engine's process for one short turn over HTTP: 32 agents, 5 turns each
  of 20 new prompt tokens and 12 sampled ones, prefixes reused.

CPU time is the process's own, all threads. The last line is JSON; spreads are the lowest and the
highest round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import aiohttp
import torch
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import load_weights
from rollout_engine.engines.http_server import listen
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.engines.types import EngineRequest, SamplingParams

VOCAB = 256
CONTEXT = 512
LONGEST_TO_SHORTEST = 2.5
BATCHES = 3
"""Each round with uneven lengths has so many times N requests."""


@dataclass(frozen=True)
class Job:
    """One prompt, and how many tokens to continue it by."""

    prompt: list[int]
    new_tokens: int


def make_model(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: Any = transformers.Qwen3ForCausalLM
    model(config).save_pretrained(folder)


class Rival:
    """transformers' `generate`."""

    def __init__(self, folder: Path) -> None:
        import transformers

        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.pad_token_id = 0
        self.cache = ""

    def choose_cache(self, jobs: Sequence[Job]) -> None:
        """Find the faster cache for this many prompts."""
        took_s = {}
        for cache in ("dynamic", "static"):
            self.cache = cache
            self.run(jobs, len(jobs))
            took_s[cache] = self.run(jobs, len(jobs))
        self.cache = min(took_s, key=lambda cache: took_s[cache])

    def run(self, jobs: Sequence[Job], in_flight: int) -> float:
        """Generate, and return the CPU-seconds."""
        began_s = time.process_time()
        with torch.inference_mode():
            for start in range(0, len(jobs), in_flight):
                self._batch(jobs[start : start + in_flight])
        return time.process_time() - began_s

    def _batch(self, jobs: Sequence[Job]) -> None:
        options: dict[str, Any] = {}
        if self.cache == "static":
            options = {"cache_implementation": "static", "disable_compile": True}
        ids = torch.tensor([job.prompt for job in jobs])
        longest = max(job.new_tokens for job in jobs)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            **options,
        )
        assert out.shape == (len(jobs), ids.shape[1] + longest)


class Ours:
    """The embedded engine, without its HTTP server."""

    def __init__(self, folder: Path) -> None:
        config = CpuEngineConfig(model=folder, context_tokens=CONTEXT, prefix_cache_tokens=0)
        weights = load_weights(folder, read_spec(folder))
        self._engine = CpuEngine(config, weights, time.monotonic)

    def run(self, jobs: Sequence[Job], in_flight: int) -> float:
        """Generate, and return the CPU-seconds."""
        began_s = time.process_time()
        waiting = list(reversed(jobs))
        done: list[int] = []
        while waiting or self._engine.busy:
            while waiting and self._engine.in_flight < in_flight:
                job = waiting.pop()
                sampling = SamplingParams(max_new_tokens=job.new_tokens, ignore_eos=True)
                self._engine.submit(
                    EngineRequest(rid=str(len(waiting)), input_ids=job.prompt, sampling=sampling)
                )
            for sequence in self._engine.step():
                assert len(sequence.output) == len(sequence.logprobs)
                done.append(len(sequence.output))
        took_s = time.process_time() - began_s
        assert sum(done) == sum(job.new_tokens for job in jobs)
        return took_s


def make_jobs(count: int, arguments: argparse.Namespace, seed: int, *, even: bool) -> list[Job]:
    source = random.Random(seed)
    shortest = round(arguments.new / LONGEST_TO_SHORTEST)
    return [
        Job(
            prompt=[source.randrange(VOCAB) for _ in range(arguments.prompt)],
            new_tokens=arguments.new if even else source.randint(shortest, arguments.new),
        )
        for _ in range(count)
    ]


def compare(
    rival: Rival, ours: Ours, in_flight: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    rival.choose_cache(make_jobs(in_flight, arguments, 0, even=True))
    for number in range(arguments.rounds + 1):
        uneven = make_jobs(BATCHES * in_flight, arguments, number, even=False)
        even = make_jobs(in_flight, arguments, number, even=True)
        first = [Job(job.prompt, 1) for job in even]
        took_s = {
            name: [side.run(jobs, in_flight) for side in (rival, ours)]
            for name, jobs in (("uneven", uneven), ("even", even), ("first", first))
        }
        if number == 0:
            continue  # warm-up
        decode_s = [whole - one for whole, one in zip(took_s["even"], took_s["first"], strict=True)]
        tokens = sum(job.new_tokens for job in uneven)
        for key, value in (
            ("ratio", took_s["uneven"][0] / took_s["uneven"][1]),
            ("engine_tokens", tokens / took_s["uneven"][1]),
            ("rival_tokens", tokens / took_s["uneven"][0]),
            ("equal_ratio", took_s["even"][0] / took_s["even"][1]),
            ("equal_decode_ratio", decode_s[0] / decode_s[1]),
        ):
            rows.setdefault(key, []).append(value)
    return rows


def turn_cpu_ms(folder: Path, agents: int = 32, turns: int = 5) -> float:
    """Return the CPU-milliseconds of a served engine's process for one turn of an agent."""
    free = listen("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    program = (
        "import asyncio; from rollout_engine.engines.cpu.config import CpuEngineConfig; "
        "from rollout_engine.engines.cpu.main import serve_engine; asyncio.run(serve_engine("
        f"CpuEngineConfig(model={str(folder)!r}, port={port}, context_tokens={CONTEXT})))"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        spent_s = asyncio.run(_spent_s(process, port, agents, turns))
    finally:
        process.terminate()
        process.wait(30)
    return 1000 * spent_s / (agents * turns)


async def _spent_s(process: subprocess.Popen[bytes], port: int, agents: int, turns: int) -> float:
    async with SglangClient(f"http://127.0.0.1:{port}") as client:
        await _until_up(client, process)
        await _play(client, agents, turns, seed=0)
        before_s = _cpu_s(process.pid)
        await _play(client, agents, turns, seed=1)
        return _cpu_s(process.pid) - before_s


async def _until_up(client: SglangClient, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"{client.url}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise RuntimeError(f"the engine's process ended with {process.returncode}")


async def _play(client: SglangClient, agents: int, turns: int, seed: int) -> None:
    async def agent(number: int) -> None:
        source = random.Random(1000 * seed + number)
        tokens: list[int] = []
        for turn in range(turns):
            tokens += [source.randrange(VOCAB) for _ in range(20)]
            request = EngineRequest(
                rid=f"{seed}-{number}-{turn}",
                input_ids=tokens,
                sampling=SamplingParams(max_new_tokens=12, ignore_eos=True),
            )
            tokens += (await client.generate(request, timeout_s=120.0)).output_ids

    async with asyncio.TaskGroup() as group:
        for number in range(agents):
            group.create_task(agent(number))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens generated, at most")
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1, 8, 32, 64])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        rival, ours = Rival(folder), Ours(folder)
        for in_flight in arguments.in_flight:
            for key, values in compare(rival, ours, in_flight, arguments).items():
                figures[f"{key}_{in_flight}"] = round(statistics.median(values), 3)
                spread[f"{key}_{in_flight}"] = [round(min(values), 3), round(max(values), 3)]
            sys.stdout.write(
                f"{in_flight:3d} in flight: engine {figures[f'engine_tokens_{in_flight}']:7.0f}, "
                f"transformers ({rival.cache} cache) {figures[f'rival_tokens_{in_flight}']:6.0f} "
                f"tokens a CPU-second; ratio {figures[f'ratio_{in_flight}']:.2f} "
                f"{spread[f'ratio_{in_flight}']}; equal lengths "
                f"{figures[f'equal_ratio_{in_flight}']:.2f}, decode alone "
                f"{figures[f'equal_decode_ratio_{in_flight}']:.2f}\n"
            )
            sys.stdout.flush()
            loads.append(os.getloadavg()[0])
        costs = [turn_cpu_ms(folder) for _ in range(3)]
        figures["turn_cpu_ms"] = round(statistics.median(costs), 3)
        spread["turn_cpu_ms"] = [round(min(costs), 3), round(max(costs), 3)]
        sys.stdout.write(f"a turn over HTTP: {figures['turn_cpu_ms']:.2f} CPU-ms of the engine\n")
    result = {
        "figures": figures,
        "spread": spread,
        "runs": arguments.rounds,
        "load_avg": round(max(loads), 2),
        "settings": {
            "prompt_tokens": arguments.prompt,
            "new_tokens": arguments.new,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
