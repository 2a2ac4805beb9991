"""Dead letters: messages kept as they came, with why they failed."""

import base64
import datetime
import decimal
import re
from collections.abc import Mapping
from typing import Any, Final

import aio_pika
import aio_pika.abc

from messages import errors, redaction

REASON_HEADERS: Final = (
    "reason",
    "origin",
    "job-id",
    "attempts",
    "first-failed-at",
    "last-error",
)
"""Headers that a worker adds to a dead letter."""

REPLAYS: Final = "replays"
"""Header of the letter of a job that was replayed: how often."""
HISTORY: Final = "replay-history"
"""Header beside it: how the newest of its earlier lives ended, the oldest first."""

LEFT_OUT: Final = "headers-left-out"
"""Header of a letter without those that its sender set: how many these were."""

_BROKERS_HEADERS: Final = re.compile(
    r"x-(death|(first|last)-death-\w+|delivery-count|acquired-count|undecodable)"
)

_MADE_ANEW: Final = frozenset({*REASON_HEADERS, REPLAYS, HISTORY, LEFT_OUT})
"""What no letter inherits from an earlier one, so that none grows."""

_PLAIN: Final = (
    "content_type",
    "content_encoding",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
)


MAX_DEPTH: Final = 32
"""How deep a header table may be nested; each level costs every reader a call."""


def is_too_deep(value: Any) -> bool:
    """Whether a header table is nested deeper than :data:`MAX_DEPTH`; found without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            member
            for one in level
            if isinstance(one, Mapping | list | tuple)
            for member in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not level:
            return False
    return True


def keep_properties(message: aio_pika.abc.AbstractIncomingMessage) -> dict[str, Any]:
    """A message's AMQP properties as JSON data, to be given back by :func:`restore`.

    Headers that are nested too deep are left out: no reader could do anything with them.
    """
    kept = {name: _encode(getattr(message, name)) for name in _PLAIN}
    headers = message.headers or {}
    kept["headers"] = _encode({} if is_too_deep(headers) else headers)
    return {name: value for name, value in kept.items() if value is not None}


def restore(
    body: bytes, properties: Mapping[str, Any], added_headers: Mapping[str, Any]
) -> aio_pika.Message:
    """The message as it came, with headers added; headers of an earlier death are replaced."""
    return _restore(body, properties, {**_own_headers(properties), **_set(added_headers)})


def restore_without_headers(
    body: bytes, properties: Mapping[str, Any], added_headers: Mapping[str, Any]
) -> aio_pika.Message:
    """The same without its sender's headers, where it cannot be sent with them.

    They may leave no room for those that are added, or hold what AMQP has no form for.
    """
    left_out = {LEFT_OUT: len(_own_headers(properties))}
    return _restore(body, properties, {**_set(added_headers), **left_out})


def _set(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if value is not None}


def _own_headers(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in _decode(properties.get("headers", {"$table": []})).items()
        if name not in _MADE_ANEW and not _BROKERS_HEADERS.fullmatch(name)
    }


def _restore(
    body: bytes, properties: Mapping[str, Any], headers: Mapping[str, Any]
) -> aio_pika.Message:
    plain = {name: _decode(properties[name]) for name in _PLAIN if name in properties}
    # The broker checks user_id against the connection's own user, and would refuse the letter.
    plain.pop("user_id", None)
    return aio_pika.Message(
        body,
        headers=dict(headers),
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        **plain,
    )


def as_request(
    message: aio_pika.abc.AbstractIncomingMessage, body: bytes, *, message_id: str
) -> aio_pika.Message:
    """A letter as it can be sent to its address again, without the deadline that it had."""
    again = restore(body, keep_properties(message), {})
    again.headers.pop("deadline", None)
    # A caller without a correlation id is answered under its message_id, whatever that was.
    again.correlation_id = again.correlation_id or again.message_id
    again.message_id = message_id
    if body != message.body:
        again.content_type, again.content_encoding = "application/json", None
    return again


def reason_headers(
    *,
    error: errors.VolumeWorkerError | Mapping[str, Any],
    origin: str,
    job_id: object = None,
    attempts: int = 0,
    first_failed_at: datetime.datetime | None = None,
    history: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The headers that say why a message is a dead letter; they hold no secret.

    ``history`` is of a job that was replayed: ``replays``, how many ``attempts`` those lives had in
    all, and the newest ``lives``, each with ``code``, ``message``, ``attempts``, ``finished_at``.
    """
    wire = error.to_wire() if isinstance(error, errors.VolumeWorkerError) else error
    moment = first_failed_at or datetime.datetime.now(datetime.UTC)
    headers: dict[str, Any] = {
        "reason": str(wire["code"]),
        "origin": origin,
        "job-id": None if job_id is None else str(job_id),
        "attempts": attempts,
        "first-failed-at": moment.astimezone(datetime.UTC).isoformat(),
        "last-error": redaction.mask_text(str(wire["message"]))[:1000],
    }
    if history is not None:
        headers["attempts"] = attempts + history["attempts"]
        headers[REPLAYS] = history["replays"]
        headers[HISTORY] = [_life(life) for life in history["lives"]]
    return headers


def _life(life: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "reason": str(life["code"]),
        "attempts": life["attempts"],
        "failed-at": str(life["finished_at"]),
        "last-error": redaction.mask_text(str(life["message"]))[:300],
    }


def _encode(value: Any) -> Any:
    """JSON data; what JSON or PostgreSQL's jsonb cannot hold becomes ``{"$kind": …}``."""
    match value:
        case None | bool() | int():
            return value
        case float():
            # jsonb would make a whole number of it, and none of one that is infinite.
            return {"$float": repr(value)}
        case str():
            if "\0" not in value and value.isprintable():
                return value
            return {"$text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
        case datetime.datetime():
            return {"$time": value.isoformat()}
        case decimal.Decimal():
            return {"$decimal": str(value)}
        case Mapping():
            return {"$table": [[_encode(name), _encode(member)] for name, member in value.items()]}
        case list() | tuple():
            return [_encode(member) for member in value]
        case _:
            return _encode(str(value))


def _decode(value: Any) -> Any:
    match value:
        case {"$float": text}:
            return float(text)
        case {"$text": text}:
            return base64.b64decode(text).decode("utf-8", "surrogatepass")
        case {"$bytes": text}:
            # pamqp takes a bytearray for a field's value, and no bytes.
            return bytearray(base64.b64decode(text))
        case {"$time": text}:
            return datetime.datetime.fromisoformat(text)
        case {"$decimal": text}:
            return decimal.Decimal(text)
        case {"$table": pairs}:
            return {_decode(name): _decode(member) for name, member in pairs}
        case list():
            return [_decode(member) for member in value]
        case _:
            return value
