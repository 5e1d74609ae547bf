import sys

import pytest
from sandbox_client.app import make_backend
from sandbox_client.config import SandboxServiceConfig
from service_kit.errors import StartupError


def test_the_configuration_names_the_back_end() -> None:
    for name in ("local", "docker"):
        config = SandboxServiceConfig.model_validate({"backend": name})
        assert make_backend(config).name == name


def test_a_back_end_whose_library_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in [m for m in sys.modules if m.startswith("sandbox_client.backends.docker")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    config = SandboxServiceConfig.model_validate({"backend": "docker"})
    with pytest.raises(StartupError, match=r"sandbox-client\[docker\]"):
        make_backend(config)
