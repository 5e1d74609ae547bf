from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from service_kit import setup_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_of_text_holds_level_logger_and_message() -> None:
    stream = io.StringIO()
    setup_logging("info", stream=stream)
    logging.getLogger("swe_eval.grading").warning("slow: %d s", 5)
    logging.getLogger("swe_eval.grading").debug("unseen")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING swe_eval.grading: slow: 5 s")


def test_a_json_line_holds_the_ids_of_the_active_span_and_the_traceback() -> None:
    stream = io.StringIO()
    setup_logging("debug", json=True, stream=stream)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("t")
    with tracer.start_as_current_span("s") as span:
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("a").exception("failed")
    logging.getLogger("b").debug("plain")
    first, second = map(json.loads, stream.getvalue().splitlines())
    context = span.get_span_context()
    assert first["trace_id"] == trace.format_trace_id(context.trace_id)
    assert first["span_id"] == trace.format_span_id(context.span_id)
    assert "KeyError: 'x'" in first["exception"]
    assert second["message"] == "plain"
    assert second["level"] == "debug"
    assert "trace_id" not in second
    assert second["time"].endswith("Z")


def test_setting_up_twice_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    setup_logging("info", stream=stream)
    setup_logging("info", stream=stream)
    logging.getLogger("a").info("once")
    assert len(stream.getvalue().splitlines()) == 1
