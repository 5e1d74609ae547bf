"""A shadow of a delta holds the version's bytes, whatever way leads there, or there is none."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_sync.codecs import CODERS, Dense, Tensor, delta_codec
from weight_sync.core.manifest import PayloadFile, TensorEntry, build_manifest
from weight_sync.core.plan import Link, prunable
from weight_sync.errors import ChecksumMismatch, ManifestError, PayloadMissing, UnknownCodec
from weight_sync.model_files import tensors_in
from weight_sync.shadow import Shadow, ShadowFolder
from weight_sync.stores import FolderStore
from weight_sync.stores.folder import path_of
from weight_sync.transports import Fetched, FirstThatWorks, StoreTransport
from weight_sync.types import AnnouncedVersion

SHAPES = {"a": (40, 50), "b": (300,), "c": (7,)}


class Trainer:
    """Publishes versions, each some steps from the last, and remembers what they hold."""

    def __init__(self, root: Path, *, codec: str = "ulp-gap", seed: int = 0) -> None:
        self.store = FolderStore(root / "store", sync=False)
        self.codec = codec
        self.announced: list[AnnouncedVersion] = []
        self.bits: dict[int, dict[str, bytes]] = {}
        self._rng = np.random.default_rng(seed)
        self._model = {n: self._rng.integers(0, 1 << 16, s, np.uint16) for n, s in SHAPES.items()}
        self._base: list[Tensor] = []

    def publish(
        self, *, anchor: bool = False, frozen: str = "", payloads: int = 1
    ) -> AnnouncedVersion:
        """Take a step and publish it: whole, or as a delta of the last version."""
        for name, words in self._model.items():
            if name != frozen:
                words += (self._rng.random(words.shape) < 0.1).astype(np.uint16)
        tensors = [
            Tensor(n, "BF16", w.shape, w.copy().reshape(-1).view(np.uint8).data)
            for n, w in self._model.items()
        ]
        whole = anchor or not self._base
        number = len(self.announced) + 1
        publication = self.store.begin("run", number, 1)
        files: list[PayloadFile] = []
        for index in range(payloads):
            part = tensors[index::payloads]
            if whole:
                name, pieces = Dense.payload_name, Dense().encode(part)
            else:
                codec = delta_codec(self.codec)
                name, pieces = codec.payload_name, codec.encode(part, self._base, part=payloads > 1)
            files.append(publication.write(f"{index}.{name}", pieces))
        manifest = build_manifest(
            run="run",
            incarnation=1,
            number=number,
            step=number,
            parent=number - 1,
            base=0 if whole else number - 1,
            codec="dense" if whole else self.codec,
            tensors=[t.entry() for t in tensors],
            payloads=files,
        )
        uri = publication.commit(manifest)
        announced = AnnouncedVersion(
            version=manifest.version,
            manifest_uri=uri,
            payload_bytes=manifest.payload_bytes,
            base=manifest.base,
        )
        self._base = tensors
        self.announced.append(announced)
        self.bits[number] = {t.name: bytes(t.data) for t in tensors}
        return announced

    def remove(self, number: int) -> None:
        for version in self.store.committed("run"):
            if version.number == number:
                self.store.remove(version)

    def payload(self, announced: AnnouncedVersion) -> Path:
        manifest = self.store.read_manifest(announced.manifest_uri)
        path = path_of(announced.manifest_uri).parent / manifest.payloads[0].name
        path.chmod(0o644)
        return path


@pytest.fixture(params=list(CODERS))
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Trainer:
    return Trainer(tmp_path, codec=request.param)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def shadows(tmp_path: Path) -> Iterator[ShadowFolder]:
    folder = ShadowFolder(tmp_path / "shadow", threads=2)
    yield folder
    folder.close()


def held(folder: Path) -> dict[str, bytes]:
    return {t.name: bytes(t.data) for t in tensors_in(folder)}


def assert_exact(shadow: Shadow, trainer: Trainer) -> None:
    assert held(shadow.folder) == trainer.bits[shadow.manifest.version.number]
    assert not [p for p in shadow.folder.iterdir() if p.name.startswith(".")]


def test_a_chain_of_deltas_is_followed_version_by_version(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    for _ in range(4):
        announced = trainer.publish()
        shadow = shadows.prepare(announced, base, trainer.announced)
        assert_exact(shadow, trainer)
        shadows.prune([shadow.folder])
    assert announced.base == 3


def test_versions_in_between_are_applied_without_being_made(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    first = shadows.prepare(trainer.publish(), base, trainer.announced)
    for _ in range(3):
        announced = trainer.publish()
    trainer.remove(1)  # held here: not needed from the store
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)
    assert held(first.folder) == trainer.bits[1]  # what it was copied from is as it was
    assert len([p for p in shadows.root.iterdir() if p.is_dir()]) == 2


def test_a_late_joiner_starts_at_the_newest_anchor(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    for _ in range(3):
        trainer.publish()
    trainer.publish(anchor=True)
    for _ in range(2):
        announced = trainer.publish()
    for number in (1, 2, 3):
        trainer.remove(number)
    anchor = trainer.payload(trainer.announced[3])
    before = anchor.read_bytes()
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)
    assert anchor.read_bytes() == before  # linked, never written to


def test_a_new_anchor_is_not_rebuilt_from_what_is_held(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    for _ in range(2):
        shadows.prepare(trainer.publish(), base, trainer.announced)
    anchor = trainer.publish(anchor=True)
    assert_exact(shadows.prepare(anchor, base, trainer.announced), trainer)
    after = trainer.publish()
    assert_exact(shadows.prepare(after, base, trainer.announced), trainer)


def test_several_payloads_of_a_delta_are_applied_together(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    trainer.publish(payloads=2)
    announced = trainer.publish(payloads=3)
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)


def test_a_restarted_receiver_trusts_no_old_shadow_as_a_base(
    trainer: Trainer, tmp_path: Path, base: Path
) -> None:
    folder = ShadowFolder(tmp_path / "shadow")
    first = folder.prepare(trainer.publish(), base, trainer.announced)
    folder._lock.close()  # as a killed process does
    data = bytearray((first.folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (first.folder / "model.safetensors").unlink()
    (first.folder / "model.safetensors").write_bytes(data)
    announced = trainer.publish()
    again = ShadowFolder(tmp_path / "shadow")
    assert_exact(again.prepare(announced, base, trainer.announced), trainer)
    again.close()


def test_a_base_of_the_same_number_from_another_publisher_is_not_used(
    trainer: Trainer, shadows: ShadowFolder, base: Path, tmp_path: Path
) -> None:
    other = Trainer(tmp_path / "other", seed=1)
    other.publish()
    shadows.prepare(other.publish(anchor=True), base, other.announced)  # a number 2, of other bytes
    for _ in range(3):
        announced = trainer.publish()
    trainer_shadow = shadows.prepare(announced, base, trainer.announced)
    assert_exact(trainer_shadow, trainer)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, remove])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_link_of_the_chain_is_refused_and_leaves_nothing(
    trainer: Trainer, shadows: ShadowFolder, base: Path, damage: object, number: int
) -> None:
    for _ in range(3):
        announced = trainer.publish()
    damage(trainer.payload(trainer.announced[number - 1]))  # type: ignore[operator]
    try:
        shadow = shadows.prepare(announced, base, trainer.announced)
    except (ChecksumMismatch, PayloadMissing):
        assert [path.name for path in shadows.root.iterdir()] == [".lock"]
    else:
        # What was damaged in the anchor has been overwritten since: no steps from it are wrong.
        assert (trainer.codec, number, damage) == ("overwrite", 1, flip)
        assert_exact(shadow, trainer)


def test_a_payload_swapped_for_another_version_s_is_refused(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    """The same size and a sound structure, but not the bytes that the manifest names."""
    first = trainer.publish()
    held_now = shadows.prepare(first, base, trainer.announced)
    announced = trainer.publish()
    payload = trainer.payload(announced)
    codec = delta_codec(trainer.codec)
    old = list(tensors_in(held_now.folder))
    other = b"".join(codec.encode(old, old))
    payload.write_bytes(other.ljust(payload.stat().st_size, b"\0"))
    with pytest.raises(ChecksumMismatch, match=r"expected checksum .* publish the version again"):
        shadows.prepare(announced, base, trainer.announced)


class Peer:
    """Another receiver: it has what a trainer published, and counts who asks."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.asked: list[int] = []

    def fetch_model(self, announced: AnnouncedVersion, into: Path) -> list[Path]:
        number = announced.version.number
        self.asked.append(number)
        bits = self.trainer.bits[number]
        tensors = [Tensor(n, "BF16", s, memoryview(bits[n])) for n, s in SHAPES.items()]
        (into / "model.safetensors").write_bytes(b"".join(Dense().encode(tensors)))
        return [into / "model.safetensors"]


@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_a_host_that_is_stuck_takes_a_peer_s_copy(
    trainer: Trainer, tmp_path: Path, base: Path, damage: object
) -> None:
    peer = Peer(trainer)
    shadows = ShadowFolder(tmp_path / "shadow", models=peer)
    shadows.prepare(trainer.publish(), base, trainer.announced)  # a newcomer asks first
    assert_exact(shadows.prepare(trainer.publish(), base, trainer.announced), trainer)
    assert peer.asked == [1]
    announced = trainer.publish()
    damage(trainer.payload(announced))  # type: ignore[operator]
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)
    assert peer.asked == [1, 3]
    # What came from a peer is a base as good as any other.
    assert_exact(shadows.prepare(trainer.publish(), base, trainer.announced), trainer)
    assert peer.asked == [1, 3]
    shadows.close()


class Elsewhere(StoreTransport):
    """A second way to the same payloads, which was not damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.sound: dict[str, bytes] = {}

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        into.write_bytes(self.sound[payload.name])
        return Fetched(into, payload.size_bytes)


@pytest.mark.parametrize("anchor", [False, True])
def test_a_payload_damaged_in_the_store_is_fetched_by_the_next_transport(
    trainer: Trainer, tmp_path: Path, base: Path, anchor: bool
) -> None:
    """A shared file is linked unread: that it is damaged shows in what it decodes to."""
    elsewhere = Elsewhere()
    shadows = ShadowFolder(
        tmp_path / "shadow", transport=FirstThatWorks([StoreTransport(), elsewhere])
    )
    shadows.prepare(trainer.publish(), base, trainer.announced)
    announced = trainer.publish(anchor=anchor)
    payload = trainer.payload(announced)
    elsewhere.sound[payload.name] = payload.read_bytes()
    flip(payload)
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)
    shadows.close()


def rot(shadow: Shadow) -> None:
    """Flip a bit of `c`, the file's last tensor, in this copy alone."""
    path = shadow.folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_shadow_that_rots_is_seen_in_what_is_built_on_it(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    rot(shadows.prepare(trainer.publish(), base, trainer.announced))
    announced = trainer.publish(frozen="c")
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)


def test_rot_where_nothing_changed_is_the_engine_s_to_see_and_not_built_on_again(
    tmp_path: Path, shadows: ShadowFolder, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was proven is not hashed again; the engine's checksums are of every tensor."""
    trainer = Trainer(tmp_path)
    monkeypatch.setattr("weight_sync.codecs.delta.SMALL_BYTES", 1)  # a block for each tensor
    rot(shadows.prepare(trainer.publish(), base, trainer.announced))
    announced = trainer.publish(frozen="c")
    rebuilt = shadows.prepare(announced, base, trainer.announced)
    assert held(rebuilt.folder)["c"] != trainer.bits[2]["c"]
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)


def announce_lie(
    trainer: Trainer, said: list[TensorEntry], new: list[Tensor], base: list[Tensor]
) -> AnnouncedVersion:
    """Commit a version 3 on 1 whose payload is sound, but not of what its manifest says."""
    publication = trainer.store.begin("run", 3, 1)
    payload = publication.write("delta.bin", delta_codec("ulp-gap").encode(new, base))
    manifest = build_manifest(
        run="run",
        incarnation=1,
        number=3,
        step=3,
        parent=1,
        base=1,
        codec="ulp-gap",
        tensors=said,
        payloads=[payload],
    )
    return AnnouncedVersion(
        version=manifest.version,
        manifest_uri=publication.commit(manifest),
        payload_bytes=manifest.payload_bytes,
        base=1,
    )


@pytest.mark.parametrize("lie", ["changes left out", "changes not named"])
def test_a_delta_of_other_changes_than_its_manifest_s_is_refused(
    tmp_path: Path, shadows: ShadowFolder, base: Path, lie: str
) -> None:
    trainer = Trainer(tmp_path)
    first = shadows.prepare(trainer.publish(), base, trainer.announced)
    old = list(tensors_in(first.folder))
    new = list(tensors_in(shadows.prepare(trainer.publish(), base, trainer.announced).folder))
    shadows.prune([first.folder])
    said, sent = (new, old) if lie == "changes left out" else (old, new)
    lying = announce_lie(trainer, [t.entry() for t in said], sent, old)
    with pytest.raises(ChecksumMismatch, match="tensor a: expected BF16"):
        shadows.prepare(lying, base, [*trainer.announced, lying])


def test_tensors_that_did_not_change_are_not_hashed_again(
    tmp_path: Path, shadows: ShadowFolder, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path)
    monkeypatch.setattr("weight_sync.codecs.delta.SMALL_BYTES", 1)  # a block for each tensor
    shadows.prepare(trainer.publish(), base, trainer.announced)
    announced = trainer.publish(frozen="a")
    hashed: list[str] = []
    entry = Tensor.entry

    def counted(tensor: Tensor) -> TensorEntry:
        hashed.append(tensor.name)
        return entry(tensor)

    monkeypatch.setattr(Tensor, "entry", counted)
    assert_exact(shadows.prepare(announced, base, trainer.announced), trainer)
    assert sorted(hashed) == ["b", "c"]


def test_a_hole_in_the_history_is_named(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    for _ in range(3):
        announced = trainer.publish()
    with pytest.raises(PayloadMissing, match="version 3 needs version 2, which is not in the"):
        shadows.prepare(announced, base, trainer.announced[:1])
    trainer.remove(2)
    with pytest.raises(PayloadMissing, match=r"0000000002-0001/.*: it was pruned"):
        shadows.prepare(announced, base, trainer.announced)


def test_a_base_that_was_announced_otherwise_is_refused(
    trainer: Trainer, shadows: ShadowFolder, base: Path
) -> None:
    trainer.publish()
    announced = replace(trainer.publish(), base=0)
    with pytest.raises(ManifestError, match="a delta of 1, announced as a delta of 0"):
        shadows.prepare(announced, base, trainer.announced)


def test_codecs_of_another_release_are_refused(
    tmp_path: Path, shadows: ShadowFolder, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish()
    announced = trainer.publish()
    monkeypatch.setattr("weight_sync.codecs.CODERS", {})
    with pytest.raises(UnknownCodec, match="the manifest of a delta names codec 'ulp-gap'"):
        shadows.prepare(announced, base, trainer.announced)


@given(
    steps=st.lists(st.sampled_from(["delta", "anchor", "follow", "restart", "prune"]), max_size=14),
    codec=st.sampled_from(list(CODERS)),
)
@settings(max_examples=40, deadline=None)
def test_whatever_was_published_pruned_and_skipped_the_newest_is_made_exactly(
    steps: list[str], codec: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "base").mkdir()
        trainer = Trainer(root, codec=codec)
        trainer.publish()
        shadows = ShadowFolder(root / "shadow", threads=1)
        for step in [*steps, "follow"]:
            if step in ("delta", "anchor"):
                trainer.publish(anchor=step == "anchor")
            elif step == "follow":
                announced = trainer.announced[-1]
                shadow = shadows.prepare(announced, root / "base", trainer.announced)
                assert_exact(shadow, trainer)
                shadows.prune([shadow.folder])
            elif step == "restart":
                shadows.close()
                shadows = ShadowFolder(root / "shadow", threads=1)
            else:
                stored = {v.number for v in trainer.store.committed("run")}
                links = {
                    v.version.number: Link(v.version.number, v.base)
                    for v in trainer.announced
                    if v.version.number in stored
                }
                for number in prunable(links, targets=(), keep_latest=1):
                    trainer.remove(number)
        shadows.close()


def test_threads_are_enough_for_all(trainer: Trainer, tmp_path: Path, base: Path) -> None:
    trainer.publish()
    announced = trainer.publish()
    with ThreadPoolExecutor(4) as pool:
        folders = [ShadowFolder(tmp_path / f"s{i}", threads=i + 1) for i in range(4)]
        made = pool.map(lambda f: f.prepare(announced, base, trainer.announced), folders)
        for shadow in made:
            assert_exact(shadow, trainer)
    for folder in folders:
        folder.close()
