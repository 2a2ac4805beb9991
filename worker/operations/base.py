"""What an operation is, and what it works with."""

import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pydantic

from messages import client, errors, requests, resources
from messages.resources import VolumeStatus
from worker import backend, throttle
from worker.connectors import registry
from worker.drivers import base as drivers
from worker.store import acceptance, database, jobs, volumes

USABLE = (VolumeStatus.AVAILABLE, VolumeStatus.IN_USE)
"""Statuses in which a volume can be connected, exported and copied from."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A good end. Without ``result``, it is the record of the volume as changed."""

    result: Mapping[str, Any] | None = None
    change: jobs.VolumeChange | None = None
    connection_id: uuid.UUID | None = None
    """The connection whose secrets are to be filled into the result that the caller gets."""


@dataclasses.dataclass(slots=True)
class Context:
    """What an operation works with."""

    job: jobs.Job
    args: Any
    host: str
    backends: Mapping[str, backend.Backend]
    store: database.Database
    remote: client.Client
    connectors: registry.Registry
    lease: float
    """Seconds for which the worker may stand still, and still have the job."""
    say_volume: Callable[[Mapping[str, Any]], None]
    progress: Callable[[resources.Progress], Awaitable[None]]
    cancel: Callable[[uuid.UUID], Awaitable[jobs.Job]]
    """Has a job cancelled, wherever it runs; returns it when it has ended."""
    keep_checkpoint: Callable[[Mapping[str, Any]], Awaitable[None]]
    """Keeps how far a copy has safely come, for the job's next attempt."""
    on_child: Callable[[int], Awaitable[None]]
    """Keeps the pid of a process that works for the job, before it does anything."""
    throttle: throttle.Throttle
    """How fast the job may go."""
    begun: Mapping[str, Any] | None = None
    """The row of the volume that it creates, where that was made when the job was accepted."""
    is_storage_touched: bool = False
    """Whether this attempt has asked the storage for anything that can be taken back."""
    on_cancel: jobs.VolumeChange | None = None
    """What becomes of the volume if the job is cancelled now, where nothing else is said."""
    on_failure: jobs.VolumeChange | None = None
    """What becomes of the volume if the job ends in an error now, where settling it by its
    passing status (``creating`` to ``error``, ``maintenance`` back, …) would be wrong."""

    def backend_at(self, address: str) -> backend.Backend:
        """A backend of this host.

        Raises:
            DriverNotInitialized: it is not set up, or not configured any more.
        """
        found = self.backends.get(address)
        if found is None:
            raise errors.DriverNotInitialized(
                f"no backend of this worker is {address}", address=address
            )
        found.require()
        return found

    @property
    def backend(self) -> backend.Backend:
        """The backend that the request was sent to.

        Raises:
            DriverNotInitialized: it is not set up.
        """
        return self.backend_at(self.job.address)

    async def volume(self, volume_id: uuid.UUID) -> volumes.Volume:
        """A volume of the backend that the request was sent to.

        Looked up again although it was checked at acceptance: a job that waits behind the create
        of its volume was accepted before there was anything to check.

        Raises:
            VolumeNotFound, WrongAddress: it is not here.
        """
        volume = await volumes.get(self.store, volume_id)
        if volume.address != self.job.address:
            raise wrong_address(volume_id, volume.address)
        return volume

    async def take(
        self,
        volume_id: uuid.UUID,
        status: VolumeStatus,
        *,
        allowed: Sequence[VolumeStatus],
        attach_status: resources.AttachStatus | None = None,
    ) -> volumes.Volume:
        """Moves a volume into a passing status, and lets it be known."""
        volume = await volumes.take(
            self.store,
            self.job,
            volume_id,
            allowed=allowed,
            status=status,
            attach_status=attach_status,
        )
        self.say_volume(volume.event())
        return volume


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """How one method is carried out."""

    run: Callable[[Context], Awaitable[Outcome]]
    needs: Callable[[uuid.UUID, Any], Sequence[acceptance.Need]]
    """The volumes that it needs, from the job's id and arguments."""
    creates: Callable[[uuid.UUID, Any], acceptance.NewVolume] | None = None
    """The volume that it makes the record of before all else."""
    slot: jobs.Slot = jobs.Slot.CONTROL
    takes_parent: bool = False
    """Whether it may run for another job, passing that job's locks."""
    undo: Callable[[Context], Awaitable[None]] | None = None
    """Gives back what an earlier attempt has acquired, where there will be no other attempt."""
    take_back: Callable[[Context], Awaitable[None]] | None = None
    """Undoes what the job did, where it was cancelled, beside what the operation undoes itself.
    Without it, ``undo`` gives back what an earlier attempt has acquired."""


def parse(job: jobs.Job) -> pydantic.BaseModel:
    """A stored job's arguments; they were checked when it was accepted."""
    return requests.parse_args(requests.METHODS[job.method], dict(job.args))


def reference(volume: volumes.Volume) -> drivers.Volume:
    """A volume as drivers and targets see it."""
    return drivers.Volume(
        id=volume.id,
        name=volume.name,
        size_bytes=volume.size_bytes,
        metadata=volume.metadata,
        provider_location=volume.provider_location,
    )


def updated(update: drivers.Update) -> dict[str, Any]:
    """The columns that a driver wants changed."""
    columns = {
        "provider_location": update.provider_location,
        "metadata": None if update.metadata is None else dict(update.metadata),
    }
    return {name: value for name, value in columns.items() if value is not None}


def back(volume: volumes.Volume, **columns: Any) -> jobs.VolumeChange:
    """Back to the status from before the job took the volume."""
    return jobs.VolumeChange(volume.id, {"status": volume.previous_status, **columns})


def wrong_address(volume_id: object, address: str) -> errors.WrongAddress:
    """The error that says where the volume lives."""
    return errors.WrongAddress(
        f"volume {volume_id} lives at {address}; send it there",
        volume_id=str(volume_id),
        address=address,
    )


def refusal(job: jobs.Job) -> errors.VolumeWorkerError:
    """The error that a job is refused with for what was plain when it was accepted."""
    details = dict(job.refusal or {})
    code = details.pop("code")
    volume_id = details.get("volume_id")
    texts = {
        "Cancelled": "the job was cancelled before it had begun",
        "VolumeNotFound": f"there is no volume {volume_id}",
        "VolumeExists": f"volume {volume_id} exists",
        "WrongAddress": wrong_address(volume_id, str(details.get("address"))).message,
        "VolumeIsBusy": f"volume {volume_id} has connections or attachments; end them first",
        "InvalidVolumeStatus": f"volume {volume_id} is {details.get('status')}",
        "InvalidRequest": "parent-job names no running job that works on this volume",
    }
    return errors.BY_CODE[code](texts[code], **details)
