"""Settings of the sandbox service. Each field documents its meaning, unit and default."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic
from service_kit.channel import ChannelConfig
from service_kit.config import Config
from service_kit.server import MIB, ServerConfig
from service_kit.telemetry import TelemetryConfig

from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.core.paths import PathRefusedError, check_mount_point
from sandbox_client.e2b_api.config import E2BApiConfig

__all__ = [
    "DelayConfig",
    "DockerConfig",
    "ExecConfig",
    "FaultConfig",
    "LeaseConfig",
    "LimitsConfig",
    "LocalConfig",
    "OnHostConfig",
    "PoolConfig",
    "SandboxDefaults",
    "SandboxServiceConfig",
]

_Positive = Annotated[float, pydantic.Field(gt=0)]
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]

DEFAULT_PRELOAD = [
    "abc",
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmath",
    "collections.abc",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fnmatch",
    "fractions",
    "functools",
    "glob",
    "hashlib",
    "heapq",
    "inspect",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "numbers",
    "operator",
    "os",
    "pathlib",
    "pprint",
    "pytest",
    "queue",
    "random",
    "re",
    "resource",
    "shutil",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "traceback",
    "types",
    "typing",
    "unittest",
    "warnings",
    "weakref",
]


class SandboxDefaults(Config):
    """What a sandbox may use if its request does not say."""

    memory_bytes: int = pydantic.Field(default=512 * MIB, ge=16 * MIB)
    """Memory of all its processes and of its files, which live in memory."""

    pids: int = pydantic.Field(default=128, ge=8)
    """Processes and threads at once."""

    cpus: float = pydantic.Field(default=2.0, gt=0)
    """CPU cores. A value of the host's cores or more sets no quota."""

    disk_bytes: int = pydantic.Field(default=256 * MIB, ge=MIB)
    """Bytes of all files it has written."""

    inodes: int = pydantic.Field(default=65_536, ge=256)
    """Files, folders and links it has made."""

    open_files: int = pydantic.Field(default=1024, ge=32)
    """Open files of one process."""


class ExecConfig(Config):
    """How commands run."""

    default_timeout_s: _Positive = 60.0
    """Time of a command whose request names none."""

    max_timeout_s: _Positive = 3600.0
    """Longest time that a request may ask for."""

    max_output_bytes: int = pydantic.Field(default=10_000, ge=2)
    """Bytes kept of each stream of a command whose request names no bound."""

    output_bytes_limit: int = pydantic.Field(default=256 * 1024, ge=2, le=480 * 1024)
    """Largest bound that a request may name; both streams have to fit into one message."""

    heartbeat_s: _Positive = 5.0
    """Time between heartbeats of a command that streams."""

    kill_grace_s: _Positive = 5.0
    """Time that a killed command may take to end before its whole sandbox is ended."""

    path: str = "/opt/tailrace/bin:/opt/python/bin:/usr/local/bin:/usr/bin:/bin"
    """PATH of every command."""


class LeaseConfig(Config):
    """How long sandboxes live without being renewed."""

    default_s: _Positive = 60.0
    """Lease of a sandbox whose request names none."""

    max_s: _Positive = 3600.0
    """Longest lease that a request may ask for."""

    reap_interval_s: _Positive = 1.0
    """Time between the reaper's rounds."""


class LimitsConfig(Config):
    """Limits of the service. Each has a gauge of its name in `GetStatus` and in the metrics."""

    sandboxes: int = pydantic.Field(default=384, ge=1)
    """Sandboxes alive at once. Above it creating is refused with a time to retry after."""

    starts_per_s: float = pydantic.Field(default=0.0, ge=0)
    """Sandboxes started a second in the long run; 0 is no limit. Above it creating is refused."""

    start_burst: int = pydantic.Field(default=64, ge=1)
    """Starts at once while `starts_per_s` holds on average."""

    concurrent_starts: int = pydantic.Field(default=16, ge=1)
    """Sandboxes being set up at once; others wait in line."""

    commands: int = pydantic.Field(default=256, ge=1)
    """Commands running at once; others wait in line, which does not count as their run time."""

    upload_bytes: int = pydantic.Field(default=1024 * MIB, ge=MIB)
    """Largest environment or tree, as a tar, that one call puts or fetches."""

    diff_bytes: int = pydantic.Field(default=4 * MIB, ge=1024)
    """Largest diff made or applied, and the bound of each file in it."""

    environments_bytes: int = pydantic.Field(default=8 * 1024 * MIB, ge=MIB)
    """Disk space of stored environments; the least recently used ones go first."""

    spool_bytes: int = pydantic.Field(default=4096 * MIB, ge=MIB)
    """Bytes of all environments and trees that are being put, uploaded or downloaded at once.
    Above it the call is refused with a time to retry after."""

    snapshots: int = pydantic.Field(default=64, ge=1)
    """Snapshots kept at once. Above it making one is refused with a time to retry after."""

    snapshots_bytes: int = pydantic.Field(default=4 * 1024 * MIB, ge=MIB)
    """Disk space of all snapshots. Above it making one is refused with a time to retry after."""

    retry_after_s: _Positive = 1.0
    """What a refusal for lack of sandboxes or space asks the caller to wait."""


class PoolConfig(Config):
    """The warm pool: idle sandboxes, made ahead for environments asked for lately.

    It pays where the same environment and limits are asked for again and again. It costs an idle
    sandbox's memory each, and the making of those that nobody takes in the end.
    """

    sandboxes: int = pydantic.Field(default=0, ge=0)
    """Idle sandboxes at most; 0 keeps none. They do not count as `limits.sandboxes`. The gauges
    are called `pool_sandboxes` and `pool_memory_bytes`."""

    memory_bytes: int = pydantic.Field(default=256 * MIB, ge=0)
    """Memory of all idle sandboxes, by what the back-end says one takes."""

    per_environment: int = pydantic.Field(default=2, ge=1)
    """Idle sandboxes of the same environment and limits."""

    demand_s: _Positive = 60.0
    """How long after its last create an environment is kept warm."""


class OnHostConfig(Config):
    """What the back-ends have in common whose sandboxes run on this host."""

    uid: int = pydantic.Field(default=65534, ge=1)
    """User that commands run as. It should own nothing on the host."""

    gid: int = pydantic.Field(default=65534, ge=1)
    """Group that commands run as."""

    user: str = pydantic.Field(default="agent", pattern=r"^[a-z_][a-z0-9_-]*$")
    """Name of that user inside; with `docker` what USER says, whatever the image calls it."""

    writable: tuple[str, ...] = ("/tmp", "/logs", "/tests", "/solution")  # noqa: S108 -- inside the sandbox
    """Writable folders beside the work folder, empty at first, counted against `disk_bytes`."""

    diff_exclude: tuple[str, ...] = (".git", "__pycache__", "*.pyc", ".pytest_cache")
    """Names (with wildcards) of files and folders that a diff leaves out."""

    @pydantic.field_validator("writable")
    @classmethod
    def _check_writable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            try:
                check_mount_point(path)
            except PathRefusedError as error:
                raise ValueError(str(error)) from None
        return value


class LocalConfig(OnHostConfig):
    """Back-end `local`: sandboxes made of namespaces on this host."""

    visible: tuple[Path, ...] = (Path("/usr"),)
    """Host folders that sandboxes see read-only at their own path. Nothing else of the host is
    there, except for the links /bin, /lib and so on, a few files of /etc, and the interpreter."""

    masked: tuple[Path, ...] = (Path("/usr/src"), Path("/usr/local/src"))
    """Folders to hide within the visible ones. This package's own folder, the state folder, the
    service's virtual environment and the interpreter's installed packages are always hidden."""

    python: Path | None = None
    """Interpreter shown at /opt/python and kept warm. Default: this one's base interpreter."""

    site_packages: Path | None = None
    """Folder with packages (as `pip install --target` makes it) that the sandboxes' interpreter
    gets as its site-packages. Default: none, so that every host's sandboxes are alike."""

    compile_shim: bool = True
    """Compile the small stand-in for `python` where a C compiler exists, so that Python runs warm
    inside shell commands too. Without it such programs start a fresh interpreter."""

    compile_launcher: bool = True
    """Compile the small program that makes sandboxes where a C compiler exists and the service is
    root. Without it they are made in Python, which takes about twice as long."""

    preload: tuple[str, ...] = tuple(DEFAULT_PRELOAD)
    """Modules that warm Python has at hand: standard ones, and packages of `site_packages` that
    programs often start with. Those not there are left out. They are imported with the
    service's rights."""

    seccomp: bool = True
    """Filter system calls that no command needs (x86_64 and aarch64)."""

    cgroup_parent: str = pydantic.Field(default="tailrace", pattern=r"^[A-Za-z0-9_.-]+$")
    """Cgroup under which sandboxes get theirs."""

    require_cgroups: bool = False
    """Refuse to start where memory and processes cannot be limited by cgroups."""

    spares: int = pydantic.Field(default=2, ge=0)
    """Processes that wait in namespaces of their own for what the next sandbox is to be; each
    takes about 1 MiB and saves a start more than a millisecond."""

    start_timeout_s: _Positive = 30.0
    """Longest time that the fork-server or a sandbox may take to start."""


class DockerConfig(OnHostConfig):
    """Back-end `docker`: containers of a dockerd on this host. Needs the extra `docker`."""

    socket: Path = Path("/var/run/docker.sock")
    """Unix socket of the daemon (or podman's). The service has to be root in the same mount and pid
    namespaces as the daemon."""

    base_image: str = "python:3.11-slim-bookworm"
    """Image that sandboxes of a folder tree run on. It needs `/bin/sh` and `cat`."""

    network: str = pydantic.Field(default="", pattern=r"^([a-zA-Z0-9][a-zA-Z0-9_.-]*)?$")
    """The one network of all sandboxes that ask for network access; made if it does not exist.
    Default: none, and such sandboxes are refused."""

    keeper_uid: int = pydantic.Field(default=65533, ge=1)
    """User of each container's first process, out of the commands' reach; another than `uid`."""

    concurrent_starts: int = pydantic.Field(default=4, ge=1)
    """Containers being started at once; others wait in line. A daemon gets slower, not faster, with
    more."""

    start_timeout_s: _Positive = 60.0
    """Longest time that a container, or a command in it, may take to start."""

    call_timeout_s: _Positive = 60.0
    """Longest time of any other call of the daemon's."""

    concurrent_pulls: int = pydantic.Field(default=2, ge=1)
    """Images being pulled at once; others wait in line."""

    pull_wait_s: _Positive = 10.0
    """How long a create waits for its image to be pulled. Then it is told to come back, so that it
    keeps no others from starting; the pull goes on."""

    pull_timeout_s: _Positive = 1800.0
    """Longest time that one image may take to be pulled."""

    image_pulls_per_hour: int = pydantic.Field(default=100, ge=0)
    """Images pulled in any hour, by this service and all that name it as their `pull_budget`; 0 is
    no limit. Above it creating is refused with the time to retry after."""

    pull_budget: ChannelConfig | None = None
    """The sandbox service that keeps the budget of pulls for all hosts, as
    `pull_budget.target = "host:port"`. Default: this one."""

    prefetch: tuple[str, ...] = ()
    """Images to pull as soon as the service is up, one after the other."""

    disk_watermark: float = pydantic.Field(default=0.85, gt=0, le=1)
    """Share of the daemon's disk in use above which unused images that this service has pulled are
    removed, the longest unused first; where that does not help, creating and pulling are refused
    with a time to retry after."""

    @pydantic.field_validator("network")
    @classmethod
    def _check_network(cls, value: str) -> str:
        if value in ("host", "none", "default"):
            raise ValueError(f"{value!r} is no network of the sandboxes' own; name another one")
        return value

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.keeper_uid == self.uid:
            raise ValueError("keeper_uid must be another user than uid")
        return self


class FaultConfig(Config):
    """Injected faults, for tests of the callers only. All rates are 0 unless set."""

    create_rate: _Share = 0.0
    """Share of creates that fail as a broken host would let them fail."""

    exec_rate: _Share = 0.0
    """Share of commands that fail before they start, the same way."""

    seed: int = 0
    """Start of the random sequence that picks them."""

    @property
    def active(self) -> bool:
        """Whether any fault can happen."""
        return self.create_rate > 0 or self.exec_rate > 0


class DelayConfig(Config):
    """Injected waiting before commands, for benchmarks only. It costs no CPU time.

    The waits are log-normal: half are shorter than `median_s`, few are many times longer.
    """

    median_s: float = pydantic.Field(default=0.0, ge=0)
    """Median wait; 0 turns the delay off."""

    sigma: float = pydantic.Field(default=1.0, ge=0)
    """Width of the distribution: the standard deviation of the wait's logarithm."""

    max_s: _Positive = 60.0
    """Longest wait."""

    per_sandbox: bool = True
    """Draw one factor for each sandbox as well, so that some attempts are slow as a whole."""

    seed: int = 0
    """Start of the random sequence."""


class SandboxServiceConfig(Config):
    """The sandbox service."""

    server: ServerConfig = ServerConfig(bind="127.0.0.1:7101")
    telemetry: TelemetryConfig = TelemetryConfig()

    backend: Literal["local", "docker", "e2b"] = "local"
    """Where sandboxes run."""

    state_dir: Path = Path("~/.local/state/tailrace/sandbox-client")
    """Folder of stored environments and of what is needed to clean up after a crash. One service
    at a time uses it."""

    sandbox: SandboxDefaults = SandboxDefaults()
    exec: ExecConfig = ExecConfig()
    lease: LeaseConfig = LeaseConfig()
    limits: LimitsConfig = LimitsConfig()
    pool: PoolConfig = PoolConfig()
    local: LocalConfig = LocalConfig()
    docker: DockerConfig = DockerConfig()
    e2b: E2BConfig = E2BConfig()
    e2b_api: E2BApiConfig = E2BApiConfig()

    faults: FaultConfig = FaultConfig()
    """For tests only."""

    delay: DelayConfig = DelayConfig()
    """For benchmarks only."""

    @pydantic.field_validator("state_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return Path(os.path.abspath(value.expanduser()))  # noqa: PTH100 -- keeps links as they are

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.exec.max_output_bytes > self.exec.output_bytes_limit:
            raise ValueError("exec.max_output_bytes is larger than exec.output_bytes_limit")
        return self
