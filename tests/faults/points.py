"""Crash points: places between a request's frame and its confirmed reply where a worker may die.

Product code knows nothing of them. :data:`PLACES` is the one table of what is wrapped; a name in it
that is not there any more keeps the crashing worker from starting, and a place that is not reached
any more fails ``test_every_crash_point_is_reached_where_the_table_says``.
"""

import dataclasses
import enum
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from worker.store import jobs


class Point(enum.StrEnum):
    """What the last thing is that a worker does."""

    DELIVERED = "delivered"
    """A frame has come from the broker, and nobody has looked into it."""
    READ = "read"
    """The request was read and found good, and is stored nowhere."""
    STORING = "storing"
    """All is ready to be stored."""
    STORED = "stored"
    """The job stands in the database, and the broker has not been told so."""
    ACKNOWLEDGED = "acknowledged"
    """The broker has forgotten the request: the job's row is all there is of it."""
    BEGINNING = "beginning"
    """The job's task has begun, and its operation has not."""
    HOLDING = "holding"
    """The volume's record is made, or its status is the passing one of the job."""
    HALF_MADE = "half_made"
    """The storage is about to give the volume its size, beyond what it was."""
    DRIVER_DONE = "driver_done"
    """The driver has made, deleted, extended, attached or detached, and nobody knows of it."""
    TARGET_EXTENDED = "target_extended"
    """The target knows of a volume's new size, and the record does not."""
    ATTACHMENT_RECORDED = "attachment_recorded"
    """An attachment is recorded, and the driver has not heard of it."""
    ATTACHMENT_ENDED = "attachment_ended"
    """An attachment's record is gone, and the job goes on."""
    EXPORT_RECORDED = "export_recorded"
    """An export is recorded, to be made or to be removed, and the target has not heard of it."""
    EXPORTED = "exported"
    """The target exports the volume, and nobody knows of it."""
    CONNECTION_RECORDED = "connection_recorded"
    """A connection is recorded, and the target has not heard of it."""
    HALF_SERVED = "half_served"
    """The target has opened the volume, or begun a target for it, and lets nobody in yet."""
    CONNECTION_MADE = "connection_made"
    """The target has made a connection, and the record does not say so yet."""
    CONNECTION_LIVE = "connection_live"
    """A connection is recorded as made, and its job has not ended."""
    CONNECTION_ENDING = "connection_ending"
    """A connection is recorded as ending, and the target has not heard of it."""
    HALF_ENDED = "half_ended"
    """The target has let go of the volume, and keeps a part of what it was served by."""
    CONNECTION_CUT = "connection_cut"
    """The target has ended a connection, and the record does not say so yet."""
    UNEXPORTED = "unexported"
    """The target has removed an export, and the record does not say so yet."""
    ACCESS_GIVEN = "access_given"
    """Another host's worker has given access to its volume, and the answer was not used yet."""
    DESTINATION_ATTACHED = "destination_attached"
    """A copy has attached its destination, and not its source."""
    SOURCE_ATTACHED = "source_attached"
    """A copy has attached both, and its child process has not begun."""
    COPYING = "copying"
    """A copy has moved some of the bytes, and not all."""
    COPIED = "copied"
    """A copy has moved and verified all bytes, and undone nothing."""
    UNDOING = "undoing"
    """A copy has let go of its source's device; everything else is still held."""
    ACCESS_ENDED = "access_ended"
    """Another host's worker has ended the access to its volume, and the answer was not used yet."""
    HALF_UNDONE = "half_undone"
    """A copy has given back its source, and is about to let go of its destination."""
    FINISHING = "finishing"
    """All is done, and the job's end is not stored."""
    FINISHED = "finished"
    """The job's end is stored, and nobody was told."""
    CONFIRMED = "confirmed"
    """The broker has confirmed the reply and the events, which stand in the outbox still."""
    FORGOTTEN = "forgotten"
    """The outbox is empty: nothing is left to be done."""
    REQUEUED = "requeued"
    """A failed attempt was put back, to be tried again."""
    CLAIMED = "claimed"
    """A job that had waited was claimed, and its task has not begun."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a point is: before or after a call of any of these, ``package.module:qualified.name``.

    Args:
        nth: which of the calls; those before it are other points, or none.
        counts: whether a call counts, by what it was given and what it returned.
    """

    names: tuple[str, ...]
    before: bool = False
    nth: int = 1
    counts: "Counts" = lambda _, __: True


Counts = Callable[[Sequence[Any], Any], bool]


def _after(*names: str, nth: int = 1, counts: Counts = lambda _, __: True) -> Place:
    return Place(names, nth=nth, counts=counts)


def _before(*names: str, nth: int = 1) -> Place:
    return Place(names, before=True, nth=nth)


def _is_midway(_args: Sequence[Any], job: jobs.Job) -> bool:
    progress = job.progress or {}
    return bool(0 < progress["done_bytes"] < progress["total_bytes"])


def _names_any(args: Sequence[Any], _result: Any) -> bool:
    # A target that compares what it serves with the records calls it for nothing, too.
    return len(args) > 1


def _found_any(_args: Sequence[Any], claimed: Sequence[jobs.Job]) -> bool:
    return bool(claimed)


_DRIVERS: Final = ("worker.drivers.file:FileDriver", "worker.drivers.fake:FakeISCSIDriver")
_TARGETS: Final = (
    "worker.targets.nbd:NbdTarget",
    "worker.targets.tgt:TgtTarget",
    "worker.targets.fake:FakeTarget",
)
_CONNECTORS: Final = (
    "worker.connectors.local:LocalConnector",
    "worker.connectors.nbd:NbdConnector",
    "worker.connectors.iscsi:IscsiConnector",
)


def _methods(classes: tuple[str, ...], *methods: str) -> tuple[str, ...]:
    return tuple(f"{one}.{method}" for one in classes for method in methods)


PLACES: Final[Mapping[Point, Place]] = {
    Point.DELIVERED: _before("worker.inbox:Inbox.receive"),
    Point.READ: _after("messages.envelope:read_body"),
    Point.STORING: _before("worker.store.acceptance:accept"),
    Point.STORED: _after("worker.store.acceptance:accept"),
    Point.ACKNOWLEDGED: _after("messages.wire:acknowledge"),
    Point.BEGINNING: _before("worker.operations.base:parse"),
    Point.HOLDING: _after("worker.store.volumes:begin", "worker.store.volumes:take"),
    Point.HALF_MADE: _before("os:ftruncate"),
    Point.DRIVER_DONE: _after(
        *_methods(_DRIVERS, "create_volume", "delete_volume", "extend_volume"),
        *_methods(_DRIVERS, "attach_volume", "detach_volume"),
    ),
    Point.TARGET_EXTENDED: _after(*_methods(_TARGETS, "extend_volume")),
    Point.ATTACHMENT_RECORDED: _after("worker.store.volumes:begin_attachment"),
    Point.ATTACHMENT_ENDED: _after("worker.store.volumes:end_attachments"),
    Point.EXPORT_RECORDED: _after("worker.store.volumes:set_export"),
    Point.EXPORTED: _after(*_methods(_TARGETS, "create_export")),
    Point.CONNECTION_RECORDED: _after("worker.store.connections:begin"),
    Point.HALF_SERVED: _after(
        "worker.storage_daemon.server:Server.add_node", "worker.targets.tgtadm:Tgtadm.new_target"
    ),
    Point.CONNECTION_MADE: _after(*_methods(_TARGETS, "initialize_connection")),
    Point.CONNECTION_LIVE: _after("worker.store.connections:live"),
    Point.CONNECTION_ENDING: _after("worker.store.connections:ending"),
    Point.HALF_ENDED: _after(
        "worker.storage_daemon.server:Server.remove_exports",
        "worker.targets.tgtadm:Tgtadm.delete_unit",
        "worker.targets.tgtadm:Tgtadm.unbind_initiator",
        counts=_names_any,
    ),
    Point.CONNECTION_CUT: _after(*_methods(_TARGETS, "terminate_connection")),
    Point.UNEXPORTED: _after(*_methods(_TARGETS, "remove_export")),
    Point.ACCESS_GIVEN: _after("messages.client:Client.call"),
    Point.DESTINATION_ATTACHED: _after(*_methods(_CONNECTORS, "connect_volume")),
    Point.SOURCE_ATTACHED: _after(*_methods(_CONNECTORS, "connect_volume"), nth=2),
    Point.COPYING: _after("worker.store.jobs:set_progress", counts=_is_midway),
    Point.COPIED: _after("worker.transfer.copying:copy"),
    Point.UNDOING: _after(*_methods(_CONNECTORS, "disconnect_volume")),
    Point.ACCESS_ENDED: _after("messages.client:Client.call", nth=2),
    Point.HALF_UNDONE: _before(*_methods(_CONNECTORS, "disconnect_volume"), nth=2),
    Point.FINISHING: _before("worker.store.jobs:finish"),
    Point.FINISHED: _after("worker.store.jobs:finish"),
    Point.CONFIRMED: _before("worker.store.outbox:delete"),
    Point.FORGOTTEN: _after("worker.store.outbox:delete"),
    Point.REQUEUED: _after("worker.store.jobs:requeue"),
    Point.CLAIMED: _after("worker.store.jobs:claim", counts=_found_any),
}


class At(NamedTuple):
    """A point, and which time it is reached."""

    point: Point
    time: int = 1

    @classmethod
    def read(cls, text: str) -> Self:
        """From ``NAME`` or ``NAME:N``."""
        name, _, time = text.partition(":")
        return cls(Point(name), int(time or 1))

    def __str__(self) -> str:
        return self.point if self.time == 1 else f"{self.point}:{self.time}"


def watch(reach: Callable[[Point], None], wait: Callable[[Point], Awaitable[None]]) -> None:
    """Has each place tell that it was come to: ``wait`` where that can be awaited, else ``reach``.

    Raises:
        AttributeError: there is nothing of a name; the table of places is to be mended.
    """
    for point, place in PLACES.items():
        for name in place.names:
            module, _, path = name.partition(":")
            *outer, last = path.split(".")
            owner: Any = importlib.import_module(module)
            for one in outer:
                owner = getattr(owner, one)
            call = getattr(owner, last)
            wrapped = (
                _awaiting(point, place, call, wait)
                if inspect.iscoroutinefunction(call)
                else _calling(point, place, call, reach)
            )
            setattr(owner, last, wrapped)


def _awaiting(
    point: Point,
    place: Place,
    call: Callable[..., Awaitable[Any]],
    wait: Callable[[Point], Awaitable[None]],
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        if place.before:
            await wait(point)
        result = await call(*args, **kwargs)
        if not place.before and place.counts(args, result):
            await wait(point)
        return result

    return wrapped


def _calling(
    point: Point, place: Place, call: Callable[..., Any], reach: Callable[[Point], None]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if place.before:
            reach(point)
        result = call(*args, **kwargs)
        if not place.before and place.counts(args, result):
            reach(point)
        return result

    return wrapped
