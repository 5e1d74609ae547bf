"""Host and port texts, and which of them other machines can reach."""

from __future__ import annotations

import ipaddress

_LOCAL_SCHEMES = ("unix:", "unix-abstract:")


def is_unix(address: str) -> bool:
    """Tell whether the address is a Unix domain socket."""
    return address.startswith(_LOCAL_SCHEMES)


def split_host_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`.

    Raises:
        ValueError: If there is no host or no valid port.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"expected host:port, and an IPv6 host in brackets, found {address!r}")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"expected host:port such as 127.0.0.1:7101 (port 0: any free one), found {address!r}"
        )
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Tell whether only this machine can reach the address: loopback, `localhost`, Unix socket."""
    if is_unix(address):
        return True
    # Clients may name a resolver: dns:///host:port, ipv4:127.0.0.1:80.
    bare = address.rsplit("/", 1)[-1]
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        bare = bare.removeprefix(scheme)
    try:
        host, _ = split_host_port(bare)
    except ValueError:
        host = bare
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
