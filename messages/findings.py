"""What ``reconcile`` finds: where what is there and what is recorded differ."""

import enum
import uuid
from typing import NamedTuple, assert_never

from messages import resources


class FindingKind(enum.StrEnum):
    """What is wrong."""

    BACKEND_DOWN = "backend_down"
    """The backend, its target or its storage cannot be asked."""
    UNREADABLE_RECORD = "unreadable_record"
    """A volume's record holds what this version does not know."""
    STUCK_STATUS = "stuck_status"
    """A passing status (``creating``, …) that no unfinished job accounts for."""
    WRONG_STATUS = "wrong_status"
    """``available`` with an attachment, or ``in-use`` without one."""
    LEFT_CONNECTION = "left_connection"
    """A connection, or an export made for one, that no job will end any more."""
    ABANDONED_JOB = "abandoned_job"
    """A running job whose lease ran out long ago, and that nobody takes over."""
    MISSING_EXPORT = "missing_export"
    """Recorded, and not served, or not as recorded."""
    UNOWNED_EXPORT = "unowned_export"
    """Served, of this backend's own making, and recorded by nobody."""
    MISSING_STORAGE = "missing_storage"
    """A volume whose storage is gone, or smaller than recorded."""
    UNOWNED_STORAGE = "unowned_storage"
    """Storage under a volume's name that no record owns."""
    UNOWNED_DEVICE = "unowned_device"
    """A volume attached to this host for a job that there is not."""
    UNOWNED_PROCESS = "unowned_process"
    """A process of a worker's that no job and no backend accounts for."""


class Identity(NamedTuple):
    """What tells one finding from another."""

    kind: FindingKind
    address: str
    subject: str


class Finding(resources.Record):
    """One thing that is wrong."""

    kind: FindingKind
    address: str
    """``HOST@BACKEND``; the host alone for what belongs to no backend."""
    subject: str
    """The id, or the name that the target, the storage or the system has for it."""
    volume_id: uuid.UUID | None = None
    what: str
    """In words."""
    action: str | None
    """What a repair does about it; None where it is for people to decide."""
    repaired: bool | None = None
    """Whether it is gone after the repair; None where none was asked for, or there is none."""
    error: str | None = None
    """Why the repair failed."""

    @property
    def identity(self) -> Identity:
        """What tells it from others."""
        return Identity(self.kind, self.address, self.subject)


def action_for(kind: FindingKind) -> str | None:
    """What a repair does about a finding of a kind, or None."""
    match kind:
        case FindingKind.STUCK_STATUS | FindingKind.WRONG_STATUS:
            return "set the status by what is there"
        case FindingKind.LEFT_CONNECTION:
            return "end it, by a job of its own"
        case FindingKind.MISSING_EXPORT:
            return "serve it as recorded"
        case FindingKind.UNOWNED_EXPORT:
            return "end it"
        case FindingKind.UNOWNED_DEVICE:
            return "detach it"
        case FindingKind.UNOWNED_PROCESS:
            return "end the process"
        case (
            FindingKind.BACKEND_DOWN
            | FindingKind.UNREADABLE_RECORD
            | FindingKind.ABANDONED_JOB
            | FindingKind.MISSING_STORAGE
            | FindingKind.UNOWNED_STORAGE
        ):
            return None
        case _:
            assert_never(kind)
