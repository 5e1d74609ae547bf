"""The index of a model folder that has several safetensors files, as loaders expect it."""

import json
from pathlib import Path

from weight_sync.codecs import safetensors_file
from weight_sync.model_files import mapped, model_files

NAME = "model.safetensors.index.json"


def write_index(folder: Path) -> None:
    """Say in which file each tensor is; one file needs no index."""
    files = model_files(folder)
    if len(files) < 2:
        return
    where = {
        tensor.name: path.name
        for path in files
        for tensor in safetensors_file.tensors(mapped(path))
    }
    (folder / NAME).write_text(json.dumps({"metadata": {}, "weight_map": where}))
