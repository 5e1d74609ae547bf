from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pydantic
import pytest
from service_kit import StartupError, TelemetryConfig, setup_telemetry

ENVIRON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture
def _no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.startswith("opentelemetry.sdk") else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.usefixtures("_no_sdk")
def test_an_endpoint_in_the_config_without_the_sdk_is_an_error_that_names_the_extra() -> None:
    config = TelemetryConfig(endpoint="http://127.0.0.1:1")
    with pytest.raises(StartupError, match=r"tailrace-service-kit\[otel\]"):
        setup_telemetry(config, "x", environ={}, install=False)


@pytest.mark.usefixtures("_no_sdk")
def test_an_endpoint_in_the_environment_without_the_sdk_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        telemetry = setup_telemetry(TelemetryConfig(), "x", environ=ENVIRON, install=False)
    assert not telemetry.enabled
    assert "telemetry stays off" in caplog.text


def test_an_endpoint_of_another_kind_is_refused() -> None:
    for wrong in ("", "grpc://h:1", "ftp://h"):
        with pytest.raises(pydantic.ValidationError, match="OTLP over gRPC"):
            TelemetryConfig(endpoint=wrong)
    assert TelemetryConfig(endpoint="collector:4317").endpoint == "collector:4317"


def test_the_collectors_headers_do_not_show() -> None:
    config = TelemetryConfig.model_validate({"headers": {"x-key": "hidden-value"}})
    assert "hidden-value" not in repr(config)
