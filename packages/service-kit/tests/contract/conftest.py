"""An echo service without a .proto, and servers and channels around it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from service_kit import Channel, ChannelConfig, Server, ServerConfig, Service, open_channel

NAME = "test.v1.EchoService"


@dataclass
class EchoService:
    """Handlers over bytes. `on_unary` stands in for the work of a unary call."""

    on_unary: Callable[[bytes, Any], Awaitable[bytes]] | None = None
    calls: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.calls += 1
        return request if self.on_unary is None else await self.on_unary(request, context)

    async def hang(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return request

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Stream 0..n-1, then hang if the request ends with `+`."""
        try:
            for number in range(int(request.rstrip(b"+"))):
                yield str(number).encode()
            self.started.set()
            if request.endswith(b"+"):
                await self.release.wait()
                yield b"released"
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.upper()
            if request == b"bye":
                return

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "Hang": grpc.unary_unary_rpc_method_handler(self.hang),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


class EchoStub:
    """What generated code does with a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.echo: Any = channel.unary_unary(f"/{NAME}/Echo")
        self.hang: Any = channel.unary_unary(f"/{NAME}/Hang")
        self.count: Any = channel.unary_stream(f"/{NAME}/Count")
        self.join: Any = channel.stream_unary(f"/{NAME}/Join")
        self.chat: Any = channel.stream_stream(f"/{NAME}/Chat")


@dataclass
class Stack:
    """Starts servers and channels, and closes them after the test."""

    exits: AsyncExitStack
    echo: EchoService

    async def serve(self, config: ServerConfig | None = None, **options: Any) -> Server:
        service = Service(NAME, self.echo.register, on_drain=options.pop("on_drain", None))
        server = Server(config or ServerConfig(drain_grace_s=5), [service], **options)
        return await self.exits.enter_async_context(server)

    async def channel(self, target: str, **settings: Any) -> Channel:
        options = {
            key: settings.pop(key)
            for key in ("contracts", "idempotent", "telemetry")
            if key in settings
        }
        config = ChannelConfig(target=target, **settings)
        return await self.exits.enter_async_context(open_channel(config, **options))

    async def stub(self, target: str, **settings: Any) -> EchoStub:
        return EchoStub(await self.channel(target, **settings))


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        yield Stack(exits, EchoService())


@dataclass(frozen=True)
class Certificates:
    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority of our own, a server certificate for localhost and a client certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make test certificates")
    folder = tmp_path_factory.mktemp("tls")
    run = partial(subprocess.run, check=True, capture_output=True, cwd=folder)
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run(
        ["openssl", "req", "-x509", *new_key, "-days", "2", "-subj", "/CN=test authority",
         "-keyout", "ca.key", "-out", "ca.pem"]
    )  # fmt: skip
    (folder / "san.cnf").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        run(
            ["openssl", "req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
             "-out", f"{name}.csr"]
        )  # fmt: skip
        run(
            ["openssl", "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
             "-CAcreateserial", "-days", "2", "-extfile", "san.cnf", "-out", f"{name}.pem"]
        )  # fmt: skip
    return Certificates(
        ca=folder / "ca.pem",
        server=folder / "server.pem",
        server_key=folder / "server.key",
        client=folder / "client.pem",
        client_key=folder / "client.key",
    )
