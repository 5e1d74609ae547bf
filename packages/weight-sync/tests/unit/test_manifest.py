import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_sync.core.manifest import (
    DTYPE_BYTES,
    Manifest,
    PayloadFile,
    TensorEntry,
    build_manifest,
    digest,
)
from weight_sync.errors import ManifestError

digests = st.binary(max_size=8).map(digest)
entries = st.builds(
    TensorEntry,
    name=st.text(min_size=1, max_size=30).filter(
        lambda name: name.isprintable() and name != "__metadata__"
    ),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple),
    checksum=digests,
)
manifests = st.builds(
    lambda number, delta, parent, step, tensors: build_manifest(
        run="a-run.1",
        incarnation=3,
        number=number,
        step=step,
        parent=parent % number,
        base=delta % number,
        codec="dense",
        tensors=tensors,
        payloads=[PayloadFile("model.safetensors", 17, digest(b"file"))],
    ),
    number=st.integers(1, 1 << 40),
    delta=st.integers(0, 1 << 40),
    parent=st.integers(0, 1 << 40),
    step=st.integers(0, 1 << 40),
    tensors=st.lists(entries, max_size=6, unique_by=lambda entry: entry.name),
)


def one_manifest() -> Manifest:
    return build_manifest(
        run="run",
        incarnation=1,
        number=4,
        step=7,
        parent=3,
        codec="dense",
        tensors=[
            TensorEntry("b", "F32", (2, 3), digest(b"b")),
            TensorEntry("a", "BF16", (5,), digest(b"a")),
        ],
        payloads=[PayloadFile("model.safetensors", 34, digest(b"file"))],
    )


@given(manifests)
def test_reads_back_exactly_what_was_written(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_bytes_do_not_depend_on_the_order_the_tensors_came_in() -> None:
    manifest = one_manifest()
    again = build_manifest(
        run="run",
        incarnation=1,
        number=4,
        step=7,
        parent=3,
        codec="dense",
        tensors=reversed(manifest.tensors),
        payloads=manifest.payloads,
    )
    assert again.to_bytes() == manifest.to_bytes()
    assert manifest.model_bytes == 34
    assert manifest.is_anchor


def test_every_truncation_is_refused() -> None:
    data = one_manifest().to_bytes()
    for length in range(len(data)):
        with pytest.raises(ManifestError, match="cut off"):
            Manifest.from_bytes(data[:length])


def test_every_changed_byte_is_refused_or_is_another_version() -> None:
    manifest = one_manifest()
    data = manifest.to_bytes()
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 1
        try:
            other = Manifest.from_bytes(bytes(changed))
        except (ManifestError, UnicodeDecodeError):
            continue
        # What can change unseen by the hashes inside is caught by the content address outside.
        assert other != manifest


def edited(**changes: Any) -> bytes:
    top = json.loads(one_manifest().to_bytes())
    for path, value in changes.items():
        at = top
        *parents, last = path.split("__")
        for key in parents:
            at = at[int(key) if key.isdigit() else key]
        if value is None:
            del at[last]
        else:
            at[int(last) if last.isdigit() else last] = value
    return json.dumps(top, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "expected manifest format 1, found 2"),
        ({"format": "1"}, "expected manifest format 1, found '1'"),
        ({"codec": None}, "missing \\['codec'\\]"),
        ({"extra": 1}, "unknown \\['extra'\\]"),
        ({"version__step": None}, "missing \\['step'\\]"),
        ({"version__step": -1}, "step: expected at least 0, found -1"),
        ({"version__number": True}, "version.number: expected int, found True"),
        ({"version__parent": 4}, "parent: expected 0 or a lower number, found 4"),
        ({"version__run": "../up"}, "run: expected 1 to 100 letters"),
        ({"base": 9}, "base: expected 0 or a lower number"),
        ({"version__root_hash": "0" * 32}, "root_hash: expected [0-9a-f]{32}, found '0{32}'"),
        ({"layout_hash": "0" * 32}, "layout_hash: expected [0-9a-f]{32}, found '0{32}'"),
        ({"tensors__0__0": "\ud800"}, "tensor name: expected printable text"),
        ({"tensors__0__0": "__metadata__"}, "tensor name: expected printable text, not"),
        ({"tensors__0__1": "BF15"}, "dtype of a: expected one of BOOL"),
        ({"tensors__0__2": [1.5]}, "shape of a: expected int, found 1.5"),
        ({"tensors__0__3": "xyz"}, "checksum of a: expected 32 hex digits"),
        ({"tensors__0": ["a"]}, "tensors\\[0\\]: expected 4 values"),
        ({"payloads__0__0": "../../etc/passwd"}, "payload name: expected a plain file name"),
        ({"payloads__0__1": -2}, "size of model.safetensors: expected at least 0"),
        ({"tensors": {}}, "manifest.tensors: expected list"),
    ],
)
def test_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_bytes(edited(**changes))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b'{"format":1}'])
def test_refuses_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)


def test_refuses_a_repeated_key() -> None:
    data = one_manifest().to_bytes()
    doubled = data.replace(b'{"base":0', b'{"base":1,"base":0', 1)
    assert doubled != data
    with pytest.raises(ManifestError, match="canonical"):
        Manifest.from_bytes(doubled)


def test_root_tells_apart_same_bytes_under_another_layout() -> None:
    manifest = one_manifest()
    reshaped = [replace(manifest.tensors[1], shape=(3, 2)), manifest.tensors[0]]
    other = build_manifest(
        run="run",
        incarnation=1,
        number=4,
        step=7,
        parent=3,
        codec="dense",
        tensors=reshaped,
        payloads=(),
    )
    assert other.version.root_hash != manifest.version.root_hash
    assert other.layout_hash != manifest.layout_hash
