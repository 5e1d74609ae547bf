"""Generated tokens a CPU-second: the embedded engine against transformers' `generate`.

Both get the same model (0.8M-parameter Qwen3, float32, random weights), the same prompts and for
each of them the same number of new tokens, temperature 1, one thread, no stop tokens; both return
the log-probability of every sampled token. The rival runs with the cache that is faster for it
here, dynamic or static. Rounds of the two alternate, so that whatever else the machine does meets
both, and all CPU time counts.

* `ratio_N`: N agents in flight, each at a conversation of 3 to 8 turns: a turn samples 6 to 18
  tokens, and 10 to 30 come in reply. A place that an agent leaves is taken by the next one at once.
  The engine computes only what is new in a turn and starts a turn as soon as its reply is there;
  `generate` is called with the turns of all agents together, padded on the left, computes their
  prompts anew and returns with the longest. What follows takes that apart.
* `single_ratio_N`: one turn alone, no prefix to reuse: N prompts of equal length, the longest
  answer 2.5 times the shortest. The engine fills a place as soon as it is free, until it has
  generated as many tokens as the rival will; `generate` takes N prompts and returns with the
  longest, three times.
* `equal_ratio_N`: N requests with equally many tokens, once: nothing is won by filling places.
  `equal_decode_ratio_N` leaves out the prompts and first tokens: what a step costs.
* `turn_cpu_ms`: CPU of the engine's process for one short turn over HTTP: 32 agents, 5 turns each
  of 20 new prompt tokens and 12 sampled ones, prefixes reused.

CPU time is the process's own, all threads. The last line is JSON; spreads are the lowest and the
highest round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Turn:
    """What an agent is told, and how many tokens it answers with."""

    told: list[int]
    new_tokens: int


class Talk:
    """An agent's conversation so far, and the turns to come."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self._tokens: list[int] = []

    def next_job(self) -> Job | None:
        """The next turn, or None when the conversation is over."""
        if not self._turns:
            return None
        turn = self._turns.pop(0)
        self._tokens += turn.told
        return Job(list(self._tokens), turn.new_tokens)

    def answer(self, tokens: list[int]) -> None:
        """What the model said."""
        self._tokens += tokens


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

    def choose_cache(self, work: Callable[[], float]) -> None:
        """Find the cache that does some work, whose CPU-seconds it returns, faster."""
        took_s = {}
        for cache in ("dynamic", "static"):
            self.cache = cache
            work()
            took_s[cache] = work()
        self.cache = min(took_s, key=lambda cache: took_s[cache])

    def run(self, jobs: Sequence[Job], in_flight: int) -> float:
        """Generate, and return the CPU-seconds."""
        began_s = time.process_time()
        for start in range(0, len(jobs), in_flight):
            self._batch(jobs[start : start + in_flight])
        return time.process_time() - began_s

    def talk(self, talks: Sequence[Talk], in_flight: int) -> float:
        """Hold the conversations, a turn of all in flight at a time; return the CPU-seconds."""
        began_s = time.process_time()
        waiting = iter(talks)
        active: list[tuple[Talk, Job]] = []
        while True:
            while len(active) < in_flight and (talk := next(waiting, None)):
                active.append((talk, _first(talk)))
            if not active:
                return time.process_time() - began_s
            answers = self._batch([job for _, job in active])
            for (talk, job), answer in zip(active, answers, strict=True):
                talk.answer(answer[: job.new_tokens])
            active = [(talk, following) for talk, _ in active if (following := talk.next_job())]

    @torch.inference_mode()
    def _batch(self, jobs: Sequence[Job]) -> list[list[int]]:
        options: dict[str, Any] = {}
        if self.cache == "static":
            options = {"cache_implementation": "static", "disable_compile": True}
        width = max(len(job.prompt) for job in jobs)
        pads = [width - len(job.prompt) for job in jobs]
        ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(pads, jobs, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(pads)[:, None]).long()
        longest = max(job.new_tokens for job in jobs)
        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        answers = out.sequences[:, width:]
        logprobs = torch.log_softmax(torch.stack(out.logits, 1), -1)
        chosen = logprobs.gather(-1, answers[..., None]).squeeze(-1)
        assert chosen.shape == (len(jobs), longest)
        told: list[list[int]] = answers.tolist()
        return told


class Ours:
    """The embedded engine, without its HTTP server."""

    def __init__(self, folder: Path, *, prefixes: bool) -> None:
        config = CpuEngineConfig(model=folder, context_tokens=CONTEXT)
        if not prefixes:
            config = config.model_copy(update={"prefix_cache_tokens": 0})
        weights = load_weights(folder, read_spec(folder))
        self._engine = CpuEngine(config, weights, time.monotonic)

    def run(self, jobs: Sequence[Job], in_flight: int) -> float:
        """Generate as many tokens as the jobs have, and return the CPU-seconds.

        As long as that isn't done, `in_flight` requests are: the jobs are begun again if need be.
        """
        wanted = sum(job.new_tokens for job in jobs)
        counters = self._engine.counters
        before = counters.generated_tokens
        supply = itertools.cycle(jobs) if len(jobs) > in_flight else iter(jobs)
        began_s = time.process_time()
        while counters.generated_tokens - before < wanted:
            while self._engine.in_flight < in_flight and (job := next(supply, None)):
                self._submit("r", job)
            for sequence in self._engine.step():
                assert len(sequence.output) == len(sequence.logprobs) > 0
        took_s = time.process_time() - began_s
        self._engine.abort(None)
        return took_s

    def talk(self, talks: Sequence[Talk], in_flight: int) -> float:
        """Hold the conversations, each at its own pace; return the CPU-seconds."""
        began_s = time.process_time()
        waiting = iter(enumerate(talks))
        active: dict[str, Talk] = {}
        while True:
            while len(active) < in_flight and (found := next(waiting, None)):
                rid = str(found[0])
                active[rid] = found[1]
                self._submit(rid, _first(found[1]))
            if not active:
                self._engine.flush()  # the next round's prompts are others, as they are for all
                return time.process_time() - began_s
            for sequence in self._engine.step():
                rid = sequence.request.rid
                assert len(sequence.output) == len(sequence.logprobs) > 0
                active[rid].answer(list(sequence.output))
                if job := active[rid].next_job():
                    self._submit(rid, job)
                else:
                    del active[rid]

    def _submit(self, rid: str, job: Job) -> None:
        sampling = SamplingParams(max_new_tokens=job.new_tokens, ignore_eos=True)
        self._engine.submit(EngineRequest(rid=rid, input_ids=job.prompt, sampling=sampling))


def _first(talk: Talk) -> Job:
    job = talk.next_job()
    assert job is not None
    return job


def make_talks(count: int, seed: int) -> tuple[list[list[Turn]], int]:
    """Turns of so many conversations, and how many tokens the model says in all."""
    source = random.Random(seed)

    def turn(told: int) -> Turn:
        return Turn([source.randrange(VOCAB) for _ in range(told)], source.randint(6, 18))

    talks = [
        [turn(source.randint(40, 90))]
        + [turn(source.randint(10, 30)) for _ in range(source.randint(2, 7))]
        for _ in range(count)
    ]
    return talks, sum(turn.new_tokens for talk in talks for turn in talk)


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
    rival: Rival, alone: Ours, reusing: Ours, in_flight: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Figures of every round; `alone` has no prefix cache."""
    rows: dict[str, list[float]] = {}
    turns, _ = make_talks(in_flight, 0)
    rival.choose_cache(lambda: rival.talk([Talk(talk) for talk in turns], in_flight))
    for number in range(arguments.rounds + 1):
        turns, said = make_talks(BATCHES * in_flight, number)
        talked_s = [
            side.talk([Talk(talk) for talk in turns], in_flight) for side in (rival, reusing)
        ]
        if number == 0:
            continue  # warm-up
        for key, value in (
            ("ratio", talked_s[0] / talked_s[1]),
            ("engine_tokens", said / talked_s[1]),
            ("rival_tokens", said / talked_s[0]),
        ):
            rows.setdefault(key, []).append(value)
    jobs = make_jobs(in_flight, arguments, 0, even=True)
    rival.choose_cache(lambda: rival.run(jobs, in_flight))
    for number in range(arguments.rounds + 1):
        uneven = make_jobs(BATCHES * in_flight, arguments, number, even=False)
        even = make_jobs(in_flight, arguments, number, even=True)
        first = [Job(job.prompt, 1) for job in even]
        took_s = {
            name: [side.run(jobs, in_flight) for side in (rival, alone)]
            for name, jobs in (("uneven", uneven), ("even", even), ("first", first))
        }
        if number == 0:
            continue  # warm-up
        decode_s = [whole - one for whole, one in zip(took_s["even"], took_s["first"], strict=True)]
        for key, value in (
            ("single_ratio", took_s["uneven"][0] / took_s["uneven"][1]),
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
        rival = Rival(folder)
        alone, reusing = Ours(folder, prefixes=False), Ours(folder, prefixes=True)
        for in_flight in arguments.in_flight:
            for key, values in compare(rival, alone, reusing, in_flight, arguments).items():
                figures[f"{key}_{in_flight}"] = round(statistics.median(values), 3)
                spread[f"{key}_{in_flight}"] = [round(min(values), 3), round(max(values), 3)]
            sys.stdout.write(
                f"{in_flight:3d} in flight: engine {figures[f'engine_tokens_{in_flight}']:7.0f}, "
                f"transformers {figures[f'rival_tokens_{in_flight}']:6.0f} "
                f"tokens a CPU-second; ratio {figures[f'ratio_{in_flight}']:.2f} "
                f"{spread[f'ratio_{in_flight}']}; one turn "
                f"{figures[f'single_ratio_{in_flight}']:.2f}, equal lengths "
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
