from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_kit import (
    ChannelConfig,
    Config,
    ConfigError,
    RetryConfig,
    ServerConfig,
    describe_config,
    load_config,
)
from service_kit.config import closest_key


class Local(Config):
    kind: Literal["local"] = "local"
    root: Path = Path("/var/lib/boxes")
    """Folder of the boxes."""


class Docker(Config):
    kind: Literal["docker"] = "docker"
    host: str = "unix:///var/run/docker.sock"
    """Where dockerd listens."""


class Pool(Config):
    size: int = pydantic.Field(default=8, ge=1)
    """Boxes kept warm."""
    wait_s: float = 30.0
    """Longest wait for a box, in seconds."""
    tags: tuple[str, ...] = ()
    """Labels."""


class Example(Config):
    name: str
    """Shown in logs."""
    pool: Pool = Pool()
    server: ServerConfig = ServerConfig()
    backend: Annotated[Local | Docker, pydantic.Field(discriminator="kind")] = Local()
    peers: dict[str, Pool] = pydantic.Field(default_factory=dict)
    extra: list[Pool] = pydantic.Field(default_factory=list)
    note: str | None = None
    secret: pydantic.SecretStr | None = None


def _load(
    text: str = 'name = "n"\n',
    *,
    environ: dict[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    tmp_path: Path,
) -> Example:
    file = tmp_path / "example.toml"
    file.write_text(text)
    return load_config(
        Example, file=file, environ=environ, env_prefix="TAILRACE_EXAMPLE", overrides=overrides
    )


def _error(text: str = 'name = "n"\n', *, tmp_path: Path, **sources: object) -> str:
    with pytest.raises(ConfigError) as found:
        _load(text, tmp_path=tmp_path, **sources)  # type: ignore[arg-type]
    return str(found.value)


def test_defaults_fill_what_no_source_gives(tmp_path: Path) -> None:
    config = _load(tmp_path=tmp_path)
    assert config.name == "n"
    assert config.pool.size == 8


def test_overrides_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    text = 'name = "file"\n[pool]\nsize = 2\nwait_s = 2\ntags = ["file"]\n'
    environ = {"TAILRACE_EXAMPLE__POOL__SIZE": "3", "TAILRACE_EXAMPLE__POOL__WAIT_S": "3.5"}
    config = _load(
        text, environ=environ, overrides=("pool.size=4", "pool.size=5"), tmp_path=tmp_path
    )
    assert config.pool == Pool(size=5, wait_s=3.5, tags=("file",))


def test_texts_become_the_types_of_the_fields(tmp_path: Path) -> None:
    config = _load(
        overrides=(
            "name=5",
            'pool.tags=["a", "b"]',
            "server.require_deadline=false",
            "server.bind=[::1]:0",
            "backend.root=/tmp/x",
            "note=null",
            "peers={left = {size = 3}}",
        ),
        environ={"TAILRACE_EXAMPLE__PEERS__RIGHT__SIZE": "4"},
        tmp_path=tmp_path,
    )
    assert config.name == "5"
    assert config.pool.tags == ("a", "b")
    assert config.server.require_deadline is False
    assert config.server.bind == "[::1]:0"
    assert config.backend == Local(root=Path("/tmp/x"))
    assert config.note is None
    assert config.peers == {"left": Pool(size=3), "right": Pool(size=4)}


def test_a_quoted_value_is_always_text(tmp_path: Path) -> None:
    assert _load(overrides=('note="null"',), tmp_path=tmp_path).note == "null"


def test_values_with_equals_signs_and_brackets_survive(tmp_path: Path) -> None:
    config = _load(overrides=("note=a=b", "name=[not toml"), tmp_path=tmp_path)
    assert config.note == "a=b"
    assert config.name == "[not toml"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("server.bnd", "server.bind"),
        ("pool.sise", "pool.size"),
        ("poool.size", "pool"),
        ("nam", "name"),
        ("bind", "server.bind"),
        ("wait_s", "pool.wait_s"),
        ("pol", "pool"),
    ],
)
def test_an_unknown_key_fails_in_all_three_sources_and_names_the_closest(
    wrong: str, right: str, tmp_path: Path
) -> None:
    section, _, key = wrong.rpartition(".")
    text = f'name = "n"\n[{section}]\n{key} = 1\n' if section else f'{key} = 1\nname = "n"\n'
    variable = "TAILRACE_EXAMPLE__" + wrong.upper().replace(".", "__")
    hint = f"closest valid key: '{right}'"
    for source, message in {
        "example.toml": _error(text, tmp_path=tmp_path),
        variable: _error(environ={variable: "1"}, tmp_path=tmp_path),
        f"--set {wrong}=1": _error(overrides=(f"{wrong}=1",), tmp_path=tmp_path),
    }.items():
        assert source in message
        assert hint in message
        assert "unknown key" in message


def test_an_unknown_key_unlike_any_other_has_no_hint(tmp_path: Path) -> None:
    message = _error(overrides=("zzzzzz=1",), tmp_path=tmp_path)
    assert message == "--set zzzzzz=1: unknown key 'zzzzzz'"


def test_an_unknown_key_inside_a_union_list_or_table_is_found(tmp_path: Path) -> None:
    text = """
name = "n"
[backend]
kind = "docker"
hosst = "x"
[peers.left]
sze = 1
[[extra]]
tag = []
"""
    message = _error(text, tmp_path=tmp_path)
    assert "unknown key 'backend.hosst'; closest valid key: 'backend.host'" in message
    assert "unknown key 'peers.left.sze'" in message
    assert "unknown key 'extra.0.tag'" in message


def test_all_problems_are_told_at_once_each_with_its_source(tmp_path: Path) -> None:
    text = "[pool]\nsize = 0\nwait_s = 1\n"
    message = _error(
        text,
        environ={"TAILRACE_EXAMPLE__POOL__WAIT_S": "soon"},
        overrides=("x.y=1",),
        tmp_path=tmp_path,
    )
    lines = message.splitlines()
    assert len(lines) == 4
    file = tmp_path / "example.toml"
    assert f"{file}: 'name' is required and has no default" in lines
    assert any(
        line.startswith(f"{file}: 'pool.size': ") and line.endswith("found '0'") for line in lines
    )
    assert any(
        line.startswith("TAILRACE_EXAMPLE__POOL__WAIT_S: 'pool.wait_s': ")
        and line.endswith("found 'soon'")
        for line in lines
    )
    assert any(line.startswith("--set x.y=1: unknown key 'x'") for line in lines)


def test_a_rule_over_several_fields_names_the_sources_of_the_table(tmp_path: Path) -> None:
    message = _error(overrides=("server.bind=0.0.0.0:7101",), tmp_path=tmp_path)
    assert message.startswith("--set server.bind=0.0.0.0:7101: 'server': bind '0.0.0.0:7101'")


def test_a_secret_never_shows_in_a_message(tmp_path: Path) -> None:
    message = _error(overrides=("secret=[1]",), tmp_path=tmp_path)
    assert "'secret'" in message
    message = _error(environ={"TAILRACE_EXAMPLE__SERVER__TOKEN": "[1]"}, tmp_path=tmp_path)
    assert "'server.token'" in message


def test_a_variable_with_a_single_underscore_is_caught(tmp_path: Path) -> None:
    message = _error(environ={"TAILRACE_EXAMPLE_SERVER__BIND": "x"}, tmp_path=tmp_path)
    assert "did you mean TAILRACE_EXAMPLE__SERVER__BIND?" in message


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    environ = {"TAILRACE_OTHER__X": "1", "PATH": "/bin", "TAILRACE_EXAMPLES": "1"}
    assert _load(environ=environ, tmp_path=tmp_path).name == "n"


@pytest.mark.parametrize("override", ["", "pool.size", "=1", "pool..size=1", ".size=1"])
def test_a_malformed_override_is_a_clear_error(override: str, tmp_path: Path) -> None:
    assert "expected dotted.key=value" in _error(overrides=(override,), tmp_path=tmp_path)


def test_a_file_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    assert "not valid TOML" in _error("name = \n", tmp_path=tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for file, cause in {
        tmp_path / "nothing.toml": "No such file",
        tmp_path: "Is a directory",
        tmp_path / "binary.toml": "not UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=cause) as found:
            load_config(Example, file=file, env_prefix="X")
        assert str(file) in str(found.value)


def test_a_scalar_in_place_of_a_table_is_an_error_and_can_be_overridden(tmp_path: Path) -> None:
    text = 'name = "n"\npool = 3\n'
    assert "'pool'" in _error(text, tmp_path=tmp_path)
    assert _load(text, overrides=("pool.size=2",), tmp_path=tmp_path).pool.size == 2


class Service(Config):
    server: ServerConfig = ServerConfig(bind="127.0.0.1:7101", drain_grace_s=3)
    backend: Annotated[Local | Docker, pydantic.Field(discriminator="kind")] = Docker(
        host="tcp://h"
    )
    peer: ChannelConfig = ChannelConfig(target="127.0.0.1:7102", retry=RetryConfig(max_attempts=2))


def test_a_table_given_in_part_keeps_the_rest_of_the_fields_default() -> None:
    config = load_config(
        Service,
        env_prefix="X",
        overrides=[
            "server.require_deadline=false",
            "peer.retry.multiplier=3",
            "backend.host=tcp://i",
        ],
    )
    assert config.server.bind == "127.0.0.1:7101"
    assert config.server.drain_grace_s == 3
    assert not config.server.require_deadline
    assert config.peer.target == "127.0.0.1:7102"
    assert config.peer.retry == RetryConfig(max_attempts=2, multiplier=3)
    assert config.backend == Docker(host="tcp://i")


def test_choosing_another_member_of_a_union_takes_nothing_of_the_default() -> None:
    config = load_config(Service, env_prefix="X", overrides=["backend.kind=local"])
    assert config.backend == Local()
    with pytest.raises(ConfigError, match=r"unknown key 'backend\.host'"):
        load_config(
            Service, env_prefix="X", overrides=["backend.kind=local", "backend.host=tcp://i"]
        )


def test_config_is_frozen_and_checked_on_construction() -> None:
    config = Example(name="n")
    with pytest.raises(pydantic.ValidationError):
        config.name = "other"
    with pytest.raises(pydantic.ValidationError):
        Pool(size=0)
    with pytest.raises(pydantic.ValidationError):
        Pool(sise=1)  # type: ignore[call-arg]


def test_the_description_lists_every_setting_with_type_default_and_meaning() -> None:
    entries = {entry.key: entry for entry in describe_config(Example)}
    assert entries["pool.size"].default == "8"
    assert entries["pool.size"].type == "int"
    assert entries["pool.size"].description == "Boxes kept warm."
    assert entries["name"].default == ""
    assert entries["note"].default == "null"
    assert entries["note"].type == "str | null"
    assert entries["backend.root"].type == "path"
    assert entries["backend.host"].default == "unix:///var/run/docker.sock"
    assert "peers.*.size" in entries
    assert "extra.*.size" in entries
    assert entries["server.token"].secret
    assert entries["server.drain_grace_s"].description


@given(
    st.dictionaries(
        st.sampled_from([entry.key for entry in describe_config(Pool) if entry.key != "tags"]),
        st.integers(1, 1000),
    ),
    st.dictionaries(st.sampled_from(["size", "wait_s"]), st.integers(1, 1000)),
    st.dictionaries(st.sampled_from(["size", "wait_s"]), st.integers(1, 1000)),
)
def test_the_last_source_in_the_order_of_precedence_wins(
    in_file: dict[str, int], in_environment: dict[str, int], in_overrides: dict[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pool.toml"
        file.write_text("".join(f"{key} = {value}\n" for key, value in in_file.items()))
        config = load_config(
            Pool,
            file=file,
            environ={f"P__{key.upper()}": str(value) for key, value in in_environment.items()},
            env_prefix="P",
            overrides=[f"{key}={value}" for key, value in in_overrides.items()],
        )
    expected = {"size": 8, "wait_s": 30.0} | in_file | in_environment | in_overrides
    assert config.model_dump(include={"size", "wait_s"}) == expected


def test_the_closest_key_prefers_the_whole_path_to_the_name_alone() -> None:
    assert closest_key("pool.wait", Example) == "pool.wait_s"
    assert closest_key("qqq", Example) is None
