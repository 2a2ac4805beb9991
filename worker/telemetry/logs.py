"""Logging: one JSON line an event, or lines for people.

Event names and keys are an interface. Every line goes through redaction: members named like a
secret are masked, and in texts, at any depth, the values that stand behind such a name. A secret
that nothing names cannot be known for one here: whoever has it must not log it.
"""

import contextlib
import enum
import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

from messages import redaction

_LONG: Final = ("exception", "stack")
"""What has more than one line."""


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
        _add_logger_name,
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
            shared.append(_escape)
    # Straight to the stream: a record of the standard library costs more than all the rest.
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *name: _Logger(stream or sys.stderr, *name),
        cache_logger_on_first_use=True,
    )
    handler = _Handler(stream or sys.stderr)
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


class _Logger(structlog.WriteLogger):
    """Writes lines, and knows whose they are.

    A line that cannot be written is lost: its reader has gone, or the disk is full. Nothing that is
    at work may fail for that.
    """

    def __init__(self, stream: TextIO, name: str = "") -> None:
        super().__init__(stream)
        self.name = name

    def msg(self, message: str) -> None:
        """Writes a line, if that can be."""
        # A closed stream raises ValueError.
        with contextlib.suppress(OSError, ValueError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class _Handler(logging.StreamHandler[TextIO]):
    """Loses what cannot be written like :class:`_Logger`, and says nothing of it on stderr."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called with the error at hand."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _add_logger_name(
    logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    record = event.get("_record")
    event["logger"] = logger.name if record is None else record.name
    return event


def _redact(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    masked: dict[str, Any] = redaction.mask_tree(event)
    # Those with _ are the logging machinery's own, and are taken out before a line is made.
    return {key: value if key.startswith("_") else _mask(value) for key, value in masked.items()}


def _escape(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """What is logged, with nothing in it that could play with a terminal.

    Only texts: what is inside of others is shown by its repr, which escapes it.
    """
    return {
        _printable(key): _printable(value, but="\n" if key in _LONG else "")
        if isinstance(value, str)
        else value
        for key, value in event.items()
    }


def _printable(text: str, *, but: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in but
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _mask(value: Any) -> Any:
    """What is logged, with no text in it, at any depth, that shows a value named like a secret."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return redaction.mask_text(value)
        case Mapping():
            return {name: _mask(member) for name, member in value.items()}
        case list() | tuple() | set() | frozenset():
            return _mask_members([_mask(member) for member in value])
        case _:
            # What the renderer would print of it.
            return redaction.mask_text(repr(value))


def _mask_members(members: list[Any]) -> Any:
    # A program's arguments: the secret is a member of its own, behind the one that names it.
    if not members or not all(isinstance(member, str) for member in members):
        return members
    text = redaction.mask_text(json.dumps(members))
    try:
        return json.loads(text)
    except ValueError:
        return text
