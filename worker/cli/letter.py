"""One dead letter, as its headers tell of it.

A letter of the broker's own making (a delivery limit, a rejection) carries only ``x-death``, which
is mapped to the same words. A caller can set any header of its request: where the broker made the
letter, what looks like a worker's header is the caller's and counts for nothing.
"""

import base64
import dataclasses
import datetime
import math
from collections.abc import Mapping
from typing import Any, Final

import aio_pika.abc

from messages import letters, redaction, topology
from worker.cli import arguments

_MAX_REPLAYS: Final = 2**31 - 1
_MAX_TEXT: Final = 64 * 1024
"""Characters of a body that is not JSON that are shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter."""

    message_id: str | None
    job_id: str | None
    method: str | None
    reason: str
    origin: str
    attempts: int | None
    """In all of its job's lives."""
    replays: int
    first_failed_at: datetime.datetime | None
    last_error: str | None
    made_by_broker: bool
    size_bytes: int
    reply_to: str | None
    correlation_id: str | None
    headers: Mapping[str, Any]
    body: Any
    """JSON data, its secrets masked; None where it is none."""
    body_text: str | None
    """The body where it is not JSON, with what is not UTF-8 as escapes."""

    def summary(self) -> dict[str, Any]:
        """What a list shows, as JSON data."""
        moment = self.first_failed_at
        return {
            "message_id": self.message_id,
            "job_id": self.job_id,
            "method": self.method,
            "reason": self.reason,
            "origin": self.origin,
            "attempts": self.attempts,
            "replays": self.replays,
            "first_failed_at": None if moment is None else moment.isoformat(),
            "last_error": self.last_error,
            "made_by_broker": self.made_by_broker,
            "size_bytes": self.size_bytes,
        }

    def to_wire(self) -> dict[str, Any]:
        """All of it, as JSON data."""
        return {
            **self.summary(),
            "reply_to": self.reply_to,
            "correlation_id": self.correlation_id,
            "headers": self.headers,
            "body": self.body,
            "body_text": self.body_text,
        }


def read(message: aio_pika.abc.AbstractIncomingMessage, names: topology.Topology) -> Letter:
    """A letter from its message."""
    headers = message.headers or {}
    death = _death(headers)
    reasons = _by_worker(message) if death is None else _by_broker(death, names)
    body, text = _body(message.body)
    method = body.get("method") if isinstance(body, dict) else None
    return Letter(
        message_id=message.message_id or None,
        method=method if isinstance(method, str) else None,
        made_by_broker=death is not None,
        size_bytes=len(message.body),
        reply_to=message.reply_to or None,
        correlation_id=message.correlation_id or None,
        headers=_shown(headers),
        body=body,
        body_text=text,
        **reasons,
    )


def _by_worker(message: aio_pika.abc.AbstractIncomingMessage) -> dict[str, Any]:
    headers = message.headers or {}
    attempts = headers.get("attempts")
    replays = headers.get(letters.REPLAYS)
    error = headers.get("last-error")
    return {
        "reason": str(headers.get("reason", "unknown")),
        "origin": str(headers.get("origin") or message.routing_key or "unknown"),
        "job_id": _text(headers.get("job-id")),
        "attempts": attempts if isinstance(attempts, int) else None,
        "replays": replays if isinstance(replays, int) and 0 <= replays < _MAX_REPLAYS else 0,
        "first_failed_at": _moment(headers.get("first-failed-at")),
        "last_error": None if error is None else redaction.mask_text(str(error)),
    }


def _by_broker(death: Mapping[str, Any], names: topology.Topology) -> dict[str, Any]:
    queue = _text(death.get("queue")) or ""
    keys = death.get("routing-keys")
    key = _text(keys[0]) if isinstance(keys, list) and keys else None
    prefix = names.queue("")
    origin = queue.removeprefix(prefix) if queue.startswith(prefix) else key or queue
    reason = _text(death.get("reason")) or "unknown"
    return {
        "reason": reason,
        "origin": origin,
        "job_id": None,
        "attempts": topology.DELIVERY_LIMIT if reason == "delivery_limit" else None,
        "replays": 0,
        "first_failed_at": _moment(death.get("time")),
        "last_error": _BROKER_REASONS.get(reason, f"the broker gave it up: {reason}"),
    }


_BROKER_REASONS: Final = {
    "delivery_limit": "no worker acknowledged it, however often it was delivered",
    "rejected": "it was rejected without an answer",
    "expired": "it expired in its queue",
    "maxlen": "its queue was full",
}


def _death(headers: Mapping[str, Any]) -> Mapping[str, Any] | None:
    deaths = headers.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths else None
    return newest if isinstance(newest, Mapping) else None


def _body(body: bytes) -> tuple[Any, str | None]:
    try:
        return redaction.mask_tree(arguments.read_json(body)), None
    except (ValueError, RecursionError):
        text = body[:_MAX_TEXT].decode("utf-8", "backslashreplace")
        cut = "" if len(body) <= _MAX_TEXT else f"… ({len(body)} bytes in all)"
        return None, redaction.mask_text(text) + cut


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return None if value is None else str(value)


def _moment(value: object) -> datetime.datetime | None:
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
    if not isinstance(value, datetime.datetime):
        return None
    # AMQP's timestamps are in UTC and do not say so.
    return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)


def _shown(headers: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in headers.items():
        try:
            shown |= redaction.mask_tree({str(name): to_data(value)})
        except RecursionError:
            shown[str(name)] = "(nested too deeply)"
    return shown


def to_data(value: Any) -> Any:
    """A header as JSON data."""
    match value:
        case Mapping():
            return {str(name): to_data(member) for name, member in value.items()}
        case list() | tuple():
            return [to_data(member) for member in value]
        case bytes() | bytearray():
            try:
                return bytes(value).decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case datetime.datetime():
            return value.isoformat()
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)
