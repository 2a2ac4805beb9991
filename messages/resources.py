"""The records that callers see: volumes, attachments, connections, jobs, and their states."""

import datetime
import enum
import uuid
from typing import Annotated, Any, overload

import pydantic


@overload
def rfc3339(value: datetime.datetime) -> str: ...
@overload
def rfc3339(value: datetime.datetime | None) -> str | None: ...
def rfc3339(value: datetime.datetime | None) -> str | None:
    """A moment as it is sent, in UTC with microseconds; None for None."""
    if value is None:
        return None
    moment = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="microseconds") + "Z"


Time = Annotated[datetime.datetime, pydantic.PlainSerializer(rfc3339, return_type=str)]
"""A moment, RFC 3339 in UTC on the wire."""


class VolumeStatus(enum.StrEnum):
    """A volume's status, in Cinder's words."""

    CREATING = "creating"
    AVAILABLE = "available"
    ATTACHING = "attaching"
    IN_USE = "in-use"
    DETACHING = "detaching"
    DELETING = "deleting"
    DELETED = "deleted"  # seen in the last event of a volume only: its record is gone
    EXTENDING = "extending"
    MAINTENANCE = "maintenance"
    ERROR = "error"
    ERROR_DELETING = "error_deleting"
    ERROR_EXTENDING = "error_extending"


class AttachStatus(enum.StrEnum):
    """Whether something uses the volume, in Cinder's words."""

    DETACHED = "detached"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    DETACHING = "detaching"


class AccessMode(enum.StrEnum):
    """What a connection or attachment may do."""

    READ_WRITE = "rw"
    READ_ONLY = "ro"


class JobState(enum.StrEnum):
    """Where a job stands; see :data:`ENDED`."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD = "dead"


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})


class Record(pydantic.BaseModel):
    """A record as it is sent. Receivers ignore members that they do not know."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    def to_wire(self) -> dict[str, Any]:
        """JSON data."""
        return self.model_dump(mode="json")


class Attachment(Record):
    """An instance or host uses the volume."""

    id: uuid.UUID
    volume_id: uuid.UUID
    instance_uuid: uuid.UUID | None
    host_name: str | None
    mountpoint: str
    mode: AccessMode
    status: str
    created_at: Time


class Connection(Record):
    """A connector's right to the volume."""

    id: uuid.UUID
    volume_id: uuid.UUID
    connector_host: str | None
    access_mode: AccessMode
    created_at: Time


class Volume(Record):
    """A volume."""

    id: uuid.UUID
    name: str
    address: str
    size_bytes: int
    status: VolumeStatus
    migration_status: str | None
    attach_status: AttachStatus
    metadata: dict[str, str]
    provider_location: str | None
    source: dict[str, Any] | None
    user_id: str | None
    project_id: str | None
    exported: bool
    attachments: list[Attachment]
    connections: list[Connection]
    created_at: Time
    updated_at: Time
    error: dict[str, Any] | None = None

    @pydantic.model_serializer(mode="wrap")
    def _without_empty_error(
        self, handler: pydantic.SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        wire: dict[str, Any] = handler(self)
        if wire.get("error") is None:
            wire.pop("error", None)
        return wire


class Progress(Record):
    """How far a job has come."""

    done_bytes: int
    total_bytes: int
    bytes_per_second: int


class Job(Record):
    """An accepted request, and what became of it; secrets in it are masked."""

    id: uuid.UUID
    method: str
    address: str
    state: JobState
    attempt: int
    args: dict[str, Any]
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    progress: Progress | None
    parent_job: uuid.UUID | None
    edited: bool
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
