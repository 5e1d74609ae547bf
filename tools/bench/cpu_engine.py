"""Generated tokens a CPU-second: the embedded engine against transformers' `generate`.

Both get the same model (0.8M-parameter Qwen3, float32, random weights), the same prompts, the same
number of new tokens for each, temperature 1, one thread, all requests at once, no stop tokens. The
rival runs with the cache that is faster for it here, dynamic or static; it is not asked for
log-probabilities, which the engine always returns. Rounds of the two alternate, so that whatever
else the machine does meets both.

* `ratio_N`: N requests in flight, engine over rival, tokens a CPU-second while they decode: all but
  the first, in the CPU time that generating all takes beyond generating the first alone.
* `whole_ratio_N`: the same with the prompts' computation and the first token counted in.
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
        self.cache: dict[int, str] = {}

    def choose_cache(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Find the faster cache for this many prompts."""
        took = {}
        for cache in ("dynamic", "static"):
            self.cache[len(prompts)] = cache
            self.run(prompts, 2)
            took[cache] = self.run(prompts, new_tokens)
        self.cache[len(prompts)] = min(took, key=lambda cache: took[cache])

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Generate, and return the CPU-seconds."""
        options: dict[str, Any] = {}
        if self.cache[len(prompts)] == "static":
            options = {"cache_implementation": "static", "disable_compile": True}
        began_s = time.process_time()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                **options,
            )
        took_s = time.process_time() - began_s
        assert out.shape[1] == len(prompts[0]) + new_tokens
        return took_s


class Ours:
    """The embedded engine, without its HTTP server."""

    def __init__(self, folder: Path) -> None:
        # Without the prefix cache, or later rounds would find earlier prompts computed.
        config = CpuEngineConfig(model=folder, context_tokens=CONTEXT, prefix_cache_tokens=0)
        weights = load_weights(folder, read_spec(folder))
        self._engine = CpuEngine(config, weights, time.monotonic)

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Generate, and return the CPU-seconds."""
        sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        began_s = time.process_time()
        sequences = [
            self._engine.submit(EngineRequest(rid=str(i), input_ids=prompt, sampling=sampling))
            for i, prompt in enumerate(prompts)
        ]
        while self._engine.busy:
            self._engine.step()
        took_s = time.process_time() - began_s
        assert all(len(s.output) == len(s.logprobs) == new_tokens for s in sequences)
        return took_s


def compare(
    rival: Rival, ours: Ours, in_flight: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    source = random.Random(in_flight)
    rows: dict[str, list[float]] = {
        key: [] for key in ("ratio", "whole_ratio", "engine_tokens", "rival_tokens")
    }
    for number in range(arguments.rounds + 1):
        prompts = [
            [source.randrange(VOCAB) for _ in range(arguments.prompt)] for _ in range(in_flight)
        ]
        if number == 0:
            rival.choose_cache(prompts, arguments.new)
        first = rival.run(prompts, 1), ours.run(prompts, 1)
        whole = rival.run(prompts, arguments.new), ours.run(prompts, arguments.new)
        if number == 0:
            continue  # warm-up
        decoded = in_flight * (arguments.new - 1)
        rates = [decoded / (all_s - first_s) for all_s, first_s in zip(whole, first, strict=True)]
        rows["rival_tokens"].append(rates[0])
        rows["engine_tokens"].append(rates[1])
        rows["ratio"].append(rates[1] / rates[0])
        rows["whole_ratio"].append(whole[0] / whole[1])
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens generated for each")
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
            rows = compare(rival, ours, in_flight, arguments)
            for key, values in rows.items():
                figures[f"{key}_{in_flight}"] = round(statistics.median(values), 3)
                spread[f"{key}_{in_flight}"] = [round(min(values), 3), round(max(values), 3)]
            sys.stdout.write(
                f"{in_flight:3d} in flight: engine {figures[f'engine_tokens_{in_flight}']:7.0f}, "
                f"transformers ({rival.cache[in_flight]} cache) "
                f"{figures[f'rival_tokens_{in_flight}']:7.0f} tokens a CPU-second; ratio "
                f"{figures[f'ratio_{in_flight}']:.2f} {spread[f'ratio_{in_flight}']}, with prompts "
                f"{figures[f'whole_ratio_{in_flight}']:.2f}\n"
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
