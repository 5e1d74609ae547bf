"""Settings of the embedded engine."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from service_kit.config import Config


class CpuEngineConfig(Config):
    """Settings of `python -m rollout_engine engine`."""

    model: Path
    """Folder of the model in Hugging Face's layout: config.json and safetensors."""

    host: str = "127.0.0.1"
    """Address to listen on. The API has no authentication: anything but loopback is refused."""

    port: int = Field(default=7201, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""

    weight_version: str = "default"
    """Label of the weights in `model`, until an update brings another."""

    max_running_requests: int = Field(default=64, ge=1)
    """Sequences that are computed at once; more wait in the queue."""

    max_queued_requests: int = Field(default=4096, ge=1)
    """Requests that may wait; more are refused with status 503."""

    context_tokens: int = Field(default=4096, ge=2)
    """Longest prompt and output together. The model's own limit applies if it is lower."""

    prefill_tokens: int = Field(default=512, ge=1)
    """Prompt tokens computed in one step besides the running sequences; longer prompts take
    several steps, so that they don't hold up the others."""

    prefix_cache_tokens: int = Field(default=65536, ge=0)
    """Tokens of finished sequences that are kept for later turns, the latest used; 0: none."""

    kv_cache_max_bytes: int = Field(default=8 << 30, ge=1)
    """Refuse to start if running and kept sequences could need more than this."""

    kv_policy: Literal["recompute", "keep"] = "recompute"
    """What a weight update does to KV caches: `recompute` computes those of running sequences again
    and drops the others, so that every token is sampled from one version alone; `keep` goes on
    with them, which is cheaper, and reports the oldest version attended to."""

    seed: int | None = None
    """Seeds requests that bring no `sampling_seed`, by their order of arrival; None: at random."""

    dtype: Literal["float32", "float64"] = "float32"
    """What weights and KV cache are held in and all is computed in, whatever the checkpoint has.
    `float64` is for measurements: with a trainer that computes in it too, every token's
    log-probability is the trainer's to the last bit or two of a float32, while computed in float32
    the worst of some thousands is off by 3e-5. It takes twice the memory and 1.6 times the time."""

    threads: int = Field(default=1, ge=1)
    """Threads of one matrix product. More than one seldom helps a small model."""

    drain_grace_s: float = Field(default=10.0, ge=0)
    """On SIGTERM, how long requests in flight may go on."""

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(
                f"must be a loopback address, found {host!r}: the API has no authentication. To "
                "serve other hosts put a proxy with TLS and a token before it"
            )
        return host


__all__ = ["CpuEngineConfig"]
