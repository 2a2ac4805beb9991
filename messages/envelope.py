"""The request as it travels: AMQP properties and body, taken apart and checked.

Reading goes in two steps, because a message that cannot be read must be answered all the same where
it names a reply queue: :func:`read_properties` finds who asks, :func:`read_body` what.
"""

import dataclasses
import datetime
import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

import pydantic
import pydantic_core

from messages import decoding, errors, requests

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
        raise Malformed(f"a property cannot be decoded: {undecodable}", member=str(undecodable))
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
        raise Malformed(f"the body has an unknown member {unknown[0][:100]!r}", member=unknown[0])
    if not isinstance(data["method"], str):
        raise Malformed("method must be a text", member="method")
    _check_version(data["version"])
    method = requests.METHODS.get(data["method"])
    if method is None:
        raise errors.UnknownMethod(f"there is no method {data['method'][:100]!r}")
    args = requests.parse_args(method, data["args"])
    return Body(method, args, _fingerprint(method.name, address, data["args"]))


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
    # PostgreSQL's text and jsonb take no NUL.
    if rb"\u0000" in body and "\0" in _all_text(data):
        raise Malformed("the body has a text with a NUL character", member="body")
    return data


def _all_text(value: Any) -> str:
    match value:
        case str():
            return value
        case dict():
            return "".join(str(key) + _all_text(member) for key, member in value.items())
        case list():
            return "".join(_all_text(member) for member in value)
        case _:
            return ""


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
    if isinstance(value, str):
        try:
            moment = datetime.datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is not None:
            return moment
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
