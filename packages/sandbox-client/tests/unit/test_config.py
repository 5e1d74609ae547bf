from pathlib import Path

import pydantic
import pytest
from sandbox_client.config import SandboxServiceConfig
from service_kit.config import describe_config


def test_the_defaults_are_valid_and_safe() -> None:
    config = SandboxServiceConfig()
    assert config.server.bind == "127.0.0.1:7101"
    assert config.local.seccomp
    assert not config.faults.active
    assert config.state_dir.is_absolute()


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "none"},
        {"local": {"uid": 0}},
        {"local": {"gid": 0}},
        {"local": {"writable": ["/usr"]}},
        {"local": {"writable": ["relative"]}},
        {"local": {"cgroup_parent": "../x"}},
        {"docker": {"uid": 0}},
        {"docker": {"uid": 1000, "keeper_uid": 1000}},
        {"docker": {"disk_watermark": 1.2}},
        {"docker": {"writable": ["/etc/x"]}},
        {"docker": {"network": "--net=host"}},
        {"docker": {"network": "container:x"}},
        {"docker": {"network": "host"}},
        {"faults": {"create_rate": 1.5}},
        {"exec": {"max_output_bytes": 10_000, "output_bytes_limit": 100}},
        {"limits": {"sandboxes": 0}},
        {"e2b_api": {"bind": "0.0.0.0:7102"}},
        {"e2b_api": {"bind": "0.0.0.0:7102", "api_key": "k" * 32}},
        {"e2b_api": {"bind": "0.0.0.0:7102", "tls_certificate": "c", "tls_key": "k"}},
        {"e2b_api": {"bind": "no port"}},
        {"e2b_api": {"templates": {"x": {"image": "a", "tree_digest": "b"}}}},
        {"e2b": {"api_key": "k", "api_key_file": "f"}},
        {"unknown": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        SandboxServiceConfig.model_validate(settings)


def test_the_state_folder_may_be_in_a_home() -> None:
    config = SandboxServiceConfig.model_validate({"state_dir": "~/x"})
    assert config.state_dir == Path.home() / "x"


def test_an_e2b_endpoint_may_be_public_with_a_key_and_tls() -> None:
    settings = {"bind": "0.0.0.0:7102", "api_key": "k", "tls_certificate": "c", "tls_key": "k"}
    assert SandboxServiceConfig.model_validate({"e2b_api": settings}).e2b_api.bind == "0.0.0.0:7102"


def test_every_setting_is_documented() -> None:
    keys = describe_config(SandboxServiceConfig)
    own = [key for key in keys if not key.key.startswith(("server.", "telemetry."))]
    assert len(own) > 40
    assert [key.key for key in own if not key.description and "." in key.key] == []
