"""Typed configuration from a TOML file, the environment and `--set` overrides.

Precedence: overrides, then environment, then file, then defaults. A key that the model does not
know is an error in all three, and the message names the closest key that it does know.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic_core import PydanticUndefined

from service_kit.errors import StartupError

SEPARATOR = "__"


class ConfigError(StartupError):
    """The configuration is wrong. The message lists every problem, its source and its remedy."""


class Config(pydantic.BaseModel):
    """Base of all configuration: frozen, complete on construction, closed to unknown keys.

    The string under a field documents it; the field's name tells the unit, its value the default.
    """

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


C = TypeVar("C", bound=pydantic.BaseModel)
Path_ = tuple[str, ...]


@dataclass
class _Layers:
    """The merged raw values, and which source gave each of them."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Path_, str] = field(default_factory=dict)

    def put(self, path: Path_, value: Any, source: str) -> None:
        if isinstance(value, dict):
            self._table(path)
            if not value or path == ():
                self.sources.setdefault(path, source)
            for key, inner in value.items():
                self.put((*path, key), inner, source)
            return
        self._table(path[:-1])[path[-1]] = value
        self.sources = {p: s for p, s in self.sources.items() if p[: len(path)] != path}
        self.sources[path] = source

    def _table(self, path: Path_) -> dict[str, Any]:
        table = self.values
        for key in path:
            inner = table.get(key)
            if not isinstance(inner, dict):
                inner = table[key] = {}
            table = inner
        return table

    def source_of(self, path: Path_) -> str:
        """Return who gave the value at `path`, or what lies below it, or the table around it."""
        below = {source for known, source in self.sources.items() if known[: len(path)] == path}
        if below:
            return ", ".join(sorted(below))
        for length in range(len(path) - 1, -1, -1):
            if (found := self.sources.get(path[:length])) is not None:
                return found
        return "defaults"


def load_config(
    model: type[C],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    env_prefix: str,
    overrides: Sequence[str] = (),
) -> C:
    """Read one configuration from its three sources.

    Args:
        model: The class to fill, usually a `Config`.
        file: A TOML file with the model's fields as top-level keys.
        environ: Variables; those named `<env_prefix>__SECTION__KEY` count. Pass `os.environ`.
        env_prefix: For example `TAILRACE_SWE_EVAL`, without the separator.
        overrides: `dotted.key=value`, later ones win.

    In the environment and in overrides a value is taken literally, except that a TOML array,
    inline table or quoted string is read as such, and `null` means no value.

    Raises:
        ConfigError: For unknown keys, values that do not fit, or a file that cannot be read.
    """
    layers = _Layers()
    if file is not None:
        layers.put((), _read_file(file), str(file))
    prefix = env_prefix.rstrip("_")
    for name, text in sorted((environ or {}).items()):
        if (path := _env_path(name, prefix, model)) is not None:
            layers.put(path, _value(text), name)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        source = f"--set {override}"
        if not equals or not all(path):
            raise ConfigError(
                f"{source}: expected dotted.key=value, such as server.bind=127.0.0.1:0"
            )
        layers.put(path, _value(text), source)
    try:
        return model.model_validate(_over_defaults(model, layers.values))
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, layers, model)) from None


def _read_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: cannot read the configuration file: {cause}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _env_path(name: str, prefix: str, model: type[pydantic.BaseModel]) -> Path_ | None:
    if not name.startswith(prefix + "_"):
        return None
    rest = name[len(prefix) :]
    path = tuple(part.lower() for part in rest[len(SEPARATOR) :].split(SEPARATOR))
    if not rest.startswith(SEPARATOR) or not all(path):
        guess = closest_key(rest.strip("_").lower().replace(SEPARATOR, "."), model)
        meant = prefix + "".join(SEPARATOR + part.upper() for part in (guess or "key").split("."))
        raise ConfigError(
            f"{name}: expected {prefix}{SEPARATOR}SECTION{SEPARATOR}KEY with double underscores; "
            f"did you mean {meant}?"
        )
    return path


def _value(text: str) -> Any:
    stripped = text.strip()
    if stripped == "null":
        return None
    if stripped[:1] not in {"[", "{", '"', "'"}:
        return text
    try:
        return tomllib.loads(f"value = {stripped}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # such as [::1]:7101


def _over_defaults(model: type[pydantic.BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Complete tables that are given in part from the default of their field.

    A service whose default is `ServerConfig(bind="127.0.0.1:7101")` keeps that address when the
    operator sets `server.drain_grace_s` alone.
    """
    completed = dict(values)
    for name, info in model.model_fields.items():
        given = values.get(name)
        if not isinstance(given, dict):
            continue
        default = info.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, pydantic.BaseModel):
            completed[name] = _over_instance(default, given)
        elif isinstance(info.annotation, type) and issubclass(info.annotation, pydantic.BaseModel):
            completed[name] = _over_defaults(info.annotation, given)
    return completed


def _over_instance(default: pydantic.BaseModel, given: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, info in type(default).model_fields.items():
        current = getattr(default, name)
        value = given.get(name, current)
        if typing.get_origin(info.annotation) is typing.Literal and value != current:
            return given  # the operator chose another member of the union
        if isinstance(current, pydantic.BaseModel) and isinstance(value, dict):
            value = _over_instance(current, value)
        merged[name] = value
    return {**given, **merged}


def _explain(
    error: pydantic.ValidationError, layers: _Layers, model: type[pydantic.BaseModel]
) -> str:
    lines = []
    # One finding a key: a union reports each of its members.
    seen: set[Path_] = set()
    for item in error.errors(include_url=False, include_context=False):
        path = _raw_path(item["loc"], layers.values, missing=item["type"] == "missing")
        if path in seen:
            continue
        seen.add(path)
        dotted = ".".join(path)
        source = layers.source_of(path)
        if item["type"] == "extra_forbidden":
            guess = closest_key(dotted, model)
            hint = f"; closest valid key: {guess!r}" if guess else ""
            lines.append(f"{source}: unknown key {dotted!r}{hint}")
        elif item["type"] == "missing":
            lines.append(f"{source}: {dotted!r} is required and has no default")
        else:
            said = item["msg"].removeprefix("Value error, ")
            shown = _shown(path, layers.values, model)
            about = f"{dotted!r}: " if dotted else ""
            lines.append(f"{source}: {about}{said}{shown}")
    return "\n".join(lines)


def _raw_path(loc: tuple[int | str, ...], values: Any, *, missing: bool) -> Path_:
    """Return the location as the operator wrote it, without the tags that unions add."""
    path: list[str] = []
    node: Any = values
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        known = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if known:
            node = node[part]
            path.append(str(part))
        elif last and missing:
            path.append(str(part))
    return tuple(path) or tuple(str(part) for part in loc)


def _shown(path: Path_, values: Any, model: type[pydantic.BaseModel]) -> str:
    node = values
    for part in path:
        if isinstance(node, list):
            node = node[int(part)] if part.isdigit() and int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, dict) else None
    if node is None or isinstance(node, dict | list):
        return ""
    known = {entry.key: entry for entry in describe_config(model)}
    entry = known.get(".".join(path))
    if entry is not None and entry.secret:
        return ", found a secret value"
    return f", found {str(node)[:100]!r}"


def closest_key(dotted: str, model: type[pydantic.BaseModel]) -> str | None:
    """Return the valid dotted key that looks most like `dotted`, or None."""
    keys = [entry.key for entry in describe_config(model)]
    tables = {".".join(key.split(".")[:n]) for key in keys for n in range(1, key.count(".") + 1)}
    valid = [*keys, *sorted(tables)]
    near = difflib.get_close_matches(dotted, valid, n=1, cutoff=0.6)
    if near:
        return near[0]
    # The right name in the wrong section.
    name = dotted.rsplit(".", 1)[-1]
    by_name = {key.rsplit(".", 1)[-1]: key for key in reversed(valid)}
    near = difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.6)
    return by_name[near[0]] if near else None


@dataclass(frozen=True)
class ConfigKey:
    """One setting of a model, for tables and suggestions."""

    key: str
    """Dotted path; `*` stands for a free name or an index."""
    type: str
    default: str
    """As text; empty when the key is required."""
    description: str
    secret: bool


def describe_config(model: type[pydantic.BaseModel]) -> list[ConfigKey]:
    """List every setting of a configuration model, in order."""
    return list(_describe(model, (), None))


def _describe(model: type[pydantic.BaseModel], at: Path_, default: Any) -> Iterator[ConfigKey]:
    for name, info in model.model_fields.items():
        path = (*at, name)
        if isinstance(default, model):
            value = getattr(default, name)
        else:
            value = info.get_default(call_default_factory=True, validated_data={})
        nested = _nested_models(info.annotation)
        secret = "Secret" in str(info.annotation)
        if not nested:
            yield ConfigKey(
                key=".".join(path),
                type=_type_name(info.annotation),
                default=_default_text(value, secret=secret),
                description=" ".join((info.description or "").split()),
                secret=secret,
            )
        for extra, inner in nested:
            yield from _describe(inner, (*path, *extra), value)


def _nested_models(annotation: Any) -> list[tuple[Path_, type[pydantic.BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [((), annotation)]
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in {typing.Union, types.UnionType, typing.Annotated}:
        return [found for argument in arguments for found in _nested_models(argument)]
    if origin in {list, tuple, dict, Mapping, Sequence}:
        inner = [found for argument in arguments for found in _nested_models(argument)]
        return [(("*", *path), model) for path, model in inner]
    return []


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in {typing.Union, types.UnionType}:
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if origin is not None:
        inner = ", ".join(_type_name(argument) for argument in arguments if argument is not ...)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    name: str = getattr(annotation, "__name__", str(annotation))
    return name.removesuffix("Path") + "path" if name.endswith("Path") else name


def _default_text(value: Any, *, secret: bool) -> str:
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "null"
    return "***" if secret else str(value)
