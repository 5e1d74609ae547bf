"""Payloads that are dropped, cut off, flipped, repeated or swapped, on their way and before it.

Whatever is wrong with a version, no engine holds it; and the next one gets through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from weight_sync import FolderStore, PublishConfig
from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.stores.folder import FolderPublication, path_of

from integration_tests.weight_chaos.processes import Processes, world
from integration_tests.weight_chaos.roles import Journal

Damage = Callable[[bytes, bytes], bytes | None]
"""From a payload, and that of the version before, to what is there; None: nothing is."""


def flipped(at: float) -> Damage:
    def flip(data: bytes, _: bytes) -> bytes:
        changed = bytearray(data)
        changed[int(at * (len(data) - 1))] ^= 0x10
        return bytes(changed)

    return flip


DAMAGES: dict[str, Damage] = {
    "dropped": lambda data, last: None,
    "empty": lambda data, last: b"",
    "half of it": lambda data, last: data[: len(data) // 2],
    "all but a byte": lambda data, last: data[:-1],
    "a byte too many": lambda data, last: data + b"\0",
    "twice": lambda data, last: data + data,
    "its halves swapped": lambda data, last: data[len(data) // 2 :] + data[: len(data) // 2],
    "the version before's": lambda data, last: last,
} | {f"a bit flipped at {at}": flipped(at) for at in (0.0, 0.1, 0.5, 0.9, 1.0)}


HARMLESS = ("a byte too many", "twice")
"""Over gRPC just the bytes that belong to a payload are read."""


class Damager(Journal):
    """Damages a payload between its commit and its announcement."""

    damage: Damage | None = None
    last = b""

    def open(self, manifest_uri: str, manifest: Manifest) -> None:
        super().open(manifest_uri, manifest)
        path = path_of(manifest_uri).parent / manifest.payloads[0].name
        data = path.read_bytes()
        if self.damage is not None:
            found = self.damage(data, self.last)
            path.unlink()
            if found is not None:
                path.write_bytes(found)
        self.last = data


class ForgingStore(FolderStore):
    """Damages a payload before its checksum is taken: only what it decodes to can tell."""

    damage: Damage | None = None
    last = b""

    def _publication(self, folder: Path) -> FolderPublication:
        publication = super()._publication(folder)
        write = publication.write

        def forged(name: str, pieces: Iterable[bytes | memoryview]) -> PayloadFile:
            data = b"".join(bytes(piece) for piece in pieces)
            found = self.damage(data, self.last) if self.damage else data
            self.last = data
            return write(name, [found or b""])

        publication.write = forged  # type: ignore[method-assign]
        return publication


async def stuck(processes: Processes) -> None:
    """Wait until the host's receiver has told that it cannot get to the newest version."""
    async with asyncio.timeout(20):
        while not await processes.client.plan_version("run", timeout_s=5):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("codec", ["dense", "ulp-gap"])
@pytest.mark.parametrize("checksums", ["as published", "of what is there"])
async def test_a_damaged_payload_is_never_held_and_never_held_up_for_long(
    tmp_path: Path, codec: Any, checksums: str
) -> None:
    async with world(tmp_path) as processes:
        config = PublishConfig(codec=codec, anchor_every=100)
        sender = Damager(processes.journal)
        publisher = await processes.publisher(config, sender)
        damager: Damager | ForgingStore = sender
        if checksums == "of what is there":
            damager = ForgingStore(processes.store)
            publisher._store = damager
        step, anchors = 0, 1
        await processes.reached(await processes.publish(publisher, step))
        for name, damage in DAMAGES.items():
            sound = await processes.newest()
            damager.damage = damage
            step += 1
            bad = await processes.publish(publisher, step)
            if checksums == "as published" and name in HARMLESS:
                await processes.reached(bad)
                continue
            await stuck(processes)
            await processes.check()
            (node,) = (await processes.client.list_nodes(timeout_s=5)).nodes
            assert [e.version for e in node.engines] == [sound], name
            anchors += 1
            damager.damage = None
            for _ in range(2):  # an anchor, and for deltas one that builds on it
                step += 1
                number = await processes.publish(publisher, step)
                await processes.reached(number)
            assert number == bad + 2
        bases = [v.base for v in (await processes.client.list_versions(timeout_s=5)).versions]
        assert bases.count(0) == (len(bases) if codec == "dense" else anchors)
