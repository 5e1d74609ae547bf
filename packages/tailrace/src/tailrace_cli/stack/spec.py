"""What a stack is made of: processes, their configuration and what they wait for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator
from service_kit.config import Config, ConfigError

from tailrace_cli.stack.files import BASE_MODEL

PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


class ProcessSpec(Config):
    """One process: `python -m <module> <command> --config <its config as TOML> <arguments>`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Unique within the stack; names the log file."""
    module: str
    """Importable package with a `__main__`."""
    command: str = "serve"
    """Sub-command of the module."""
    address: str
    """Where it answers health checks: `grpc://host:port` or `http://host:port`."""
    after: tuple[str, ...] = ()
    """Started once these answer their health checks."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Keys of the module's own config; nested tables as in its TOML file."""
    arguments: tuple[str, ...] = ()
    """Further command line arguments, after `--config`."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Added to the supervisor's environment."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for its first successful health check."""

    @model_validator(mode="after")
    def _address_scheme_is_known(self) -> Self:
        if not re.match(r"^(grpc|http)://[^/:]+:\d+$", self.address):
            raise ValueError(
                f"address is {self.address!r}; expected grpc://host:port or http://host:port"
            )
        return self

    @property
    def protocol(self) -> Literal["grpc", "http"]:
        """How its health is asked for."""
        return "grpc" if self.address.startswith("grpc://") else "http"

    @property
    def target(self) -> str:
        """host:port."""
        return self.address.split("://", 1)[1]


class RestartPolicy(Config):
    """When a process that ended is started again."""

    enabled: bool = True
    """False: the first unexpected end of a process ends the stack."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Wait before the first restart; doubles with each restart in a row, up to `backoff_max_s`."""
    backoff_max_s: float = Field(default=30.0, gt=0)
    """Longest wait between restarts."""
    healthy_after_s: float = Field(default=30.0, gt=0)
    """A process that ran this long starts again from the first backoff."""
    max_in_a_row: int = Field(default=10, ge=1)
    """Restarts in a row after which the stack gives up on the process and ends."""


class StackSpec(Config):
    """A stack file: variables, processes, restart policy."""

    name: str = "local"
    """Shown in status and logs."""
    state_dir: Path = Path("runs/stack")
    """Logs, generated config files and the services' own state."""
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Values of `${name}` in every string below; `state_dir` is always defined."""
    restart: RestartPolicy = RestartPolicy()
    """When processes are started again."""
    drain_s: float = Field(default=15.0, gt=0)
    """Time a process has to end after SIGTERM before it is killed."""
    processes: tuple[ProcessSpec, ...] = Field(min_length=1)
    """In no particular order; `after` gives the order."""

    @model_validator(mode="after")
    def _names_are_unique_and_known(self) -> Self:
        names = [p.name for p in self.processes]
        if len(names) != len(set(names)):
            raise ValueError(f"process names repeat: {', '.join(names)}")
        for process in self.processes:
            unknown = set(process.after) - set(names)
            if unknown:
                raise ValueError(
                    f"{process.name} starts after {', '.join(sorted(unknown))}, "
                    f"which is not a process; known: {', '.join(names)}"
                )
        start_order(self.processes)
        return self


def start_order(processes: Sequence[ProcessSpec]) -> list[list[ProcessSpec]]:
    """Waves of processes, each of which may start once all earlier waves are healthy.

    Raises:
        ValueError: `after` has a cycle.
    """
    waves: list[list[ProcessSpec]] = []
    started: set[str] = set()
    left = list(processes)
    while left:
        wave = [p for p in left if set(p.after) <= started]
        if not wave:
            raise ValueError(f"'after' has a cycle among {', '.join(p.name for p in left)}")
        waves.append(wave)
        started |= {p.name for p in wave}
        left = [p for p in left if p not in wave]
    return waves


def expand(value: Any, variables: Mapping[str, str]) -> Any:
    """Replaces `${name}` in every string of a nested value.

    Raises:
        ConfigError: an unknown variable.
    """
    if isinstance(value, str):

        def lookup(found: re.Match[str]) -> str:
            if found[1] not in variables:
                raise ConfigError(
                    f"unknown variable ${{{found[1]}}} in {value!r}; "
                    f"known: {', '.join(sorted(variables))}"
                )
            return variables[found[1]]

        return PLACEHOLDER.sub(lookup, value)
    if isinstance(value, Mapping):
        return {key: expand(item, variables) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expand(item, variables) for item in value]
    return value


def parse_stack(
    document: Mapping[str, Any],
    *,
    source: str,
    state_dir: Path | None = None,
    variables: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> StackSpec:
    """A validated stack with its variables filled in.

    Args:
        document: What the TOML file holds.
        source: Names the file in errors.
        state_dir: Instead of the file's.
        variables: Instead of the file's, by name.
        settings: `process.dotted.key=value`, set in the processes' configurations last; values are
            read as TOML, or else as text.

    Raises:
        ConfigError: unknown keys, wrong types, unknown variables or processes.
    """
    data = dict(document)
    folder = Path(state_dir or data.get("state_dir", StackSpec.model_fields["state_dir"].default))
    values = {"base_model": str(BASE_MODEL), "state_dir": str(folder.resolve())}
    unknown = set(variables or {}) - set(data.get("variables", {})) - set(values)
    if unknown:
        known = ", ".join(sorted({*data.get("variables", {}), *values}))
        raise ConfigError(f"{source} has no variable {', '.join(sorted(unknown))}; known: {known}")
    for name, value in {**data.get("variables", {}), **(variables or {})}.items():
        values[name] = expand(value, values)
    if "processes" in data:
        data["processes"] = expand(data["processes"], values)
        tables = {p["name"]: p.setdefault("config", {}) for p in data["processes"] if "name" in p}
        for setting in settings:
            apply_setting(tables, setting)
    data["variables"] = values
    data["state_dir"] = folder
    try:
        return StackSpec.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{source} is not a valid stack:\n  " + "\n  ".join(lines)) from error


def apply_setting(tables: Mapping[str, dict[str, Any]], setting: str) -> None:
    """Puts one `name.dotted.key=value` into the table of that name.

    Raises:
        ConfigError: it is no setting, or there is no such table.
    """
    path, equals, text = setting.partition("=")
    name, _, key = path.partition(".")
    if not equals or not key:
        raise ConfigError(f"{setting!r} is no setting; expected name.dotted.key=value")
    if name not in tables:
        raise ConfigError(f"{setting!r}: nothing is named {name!r}; known: {', '.join(tables)}")
    table = tables[name]
    *folders, last = key.split(".")
    for part in folders:
        table = table.setdefault(part, {})
    table[last] = _toml_value(text)


def parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """Variables from `name=value` texts.

    Raises:
        ConfigError: a text is something else.
    """
    for text in texts:
        if not re.match(r"^\w+=", text):
            raise ConfigError(f"{text!r} is no variable; expected name=value")
    return dict(text.split("=", 1) for text in texts)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def load_stack(
    file: Path,
    *,
    state_dir: Path | None = None,
    variables: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> StackSpec:
    """Reads a stack file such as infra/local/stack.toml; see `parse_stack` for the rest.

    Raises:
        ConfigError: the file is missing, no TOML, or not a valid stack.
    """
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"no stack file {file}; expected a TOML file with [[processes]]"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no valid TOML: {error}") from error
    return parse_stack(
        document,
        source=str(file),
        state_dir=state_dir,
        variables=variables,
        settings=settings,
    )


def dump_stack(spec: StackSpec) -> str:
    """The text of a stack file that gives this very stack, its variables filled in."""
    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True))
