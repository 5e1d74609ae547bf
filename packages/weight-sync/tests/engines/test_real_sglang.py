"""A real SGLang server gets version after version while it generates.

`tools/sglang_cpu/serve.py` starts the server and says where in TAILRACE_SGLANG_URL and
TAILRACE_SGLANG_MODELS. Everything else here is real too: service, receiver, publisher, files.
"""

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import safetensors.torch
from numpy.typing import NDArray
from service_kit.channel import ChannelConfig, open_channel
from service_kit.server import ServerConfig
from weight_sync import PublishConfig, Publisher, RawTensor, WeightClient
from weight_sync.app import assemble
from weight_sync.config import (
    CollectiveConfig,
    ReceiverConfig,
    StaticEngine,
    StoreConfig,
    WeightSyncConfig,
)

pytestmark = pytest.mark.sglang

VERSIONS = 20
CHANGED = 0.02
TOLERANCE = 0.01
"""Between log-probabilities of SGLang in bf16 and transformers in fp32: 0.002 was measured."""

Weights = dict[str, NDArray[np.uint16]]


@dataclass
class Server:
    url: str
    model: Path
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        async with self.session.post(self.url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json(content_type=None)

    async def generate(self, prompt: list[int], tokens: int, **sampling: float) -> Any:
        options = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens} | sampling
        return await self.post(
            "/generate", {"input_ids": prompt, "sampling_params": options, "return_logprob": True}
        )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    url, models = (os.environ.get(f"TAILRACE_SGLANG_{x}") for x in ("URL", "MODELS"))
    if not url or not models:
        pytest.skip("run it as: python tools/sglang_cpu/serve.py pytest -m sglang")
    model = Path(models.split(":")[0])
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        server = Server(url, model, session)
        yield server
        # As the next test expects it.
        await server.post("/continue_generation", {})
        body = {"model_path": str(model), "weight_version": "default", "flush_cache": True}
        await server.post("/update_weights_from_disk", body)


def bits_of(model: Path) -> Weights:
    """Return a checkpoint's bf16 tensors as their bits."""
    import torch

    tensors = safetensors.torch.load_file(model / "model.safetensors")
    return {name: t.view(torch.uint16).numpy().copy() for name, t in tensors.items()}


def next_version(weights: Weights, rng: np.random.Generator) -> Weights:
    """Move a few elements by an ulp or two, as an optimizer step does; signs stay."""
    changed = {}
    for name, bits in weights.items():
        new = bits.copy()
        moved = (rng.random(bits.shape) < CHANGED) & ((bits & 0x7FFF) > 0x0100)
        new[moved] += rng.choice(np.array([1, 2, 0xFFFF, 0xFFFE], np.uint16), int(moved.sum()))
        changed[name] = new
    return changed


def fused_checksums(weights: Weights) -> dict[str, str]:
    """Compute what SGLang must report, spelled out for this architecture."""
    layers = {name.split(".")[2] for name in weights if ".layers." in name}
    groups = {name: [name] for name in weights if not name.endswith(fused_suffixes())}
    for layer in layers:
        at = f"model.layers.{layer}"
        parts = [f"{at}.self_attn.{x}_proj.weight" for x in "qkv"]
        groups[f"{at}.self_attn.qkv_proj.weight"] = parts
        parts = [f"{at}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        groups[f"{at}.mlp.gate_up_proj.weight"] = parts
    return {
        name: hashlib.sha256(b"".join(weights[part].tobytes() for part in parts)).hexdigest()[:16]
        for name, parts in groups.items()
    }


def fused_suffixes() -> tuple[str, ...]:
    return tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "gate", "up"))


class Reference:
    """transformers on the same weights."""

    def __init__(self, model: Path) -> None:
        import torch
        import transformers

        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(model, dtype=torch.float32).eval()

    def logprobs(self, weights: Weights, tokens: list[int], after: int) -> list[float]:
        """Return the log-probability of each token from position `after` on."""
        import torch

        state = {n: torch.from_numpy(b).view(torch.bfloat16).float() for n, b in weights.items()}
        self._model.load_state_dict(state)
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens])).logits[0]
        table = torch.log_softmax(logits, -1)
        return [float(table[i - 1, tokens[i]]) for i in range(after, len(tokens))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def syncing(
    tmp_path: Path, server: Server, codec: Any = "dense", **changes: Any
) -> AsyncIterator[Any]:
    """A service with a receiver for the server, and a publisher."""
    receiver = ReceiverConfig(
        host="host",
        engines=(StaticEngine(url=server.url, kind="sglang"),),
        base_model=server.model,
        poll_interval_s=0.2,
        observe_timeout_s=60,
        collective=CollectiveConfig(port=free_port()),
        **changes,
    )
    config = WeightSyncConfig(
        server=ServerConfig(bind="127.0.0.1:0", drain_grace_s=1),
        state_dir=tmp_path / "state",
        store=StoreConfig(folder=tmp_path / "store"),
        receiver=receiver,
    )
    async with AsyncExitStack() as stack:
        app = await assemble(config, stack)
        work = [asyncio.create_task(each) for each in app.background]
        try:
            async with open_channel(ChannelConfig(target=app.server.address)) as channel:
                deltas = PublishConfig(codec=codec, anchor_every=500)
                publisher = await Publisher.acquire(channel, run="run", config=deltas)
                yield publisher, WeightClient(channel)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


class Company:
    """Requests that are in flight all the time."""

    def __init__(self, server: Server) -> None:
        self.replies: list[Any] = []
        self._server = server
        self._stop = False

    async def run(self, number: int) -> None:
        while not self._stop:
            self.replies.append(await self._server.generate([number, 7, 9], 120, temperature=1.0))

    def stop(self) -> None:
        self._stop = True


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("codec", "load", "kv_policy"),
    [
        ("ulp-gap", "disk", "keep"),
        ("ulp-gap", "distributed", "keep"),
        ("dense", "disk", "recompute"),
    ],
)
async def test_twenty_versions_while_it_generates(
    server: Server, tmp_path: Path, codec: str, load: str, kv_policy: str
) -> None:
    weights = bits_of(server.model)
    reference = Reference(server.model)
    rng = np.random.default_rng(0)
    company = Company(server)
    changes = {"sglang_load": load, "kv_policy": kv_policy}
    async with (
        syncing(tmp_path, server, codec, **changes) as (publisher, client),
        asyncio.TaskGroup() as group,
    ):
        for number in (1, 2, 3):
            group.create_task(company.run(number))
        for step in range(VERSIONS + 1):  # an anchor, and twenty after it
            weights = next_version(weights, rng)
            tensors = {name: RawTensor(bits, "BF16") for name, bits in weights.items()}
            version = await publisher.publish(tensors, step=step)
            reached = await client.await_version(version.number, timeout_s=120)
            assert reached.engines == 1, await client.list_nodes(timeout_s=5)

            answer = await server.post("/weights_checker", {"action": "checksum"})
            assert answer["ranks"][0]["checksums"] == fused_checksums(weights)

            # With the cache kept, a prompt must be new to the engine to be of this version alone.
            prompt = [100 + step if kv_policy == "keep" else 99, 20, 30, 40]
            reply = await server.generate(prompt, 8)
            meta = reply["meta_info"]
            assert meta["weight_versions"] == [{"version": version.label, "start": 0, "end": 8}]
            tokens = prompt + reply["output_ids"]
            expected = reference.logprobs(weights, tokens, after=len(prompt))
            found = [row[0] for row in meta["output_token_logprobs"]]
            assert np.abs(np.array(found) - np.array(expected)).max() < TOLERANCE
        company.stop()
        listed = await client.list_versions(timeout_s=5)
        whole = codec == "dense"
        expected_bases = [0] + [0 if whole else number for number in range(1, VERSIONS + 1)]
        assert [v.base for v in listed.versions] == expected_bases
    finishes = [reply["meta_info"]["finish_reason"] for reply in company.replies]
    assert all(finish == {"type": "length", "length": 120} for finish in finishes)
    crossed = [r for r in company.replies if len(r["meta_info"]["weight_versions"]) > 1]
    assert crossed, "no request was in flight across an update"


async def test_a_session_left_open_does_not_keep_the_next_one_out(
    server: Server, tmp_path: Path
) -> None:
    """As a receiver leaves it that was killed between two buckets: paused, and half loaded."""
    await server.post("/pause_generation", {"mode": "in_place"})
    await server.post("/begin_weight_update", {})
    weights = next_version(bits_of(server.model), np.random.default_rng(1))
    async with syncing(tmp_path, server, sglang_load="distributed") as (publisher, client):
        tensors = {name: RawTensor(bits, "BF16") for name, bits in weights.items()}
        version = await publisher.publish(tensors, step=1)
        assert (await client.await_version(version.number, timeout_s=120)).engines == 1
    answer = await server.post("/weights_checker", {"action": "checksum"})
    assert answer["ranks"][0]["checksums"] == fused_checksums(weights)
    assert (await server.generate([5, 6, 7], 4))["meta_info"]["weight_version"] == version.label
