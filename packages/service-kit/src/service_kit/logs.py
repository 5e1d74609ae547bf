"""Logging of a service process: one line an event, on stderr, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

from opentelemetry import trace

Level = Literal["debug", "info", "warning", "error"]


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s")
        self.datefmt = "%H:%M:%S"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, with the ids of the active span for joining logs to traces."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = trace.format_trace_id(span.trace_id)
            line["span_id"] = trace.format_span_id(span.span_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup_logging(
    level: Level = "info",
    json: bool = False,
    *,
    stream: TextIO | None = None,
) -> None:
    """Send this process's log to `stream`, stderr by default. Repeatable; the last call holds."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # These tell every request or poll at INFO.
    for noisy in ("httpx", "httpcore", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
