"""What a caller hears back: any number of status messages, then one result."""

import enum
import uuid
from collections.abc import Mapping
from typing import Any

from messages import errors


class ReplyType(enum.StrEnum):
    """The AMQP ``type`` property of a reply."""

    RESULT = "result"
    STATUS = "status"


def result(job_id: object, method: str | None, value: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a good result."""
    return {"job_id": _id(job_id), "method": method, "ok": True, "result": dict(value)}


def failure(
    job_id: object, method: str | None, error: errors.VolumeWorkerError | Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a result that is an error."""
    wire = error.to_wire() if isinstance(error, errors.VolumeWorkerError) else dict(error)
    return {"job_id": _id(job_id), "method": method, "ok": False, "error": wire}


def marked(body: Mapping[str, Any], ending: int) -> dict[str, Any]:
    """The body of a result of a job's first ending, or of a later one, after a replay."""
    return {**body, "replayed": True} if ending > 1 else dict(body)


def status(job: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The body of a status message about a job."""
    return {
        "job_id": _id(job["id"]),
        "method": job["method"],
        "state": str(job["state"]),
        "attempt": job["attempt"],
        "progress": job["progress"],
        "at": at,
    }


def _id(value: object) -> str | None:
    return None if value is None else str(value)


def reply_id(job_id: uuid.UUID, ending: int) -> uuid.UUID:
    """The ``message_id`` of a job's result: the same however often it is published again."""
    return uuid.uuid5(job_id, f"result-{ending}")
