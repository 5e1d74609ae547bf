"""Checking requests and filling in the configured defaults, before anything is done."""

from collections.abc import Mapping
from dataclasses import replace

from sandbox_client.config import ExecConfig, LeaseConfig, SandboxDefaults
from sandbox_client.errors import WrongRequest
from sandbox_client.types import Command, SandboxLimits, SandboxSpec

__all__ = ["check_names", "complete_command", "complete_lease", "complete_spec"]

_MAX_NAME = 255
_MAX_LABELS = 64


def check_names(key: str, owner: str, labels: Mapping[str, str]) -> None:
    """Raises `WrongRequest` if a create's key, owner or labels break the rules."""
    if not 1 <= len(key) <= _MAX_NAME:
        raise WrongRequest(
            f"idempotency_key must have 1 to {_MAX_NAME} characters, found {len(key)}"
        )
    if len(owner) > _MAX_NAME:
        raise WrongRequest(f"owner must have at most {_MAX_NAME} characters, found {len(owner)}")
    if len(labels) > _MAX_LABELS:
        raise WrongRequest(f"at most {_MAX_LABELS} labels, found {len(labels)}")


def complete_lease(settings: LeaseConfig, lease_s: float) -> float:
    """The lease that a request gets."""
    if not 0 <= lease_s <= settings.max_s:
        raise WrongRequest(
            f"lease_s must be between 0 and lease.max_s ({settings.max_s:g}), found {lease_s:g}"
        )
    return lease_s or settings.default_s


def complete_spec(defaults: SandboxDefaults, spec: SandboxSpec) -> SandboxSpec:
    """The specification with every limit set."""
    asked = spec.limits
    if min(asked.memory_bytes, asked.pids, asked.cpus, asked.disk_bytes) < 0:
        raise WrongRequest("limits must not be negative")
    memory_bytes = asked.memory_bytes or defaults.memory_bytes
    # Files live in memory: if they could fill it, a sandbox could end itself by writing.
    largest_disk = memory_bytes // 4 * 3
    if asked.disk_bytes > largest_disk:
        raise WrongRequest(
            "limits.disk_bytes must be at most three quarters of memory_bytes "
            f"({largest_disk}), found {asked.disk_bytes}"
        )
    limits = SandboxLimits(
        memory_bytes=memory_bytes,
        pids=asked.pids or defaults.pids,
        cpus=asked.cpus or defaults.cpus,
        disk_bytes=asked.disk_bytes or min(defaults.disk_bytes, largest_disk),
        network=asked.network,
    )
    return replace(spec, limits=limits)


def complete_command(settings: ExecConfig, command: Command) -> Command:
    """The command with its time and its output's bound set."""
    if not command.shell and not command.argv:
        raise WrongRequest("a command needs `shell` or `argv`")
    if not 0 <= command.timeout_s <= settings.max_timeout_s:
        raise WrongRequest(
            f"timeout_s must be between 0 and exec.max_timeout_s ({settings.max_timeout_s:g}), "
            f"found {command.timeout_s:g}"
        )
    if not 0 <= command.max_output_bytes <= settings.output_bytes_limit:
        raise WrongRequest(
            f"max_output_bytes must be between 0 and {settings.output_bytes_limit} "
            f"(exec.output_bytes_limit), found {command.max_output_bytes}"
        )
    texts = (command.shell, command.cwd, *command.argv, *command.env, *command.env.values())
    if any("\0" in text for text in texts):
        raise WrongRequest("a command must not contain NUL characters")
    if any(not name or "=" in name for name in command.env):
        raise WrongRequest("names of variables must not be empty nor contain '='")
    return replace(
        command,
        timeout_s=command.timeout_s or settings.default_timeout_s,
        max_output_bytes=command.max_output_bytes or settings.max_output_bytes,
    )
