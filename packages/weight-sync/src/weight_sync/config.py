"""The settings of `python -m weight_sync serve`."""

import socket
import tempfile
from pathlib import Path
from typing import Literal, Self

import pydantic
import xxhash
from service_kit.channel import ChannelConfig
from service_kit.config import Config
from service_kit.server import ServerConfig
from service_kit.telemetry import TelemetryConfig

from weight_sync.codecs import DENSE_ABOVE


class PublishConfig(Config):
    """How a publisher writes versions. It is the trainer's to set, not the service's."""

    codec: Literal["dense", "ulp-gap", "xor", "overwrite"] = "dense"
    """`dense` sends every version whole. The others send what changed since the last one, and keep
    a copy of that in memory; `ulp-gap` is the smallest of them."""

    anchor_every: int = pydantic.Field(default=20, ge=1, le=500)
    """One of so many versions goes out whole: a late joiner fetches that and the deltas since."""

    dense_above: float = pydantic.Field(default=DENSE_ABOVE, gt=0, le=1)
    """Share of changed elements above which a tensor goes out whole, and a version too."""

    threads: int = pydantic.Field(default=4, ge=1)
    """Threads that hash and encode tensors."""


class StoreConfig(Config):
    """Where versions are kept. Publishers are told; receivers see it in each announcement."""

    folder: Path | None = None
    """A folder that publisher and receivers share. None: one in `/dev/shm`, or else in the
    temporary folder, whose name follows from `state_dir`."""

    uri: str = ""
    """Another store, in place of the folder: `shm://NAME`, or `s3://BUCKET/PREFIX` and whatever
    else fsspec reaches (extra `object-store`). Publishers and receivers must reach it too."""

    verify_announced: bool = True
    """Read a version's manifest before it is announced. Off where this host does not see the
    store."""


class RegistryConfig(Config):
    """How long words are believed, and how many are told."""

    max_lease_s: float = pydantic.Field(default=60.0, gt=0)
    """Longest lease of a node, and the one granted when a node asks for 0."""

    report_ttl_s: float = pydantic.Field(default=15.0, gt=0)
    """A receiver's report counts for this long; then its engines are UNKNOWN."""

    listed_versions: int = pydantic.Field(default=1000, ge=1, le=2000)
    """ListVersions returns so many of a run's newest versions; more would not fit a message."""

    heartbeat_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest silence on a stream of versions."""


class StaticEngine(Config):
    """An engine that no rollout node registers."""

    url: str
    """Base URL of its HTTP API."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """Which driver speaks to it."""


class CollectiveConfig(Config):
    """How groups for broadcasts are formed; the same on both sides."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """`nccl` is RCCL on ROCm, and needs an accelerator on both sides."""

    interface: str = pydantic.Field(default="lo", min_length=1)
    """The network interface that carries the bytes. Never left to the library to guess: a wrong
    guess hangs."""

    host: str = "127.0.0.1"
    """Address of the sender, on that interface. Members meet there."""

    port: int = pydantic.Field(default=29611, ge=1, le=65535)
    """Port of the sender."""

    join_s: float = pydantic.Field(default=5.0, gt=0)
    """The sender waits so long for the receivers it expects, then goes on without the others."""

    timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Longest time for one file. A member that dies costs the others at most this."""

    start_s: float = pydantic.Field(default=300.0, gt=0)
    """Longest time for the worker process to start; it imports torch."""

    chunk_bytes: int = pydantic.Field(default=64 << 20, ge=1)
    """Bytes of one broadcast."""


class ReceiverConfig(Config):
    """The receiver of this host's engines."""

    enabled: bool = True
    """Run this host's receiver in the same process as the service."""

    only: bool = False
    """Run the receiver alone, for the service named by `service`; on every host but the first."""

    service: ChannelConfig | None = None
    """The WeightService to follow. None: the one in this process."""

    run: str = ""
    """Follow this run. Empty: the one whose publisher was acquired last."""

    host: str = pydantic.Field(default_factory=socket.gethostname)
    """Which engines are this receiver's: those registered with the same host."""

    engines: tuple[StaticEngine, ...] = ()
    """Engines to look after besides those that nodes register; the receiver registers them."""

    base_model: Path | None = None
    """HF model folder with the config and tokenizer files. None: the `tokenizer_path` that the
    engine reports."""

    shadow_folder: Path | None = None
    """Where verified copies are made; on the store's file system they are links. None: beside the
    store's folder."""

    kv_policy: Literal["keep", "recompute"] = "keep"
    """What becomes of cached keys and values at an update: `keep` pauses in place; `recompute`
    retracts what runs and flushes the prefix cache."""

    verify: Literal["checksums", "label"] = "checksums"
    """What proves an activation: checksums of the engine's own weights, or only its label."""

    threads: int = pydantic.Field(default=4, ge=1)
    """Threads that decode and verify tensors."""

    transports: tuple[Literal["store", "collective", "grpc"], ...] = pydantic.Field(
        default=("store", "grpc"), min_length=1
    )
    """How payloads get here, in the order in which it is tried: out of the `store`, if this host
    reaches it; by broadcast from a publisher that sends (`collective`); over `grpc` from the
    process of the WeightService, which always works."""

    peers: bool = False
    """Hand this host's verified copy to receivers that join late, and take another's when joining
    late. They are reached with the token and TLS settings of `service`."""

    advertise: str = ""
    """Address at which other hosts reach this process's server. Empty: the one it is bound to."""

    sglang_load: Literal["disk", "distributed"] = "disk"
    """How SGLang engines get a version: from the shadow folder, or by broadcast into memory."""

    collective: CollectiveConfig = CollectiveConfig()
    """For `distributed` engines; between publisher and receivers, for the transport."""

    poll_interval_s: float = pydantic.Field(default=1.0, gt=0)
    """Time between looks at the registry and at each engine's label."""

    report_interval_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest time between reports; every change is reported at once."""

    retry_s: float = pydantic.Field(default=2.0, gt=0)
    """Wait after a failed preparation or activation; doubles up to `max_retry_s`."""

    max_retry_s: float = pydantic.Field(default=60.0, gt=0)
    """Longest wait after failures."""

    stuck_after: int = pydantic.Field(default=2, ge=1)
    """After so many failures in a row to get to a version the publisher is asked for an anchor."""

    idle_timeout_s: float = pydantic.Field(default=20.0, gt=0)
    """Silence on the stream of versions after which it is opened again."""

    call_timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """Deadline of calls to the service."""

    prepare_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Deadline for fetching and verifying one version."""

    observe_timeout_s: float = pydantic.Field(default=5.0, gt=0)
    """Deadline for asking an engine what it holds."""

    pause_timeout_s: float = pydantic.Field(default=30.0, gt=0)
    """Deadline for an engine to pause, and to continue."""

    load_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Deadline for an engine to load a version."""

    verify_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Deadline for an engine to compute its checksums."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if set(self.transports) == {"collective"}:
            raise ValueError(
                "transports: manifests are not broadcast; expected store or grpc beside collective"
            )
        return self


class WeightSyncConfig(Config):
    """Everything `python -m weight_sync serve` can be told."""

    server: ServerConfig = ServerConfig(bind="127.0.0.1:7103")
    """Where the WeightService listens."""

    telemetry: TelemetryConfig = TelemetryConfig()
    """Where spans and metrics go."""

    state_dir: Path = Path("runs/weight-sync")
    """Folder of the record of runs and versions; survives restarts."""

    store: StoreConfig = StoreConfig()
    """Where versions are kept."""

    registry: RegistryConfig = RegistryConfig()
    """How long words are believed."""

    receiver: ReceiverConfig = ReceiverConfig()
    """The receiver of this host's engines."""

    @property
    def store_folder(self) -> Path:
        """The store's folder, default applied."""
        if self.store.folder is not None:
            return self.store.folder.absolute()
        shared = Path("/dev/shm")  # noqa: S108 -- memory that processes share is the point
        parent = shared if shared.is_dir() else Path(tempfile.gettempdir())
        tag = xxhash.xxh3_64_hexdigest(str(self.state_dir.absolute()).encode())
        return parent / f"tailrace-weights-{tag}"

    @property
    def shadow_folder(self) -> Path:
        """The receiver's folder, default applied."""
        if self.receiver.shadow_folder is not None:
            return self.receiver.shadow_folder.absolute()
        store = self.store_folder
        return store.with_name(f"{store.name}-shadow")
