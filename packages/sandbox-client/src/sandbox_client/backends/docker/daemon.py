"""What a container daemon tells of itself, and whether sandboxes can be made with it."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["daemon_name", "missing_protections", "unusable"]

_PODMAN = "Podman"


def daemon_name(version: Mapping[str, Any]) -> str:
    """What answers `/version` so, with its own version."""
    components = [component["Name"] for component in version.get("Components") or ()]
    product = _PODMAN if any(_PODMAN in component for component in components) else "Docker"
    return f"{product} {version.get('Version', '')}".rstrip()


def unusable(name: str, info: Mapping[str, Any], *, ends_are_told: bool) -> str:
    """Why sandboxes cannot be made by this daemon, and what to do; empty if they can."""
    options = " ".join(info.get("SecurityOptions") or ())
    for option in ("userns", "rootless"):
        if f"name={option}" in options:
            return (
                f"{name} runs with {option}: its containers' users are not this host's, so that "
                "work folders cannot be shared; use a daemon that runs as root without user "
                "namespaces"
            )
    if name.startswith(_PODMAN) and not ends_are_told:
        return (
            f"{name} does not tell how commands end, and neither does this kernel; use Linux 6.15 "
            "or later, or dockerd"
        )
    return ""


def missing_protections(name: str, info: Mapping[str, Any]) -> Iterator[str]:
    """Protections that a daemon which answers `/info` so cannot give, in words."""
    for key, what in (
        ("MemoryLimit", "memory"),
        ("PidsLimit", "pids"),
        ("CpuCfsQuota", "cpu"),
    ):
        if not info.get(key, True):
            yield f"no cgroup limit for {what}: the daemon cannot set one"
    if "seccomp" not in " ".join(info.get("SecurityOptions") or ()):
        yield "no seccomp filter: the daemon has none"
    elif name.startswith(_PODMAN):
        yield (
            "no seccomp filter against user namespaces and mounts: podman's own allows them, if "
            "seccomp_profile in containers.conf names no other"
        )
