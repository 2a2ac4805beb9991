"""What a worker is asked to do when it dies: each method, in the ways that reach different points.

A case prepares its volumes, says what is sent and what has to become of it, and names every point
that its request comes to: each of these makes one combination of the suite.
"""

import dataclasses
import pathlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from tests.faults import world
from tests.faults.points import At, Point
from tests.services import volumes
from tests.services.volumes import MIB

SIZE: Final = 2 * MIB
CONNECTOR: Final = {"host": "client", "initiator": volumes.INITIATOR}
PACE: Final = SIZE // 5
"""Bytes a second of a copy, so that there is a middle."""

Prepare = Callable[[world.World, str], Awaitable[world.Request]]


@dataclasses.dataclass(frozen=True)
class Scene:
    """Where a request is carried out.

    Attributes:
        backend: whose volumes the request is about.
        dies: the host whose worker is armed; the others have ordinary ones.
    """

    backend: str = "fast"
    hosts: tuple[str, ...] = ("host-a",)
    dies: str = "host-a"

    @property
    def needs_tgtd(self) -> bool:
        """Whether there must be a tgtd."""
        return self.backend == "iscsi"

    def __str__(self) -> str:
        return f"{self.backend}-{self.dies}-of-{len(self.hosts)}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One request and the points that it comes to.

    Attributes:
        reaches: the points of its own that it comes to, beside :data:`COMMON`.
        in_common: whether those that all requests come to are tried with this one.
    """

    name: str
    method: str
    prepare: Prepare
    reaches: tuple[At, ...]
    in_common: bool = True
    scene: Scene = Scene()

    @property
    def dying(self) -> tuple[At, ...]:
        """The points at which the worker is made to die."""
        return (*map(At, COMMON), *self.reaches) if self.in_common else self.reaches


COMMON: Final = (
    Point.DELIVERED,
    Point.READ,
    Point.STORING,
    Point.STORED,
    Point.ACKNOWLEDGED,
    Point.BEGINNING,
    Point.FINISHING,
    Point.FINISHED,
    Point.CONFIRMED,
    Point.FORGOTTEN,
)
"""What every request that becomes a job comes to."""


def _at(*places: Point | At) -> tuple[At, ...]:
    return tuple(one if isinstance(one, At) else At(one) for one in places)


# Preparing


async def _create(made: world.World, at: str) -> world.Request:
    new = {"name": "v", "size_bytes": SIZE}
    return world.Request(at, {"volume": new}, (world.Expected(at, SIZE),))


async def _delete(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    await made.caller.call("create_export", at, volume.at)
    return world.Request(at, volume.at, (world.Expected(at, SIZE, volume.id, status=None),))


async def _extend(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    args = {**volume.at, "new_size_bytes": 2 * SIZE}
    return world.Request(at, args, (world.Expected(at, 2 * SIZE, volume.id),))


async def _extend_connected(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    await made.volumes.connect(volume)
    args = {**volume.at, "new_size_bytes": 2 * SIZE}
    expected = world.Expected(at, 2 * SIZE, volume.id, exported=True, connections=1)
    return world.Request(at, args, (expected,))


async def _create_export(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    return world.Request(at, volume.at, (world.Expected(at, SIZE, volume.id, exported=True),))


async def _remove_export(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    await made.caller.call("create_export", at, volume.at)
    return world.Request(at, volume.at, (world.Expected(at, SIZE, volume.id),))


async def _initialize(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    expected = world.Expected(at, SIZE, volume.id, exported=True, connections=1)
    return world.Request(at, {**volume.at, "connector": CONNECTOR}, (expected,))


async def _initialize_lost(made: world.World, at: str) -> world.Request:
    request = await _initialize(made, at)
    return dataclasses.replace(request, hidden=_file(made, request.expected[0]))


async def _terminate(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    await made.volumes.connect(volume)
    expected = world.Expected(at, SIZE, volume.id)
    return world.Request(at, {**volume.at, "connector": CONNECTOR}, (expected,))


async def _attach(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    args = {**volume.at, "instance_uuid": str(uuid.UUID(int=7)), "mountpoint": "/dev/vdb"}
    expected = world.Expected(at, SIZE, volume.id, status="in-use", attachments=1)
    return world.Request(at, args, (expected,))


async def _detach(made: world.World, at: str) -> world.Request:
    volume = await made.volumes.create(at, SIZE)
    await made.volumes.attach(volume)
    return world.Request(at, volume.at, (world.Expected(at, SIZE, volume.id),))


def _copy(source_host: str, destination_host: str) -> Prepare:
    async def prepare(made: world.World, at: str) -> world.Request:
        backend = at.partition("@")[2]
        source = await made.volumes.create(f"{source_host}@{backend}", SIZE)
        destination = await made.volumes.create(f"{destination_host}@{backend}", SIZE)
        await made.volumes.fill(source, 1)
        # What the source has holes for must not stay.
        await made.volumes.fill(destination, 2)
        content = await made.volumes.content(source)
        args = {**volumes.Volumes.pair(source, destination), "bytes_per_second": PACE}
        expected = tuple(
            world.Expected(volume.address, SIZE, volume.id, content=content)
            for volume in (source, destination)
        )
        return world.Request(at, args, expected)

    return prepare


async def _copy_lost(made: world.World, at: str) -> world.Request:
    request = await _copy("host-a", "host-a")(made, at)
    return dataclasses.replace(request, hidden=_file(made, request.expected[0]))


async def _stats(made: world.World, at: str) -> world.Request:
    return world.Request(at, {"refresh": True})


def _file(made: world.World, expected: world.Expected) -> pathlib.Path:
    host, _, backend = expected.address.partition("@")
    return made.hosts[host].folder / backend / f"volume-{expected.id}"


_EXPORTED: Final = _at(Point.EXPORT_RECORDED, Point.EXPORTED)
_SERVED: Final = _at(
    Point.EXPORT_RECORDED,
    Point.EXPORTED,
    At(Point.EXPORT_RECORDED, 2),
    Point.CONNECTION_RECORDED,
    Point.HALF_SERVED,
    Point.CONNECTION_MADE,
    Point.CONNECTION_LIVE,
)
_LET_GO: Final = _at(
    Point.CONNECTION_ENDING,
    Point.HALF_ENDED,
    Point.CONNECTION_CUT,
    Point.EXPORT_RECORDED,
    Point.UNEXPORTED,
    At(Point.EXPORT_RECORDED, 2),
)
_LET_GO_THEN: Final = _at(
    Point.CONNECTION_ENDING,
    Point.HALF_ENDED,
    Point.CONNECTION_CUT,
    At(Point.EXPORT_RECORDED, 3),
    Point.UNEXPORTED,
    At(Point.EXPORT_RECORDED, 4),
)
"""By the worker that has given access before."""
_COPIED: Final = _at(
    Point.HOLDING,
    Point.CONNECTION_RECORDED,
    Point.CONNECTION_LIVE,
    Point.DESTINATION_ATTACHED,
    Point.SOURCE_ATTACHED,
    Point.COPYING,
    Point.COPIED,
    Point.UNDOING,
    Point.CONNECTION_ENDING,
    Point.HALF_UNDONE,
)
_REMOTE: Final = _at(Point.ACCESS_GIVEN, Point.ACCESS_ENDED)
_TWO: Final = Scene(hosts=("host-a", "host-b"))
_OTHER: Final = Scene(hosts=("host-a", "host-b"), dies="host-b")
_TGT: Final = Scene("iscsi")
_SIM: Final = Scene("sim")

CASES: Final[tuple[Case, ...]] = (
    Case(
        "create_volume",
        "create_volume",
        _create,
        _at(Point.HOLDING, Point.HALF_MADE, Point.DRIVER_DONE),
    ),
    Case(
        "delete_volume",
        "delete_volume",
        _delete,
        _at(Point.HOLDING, Point.EXPORT_RECORDED, Point.UNEXPORTED, Point.DRIVER_DONE),
    ),
    Case(
        "extend_volume",
        "extend_volume",
        _extend,
        _at(Point.HOLDING, Point.HALF_MADE, Point.DRIVER_DONE),
    ),
    Case(
        "extend_volume-sim",
        "extend_volume",
        _extend_connected,
        _at(Point.DRIVER_DONE, Point.TARGET_EXTENDED),
        in_common=False,
        scene=_SIM,
    ),
    Case("create_export", "create_export", _create_export, _EXPORTED),
    Case("ensure_export", "ensure_export", _create_export, _EXPORTED),
    Case(
        "remove_export",
        "remove_export",
        _remove_export,
        _at(Point.EXPORT_RECORDED, Point.UNEXPORTED),
    ),
    Case("initialize_connection", "initialize_connection", _initialize, _SERVED),
    Case(
        "initialize_connection-lost",
        "initialize_connection",
        _initialize_lost,
        _at(Point.REQUEUED, Point.CLAIMED),
        in_common=False,
    ),
    Case("terminate_connection", "terminate_connection", _terminate, _LET_GO),
    Case(
        "attach_volume",
        "attach_volume",
        _attach,
        _at(Point.HOLDING, Point.ATTACHMENT_RECORDED, Point.DRIVER_DONE),
    ),
    Case(
        "detach_volume",
        "detach_volume",
        _detach,
        _at(Point.HOLDING, Point.DRIVER_DONE, Point.ATTACHMENT_ENDED),
    ),
    Case(
        "copy_volume_data",
        "copy_volume_data",
        _copy("host-a", "host-a"),
        (*_COPIED, At(Point.CONNECTION_RECORDED, 2), At(Point.CONNECTION_ENDING, 2)),
    ),
    Case(
        "copy_volume_data-lost",
        "copy_volume_data",
        _copy_lost,
        _at(Point.REQUEUED, Point.CLAIMED),
        in_common=False,
    ),
    Case(
        "copy_volume_data-src",
        "copy_volume_data",
        _copy("host-b", "host-a"),
        (*_COPIED, *_REMOTE),
        scene=_TWO,
    ),
    Case(
        "copy_volume_data-dest",
        "copy_volume_data",
        _copy("host-a", "host-b"),
        (*_COPIED, *_REMOTE),
        scene=_TWO,
    ),
    Case("get_volume_stats", "get_volume_stats", _stats, ()),
    # The other host's worker dies while it gives a copy access, or ends that.
    Case(
        "copy_volume_data-src-other",
        "copy_volume_data",
        _copy("host-b", "host-a"),
        (*_SERVED, *_LET_GO_THEN, *(At(point, 2) for point in COMMON)),
        scene=_OTHER,
    ),
    # The same with the tgt target, and with one that only says that it serves.
    Case(
        "delete_volume-tgt",
        "delete_volume",
        _delete,
        _at(Point.EXPORT_RECORDED, Point.UNEXPORTED, Point.DRIVER_DONE),
        in_common=False,
        scene=_TGT,
    ),
    Case(
        "create_export-tgt",
        "create_export",
        _create_export,
        _at(Point.EXPORT_RECORDED, Point.HALF_SERVED, Point.EXPORTED),
        in_common=False,
        scene=_TGT,
    ),
    Case(
        "initialize_connection-tgt",
        "initialize_connection",
        _initialize,
        (*_SERVED, At(Point.HALF_SERVED, 2)),
        in_common=False,
        scene=_TGT,
    ),
    Case(
        "terminate_connection-tgt",
        "terminate_connection",
        _terminate,
        _LET_GO,
        in_common=False,
        scene=_TGT,
    ),
    Case(
        "copy_volume_data-tgt",
        "copy_volume_data",
        _copy("host-b", "host-a"),
        (*_COPIED, *_REMOTE),
        in_common=False,
        scene=Scene("iscsi", ("host-a", "host-b")),
    ),
    Case(
        "create_volume-sim",
        "create_volume",
        _create,
        _at(Point.HOLDING, Point.DRIVER_DONE),
        in_common=False,
        scene=_SIM,
    ),
    Case(
        "initialize_connection-sim",
        "initialize_connection",
        _initialize,
        _at(
            Point.EXPORTED, Point.CONNECTION_RECORDED, Point.CONNECTION_MADE, Point.CONNECTION_LIVE
        ),
        in_common=False,
        scene=_SIM,
    ),
    Case(
        "terminate_connection-sim",
        "terminate_connection",
        _terminate,
        _at(Point.CONNECTION_ENDING, Point.CONNECTION_CUT, Point.UNEXPORTED),
        in_common=False,
        scene=_SIM,
    ),
)
