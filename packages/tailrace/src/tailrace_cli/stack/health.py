"""Asks a process whether it serves, and the host whether a port is free."""

from __future__ import annotations

import secrets
import socket

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tailrace_cli.stack.spec import ProcessSpec

CHECK_TIMEOUT_S = 2.0
_PORTS = range(12_000, 32_000)


async def is_serving(spec: ProcessSpec) -> bool:
    """True when the process answers its health check now; never raises for an unreachable one."""
    if spec.protocol == "grpc":
        return await _grpc_serving(spec.target)
    return await _http_serving(f"{spec.address}/health")


async def _grpc_serving(target: str) -> bool:
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=CHECK_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def _http_serving(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
            return reply.status == 200
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False


def port_is_free(target: str) -> bool:
    """True when `host:port` can be bound now."""
    host, port = target.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports that are free now.

    They lie below those that Linux gives to outgoing connections: one of these could else hold a
    service's port just when the service is restarted. Another program may still take one first.
    """
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(_PORTS)
        if port_is_free(f"{host}:{port}"):
            found.add(port)
    return list(found)
