"""The request as it travels: AMQP properties and body, taken apart and checked.

Reading goes in two steps, because a message that cannot be read must be answered all the same where
it names a reply queue: :func:`read_properties` finds who asks, :func:`read_body` what.
"""

import dataclasses
import datetime
import difflib
import hashlib
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any, Final

import pydantic
import pydantic_core

from messages import decoding, errors, letters, requests

CONTENT_TYPE: Final = "application/json"


@dataclasses.dataclass(frozen=True, slots=True)
class Properties:
    """Who asks, and what they want besides the answer."""

    message_id: uuid.UUID
    reply_to: str | None
    correlation_id: str
    deadline: datetime.datetime | None
    status_updates: bool
    parent_job: uuid.UUID | None
    traceparent: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """What is asked."""

    method: requests.Method
    args: pydantic.BaseModel
    fingerprint: bytes
    """Tells a repeat from another request under the same id."""


class Malformed(errors.InvalidRequest):
    """A message that could not even be read: it is kept as a dead letter, call or cast."""


def read_properties(
    message_id: str | None,
    reply_to: str | None,
    correlation_id: str | None,
    headers: Mapping[str, Any],
) -> Properties:
    """Checks the AMQP properties of a request.

    Raises:
        Malformed: the ``message_id`` is not a UUID, or a property cannot be decoded.
        InvalidRequest: a header is not what the contract says.
    """
    if undecodable := headers.get(decoding.UNDECODABLE):
        # A sender can set this header too, to anything.
        named = ascii(str(undecodable)[:100])[1:-1]
        raise Malformed(f"a property cannot be decoded: {named}", member=named)
    if letters.is_too_deep(headers):
        raise Malformed("the headers are nested too deep", member="headers")
    for name, text in (("reply_to", reply_to), ("correlation_id", correlation_id)):
        # PostgreSQL cannot keep it.
        if text and "\0" in text:
            raise Malformed(f"{name} must not contain a NUL character", member=name)
    if not message_id:
        identity = uuid.uuid4()
    else:
        try:
            identity = uuid.UUID(message_id)
        except ValueError:
            raise Malformed("message_id must be a UUID", member="message_id") from None
    return Properties(
        message_id=identity,
        reply_to=reply_to or None,
        correlation_id=correlation_id or str(identity),
        deadline=_deadline(headers.get("deadline")),
        status_updates=_boolean(headers.get("status-updates"), "status-updates"),
        parent_job=_parent(headers.get("parent-job")),
        traceparent=_text(headers.get("traceparent"), "traceparent"),
    )


def read_body(body: bytes, limit: int, address: str) -> Body:
    """Checks the body of a request sent to ``address``; ``limit`` is in bytes.

    Raises:
        Malformed: it is not a request at all.
        UnknownMethod, UnsupportedVersion, InvalidRequest: it is one that cannot be carried out.
    """
    if len(body) > limit:
        raise Malformed(f"the body has {len(body)} bytes; at most {limit} are accepted")
    data = parse_json(body)
    if not isinstance(data, dict):
        raise Malformed("the body must be a JSON object", member="body")
    for member in ("method", "version", "args"):
        if member not in data:
            raise Malformed(f"the body lacks {member}", member=member)
    if unknown := sorted(set(data) - {"method", "version", "args"}):
        name = unknown[0][:100]
        raise Malformed(f"the body has an unknown member {name!r}", member=name)
    if not isinstance(data["method"], str):
        raise Malformed("method must be a text", member="method")
    _check_version(data["version"])
    method = requests.METHODS.get(data["method"])
    if method is None:
        raise errors.UnknownMethod(_unknown(data["method"]))
    args = requests.parse_args(method, data["args"])
    return Body(method, args, _fingerprint(method.name, address, data["args"]))


def _unknown(name: str) -> str:
    alike = difflib.get_close_matches(name[:100], requests.METHODS, n=1)
    return f"there is no method {name[:100]!r}" + (f"; did you mean {alike[0]}?" if alike else "")


def parse_json(body: bytes) -> Any:
    """The JSON data of a body.

    Raises:
        Malformed: it is not UTF-8, not JSON, or holds what PostgreSQL cannot keep.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8: {error.reason}", member="body") from None
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the body is not JSON: {error}", member="body") from None
    _check_storable(data)
    return data


def _check_storable(value: Any) -> None:
    """Refuses what JSON texts can say and PostgreSQL's jsonb cannot keep."""
    match value:
        case str():
            if "\0" in value:
                raise Malformed("the body has a text with a NUL character", member="body")
        case float():
            if not math.isfinite(value):
                raise Malformed("the body has a number out of range", member="body")
        case dict():
            for name, member in value.items():
                _check_storable(name)
                _check_storable(member)
        case list():
            for member in value:
                _check_storable(member)


def _check_version(version: object) -> None:
    if not isinstance(version, str):
        raise Malformed('version must be a text such as "1.0"', member="version")
    major, dot, minor = version.partition(".")
    if not (dot and _is_number(major) and _is_number(minor)):
        raise Malformed('version must be a text such as "1.0"', member="version")
    ours = requests.VERSION
    if int(major) != ours[0] or int(minor) > ours[1]:
        raise errors.UnsupportedVersion(
            f"version {version} is not spoken here; this worker speaks {ours[0]}.0 to "
            f"{ours[0]}.{ours[1]}",
            version=version,
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _fingerprint(method: str, address: str, args: object) -> bytes:
    canonical = json.dumps([method, address, args], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def _deadline(value: object) -> datetime.datetime | None:
    if value is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(str(value))
        if moment.tzinfo is not None:
            return moment.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        pass
    raise errors.InvalidRequest(
        "header deadline must be a time as in RFC 3339, with its zone", member="deadline"
    )


def _boolean(value: object, name: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise errors.InvalidRequest(f"header {name} must be true or false", member=name)


def _parent(value: object) -> uuid.UUID | None:
    if value is None:
        return None
    try:
        return uuid.UUID(str(value))
    except ValueError:
        raise errors.InvalidRequest(
            "header parent-job must be a job's id", member="parent-job"
        ) from None


def _text(value: object, name: str) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= 512 and value.isprintable()):
        return value
    raise errors.InvalidRequest(f"header {name} must be a short text", member=name)
