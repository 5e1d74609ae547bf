"""How long engines that generate stand still for a version.

`pause_s_embedded`, and `pause_s_sglang` where a real server is set up (`tools/sglang_cpu`): from
asking an engine to pause until it generates again, as the receiver reports it; loading and the
proof by checksums included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from service_kit.channel import ChannelConfig, open_channel
from service_kit.server import ServerConfig
from sglang_cpu.install import DEFAULT as SGLANG
from sglang_cpu.serve import serving
from weight_sync import Publisher, RawTensor, WeightClient
from weight_sync.app import assemble
from weight_sync.config import ReceiverConfig, StaticEngine, StoreConfig, WeightSyncConfig

IN_FLIGHT = 4
WAIT_S = 300.0
NEW_TOKENS = 200


def pause_figures(versions: int) -> dict[str, list[float]]:
    """Update each kind of engine so often; SGLang only where it is installed, or runs already."""
    return asyncio.run(_pauses(versions))


async def _pauses(versions: int) -> dict[str, list[float]]:
    pauses = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        scratch = Path(folder)
        model = scratch / "model"
        _make_model(model)
        async with _embedded(model) as url:
            pauses["pause_s_embedded"] = await _update(
                scratch / "e", "embedded", url, model, versions
            )
        with _sglang(scratch / "sglang") as environment:
            served_at = environment.get("TAILRACE_SGLANG_URL")
            if served_at is None:
                print("no pause_s_sglang: python tools/sglang_cpu/install.py sets the server up")
            else:
                served = Path(environment["TAILRACE_SGLANG_MODELS"].split(":")[0])
                pauses["pause_s_sglang"] = await _update(
                    scratch / "s", "sglang", served_at, served, versions
                )
    return pauses


@contextlib.contextmanager
def _sglang(folder: Path) -> Iterator[Mapping[str, str]]:
    """Say where a server runs: one that is there, or else one of our own, if it is installed."""
    if "TAILRACE_SGLANG_URL" in os.environ or not (SGLANG / "installed").is_file():
        yield os.environ
        return
    folder.mkdir()
    with serving(SGLANG / "bin" / "python", folder) as environment:
        yield environment


def _make_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256,
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
    model(config).to(torch.bfloat16).save_pretrained(folder)


@contextlib.asynccontextmanager
async def _embedded(model: Path) -> AsyncIterator[str]:
    """Run an embedded engine in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rollout_engine", "engine"]
    command += ["--set", f"model={model}", "--set", f"port={port}", "--set", "context_tokens=512"]
    process = subprocess.Popen(  # noqa: ASYNC220 -- it returns at once
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_S):
            while not await _healthy(session, url):  # noqa: ASYNC110 -- its own server
                await asyncio.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/health") as reply:
            return reply.status == 200
    return False


async def _update(state: Path, kind: Any, url: str, model: Path, versions: int) -> list[float]:
    """Publish versions to an engine that is never idle; return the pause of each."""
    config = WeightSyncConfig(
        server=ServerConfig(bind="127.0.0.1:0", drain_grace_s=1),
        state_dir=state,
        store=StoreConfig(folder=state / "store"),
        receiver=ReceiverConfig(
            host="bench",
            engines=(StaticEngine(url=url, kind=kind),),
            base_model=model,
            poll_interval_s=0.1,
            observe_timeout_s=60,
        ),
    )
    pauses = []
    async with contextlib.AsyncExitStack() as stack:
        app = await assemble(config, stack)
        work = [asyncio.create_task(each) for each in app.background]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        work += [asyncio.create_task(_keep_busy(session, url, n)) for n in range(IN_FLIGHT)]
        channel = await stack.enter_async_context(
            open_channel(ChannelConfig(target=app.server.address))
        )
        publisher, client = await Publisher.acquire(channel, run="bench"), WeightClient(channel)
        weights = _bits(model)
        for step in range(1, versions + 1):
            for bits in weights.values():
                bits ^= np.uint16(step % 2)  # the lowest bit of the mantissa
            version = await publisher.publish(
                {name: RawTensor(bits, "BF16") for name, bits in weights.items()}, step=step
            )
            await client.await_version(version.number, timeout_s=WAIT_S)
            (node,) = (await client.list_nodes(timeout_s=10)).nodes
            (engine,) = node.engines
            if engine.version != version.number:
                raise RuntimeError(f"version {version.number} did not arrive: {engine.error}")
            pauses.append(engine.pause_s)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return pauses


def _bits(model: Path) -> dict[str, NDArray[np.uint16]]:
    import torch

    tensors = safetensors.torch.load_file(model / "model.safetensors")
    return {name: t.view(torch.uint16).numpy().copy() for name, t in tensors.items()}


async def _keep_busy(session: aiohttp.ClientSession, url: str, number: int) -> None:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [number + 1, 2, 3], "sampling_params": sampling}
    while True:
        async with session.post(f"{url}/generate", json=body) as reply:
            await reply.read()
