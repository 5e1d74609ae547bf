"""What the back-end makes of a daemon's answers, from a daemon that is only its answers."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sandbox_client.backends.docker import engine as engine_module
from sandbox_client.backends.docker.engine import Engine
from sandbox_client.config import DockerConfig
from sandbox_client.errors import SandboxUnavailable, WrongRequest
from service_kit.errors import StartupError

DOCKER = {"Version": "20.10.24", "ApiVersion": "1.41", "Components": [{"Name": "Engine"}]}
PODMAN = {"Version": "4.3.1", "ApiVersion": "1.41", "Components": [{"Name": "Podman Engine"}]}
SECCOMP = "name=seccomp,profile=default"


@contextlib.asynccontextmanager
async def daemon(
    folder: Path,
    version: Mapping[str, Any],
    options: list[str],
    failure: str = "",
    networks: Sequence[Mapping[str, Any]] = (),
) -> AsyncIterator[Engine]:
    """A daemon that fails, if asked for anything but itself, as podman does: with 500 and words."""

    async def answer(request: web.Request) -> web.Response:
        about = {
            "version": dict(version),
            "info": {"DockerRootDir": str(folder), "SecurityOptions": options},
            "networks": list(networks),
        }
        name = request.path.rpartition("/")[2]
        if name in about:
            return web.json_response(about[name])
        return web.json_response({"message": failure}, status=500)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    socket = folder / "daemon.sock"
    await web.UnixSite(runner, str(socket)).start()
    engine = Engine(DockerConfig(socket=socket))
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("version", "name"), [(DOCKER, "Docker 20.10.24"), (PODMAN, "Podman 4.3.1")]
)
async def test_the_daemon_is_named_by_what_it_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Mapping[str, Any], name: str
) -> None:
    monkeypatch.setattr(engine_module, "ends_are_told", lambda: True)
    async with daemon(tmp_path, version, [SECCOMP]) as engine:
        info = await engine.open()
        assert info.name == name
        assert any("user namespaces" in text for text in info.missing) == (version is PODMAN)


async def test_podman_is_refused_where_nobody_tells_how_commands_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ends_are_told", lambda: False)
    async with daemon(tmp_path, PODMAN, [SECCOMP]) as engine:
        with pytest.raises(
            StartupError, match=r"Podman 4\.3\.1 .*Linux 6\.15 or later, or dockerd"
        ):
            await engine.open()
    async with daemon(tmp_path, DOCKER, [SECCOMP]) as engine:
        await engine.open()  # dockerd itself tells


@pytest.mark.parametrize("option", ["userns", "rootless"])
async def test_a_daemon_with_other_users_than_the_hosts_is_refused(
    tmp_path: Path, option: str
) -> None:
    async with daemon(tmp_path, DOCKER, [SECCOMP, f"name={option}"]) as engine:
        with pytest.raises(StartupError, match=f"{option}.*use a daemon that runs as root"):
            await engine.open()


@pytest.mark.parametrize(
    ("failure", "call", "error"),
    [
        ("normalizing name for compat API: invalid reference format", "image", WrongRequest),
        ("runtime attempted to invoke a command that was not found", "start", WrongRequest),
        ("database is locked", "image", SandboxUnavailable),
        # Removing is the service's own doing.
        ("runtime attempted to invoke a command that was not found", "remove", SandboxUnavailable),
    ],
)
async def test_what_a_daemon_calls_its_own_failure_may_be_the_requests_fault(
    tmp_path: Path, failure: str, call: str, error: type[Exception]
) -> None:
    async with daemon(tmp_path, DOCKER, [SECCOMP], failure) as engine:
        await engine.open()
        with pytest.raises(error):
            await getattr(engine, call)("x")


@pytest.mark.parametrize(
    ("options", "apart"),
    [({"com.docker.network.bridge.enable_icc": "false"}, True), ({}, False), (None, False)],
)
async def test_a_network_that_does_not_keep_sandboxes_apart_is_told(
    tmp_path: Path, options: Mapping[str, str] | None, apart: bool
) -> None:
    networks: list[dict[str, Any]] = [
        {"Name": "ours-too", "Options": {}},
        {"Name": "ours", "Options": options},
    ]
    async with daemon(tmp_path, DOCKER, [SECCOMP], networks=networks) as engine:
        await engine.open()
        lacking = await engine.ensure_network("ours", "label")
        assert bool(lacking) != apart
