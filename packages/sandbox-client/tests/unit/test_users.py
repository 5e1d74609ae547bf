"""Whose ids sandboxes get, by the maps of the service's user namespace and the host's files."""

import pytest
from sandbox_client.backends.local.users import Ids, first_subordinate, ids_from

HOST = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("uid_map", "gid_map", "ids"),
    [
        (HOST, HOST, Ids(65534, 65534, rootless=False)),
        # The user's own id alone: commands have to share it.
        ("0 1000 1\n", "0 1000 1\n", Ids(0, 0, rootless=True)),
        ("0 1000 1\n65534 100000 1\n", "0 1000 1\n65534 100000 1\n", Ids(65534, 65534, True)),
        # A container that maps its ids to others of the host's.
        ("0 100000 65536\n", "0 100000 65536\n", Ids(65534, 65534, rootless=True)),
        ("0 100000 65534\n", "0 100000 65536\n", Ids(0, 0, rootless=True)),
        ("0 100000 65536\n", "0 100000 1000\n", Ids(0, 0, rootless=True)),
    ],
)
def test_commands_get_what_is_mapped(uid_map: str, gid_map: str, ids: Ids) -> None:
    assert ids_from(uid_map, gid_map, 65534, 65534) == ids


def test_an_overlays_marks_follow_the_user_namespace() -> None:
    assert Ids(65534, 65534, rootless=False).opaque_mark == "trusted.overlay.opaque"
    assert Ids(0, 0, rootless=True).opaque_mark == "user.overlay.opaque"
    assert Ids(0, 0, rootless=True).shared
    assert not Ids(65534, 65534, rootless=True).shared


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", None),
        ("other:100000:65536\n", None),
        ("agent:100000:65536\n", 100000),
        ("other:1:2\n1000:200000:65536\n", 200000),
        ("agent:100000:0\nagent:300000:10\n", 300000),
        ("agent:nonsense\nagent::\nagent:7:x\n# agent:8:9\n", None),
    ],
)
def test_subordinate_ids_are_read_as_the_host_gives_them(text: str, first: int | None) -> None:
    assert first_subordinate(text, "agent", 1000) == first
