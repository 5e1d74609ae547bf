import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from service_kit.errors import StartupError
from weight_sync.codecs import Dense, Tensor
from weight_sync.core.manifest import Manifest, PayloadFile, build_manifest
from weight_sync.errors import (
    ChecksumMismatch,
    ManifestError,
    PayloadMissing,
    UnknownCodec,
)
from weight_sync.shadow import ShadowFolder
from weight_sync.stores import FolderStore
from weight_sync.stores.folder import path_of
from weight_sync.types import AnnouncedVersion


def tensor(name: str, seed: int) -> Tensor:
    bits = np.random.default_rng(seed).bytes(4000)
    return Tensor(name, "F32", (10, 100), memoryview(bits))


MODEL = [tensor("a", 1), tensor("b", 2), tensor("c", 3)]


def put(
    store: FolderStore,
    *,
    sent: list[Tensor] = MODEL,
    said: list[Tensor] = MODEL,
    codec: str = "dense",
    payloads: int = 1,
) -> AnnouncedVersion:
    """Commit a version whose payload holds `sent` and whose manifest says `said`."""
    number = store.last_number("run") + 1
    publication = store.begin("run", number, 1)
    files: list[PayloadFile] = [
        publication.write(f"part{i}.safetensors", Dense().encode(sent[i::payloads]))
        for i in range(payloads)
    ]
    manifest = build_manifest(
        run="run",
        incarnation=1,
        number=number,
        step=0,
        parent=0,
        codec=codec,
        tensors=[t.entry() for t in said],
        payloads=files,
    )
    uri = publication.commit(manifest)
    return AnnouncedVersion(
        version=manifest.version, manifest_uri=uri, payload_bytes=manifest.payload_bytes
    )


def payload_of(announced: AnnouncedVersion) -> Path:
    manifest = Manifest.from_bytes(path_of(announced.manifest_uri).read_bytes())
    path = path_of(announced.manifest_uri).parent / manifest.payloads[0].name
    path.chmod(0o644)
    return path


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def shadows(tmp_path: Path) -> Iterator[ShadowFolder]:
    folder = ShadowFolder(tmp_path / "shadow")
    yield folder
    folder.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "old.bin", ".hidden"):
        (folder / name).write_text(name)
    return folder


def test_a_shadow_is_a_model_folder_of_links(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    announced = put(store)
    shadow = shadows.prepare(announced, base)
    found = {path.name for path in shadow.folder.iterdir()}
    assert found == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (shadow.folder / "config.json").read_text() == "config.json"
    assert shadow.moved_bytes == 0
    payload = payload_of(announced)
    assert payload.samefile(shadow.folder / "model.safetensors")
    # The bytes outlive the version in the store.
    store.remove(store.committed("run")[0])
    assert (shadow.folder / "model.safetensors").stat().st_size == announced.payload_bytes


def test_without_links_the_payload_is_copied(
    store: FolderStore, shadows: ShadowFolder, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(source: Path, into: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    announced = put(store)
    shadow = shadows.prepare(announced, base)
    assert shadow.moved_bytes == announced.payload_bytes
    assert (shadow.folder / "model.safetensors").read_bytes() == payload_of(announced).read_bytes()


def test_several_payloads_make_one_model(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    shadow = shadows.prepare(put(store, payloads=2), base)
    found = sorted(path.name for path in shadow.folder.glob("*.safetensors"))
    assert found == ["model-00001.safetensors", "model-00002.safetensors"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, empty])
def test_a_damaged_payload_is_refused_and_leaves_nothing(
    store: FolderStore, shadows: ShadowFolder, base: Path, damage: object
) -> None:
    announced = put(store)
    damage(payload_of(announced))  # type: ignore[operator]
    with pytest.raises(ChecksumMismatch):
        shadows.prepare(announced, base)
    assert [path.name for path in shadows.root.iterdir()] == [".lock"]


def test_a_missing_payload_is_an_error_and_not_a_no_op(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    announced = put(store)
    payload_of(announced).unlink()
    with pytest.raises(PayloadMissing, match="named by its manifest but not there"):
        shadows.prepare(announced, base)


@pytest.mark.parametrize(
    ("sent", "said", "message"),
    [
        (MODEL[:2], MODEL, "expected 3 tensors, 1 are missing, among them c"),
        (MODEL, MODEL[:2], "tensor c is not in the manifest"),
        ([*MODEL[:2], tensor("c", 9)], MODEL, "tensor c: expected F32"),
        ([*MODEL[:2], replace(MODEL[2], shape=(100, 10))], MODEL, r"tensor c: .*\[10, 100\]"),
        ([*MODEL[:2], replace(MODEL[2], dtype="I32")], MODEL, "tensor c: .*found I32"),
    ],
)
def test_a_payload_that_is_not_what_the_manifest_says_is_refused(
    store: FolderStore,
    shadows: ShadowFolder,
    base: Path,
    sent: list[Tensor],
    said: list[Tensor],
    message: str,
) -> None:
    with pytest.raises(ChecksumMismatch, match=message):
        shadows.prepare(put(store, sent=sent, said=said), base)


def test_an_anchor_of_another_release_is_refused(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    with pytest.raises(UnknownCodec):
        shadows.prepare(put(store, codec="ulp-gap"), base)


def test_another_version_under_the_announced_name_is_refused(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    first, second = put(store), put(store)
    with pytest.raises(ManifestError, match="expected PolicyVersion"):
        shadows.prepare(replace(first, manifest_uri=second.manifest_uri), base)


def test_an_old_shadow_is_verified_before_it_is_used_again(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    announced = put(store)
    first = shadows.prepare(announced, base)
    marker = first.folder / "marker"
    marker.touch()
    assert shadows.prepare(announced, base).folder == first.folder
    assert marker.exists()  # used again
    model = first.folder / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.unlink()
    model.write_bytes(data)
    shadows.prepare(announced, base)
    assert not marker.exists()  # made anew


def test_prunes_all_but_what_is_kept(store: FolderStore, shadows: ShadowFolder, base: Path) -> None:
    made = [shadows.prepare(put(store), base).folder for _ in range(3)]
    shadows.prune([made[2]])
    assert [path.exists() for path in made] == [False, False, True]


def test_a_closed_folder_holds_nothing(
    store: FolderStore, shadows: ShadowFolder, base: Path
) -> None:
    shadows.prepare(put(store), base)
    shadows.close()
    assert [path.name for path in shadows.root.iterdir()] == [".lock"]


def test_a_restarted_receiver_clears_what_was_half_made(tmp_path: Path) -> None:
    (tmp_path / ".part-0000000001-abc-0").mkdir()
    (tmp_path / ".part-0000000001-abc-0" / "model.safetensors").touch()
    folder = ShadowFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(StartupError, match=r"in use by another process; set receiver\.shadow"):
        ShadowFolder(tmp_path)
    folder.close()
