"""The values that cross rooms of this package and reach its users. All are frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sandbox_client.core.limits import LimiterStatus
from sandbox_client.core.output import join_kept

__all__ = [
    "Command",
    "EnvironmentRef",
    "ExecResult",
    "FileContent",
    "ImageStage",
    "ImageStatus",
    "LimiterStatus",
    "SandboxClaim",
    "SandboxInfo",
    "SandboxLimits",
    "SandboxSpec",
    "ServiceStatus",
    "SnapshotInfo",
]

DEFAULT_WORKDIR = "/workspace"


@dataclass(frozen=True)
class EnvironmentRef:
    """What a sandbox starts from. Exactly one of the four sources is set."""

    tree_digest: str = ""
    """Digest of a folder tree that was put into the service before (back-end `local`)."""
    image: str = ""
    """Container image reference (back-end `docker`)."""
    template: str = ""
    """E2B template (back-end `e2b`)."""
    snapshot: str = ""
    """Snapshot of a sandbox, by its id."""
    workdir: str = DEFAULT_WORKDIR
    """Where the tree appears and commands start."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to every command's environment."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one sandbox may use. Zero stands for the service's configured default."""

    memory_bytes: int = 0
    pids: int = 0
    cpus: float = 0.0
    disk_bytes: int = 0
    network: bool = False
    """Reach the network outside the sandbox. The back-end `local` refuses it."""


@dataclass(frozen=True)
class SandboxClaim:
    """Who asked for a sandbox, and how: enough to know the request again."""

    owner: str
    key: str
    fingerprint: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SandboxSpec:
    """All that a back-end has to know to make a sandbox."""

    environment: EnvironmentRef
    limits: SandboxLimits = SandboxLimits()
    claim: SandboxClaim | None = None
    """For back-ends whose sandboxes outlive the service, to write on them."""


@dataclass(frozen=True)
class Command:
    """One command for a sandbox: a line for the shell, or a program with its arguments."""

    shell: str = ""
    """Given to `/bin/sh -c`, unless `argv` is set. Run without a shell where none is needed."""
    argv: tuple[str, ...] = ()
    cwd: str = ""
    """Relative to the work folder; empty for the work folder itself."""
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 0.0
    """When it has passed, all that the command started is killed. 0: the service's default."""
    max_output_bytes: int = 0
    """Bytes kept of each stream, half its head and half its tail. 0: the service's default."""
    merge_stderr: bool = False
    """Standard error goes where standard output goes."""
    user: str = ""
    """Name or number of the user to run as; empty for the sandbox's own, the only one that the
    back-end `local` has."""


@dataclass(frozen=True)
class ExecResult:
    """How a command ended, and the kept part of its output."""

    exit_code: int
    """As a shell has it: 128 + signal if a signal ended it, 127 if it was not found."""
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    signal: int = 0
    timed_out: bool = False
    """It was killed because its time was over; the output is what had come so far."""
    out_of_memory: bool = False
    """Something in it was killed because the sandbox's memory was used up."""
    stdout_omitted_bytes: int = 0
    stderr_omitted_bytes: int = 0
    wall_s: float = 0.0
    """From the start of its process to its end; queueing and transport do not count."""
    cpu_s: float = 0.0
    """Processor time of the command and of the processes it waited for."""
    max_output_bytes: int = 0
    """The bound that the kept output was cut to."""

    @property
    def stdout(self) -> str:
        """Output as text: invalid UTF-8 replaced, a line in the middle where bytes were omitted."""
        return join_kept(self.stdout_bytes, self.stdout_omitted_bytes, self.max_output_bytes)

    @property
    def stderr(self) -> str:
        """Error output as text, like `stdout`."""
        return join_kept(self.stderr_bytes, self.stderr_omitted_bytes, self.max_output_bytes)


@dataclass(frozen=True)
class FileContent:
    """A file to be written. `path` is relative to the work folder, or absolute."""

    path: str
    content: bytes
    mode: int = 0
    """Permission bits; 0 for 0o644."""


@dataclass(frozen=True)
class SandboxInfo:
    """One living sandbox, for listings."""

    sandbox_id: str
    owner: str
    labels: Mapping[str, str]
    age_s: float
    lease_left_s: float
    running_commands: int


class ImageStage(StrEnum):
    """How far a prefetched image is."""

    PRESENT = "present"
    """Sandboxes can start from it."""
    PULLING = "pulling"
    """It is being pulled, or in line for that, or for the budget of pulls."""
    FAILED = "failed"
    """It could not be pulled; asking again tries again."""


@dataclass(frozen=True)
class ImageStatus:
    """One image that was asked for ahead of time."""

    image: str
    stage: ImageStage
    message: str = ""
    """Why it failed, or what it waits for."""


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot that was made."""

    snapshot_id: str
    lease_s: float
    size_bytes: int
    """What it takes up beside what its sandbox started from."""
    workdir: str


@dataclass(frozen=True)
class ServiceStatus:
    """The service as a whole."""

    backend: str
    version: str
    sandboxes: int
    limiters: tuple[LimiterStatus, ...]
    missing_protections: tuple[str, ...]
    """Protections that this host cannot give, in words."""
