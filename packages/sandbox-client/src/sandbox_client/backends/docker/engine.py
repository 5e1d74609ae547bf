"""The calls of the Engine API that sandboxes need, with deadlines and this package's errors."""

import asyncio
import contextlib
import json
import posixpath
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
from service_kit.errors import StartupError
from yarl import URL

from sandbox_client.config import DockerConfig
from sandbox_client.errors import QuotaExhausted, SandboxUnavailable, WrongRequest

__all__ = ["Engine", "EngineInfo", "ExecState", "ImageInfo", "NotThereError"]

_CHUNK_BYTES = 1 << 18
_BAD_REQUEST, _NOT_FOUND, _CONFLICT, _TOO_MANY = 400, 404, 409, 429
# What registries answer when a host has pulled too often; dockerd passes on the text alone.
_RATE_LIMITED = ("toomanyrequests", "rate limit")
_NO_SUCH_IMAGE = ("not found", "manifest unknown", "does not exist", "invalid reference format")


class NotThereError(Exception):
    """A container, command or image that the daemon does not know (any more)."""


@dataclass(frozen=True)
class EngineInfo:
    """The daemon as a whole."""

    root_dir: Path
    """Where its images are."""
    missing: tuple[str, ...]
    """Protections that it cannot give, in words."""
    api_version: str = ""
    cgroup_driver: str = "none"
    cgroup_version: int = 1


@dataclass(frozen=True)
class ImageInfo:
    """An image that is there."""

    image_id: str
    environ: Mapping[str, str]
    volumes: tuple[str, ...]
    """Folders that it declares to be writable."""


@dataclass(frozen=True)
class ExecState:
    """A command in a container."""

    pid: int
    """As this host sees it; 0 once it has ended."""
    running: bool
    exit_code: int | None


class Engine:
    """A connection to one daemon."""

    def __init__(self, config: DockerConfig) -> None:
        self._config = config
        self._docker: aiodocker.Docker | None = None

    @property
    def _open(self) -> aiodocker.Docker:
        assert self._docker is not None, "open() comes first"
        return self._docker

    async def open(self) -> EngineInfo:
        """Connects; raises `StartupError` if there is no daemon."""
        timeout = aiohttp.ClientTimeout(total=self._config.call_timeout_s)
        socket = self._config.socket
        self._docker = aiodocker.Docker(
            url="unix://localhost",  # only a name: the connector knows the way
            # Every sandbox and command makes its calls at once; the daemon has its own limits.
            connector=aiohttp.UnixConnector(str(socket), limit=0),
            timeout=timeout,
        )
        try:
            info = await self._docker.system.info()
        except (aiodocker.DockerError, aiohttp.ClientError, TimeoutError, OSError) as error:
            await self.close()
            raise StartupError(
                f"no container daemon answers at docker.socket {socket}: {error}; start dockerd, "
                "or set docker.socket to its socket"
            ) from error
        options = " ".join(info.get("SecurityOptions") or ())
        for option in ("userns", "rootless"):
            if f"name={option}" in options:
                await self.close()
                raise StartupError(
                    f"the daemon at docker.socket {socket} runs with {option}: its containers' "
                    "users are not this host's, so that work folders cannot be shared; use one "
                    "that runs as root without user namespaces"
                )
        return EngineInfo(
            Path(info["DockerRootDir"]),
            tuple(_missing_protections(info)),
            self._docker.api_version,
            info.get("CgroupDriver", "none"),
            int(info.get("CgroupVersion", 1)),
        )

    async def close(self) -> None:
        """Ends the connection."""
        if self._docker is not None:
            await self._docker.close()
            await self._docker.connector.close()
            self._docker = None

    # -- containers

    async def create(self, name: str, settings: Mapping[str, Any]) -> str:
        """Makes a container that does not run yet; returns its id."""
        with _translated(f"make container {name}", refused="no such container can be made"):
            made = await self._open.containers.create(dict(settings), name=name)
        return made.id

    async def start(self, container: str) -> int:
        """Starts a container; returns its first process's pid, as this host sees it.

        Raises:
            WrongRequest: its image lacks what sandboxes need.
        """
        with _translated(f"start container {container}", refused="the image cannot run /bin/sh"):
            found = self._open.containers.container(container)
            await found.start()
            state = (await found.show())["State"]
        if not state["Running"]:
            raise SandboxUnavailable(
                f"the container ended as soon as it was started (exit code {state['ExitCode']}): "
                f"{state['Error'] or 'its image may lack cat'}"
            )
        return int(state["Pid"])

    async def remove(self, container: str) -> None:
        """Ends a container and removes it; it may be gone already."""
        with _translated(f"remove container {container}"), contextlib.suppress(NotThereError):
            try:
                await self._open.containers.container(container).delete(force=True, v=True)
            except aiodocker.DockerError as error:
                if error.status != _CONFLICT:  # somebody else is removing it
                    raise

    async def containers(self, label: str) -> list[str]:
        """Ids of all containers with a label, whether they run or not."""
        with _translated("list containers"):
            found = await self._open.containers.list(
                all=True, filters=json.dumps({"label": [label]})
            )
        return [container.id for container in found]

    async def images_in_use(self) -> set[str]:
        """Ids of the images that any container stands on."""
        with _translated("list containers"):
            found = await self._open.containers.list(all=True)
        return {container["ImageID"] for container in found}

    async def archive(self, container: str, path: str) -> AsyncGenerator[bytes, None]:
        """A folder of a container as a tar, in pieces; raises `NotThereError` if there is none."""
        docker = self._open
        url = URL(f"{docker.docker_host}/{docker.api_version}/containers/{container}/archive")
        timeout = aiohttp.ClientTimeout(total=self._config.pull_timeout_s)
        with _translated(f"read {path} of container {container}"):
            async with docker.session.get(url, params={"path": path}, timeout=timeout) as response:
                if response.status != 200:
                    raise aiodocker.DockerError(response.status, await response.text())
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    yield chunk

    # -- commands

    async def exec_start(
        self, container: str, argv: Sequence[str], environ: Mapping[str, str], *, user: str
    ) -> str:
        """Starts a command that is attached to nothing; returns its id."""
        with _translated(f"start a command in container {container}"):
            made = await self._open.containers.container(container).exec(
                list(argv), stdin=False, stdout=False, stderr=False, user=user, environment=environ
            )
            await made.start(detach=True)
        return made.id

    async def exec_state(self, command: str) -> ExecState:
        """How a command is doing."""
        with _translated("look at a command"):
            state = await self._open.containers.exec(command).inspect()
        code = state["ExitCode"]
        return ExecState(
            int(state["Pid"] or 0), bool(state["Running"]), None if code is None else int(code)
        )

    # -- images

    async def image(self, reference: str) -> ImageInfo | None:
        """An image, if it is there; raises `WrongRequest` if no image can have this name."""
        try:
            with _translated(f"look at image {reference}", refused=f"image {reference!r}"):
                found = await self._open.images.inspect(reference)
        except NotThereError:
            return None
        config = found.get("Config") or {}
        return ImageInfo(
            found["Id"],
            dict(pair.partition("=")[::2] for pair in config.get("Env") or ()),
            tuple(posixpath.normpath(path) for path in config.get("Volumes") or ()),
        )

    async def pull(self, reference: str) -> None:
        """Pulls an image.

        Raises:
            WrongRequest: no registry has it.
            QuotaExhausted: the registry says that this host has pulled too often.
            SandboxUnavailable: anything else; a later try can help.
        """
        try:
            async with asyncio.timeout(self._config.pull_timeout_s):
                await self._open.images.pull(reference)
        except aiodocker.DockerError as error:
            text = error.message.lower()
            if error.status == _TOO_MANY or any(sign in text for sign in _RATE_LIMITED):
                raise QuotaExhausted(
                    f"the registry lets this host pull no more for now: {error.message}",
                    retry_after_s=60.0,
                ) from error
            if error.status == _NOT_FOUND or any(sign in text for sign in _NO_SUCH_IMAGE):
                raise WrongRequest(
                    f"image {reference!r} cannot be pulled: {error.message}; check its name and "
                    "that this host may read it"
                ) from error
            raise SandboxUnavailable(
                f"image {reference!r} cannot be pulled: {error.message}"
            ) from error
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"image {reference!r} was not pulled within docker.pull_timeout_s "
                f"({self._config.pull_timeout_s:g} s)"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error) from error

    async def remove_image(self, image_id: str) -> bool:
        """Removes an image with all its names; False if it is in use."""
        try:
            with _translated(f"remove image {image_id}"), contextlib.suppress(NotThereError):
                await self._open.images.delete(image_id, force=True)
        except SandboxUnavailable as error:
            if error.metadata.get("status") == str(_CONFLICT):
                return False
            raise
        return True

    # -- networks

    async def ensure_network(self, name: str, label: str) -> None:
        """Makes a network unless it is there. Containers on it do not reach each other."""
        with _translated(f"make network {name}"):
            found = await self._open.networks.list(filters={"name": [name]})
            if any(network["Name"] == name for network in found):
                return
            await self._open.networks.create(
                {
                    "Name": name,
                    "CheckDuplicate": True,
                    "Driver": "bridge",
                    "Labels": {label: ""},
                    "Options": {"com.docker.network.bridge.enable_icc": "false"},
                }
            )


@contextlib.contextmanager
def _translated(what: str, *, refused: str = "") -> Iterator[None]:
    """Turns the daemon's errors into `NotThereError` and `SandboxUnavailable`.

    With `refused` a bad request is the caller's, and a `WrongRequest` that begins so.
    """
    try:
        yield
    except aiodocker.DockerError as error:
        if error.status == _NOT_FOUND:
            raise NotThereError(error.message) from error
        if error.status == _BAD_REQUEST and refused:
            raise WrongRequest(f"{refused}: {error.message}") from error
        raise SandboxUnavailable(
            f"the container daemon could not {what}: {error.message}",
            metadata={"status": str(error.status)},
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"the container daemon does not answer: {error or 'no reply in time'}"
    )


def _missing_protections(info: Mapping[str, Any]) -> Iterator[str]:
    for key, what in (
        ("MemoryLimit", "memory"),
        ("PidsLimit", "pids"),
        ("CpuCfsQuota", "cpu"),
    ):
        if not info.get(key, True):
            yield f"no cgroup limit for {what}: the daemon cannot set one"
    if "seccomp" not in " ".join(info.get("SecurityOptions") or ()):
        yield "no seccomp filter: the daemon has none"
