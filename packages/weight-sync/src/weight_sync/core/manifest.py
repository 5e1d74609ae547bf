"""A version's manifest: what the version holds, byte for byte, and which files carry it.

The manifest is immutable and content-addressed: its id is the xxh3-128 of its canonical JSON.
Writing it is the one commit point of a version: a payload that no manifest names does not exist,
and one that is named but absent is an error.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from weight_sync.errors import ManifestError

FORMAT = 1
"""The format this code writes, and the only one it reads."""

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes an element, by safetensors' name of the dtype."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def digest(data: Any) -> str:
    """Return the xxh3-128 of a bytes-like object, as 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One version of the policy's weights."""

    run: str
    incarnation: int
    """Rises with every start or resume of the run's trainer; fences off older ones."""
    number: int
    """From 1; never repeats within a run, whatever the incarnation."""
    step: int
    """Optimizer steps along this version's lineage."""
    parent: int
    """The number this one was trained from; 0 for the first."""
    root_hash: str
    """xxh3-128 over the tensors' names, layouts and checksums, hex."""

    def __post_init__(self) -> None:
        check_run(self.run)
        _check(self.incarnation >= 1, "incarnation", "at least 1", self.incarnation)
        _check(self.number >= 1, "number", "at least 1", self.number)
        _check(self.step >= 0, "step", "at least 0", self.step)
        _check(0 <= self.parent < self.number, "parent", "0 or a lower number", self.parent)
        _check_digest("root_hash", self.root_hash)

    @property
    def label(self) -> str:
        """What an engine that holds this version reports as its `weight_version`."""
        return str(self.number)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version."""

    name: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    checksum: str
    """xxh3-128 of the C-contiguous little-endian bytes, hex."""

    def __post_init__(self) -> None:
        usable = bool(self.name) and self.name.isprintable() and self.name != "__metadata__"
        _check(usable, "tensor name", "printable text, not safetensors' __metadata__", self.name)
        _check(self.dtype in DTYPE_BYTES, f"dtype of {self.name}", _DTYPES, self.dtype)
        _check(all(n >= 0 for n in self.shape), f"shape of {self.name}", "sizes >= 0", self.shape)
        _check_digest(f"checksum of {self.name}", self.checksum)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


_DTYPES = "one of " + ", ".join(DTYPE_BYTES)


@dataclass(frozen=True, slots=True)
class PayloadFile:
    """One file of a version, beside its manifest."""

    name: str
    size_bytes: int
    checksum: str
    """xxh3-128 of the file, hex."""

    def __post_init__(self) -> None:
        _check(bool(_FILE.fullmatch(self.name)), "payload name", "a plain file name", self.name)
        _check(self.size_bytes >= 0, f"size of {self.name}", "at least 0", self.size_bytes)
        _check_digest(f"checksum of {self.name}", self.checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one version is. Build with `build_manifest`, read with `Manifest.from_bytes`."""

    version: PolicyVersion
    base: int
    """Number of the version the payload is a delta of; 0: an anchor, complete by itself."""
    codec: str
    layout_hash: str
    """xxh3-128 over names, dtypes and shapes: equal for versions that fit the same engine."""
    tensors: tuple[TensorEntry, ...]
    """In the order of their names."""
    payloads: tuple[PayloadFile, ...]

    def __post_init__(self) -> None:
        _check(0 <= self.base < self.version.number, "base", "0 or a lower number", self.base)
        _check(bool(_FILE.fullmatch(self.codec)), "codec", "a codec's id", self.codec)
        names = [tensor.name for tensor in self.tensors]
        _check(names == sorted(set(names)), "tensors", "unique names in order", "another order")
        files = [payload.name for payload in self.payloads]
        _check(len(files) == len(set(files)), "payloads", "unique names", files)
        found = layout_hash(self.tensors)
        _check(self.layout_hash == found, "layout_hash", found, self.layout_hash)
        found = root_hash(self.tensors)
        _check(self.version.root_hash == found, "root_hash", found, self.version.root_hash)

    @property
    def is_anchor(self) -> bool:
        """Whether the version needs no other to be rebuilt."""
        return self.base == 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payload files."""
        return sum(payload.size_bytes for payload in self.payloads)

    @property
    def model_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON: sorted keys, no blanks, UTF-8."""
        version = self.version
        return _canonical(
            {
                "format": FORMAT,
                "version": {field: getattr(version, field) for field in _VERSION_FIELDS},
                "base": self.base,
                "codec": self.codec,
                "layout_hash": self.layout_hash,
                "tensors": [[t.name, t.dtype, list(t.shape), t.checksum] for t in self.tensors],
                "payloads": [[p.name, p.size_bytes, p.checksum] for p in self.payloads],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read a manifest; anything but the canonical form of a consistent one is refused.

        Raises:
            ManifestError: says which field, what was expected and what was found.
        """
        top = _parse(data)
        fields = _fields("manifest", top, _MANIFEST_FIELDS)
        version = _fields("version", fields["version"], _VERSION_FIELDS)
        manifest = cls(
            version=PolicyVersion(**version),
            base=fields["base"],
            codec=fields["codec"],
            layout_hash=fields["layout_hash"],
            tensors=tuple(
                TensorEntry(name, dtype, tuple(_integers(f"shape of {name}", shape)), checksum)
                for name, dtype, shape, checksum in _rows(
                    "tensors", fields["tensors"], (str, str, list, str)
                )
            ),
            payloads=tuple(
                PayloadFile(*row) for row in _rows("payloads", fields["payloads"], (str, int, str))
            ),
        )
        if manifest.to_bytes() != data:
            raise ManifestError(
                "the manifest is not in canonical form: expected sorted keys, no blanks and no "
                "repeated key; it was not written by a publisher. Publish the version again"
            )
        return manifest


_VERSION_FIELDS: Mapping[str, type] = {
    "run": str,
    "incarnation": int,
    "number": int,
    "step": int,
    "parent": int,
    "root_hash": str,
}
_MANIFEST_FIELDS: Mapping[str, type] = {
    "format": int,
    "version": dict,
    "base": int,
    "codec": str,
    "layout_hash": str,
    "tensors": list,
    "payloads": list,
}


def build_manifest(
    *,
    run: str,
    incarnation: int,
    number: int,
    step: int,
    parent: int,
    codec: str,
    tensors: Iterable[TensorEntry],
    payloads: Iterable[PayloadFile],
    base: int = 0,
) -> Manifest:
    """Return the manifest of a version, its hashes computed from its tensors."""
    ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
    version = PolicyVersion(
        run=run,
        incarnation=incarnation,
        number=number,
        step=step,
        parent=parent,
        root_hash=root_hash(ordered),
    )
    return Manifest(
        version=version,
        base=base,
        codec=codec,
        layout_hash=layout_hash(ordered),
        tensors=ordered,
        payloads=tuple(payloads),
    )


def root_hash(tensors: Iterable[TensorEntry]) -> str:
    """Hash what every tensor is and holds: equal roots mean equal models."""
    return digest("\n".join(f"{_layout(t)}\0{t.checksum}" for t in tensors).encode())


def layout_hash(tensors: Iterable[TensorEntry]) -> str:
    """Hash names, dtypes and shapes alone."""
    return digest("\n".join(_layout(t) for t in tensors).encode())


def layout_of(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return the text that stands for a tensor's layout in hashes."""
    return f"{name}\0{dtype}\0{'x'.join(map(str, shape))}"


def _layout(tensor: TensorEntry) -> str:
    return layout_of(tensor.name, tensor.dtype, tensor.shape)


def _canonical(value: object) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _parse(data: bytes) -> object:
    try:
        top = json.loads(data)
    except (ValueError, RecursionError) as error:
        at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc)
        cut = "; it was cut off" if at_end or not data.endswith(b"}") else ""
        raise ManifestError(
            f"expected a manifest as JSON, found {len(data)} bytes that are not: {error}{cut}. "
            "Read it again, or publish the version again"
        ) from error
    if isinstance(top, dict) and "format" in top and top["format"] != FORMAT:
        raise ManifestError(
            f"expected manifest format {FORMAT}, found {top['format']!r}: publisher and receiver "
            "are of different releases. Update the older one"
        )
    return top


def _fields(where: str, value: object, expected: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{where}: expected an object, found {type(value).__name__}")
    missing = sorted(expected.keys() - value.keys())
    unknown = sorted(value.keys() - expected.keys())
    if missing or unknown:
        raise ManifestError(
            f"{where}: expected exactly the fields {sorted(expected)}; missing {missing}, "
            f"unknown {unknown}"
        )
    for name, kind in expected.items():
        _check_kind(f"{where}.{name}", value[name], kind)
    return value


def _rows(where: str, rows: list[Any], kinds: tuple[type, ...]) -> Iterable[list[Any]]:
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(kinds):
            raise ManifestError(f"{where}[{index}]: expected {len(kinds)} values, found {row!r}")
        for value, kind in zip(row, kinds, strict=True):
            _check_kind(f"{where}[{index}]", value, kind)
        yield row


def _integers(where: str, values: list[Any]) -> list[int]:
    for value in values:
        _check_kind(where, value, int)
    return values


def _check_kind(where: str, value: object, kind: type) -> None:
    # bool is an int to isinstance, not to a reader.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ManifestError(f"{where}: expected {kind.__name__}, found {value!r}")


def _check(holds: bool, what: str, expected: str, found: object) -> None:
    if not holds:
        raise ManifestError(f"{what}: expected {expected}, found {found!r}")


def check_run(run: str) -> str:
    """Return a run's name if it is one; names become folders.

    Raises:
        ManifestError: it is not.
    """
    rule = "1 to 100 letters, digits, '.', '_' or '-', not starting with '.' or '-'"
    _check(bool(_RUN.fullmatch(run)), "run", rule, run)
    return run


def _check_digest(what: str, value: str) -> None:
    _check(bool(_DIGEST.fullmatch(value)), what, "32 hex digits", value)
