"""Model folders: reading weights, and turning them into what engines are sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from weight_sync.publisher import RawTensor, TensorLike

from grpo_trainer.errors import ModelError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What a model folder holds besides weights; copied along, if it is there.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

_RAW_DTYPES = {torch.bfloat16: "BF16"}


def read_companions(folder: Path) -> dict[str, bytes]:
    """Read the small files of a model folder."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Read every tensor of safetensors files.

    Raises:
        ModelError: A file is missing, truncated or not safetensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    return tensors


def read_model(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read a model's weights and check that they are all there, and nothing else.

    Raises:
        ModelError: Tensors are missing, unknown, or of another shape.
    """
    index = folder / INDEX_FILE
    names = [WEIGHTS_FILE]
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    tensors = read_tensors(folder / name for name in names)
    if "lm_head.weight" not in shapes:
        # A tied head is the embedding; some folders store it twice.
        tensors.pop("lm_head.weight", None)
    missing = sorted(shapes.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise ModelError(
            f"{folder}: expected the tensors that config.json implies; missing {missing[:3]} "
            f"({len(missing)} in all), unknown {unknown[:3]} ({len(unknown)} in all)"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
            )
    return {name: tensors[name] for name in shapes}


def published(
    weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, TensorLike]:
    """Copy weights to host memory, each in the dtype that the model folder has."""
    out: dict[str, TensorLike] = {}
    for name, tensor in weights.items():
        copied = tensor.detach().to("cpu", dtypes[name], copy=True).contiguous()
        raw = _RAW_DTYPES.get(copied.dtype)
        if raw is None:
            out[name] = copied.numpy()
        else:
            out[name] = RawTensor(copied.view(torch.uint16).numpy(), raw)
    return out
