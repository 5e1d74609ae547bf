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

from sandbox_client.backends.docker.daemon import daemon_name, missing_protections, unusable
from sandbox_client.backends.docker.processes import ends_are_told
from sandbox_client.config import DockerConfig
from sandbox_client.errors import QuotaExhausted, SandboxUnavailable, WrongRequest

__all__ = ["Engine", "EngineInfo", "ExecState", "ImageInfo", "NotThereError"]

_CHUNK_BYTES = 1 << 18
_REACH_EACH_OTHER = "com.docker.network.bridge.enable_icc"
_BAD_REQUEST, _NOT_FOUND, _CONFLICT, _TOO_MANY = 400, 404, 409, 429
# What registries answer when a host has pulled too often; dockerd passes on the text alone.
_RATE_LIMITED = ("toomanyrequests", "rate limit")
_NO_SUCH_IMAGE = ("not found", "manifest unknown", "does not exist", "invalid reference format")
# Podman tells by these words alone that a request is bad.
_BAD_REQUEST_IN_WORDS = ("invalid reference format", "invoke a command that was not found")


class NotThereError(Exception):
    """A container, command or image that the daemon does not know (any more)."""


@dataclass(frozen=True)
class EngineInfo:
    """The daemon as a whole."""

    name: str
    """What it is, with its version: `Docker 20.10.24`, `Podman 4.3.1`."""
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
        """Connects; raises `StartupError` if there is no daemon that sandboxes can use."""
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
            version = await self._docker.version()
        except (aiodocker.DockerError, aiohttp.ClientError, TimeoutError, OSError) as error:
            await self.close()
            raise StartupError(
                f"no container daemon answers at docker.socket {socket}: {error}; start dockerd, "
                "or set docker.socket to its socket"
            ) from error
        name = daemon_name(version)
        problem = unusable(name, info, ends_are_told=ends_are_told())
        if problem:
            await self.close()
            raise StartupError(f"docker.socket {socket}: {problem}")
        return EngineInfo(
            name,
            Path(info["DockerRootDir"]),
            tuple(missing_protections(name, info)),
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

    async def ensure_network(self, name: str, label: str) -> tuple[str, ...]:
        """Makes a network unless it is there; returns which protections it lacks, in words."""
        with _translated(f"make network {name}"):
            if await self._network(name) is None:
                await self._open.networks.create(
                    {
                        "Name": name,
                        "CheckDuplicate": True,
                        "Driver": "bridge",
                        "Labels": {label: ""},
                        "Options": {_REACH_EACH_OTHER: "false"},
                    }
                )
            # Not every daemon knows the option, and somebody else may have made the network.
            made = await self._network(name) or {}
        apart = (made.get("Options") or {}).get(_REACH_EACH_OTHER) == "false"
        return () if apart else (f"sandboxes on network {name} reach each other",)

    async def _network(self, name: str) -> Mapping[str, Any] | None:
        found = await self._open.networks.list(filters={"name": [name]})
        return next((network for network in found if network["Name"] == name), None)


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
        in_words = any(words in error.message for words in _BAD_REQUEST_IN_WORDS)
        if refused and (error.status == _BAD_REQUEST or in_words):
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
