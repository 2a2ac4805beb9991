"""Volumes as the contract has them, without a database: what the volume machine compares with."""

import dataclasses
import enum
import uuid
from collections.abc import Collection, Mapping
from typing import Final

from messages import resources
from messages.resources import AttachStatus, JobState, VolumeStatus
from worker.operations import base
from worker.store import connections, reconciliation, volumes
from worker.store.acceptance import LockMode


class Kind(enum.StrEnum):
    """What a job is about."""

    CREATE = "create"
    DELETE = "delete"
    EXTEND = "extend"
    OVERWRITE = "overwrite"
    """As the destination of a copy."""
    ATTACH = "attach"
    DETACH = "detach"
    SHARE = "share"
    """Exports and connections."""


@dataclasses.dataclass(frozen=True, slots=True)
class Passing:
    """The status that a kind of job holds its volume in, and from which it may."""

    status: VolumeStatus
    allowed: Collection[VolumeStatus]
    attach_status: AttachStatus | None = None


PASSING: Final[Mapping[Kind, Passing]] = {
    Kind.DELETE: Passing(
        VolumeStatus.DELETING,
        [
            VolumeStatus.AVAILABLE,
            VolumeStatus.ERROR,
            VolumeStatus.ERROR_DELETING,
            VolumeStatus.ERROR_EXTENDING,
        ],
    ),
    Kind.EXTEND: Passing(VolumeStatus.EXTENDING, base.USABLE),
    Kind.OVERWRITE: Passing(VolumeStatus.MAINTENANCE, [VolumeStatus.AVAILABLE]),
    Kind.ATTACH: Passing(VolumeStatus.ATTACHING, [VolumeStatus.AVAILABLE], AttachStatus.ATTACHING),
    Kind.DETACH: Passing(VolumeStatus.DETACHING, [VolumeStatus.IN_USE], AttachStatus.DETACHING),
}
ALONE: Final = (Kind.CREATE, Kind.DELETE, Kind.EXTEND, Kind.OVERWRITE)
IDLE: Final = (Kind.DELETE, Kind.OVERWRITE)
CHECKED: Final = (Kind.DELETE, Kind.EXTEND, Kind.OVERWRITE, Kind.ATTACH)
"""Kinds that are refused at once where the status stands in the way."""
SETTLING: Final = (
    VolumeStatus.CREATING,
    VolumeStatus.ATTACHING,
    VolumeStatus.DETACHING,
    VolumeStatus.EXTENDING,
)
"""Statuses that a request waits for the end of."""


@dataclasses.dataclass(slots=True)
class Job:
    """A job on one volume."""

    id: uuid.UUID
    kind: Kind
    volume_id: uuid.UUID
    refusal: str | None = None
    state: JobState = JobState.QUEUED

    @property
    def is_running(self) -> bool:
        return self.state is JobState.RUNNING

    @property
    def has_ended(self) -> bool:
        return self.state in resources.ENDED

    @property
    def mode(self) -> LockMode:
        return LockMode.EXCLUSIVE if self.kind in ALONE else LockMode.CONTROL


@dataclasses.dataclass(slots=True)
class Connection:
    """The right of a connector, told apart by ``key``."""

    key: str
    access_mode: str
    is_local: bool
    made_by: uuid.UUID
    state: connections.State = connections.State.MAKING

    @property
    def has_ended(self) -> bool:
        return self.state is connections.State.ENDED


@dataclasses.dataclass(slots=True)
class Volume:
    """A volume's record as it should be stored."""

    id: uuid.UUID
    created_by: uuid.UUID
    holder: uuid.UUID | None
    status: VolumeStatus = VolumeStatus.CREATING
    previous: VolumeStatus | None = None
    attach_status: AttachStatus = AttachStatus.DETACHED
    attachments: dict[uuid.UUID, volumes.AttachmentStatus] = dataclasses.field(default_factory=dict)
    connections: dict[uuid.UUID, Connection] = dataclasses.field(default_factory=dict)
    export: volumes.Export = volumes.Export.NONE
    export_job: uuid.UUID | None = None
    seq: int = 1

    @property
    def is_passing(self) -> bool:
        return self.status in reconciliation.PASSING

    @property
    def is_idle(self) -> bool:
        return not self.attachments and all(one.has_ended for one in self.connections.values())

    def live(self, key: str) -> tuple[uuid.UUID, Connection] | None:
        """A connector's connection that has not ended."""
        found = [
            (one_id, one)
            for one_id, one in self.connections.items()
            if one.key == key and not one.has_ended
        ]
        return found[0] if found else None

    def take(self, job: Job) -> None:
        """A job moves it into its passing status."""
        passing = PASSING[job.kind]
        if self.holder != job.id:
            self.previous = self.status
        self.status, self.holder = passing.status, job.id
        self.attach_status = passing.attach_status or self.attach_status
        self.seq += 1

    def set_export(self, job: Job, export: volumes.Export) -> None:
        """A job makes or ends its export."""
        if export is volumes.Export.NONE:
            self.export_job = None
        elif self.export is volumes.Export.NONE:
            self.export_job = job.id
        self.export = export
        self.seq += 1

    def settle(self) -> None:
        """The job that holds it has ended without a word about it."""
        is_attached = volumes.AttachmentStatus.ATTACHED in self.attachments.values()
        by_attachments = VolumeStatus.IN_USE if is_attached else VolumeStatus.AVAILABLE
        match self.status:
            case VolumeStatus.CREATING:
                self.status = VolumeStatus.ERROR
            case VolumeStatus.DELETING:
                self.status = VolumeStatus.ERROR_DELETING
            case VolumeStatus.EXTENDING:
                self.status = VolumeStatus.ERROR_EXTENDING
            case VolumeStatus.ATTACHING | VolumeStatus.DETACHING:
                self.status = by_attachments
            case _:
                assert self.previous is not None
                self.status = self.previous
        match self.status:
            case VolumeStatus.IN_USE:
                self.attach_status = AttachStatus.ATTACHED
            case VolumeStatus.AVAILABLE:
                self.attach_status = AttachStatus.DETACHED

    def release(self, job: Job, state: JobState) -> None:
        """The job has ended and holds it no more."""
        if self.holder == job.id:
            self.holder = self.previous = None
        if state is not JobState.SUCCEEDED:
            self.attachments = {
                one: status
                for one, status in self.attachments.items()
                if status is not volumes.AttachmentStatus.ATTACHING
            }
        self.seq += 1


class Model:
    """All volumes, and the jobs in the order of acceptance."""

    def __init__(self) -> None:
        self.volumes: dict[uuid.UUID, Volume] = {}
        self.jobs: list[Job] = []

    def at_work_on(self, volume_id: uuid.UUID) -> list[Job]:
        """The unfinished jobs that need a volume."""
        return [
            job
            for job in self.jobs
            if job.volume_id == volume_id and job.refusal is None and not job.has_ended
        ]

    def accept(self, job: Job) -> None:
        """Stores a new job; it starts where nobody else needs its volume."""
        job.refusal = self._refusal(job)
        if job.refusal is not None or not self.at_work_on(job.volume_id):
            job.state = JobState.RUNNING
        self.jobs.append(job)

    def _refusal(self, job: Job) -> str | None:
        volume = self.volumes.get(job.volume_id)
        others = self.at_work_on(job.volume_id)
        if job.kind is Kind.CREATE:
            return None if volume is None else "VolumeExists"
        if volume is None:
            is_awaited = any(other.mode is LockMode.EXCLUSIVE for other in others)
            return None if is_awaited else "VolumeNotFound"
        if job.kind in IDLE and not others and not volume.is_idle:
            return "VolumeIsBusy"
        if job.kind in CHECKED:
            fits = volume.status in PASSING[job.kind].allowed or volume.status in SETTLING
            return None if fits else "InvalidVolumeStatus"
        return None

    def next_jobs(self) -> list[Job]:
        """The queued jobs whose turn it is."""
        firsts = [self.at_work_on(volume_id) for volume_id in {job.volume_id for job in self.jobs}]
        return [jobs[0] for jobs in firsts if jobs and jobs[0].state is JobState.QUEUED]
