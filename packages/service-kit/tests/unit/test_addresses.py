from __future__ import annotations

import pytest
from service_kit.addresses import is_loopback, split_host_port


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:0",
        "127.8.9.1:7101",
        "localhost:7101",
        "LOCALHOST:7101",
        "[::1]:7101",
        "unix:/run/x.sock",
        "unix-abstract:x",
        "dns:///localhost:7101",
        "ipv4:127.0.0.1:7101",
    ],
)
def test_local_addresses(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:7101",
        "[::]:7101",
        "10.0.0.1:7101",
        "localhost.example.org:7101",
        "127.0.0.1.example.org:7101",
        "sandboxes:7101",
        "dns:///sandboxes:7101",
        ":7101",
        "",
    ],
)
def test_addresses_that_others_can_reach_or_that_nobody_understands(address: str) -> None:
    assert not is_loopback(address)


def test_hosts_and_ports_are_split() -> None:
    assert split_host_port("127.0.0.1:7101") == ("127.0.0.1", 7101)
    assert split_host_port("[::1]:0") == ("::1", 0)
    for wrong in ("7101", "host:", ":1", "host:x", "host:70000", "::1:80", "host:-1", ""):
        with pytest.raises(ValueError, match=r"host:port"):
            split_host_port(wrong)
