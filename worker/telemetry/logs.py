"""Logging: one JSON line an event, or lines for people.

Event names and keys are an interface. Every line goes through redaction, so that no secret is
shown whatever was logged.
"""

import enum
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from messages import redaction


class Format(enum.StrEnum):
    """How log lines look."""

    JSON = "json"
    CONSOLE = "console"


def configure(
    log_format: Format = Format.JSON,
    *,
    level: int = logging.INFO,
    stream: TextIO | None = None,
) -> None:
    """Sends every event to ``stream`` (stderr, without one), with no secret in it."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _redact,
    ]
    match log_format:
        case Format.JSON:
            renderer: Any = structlog.processors.JSONRenderer()
        case Format.CONSOLE:
            renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # They tell of each lost connection at length; the link tells of it in one line.
    for noisy in ("aio_pika", "aiormq", "qemu"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)


def _redact(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    masked: dict[str, Any] = redaction.mask_tree(event)
    return {
        key: redaction.mask_text(value) if isinstance(value, str) else value
        for key, value in masked.items()
    }
