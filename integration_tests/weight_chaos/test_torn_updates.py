"""The checker flags both torn updates that are known from the field; weight-sync refuses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from weight_sync.codecs import Dense, Tensor, delta_codec
from weight_sync.core.manifest import build_manifest
from weight_sync.errors import PayloadMissing
from weight_sync.shadow import ShadowFolder
from weight_sync.stores import FolderStore
from weight_sync.stores.folder import path_of
from weight_sync.types import AnnouncedVersion

from integration_tests.weight_chaos.checker import Checker
from integration_tests.weight_chaos.torn import TornReceiver

NAMES = [f"layer.{n}.weight" for n in range(8)]


def model(step: int) -> list[Tensor]:
    """Eight tensors; every one changes at every step."""
    return [
        Tensor(n, "F32", (64,), np.full(64, step + i / 8, np.float32).view(np.uint8).data)
        for i, n in enumerate(NAMES)
    ]


def commit(store: FolderStore, step: int, shards: int) -> AnnouncedVersion:
    """Publish a step: the first one whole, each other as overwrites in so many files."""
    new, old = model(step), model(step - 1)
    publication = store.begin("run", step, 1)
    files = []
    for shard in range(shards):
        part = new[shard::shards]
        if step == 1:
            files.append(publication.write(f"{shard}.model.safetensors", Dense().encode(part)))
        else:
            codec = delta_codec("overwrite")
            pieces = codec.encode(part, old[shard::shards], part=True)
            files.append(publication.write(f"{shard}.delta.bin", pieces))
    manifest = build_manifest(
        run="run",
        incarnation=1,
        number=step,
        step=step,
        parent=step - 1,
        base=0 if step == 1 else step - 1,
        codec="dense" if step == 1 else "overwrite",
        tensors=[t.entry() for t in new],
        payloads=files,
    )
    uri = publication.commit(manifest)
    return AnnouncedVersion(
        version=manifest.version,
        manifest_uri=uri,
        payload_bytes=manifest.payload_bytes,
        base=manifest.base,
    )


@pytest.mark.parametrize(
    ("shards", "recipe"), [(1, "old weights under the new version"), (2, "half of the new weights")]
)
def test_an_index_ahead_of_its_files_is_flagged_and_refused(
    tmp_path: Path, shards: int, recipe: str
) -> None:
    store = FolderStore(tmp_path / "store")
    versions = [commit(store, 1, 1), commit(store, 2, shards)]
    checker = Checker()
    for announced in versions:
        checker.published_manifest(store.read_manifest(announced.manifest_uri))

    torn = TornReceiver({})
    torn.load({t.name: t for t in copied(model(1))}, "1")
    checker.looked("torn", torn.label, torn.checksums())
    assert checker.violations == []

    late = store.read_manifest(versions[1].manifest_uri).payloads[-1]
    path = path_of(versions[1].manifest_uri).parent / late.name
    path.rename(tmp_path / "not visible yet")
    torn.pull(store, versions[1].manifest_uri)
    checker.looked("torn", torn.label, torn.checksums())
    assert checker.violations == ["torn reports version 2 and holds other bytes"], recipe

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    shadows = ShadowFolder(tmp_path / "shadow")
    shadows.prepare(versions[0], base, versions)
    with pytest.raises(PayloadMissing):
        shadows.prepare(versions[1], base, versions)

    # The file turns up. One of the two never looks again; the other gets there.
    (tmp_path / "not visible yet").rename(path)
    torn.pull(store, versions[1].manifest_uri)
    checker.looked("torn", torn.label, torn.checksums())
    assert len(checker.violations) == 2
    assert shadows.prepare(versions[1], base, versions).manifest.version.number == 2
    shadows.close()


def copied(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors whose memory can be written to."""
    return [
        Tensor(t.name, t.dtype, t.shape, memoryview(bytearray(t.data)))  # a copy
        for t in tensors
    ]
