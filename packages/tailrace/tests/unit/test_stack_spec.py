"""A stack file is checked whole before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from service_kit.config import ConfigError
from tailrace_cli.stack.files import LOCAL_STACK
from tailrace_cli.stack.spec import load_stack, parse_stack, start_order


def process(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "module": "m", "address": "grpc://127.0.0.1:7000", **more}


def test_waves_respect_after_and_start_together_where_they_can() -> None:
    spec = parse_stack(
        {"processes": [process("c", after=["a", "b"]), process("a"), process("b")]}, source="t"
    )
    assert [[p.name for p in wave] for wave in start_order(spec.processes)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"processes": [process("a", after=["b"]), process("b", after=["a"])]}, "cycle"),
        ({"processes": [process("a", after=["x"])]}, "starts after x, which is not a process"),
        ({"processes": [process("a"), process("a")]}, "repeat"),
        ({"processes": [process("a", colour="red")]}, "colour"),
        ({"processes": [process("a", address="localhost")]}, "grpc://host:port"),
        ({"processes": []}, "at least 1"),
        ({"processes": [process("a", config={"x": "${nowhere}"})]}, "unknown variable"),
    ],
)
def test_a_wrong_stack_names_what_is_wrong(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_stack(document, source="stack.toml")


def test_variables_are_filled_in_at_every_depth(tmp_path: Path) -> None:
    spec = parse_stack(
        {
            "variables": {"port": "7000"},
            "processes": [
                process(
                    "a", config={"deep": {"list": ["${state_dir}/x", 3]}}, arguments=["${port}"]
                )
            ],
        },
        source="t",
        state_dir=tmp_path,
    )
    assert spec.processes[0].config["deep"]["list"] == [f"{tmp_path}/x", 3]
    assert spec.processes[0].arguments == ("7000",)


def test_settings_reach_into_a_process_s_config_with_their_toml_types() -> None:
    spec = parse_stack(
        {"processes": [process("a", config={"faults": {"seed": 1}})]},
        source="t",
        settings=["a.faults.rate=0.5", "a.label=slow one", "a.faults.seed=2"],
    )
    assert spec.processes[0].config == {"faults": {"seed": 2, "rate": 0.5}, "label": "slow one"}


@pytest.mark.parametrize("setting", ["a", "a=1", "b.x=1"])
def test_a_setting_that_reaches_nothing_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"is no setting|nothing is named"):
        parse_stack({"processes": [process("a")]}, source="t", settings=[setting])


def test_given_variables_win_over_the_file_s() -> None:
    spec = parse_stack(
        {
            "variables": {"port": "1", "address": "grpc://127.0.0.1:${port}"},
            "processes": [process("a") | {"address": "${address}"}],
        },
        source="t",
        variables={"port": "2"},
    )
    assert spec.processes[0].target == "127.0.0.1:2"


def test_a_missing_file_and_broken_toml_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no stack file"):
        load_stack(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="no valid TOML"):
        load_stack(tmp_path / "bad.toml")


def test_the_shipped_stack_is_valid_and_all_on_loopback() -> None:
    spec = load_stack(LOCAL_STACK)
    assert {p.name for p in spec.processes} >= {"sandbox", "eval", "weights", "rollout", "trainer"}
    assert all(p.target.startswith("127.0.0.1:") for p in spec.processes)
