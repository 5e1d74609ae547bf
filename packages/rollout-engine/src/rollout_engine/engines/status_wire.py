"""SGLang's status calls in JSON and as values of `engines.types`, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollout_engine.engines.errors import BadReply
from rollout_engine.engines.types import EngineLoad, ModelInfo, WeightsChecksum
from rollout_engine.engines.wire import Json

T = TypeVar("T")


def model_info_to_json(info: ModelInfo) -> Json:
    """Write `/model_info`. The tokenizer's path is where the engine was started from."""
    return {
        "model_path": info.model_path,
        "served_model_name": info.served_name,
        "tokenizer_path": info.served_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": info.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": info.model_type,
        "architectures": list(info.architectures),
    }


def model_info_from_json(body: Json, engine: str) -> ModelInfo:
    """Read `/model_info`.

    Raises:
        BadReply: a field is missing.
    """

    def read() -> ModelInfo:
        return ModelInfo(
            model_path=str(body["model_path"]),
            served_name=str(body.get("served_model_name") or body["model_path"]),
            weight_version=str(body["weight_version"]),
            model_type=str(body.get("model_type") or ""),
            architectures=tuple(body.get("architectures") or ()),
        )

    return _read("/model_info", body, read, engine)


def load_to_json(load: EngineLoad, *, timestamp: str, timestamp_s: float, version: str) -> Json:
    """Write `/v1/loads`."""
    usage = load.used_tokens / max(1, load.max_tokens)
    return {
        "timestamp": timestamp,
        "version": version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [
            {
                "timestamp": timestamp_s,
                "dp_rank": 0,
                "num_running_reqs": load.running,
                "num_waiting_reqs": load.waiting,
                "num_used_tokens": load.used_tokens,
                "num_total_tokens": load.used_tokens,
                "max_total_num_tokens": load.max_tokens,
                "max_running_requests": load.max_running,
                "token_usage": usage,
                "gen_throughput": load.tokens_per_s,
                "cache_hit_rate": load.cache_hit_rate,
                "utilization": load.running / max(1, load.max_running),
                "total_generated_tokens": load.tokens_generated,
                "queues": {"waiting": load.waiting, "paused": load.paused},
            }
        ],
    }


def load_from_json(body: Json, engine: str) -> EngineLoad:
    """Read `/v1/loads`, summed over data-parallel ranks.

    Raises:
        BadReply: a field is missing.
    """

    def total(key: str) -> float:
        return sum(rank.get(key) or 0 for rank in body["loads"])

    def read() -> EngineLoad:
        first = body["loads"][0]
        return EngineLoad(
            running=sum(int(rank["num_running_reqs"]) for rank in body["loads"]),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in body["loads"]),
            used_tokens=int(total("num_used_tokens")),
            max_tokens=int(total("max_total_num_tokens")),
            max_running=int(total("max_running_requests")),
            tokens_per_s=total("gen_throughput"),
            cache_hit_rate=float(first.get("cache_hit_rate") or 0.0),
            paused=sum(int((r.get("queues") or {}).get("paused") or 0) for r in body["loads"]),
            tokens_generated=int(total("total_generated_tokens")),
        )

    return _read("/v1/loads", body, read, engine)


def checksum_to_json(checksum: WeightsChecksum) -> Json:
    """Write `/weights_checker`."""
    place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1}
    place |= {"pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
    return {
        "success": True,
        "message": "Success.",
        "ranks": [
            {
                "checksums": dict(checksum.tensors),
                "per_gpu_checksum": checksum.root_hash,
                "parallelism_info": [place],
            }
        ],
        "per_engine_checksum": checksum.root_hash,
    }


def checksum_from_json(body: Json, engine: str) -> WeightsChecksum:
    """Read `/weights_checker`; ranks hold different tensors or the same ones.

    Raises:
        BadReply: a field is missing.
    """

    def read() -> WeightsChecksum:
        tensors: dict[str, str] = {}
        for rank in body["ranks"]:
            tensors.update(rank["checksums"])
        return WeightsChecksum(str(body["per_engine_checksum"]), tensors)

    return _read("/weights_checker", body, read, engine)


def _read(path: str, body: Mapping[str, Any], read: Callable[[], T], engine: str) -> T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadReply(
            f"{path}: expected SGLang's fields, found {error!r} in {str(body)[:300]}", engine=engine
        ) from error


__all__ = [
    "checksum_from_json",
    "checksum_to_json",
    "load_from_json",
    "load_to_json",
    "model_info_from_json",
    "model_info_to_json",
]
