"""What the doctor asks of a container daemon. The judgements are functions of what it tells."""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from service_kit.errors import ServiceError, StartupError

from sandbox_client.backends.docker.engine import Engine, EngineInfo
from sandbox_client.config import DockerConfig
from sandbox_client.core.images import DiskUse
from sandbox_client.findings import Finding, Level

__all__ = ["examine", "judge_api", "judge_cgroups", "judge_disk", "judge_image", "judge_missing"]

_TRIED_FROM = (1, 41)
"""What Docker 20.10 and Podman 4.3 speak."""
_CGROUPS = Path("/sys/fs/cgroup")


def judge_api(version: str) -> Finding:
    """Whether the daemon's API is one that the back-end was tried with."""
    digits = version.lstrip("v").split(".")
    known = tuple(int(part) for part in digits if part.isdigit())
    if known >= _TRIED_FROM:
        return Finding("the daemon's API", Level.OK, version)
    return Finding(
        "the daemon's API",
        Level.WARNING,
        f"{version or 'unknown'}; nothing older than 1.41 was tried",
        "use Docker 20.10 or Podman 4.3, or later",
    )


def judge_cgroups(info: EngineInfo, cgroups: Path = _CGROUPS) -> Finding:
    """Whether containers have cgroups, and this service sees them."""
    name, here = "the containers' cgroups", 2 if (cgroups / "cgroup.controllers").exists() else 1
    found = f"version {info.cgroup_version}, driver {info.cgroup_driver}"
    if info.cgroup_driver == "none":
        fix = "run the daemon as root on a host with cgroups"
        return Finding(name, Level.PROBLEM, "the daemon uses none: nothing is limited", fix)
    if here != info.cgroup_version or not (here == 2 or (cgroups / "freezer").is_dir()):
        return Finding(
            name,
            Level.PROBLEM,
            f"{found}, which cannot be seen in {cgroups}; commands could not be ended",
            "run the service in the daemon's cgroup namespace, with that folder mounted",
        )
    return Finding(name, Level.OK, found)


def judge_missing(missing: Iterable[str]) -> list[Finding]:
    """Protections that the daemon cannot give, as `Engine.open` names them."""
    fix = "mend the daemon or its kernel: docker info tells what it lacks"
    found = [Finding("the daemon's protections", Level.WARNING, text, fix) for text in missing]
    ok = Finding("the daemon's protections", Level.OK, "seccomp, memory, processes, CPU")
    return found or [ok]


def judge_disk(use: DiskUse, watermark: float, root: Path) -> Finding:
    """Whether there is room for images."""
    found = f"{root} is {use.share:.0%} full, docker.disk_watermark is {watermark:.0%}"
    if use.share <= watermark:
        return Finding("disk for images", Level.OK, found)
    fix = "remove images or files, or raise docker.disk_watermark"
    return Finding("disk for images", Level.PROBLEM, f"{found}: creating is refused", fix)


def judge_image(reference: str, *, present: bool) -> Finding:
    """Whether the image of folder trees is there."""
    if present:
        return Finding("the base image", Level.OK, reference)
    return Finding(
        "the base image",
        Level.WARNING,
        f"{reference} is not there; the first sandbox waits for it to be pulled",
        f"docker pull {reference}, or set docker.base_image to one that is there",
    )


def examine(config: DockerConfig) -> list[Finding]:
    """All findings about the daemon that this configuration names; changes nothing."""
    return asyncio.run(_examine(config))


async def _examine(config: DockerConfig) -> list[Finding]:
    engine, name = Engine(config), "the container daemon"
    try:
        info = await engine.open()
    except StartupError as error:
        found, _, fix = str(error).rpartition("; ")
        return [Finding(name, Level.PROBLEM, found, fix)]
    findings = [
        Finding(name, Level.OK, f"{info.name} answers at {config.socket}"),
        judge_api(info.api_version),
        judge_cgroups(info),
        *judge_missing(info.missing),
    ]
    try:
        disk = os.statvfs(info.root_dir)
        use = DiskUse(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)
        findings.append(judge_disk(use, config.disk_watermark, info.root_dir))
        present = await engine.image(config.base_image) is not None
        findings.append(judge_image(config.base_image, present=present))
    except (ServiceError, OSError) as error:
        fix = "run the service on the daemon's own host, and look at the daemon's log"
        findings.append(Finding(name, Level.PROBLEM, str(error), fix))
    finally:
        await engine.close()
    return findings
