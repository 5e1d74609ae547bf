"""An engine process without a model: SGLang's API, and the scripted explorer as its policy.

It solves about a fifth of the miniature's tasks and takes hardly any processor time, so that whole
runs fit into a test. Weights are read and hashed as a real engine would, but no token depends on
them.

    python -m scripted_engine engine --config FILE.toml
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rollout_engine.agents.template import ChatTemplate
from rollout_engine.engines.backend import WeightUpdate
from rollout_engine.engines.errors import WeightUpdateFailed
from rollout_engine.engines.http_server import listen, running, until_signal
from rollout_engine.engines.scripted import Fault, ScriptedEngine, ScriptedReply, scripted_app
from rollout_engine.engines.types import EngineRequest, ModelInfo, WeightsChecksum
from tailrace_cli.demo.expert import Explorer, ExplorerStyle
from tokenizers import Tokenizer


class ExplorerPolicy:
    """Plays the explorer by the tokens of the conversation alone: it keeps nothing between turns.

    Every turn replays the attempt from its beginning, so the engine may be killed at any time.

    Args:
        model: Folder with the tokenizer and the chat template.
        delay_s: Longest wait before an answer; the real one is drawn below it.
        stuck: Attempts that are never answered, each as the number of its group in the ledger and
            its index, such as "2-0".
    """

    def __init__(self, model: Path, *, delay_s: float, stuck: Sequence[str] = ()) -> None:
        self._template = ChatTemplate.from_folder(model)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("user", "assistant", "tool")}
        self._roles = {number: name for name, number in ids.items()}
        self._end = self._template.end_of_turn_id
        self._delay_s = delay_s
        self._stuck = frozenset(stuck)

    def __call__(self, request: EngineRequest) -> ScriptedReply:
        """Answer one turn."""
        messages = self._messages(request.input_ids)
        # One try of one attempt: the request's name without turn and ticket.
        attempt = request.rid.split("~", maxsplit=1)[0].split("-", maxsplit=2)[2].rsplit("-", 2)[0]
        if attempt.rsplit("-", 1)[0] in self._stuck:
            return ScriptedReply(fault=Fault.HANG)
        rng = random.Random(f"{attempt} {messages[0][1]}")
        explorer = Explorer(messages[0][1], rng, ExplorerStyle())
        command = explorer.next_command(None)
        for role, text in messages[1:]:
            if role == "tool":
                command = explorer.next_command(text)
        delay = random.Random(request.rid).uniform(0.2, 1.0) * self._delay_s
        tokens = self._template.assistant(command).tolist()
        return ScriptedReply(output_ids=tokens, delay_s=delay)

    def _messages(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        role, start = "", 0
        for place, token in enumerate(ids):
            if token in self._roles:
                role, start = self._roles[token], place + 1
            elif token == self._end:
                text = self._template.text(np.array(ids[start:place], np.int32))
                found.append((role, text))
        return found


class ExplorerEngine(ScriptedEngine):
    """Holds the bytes of the version it reports, so that its checksums are those of the file."""

    def __init__(self, model: Path, policy: ExplorerPolicy, *, context_tokens: int = 1024) -> None:
        super().__init__(policy, context_tokens=context_tokens)
        self._model = model
        self._checksums = checksums(model / "model.safetensors")

    async def update_weights(self, update: WeightUpdate) -> int:
        """Read and hash the new weights, then take the label."""
        try:
            self._checksums = checksums(Path(update.model_path) / "model.safetensors")
        except (OSError, ValueError, KeyError) as error:
            raise WeightUpdateFailed(f"{update.model_path}: {error}") from error
        return await super().update_weights(update)

    def model_info(self) -> ModelInfo:
        """Name the folder that the engine was started with, as real ones do."""
        return ModelInfo(
            model_path=self._model_path,
            served_name=str(self._model),
            weight_version=self.label,
            model_type="qwen3",
        )

    async def checksum(self) -> WeightsChecksum:
        """Return what was read with the label."""
        return WeightsChecksum(root_hash="", tensors=self._checksums)


def checksums(file: Path) -> dict[str, str]:
    """Hash every tensor of a safetensors file."""
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    tensors = memoryview(data)[8 + size :]
    return {
        name: xxhash.xxh3_128_hexdigest(tensors[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


async def serve(config: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    model = Path(config["model"])
    policy = ExplorerPolicy(model, delay_s=config["delay_s"], stuck=config.get("stuck", ()))
    engine = ExplorerEngine(model, policy)
    sock = listen("127.0.0.1", int(config["port"]))
    async with running(scripted_app(engine), sock) as stopped:
        await until_signal(stopped)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["engine"])
    parser.add_argument("--config", type=Path, required=True)
    asyncio.run(serve(tomllib.loads(parser.parse_args().config.read_text())))
