"""Volumes, attachments and connections: what a job may change, and what is forgotten."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from messages import errors, requests, resources
from messages.resources import AttachStatus, VolumeStatus
from tests.contract import schema
from tests.integration import store_bench
from tests.integration.store_bench import ELSEWHERE, HERE, C, R, X, need
from tests.services import environment
from worker.store import acceptance, connections, jobs, volumes

SECRET = "hunter2-hunter2"
INITIATOR = "iqn.1994-05.com.example:b"


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


async def take(
    bench: store_bench.Bench, one: jobs.Job, volume_id: uuid.UUID, **changed: Any
) -> volumes.Volume:
    values = {"allowed": [VolumeStatus.AVAILABLE], "status": VolumeStatus.MAINTENANCE}
    return await volumes.take(bench.store, one, volume_id, **{**values, **changed})


# Compare and set


async def test_a_volume_is_taken_from_an_allowed_status(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, known=True))
    taken = await take(bench, one, volume.id, attach_status=AttachStatus.ATTACHING)
    assert (taken.status, taken.attach_status) == ("maintenance", "attaching")
    assert (taken.previous_status, taken.status_job) == ("available", one.id)
    assert taken.seq == volume.seq + 1
    assert taken.updated_at > volume.updated_at


async def test_a_volume_is_not_taken_from_another_status(bench: store_bench.Bench) -> None:
    volume = await bench.volume(status="in-use")
    one = await bench.started(need(volume.id, known=True))
    with pytest.raises(errors.InvalidVolumeStatus) as refused:
        await take(bench, one, volume.id)
    assert refused.value.details == {"volume_id": str(volume.id), "status": "in-use"}
    assert await volumes.get(bench.store, volume.id) == volume


async def test_a_volume_that_is_not_there_is_told_as_such(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    one = await bench.started(need(volume_id))
    with pytest.raises(errors.VolumeNotFound):
        await take(bench, one, volume_id)
    with pytest.raises(errors.VolumeNotFound):
        await volumes.record(bench.store, volume_id)
    assert await volumes.find(bench.store, volume_id) is None


async def test_a_second_attempt_takes_what_the_first_one_left(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, known=True))
    await take(bench, one, volume.id)
    await bench.expire(one)
    (again,) = await bench.other().claim()
    taken = await take(bench, again, volume.id)
    # And remembers the status from before the first.
    assert (taken.status, taken.previous_status) == ("maintenance", "available")


async def test_the_end_of_a_job_lets_go_of_its_volume(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, known=True))
    await take(bench, one, volume.id)
    await bench.finish(one, change=jobs.VolumeChange(volume.id, {"status": "available"}))
    now = await volumes.get(bench.store, volume.id)
    assert (now.status, now.status_job, now.previous_status) == ("available", None, None)


async def test_a_child_that_ends_does_not_let_go_of_what_its_parent_has_taken(
    bench: store_bench.Bench,
) -> None:
    """Else the parent's next attempt finds the volume in a status that it cannot take it from."""
    volume = await bench.volume()
    parent = await bench.started(need(volume.id, X, known=True))
    await take(bench, parent, volume.id)
    child = await bench.started(need(volume.id, C, known=True), parent_job=parent.id)
    await bench.finish(child, change=jobs.VolumeChange(volume.id))
    now = await volumes.get(bench.store, volume.id)
    assert (now.status, now.status_job, now.previous_status) == (
        "maintenance",
        parent.id,
        "available",
    )
    await bench.expire(parent)
    (again,) = await bench.other().claim()
    assert (await take(bench, again, volume.id)).previous_status == "available"


async def test_two_changes_at_once_are_both_counted(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    reader = await bench.started(need(volume.id, R, known=True))
    control = await bench.started(need(volume.id, C, known=True))
    await bench.finish(reader, change=jobs.VolumeChange(volume.id))
    await volumes.set_export(bench.store, control, volume.id, volumes.Export.IMPLICIT)
    assert (await volumes.get(bench.store, volume.id)).seq == volume.seq + 2


# Creating


async def begin(bench: store_bench.Bench, one: jobs.Job, volume_id: uuid.UUID) -> volumes.Volume:
    return await volumes.begin(
        bench.store, one, acceptance.NewVolume(volume_id, "v", 7, {"a": "b"})
    )


async def test_a_new_volume_is_creating_and_its_record_is_that_of_the_contract(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    one = await bench.started(need(volume_id))
    volume = await begin(bench, one, volume_id)
    assert (volume.status, volume.size_bytes, volume.metadata) == ("creating", 7, {"a": "b"})
    assert (volume.created_by, volume.address) == (one.id, HERE)
    record = await volumes.record(bench.store, volume_id)
    assert schema.faults(record, schema.definition("Volume")) == []
    assert record == volume.event()["volume"]


async def test_a_second_attempt_of_a_create_goes_on_with_the_firsts_record(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    one = await bench.started(need(volume_id))
    first = await begin(bench, one, volume_id)
    await bench.expire(one)
    (again,) = await bench.other().claim()
    second = await begin(bench, again, volume_id)
    assert (second.id, second.created_at) == (first.id, first.created_at)


async def test_another_jobs_volume_is_not_made_again(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    one = await bench.started()
    with pytest.raises(errors.VolumeExists):
        await begin(bench, one, volume.id)
    assert await volumes.get(bench.store, volume.id) == volume


async def test_volumes_are_listed_by_id_page_by_page(bench: store_bench.Bench) -> None:
    made = [await bench.volume() for _ in range(4)]
    there = await bench.volume(address=ELSEWHERE)
    broken = await bench.volume(status="error")

    async def listed(**wanted: Any) -> list[str]:
        values = {"address": HERE, "status": None, "after": None, "limit": 100}
        found = await volumes.records(bench.store, **{**values, **wanted})
        return [record["id"] for record in found]

    here = sorted(str(volume.id) for volume in [*made, broken])
    assert await listed() == here
    assert await listed(address=None) == sorted([*here, str(there.id)])
    assert await listed(status="error") == [str(broken.id)]
    assert await listed(limit=2) == here[:2]
    assert await listed(limit=2, after=uuid.UUID(here[1])) == here[2:4]
    assert await listed(after=uuid.UUID(here[-1])) == []


# Attachments


async def test_an_attachment_is_recorded_changed_and_removed(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, C, known=True))
    instance, attachment_id = uuid.uuid4(), uuid.uuid4()

    async def begin_it() -> resources.Attachment:
        return await volumes.begin_attachment(
            bench.store,
            one,
            attachment_id,
            volume_id=volume.id,
            instance_uuid=instance,
            host_name="b",
            mountpoint="/dev/vdb",
            mode="ro",
        )

    first = await begin_it()
    assert (first.status, first.mode, first.instance_uuid) == ("attaching", "ro", instance)
    assert await begin_it() == first
    done = await volumes.set_attachment(
        bench.store, one, attachment_id, volumes.AttachmentStatus.ATTACHED
    )
    assert done.status == "attached"
    record = await volumes.record(bench.store, volume.id)
    assert record["attachments"] == [done.to_wire()]
    assert schema.faults(record, schema.definition("Volume")) == []
    await volumes.end_attachments(bench.store, one, volume.id, uuid.uuid4())
    assert (await volumes.record(bench.store, volume.id))["attachments"]
    await volumes.end_attachments(bench.store, one, volume.id, attachment_id)
    assert (await volumes.record(bench.store, volume.id))["attachments"] == []


async def test_the_last_event_of_a_failed_attach_lists_no_attachment(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, C, known=True))
    await take(bench, one, volume.id, status=VolumeStatus.ATTACHING)
    await volumes.begin_attachment(
        bench.store,
        one,
        uuid.uuid4(),
        volume_id=volume.id,
        instance_uuid=uuid.uuid4(),
        host_name=None,
        mountpoint="/dev/vdb",
        mode="rw",
    )
    assert (await volumes.get(bench.store, volume.id)).attachments
    error = errors.Internal("no")
    ended = await bench.finish(one, state=resources.JobState.FAILED, result=None, error=error)
    assert ended.event is not None
    assert ended.event["volume"]["status"] == "available"
    assert ended.event["volume"]["attachments"] == []
    assert await bench.rows("SELECT FROM attachments") == []


# Connections


class Connecting:
    """A job that makes and ends connections of a volume."""

    def __init__(self, bench: store_bench.Bench, volume: volumes.Volume, one: jobs.Job) -> None:
        self.bench, self.volume, self.job = bench, volume, one

    async def begin(self, *, is_local: bool = False, **connector: Any) -> connections.Connection:
        values = {"host": "b", "initiator": INITIATOR, **connector}
        return await connections.begin(
            self.bench.store,
            self.job,
            self.volume.id,
            requests.Connector.model_validate(values),
            is_local=is_local,
            credentials={"auth_username": "u", "auth_password": SECRET},
        )

    async def live(self, connection: connections.Connection) -> connections.Connection:
        return await connections.live(
            self.bench.store,
            self.job,
            connection,
            driver_volume_type="iscsi",
            data={"target_iqn": "iqn.x", "tls": {"kind": "psk"}},
            secrets={"auth_password": SECRET, "tls.key": SECRET},
        )


@pytest.fixture
async def connecting(bench: store_bench.Bench) -> Connecting:
    volume = await bench.volume()
    return Connecting(bench, volume, await bench.started(need(volume.id, C, known=True)))


async def test_the_same_connector_gets_the_same_connection(connecting: Connecting) -> None:
    first = await connecting.begin()
    again = await connecting.begin(initiator=INITIATOR.upper(), ip="192.0.2.9")
    assert again.id == first.id
    # Made from what was recorded first, since that is what its target knows.
    assert again.credentials == first.credentials
    assert await connecting.live(again) == await connections.find(connecting.bench.store, first.id)
    assert (await connecting.begin()).state == "live"


@pytest.mark.parametrize(
    "other",
    [
        {"host": "c"},
        {"host": None},
        {"initiator": INITIATOR + "2"},
        {"connection_key": "k"},
        {"initiator": None, "nqn": "nqn.x"},
    ],
)
async def test_another_host_initiator_or_key_is_another_connection(
    connecting: Connecting, other: dict[str, Any]
) -> None:
    first = await connecting.begin()
    second = await connecting.begin(**other)
    assert second.id != first.id
    assert (await connecting.begin(**other)).id == second.id
    assert len(await connections.of_volume(connecting.bench.store, connecting.volume.id)) == 2


async def test_the_same_connector_in_another_mode_is_refused(connecting: Connecting) -> None:
    first = await connecting.begin(mode="ro")
    with pytest.raises(errors.InvalidConnector) as refused:
        await connecting.begin(mode="rw")
    assert refused.value.details["connection_id"] == str(first.id)
    with pytest.raises(errors.InvalidConnector):
        await connecting.begin(mode="ro", is_local=True)


async def test_asking_for_another_mode_leaves_a_connection_ending(connecting: Connecting) -> None:
    first = await connecting.begin(mode="ro")
    await connections.ending(connecting.bench.store, connecting.job, connecting.volume.id)
    for other in ({"mode": "rw"}, {"mode": "ro", "is_local": True}):
        with pytest.raises(errors.InvalidConnector):
            await connecting.begin(**other)
        found = await connections.find(connecting.bench.store, first.id)
        assert found is not None
        assert found.state is connections.State.ENDING
    assert (await connecting.begin(mode="ro")).state is connections.State.MAKING


async def test_connections_are_unique_even_beside_the_store(connecting: Connecting) -> None:
    first = await connecting.begin()
    with pytest.raises(asyncpg.UniqueViolationError):
        await connecting.bench.rows(
            "INSERT INTO connections (id, volume_id, connector_host, identity, connection_key,"
            " connector, access_mode, state, is_local, made_by)"
            " SELECT gen_random_uuid(), volume_id, connector_host, identity, connection_key,"
            " connector, 'ro', 'live', is_local, made_by FROM connections WHERE id = $1",
            first.id,
        )


async def test_a_connection_that_has_ended_is_remembered_without_its_secrets(
    connecting: Connecting,
) -> None:
    bench, volume = connecting.bench, connecting.volume
    made = await connecting.live(await connecting.begin())
    assert SECRET in str(await bench.columns())
    (ending,) = await connections.ending(bench.store, connecting.job, volume.id, [made.id])
    assert ending.state == "ending"
    assert ending.credentials is not None  # its target still needs them
    await connections.ended(bench.store, connecting.job, ending)
    assert SECRET not in str(await bench.columns())
    tombstone = await connections.find(bench.store, made.id)
    assert tombstone is not None
    assert (tombstone.state, tombstone.credentials, tombstone.data) == ("ended", None, None)
    assert await connections.of_volume(bench.store, volume.id) == []
    assert (await volumes.record(bench.store, volume.id))["connections"] == []
    # The connector may come again, and gets a new one.
    assert (await connecting.begin()).id != made.id


async def test_connections_of_other_connectors_and_volumes_are_left_alone(
    connecting: Connecting,
) -> None:
    bench = connecting.bench
    mine = await connecting.live(await connecting.begin())
    theirs = await connecting.live(await connecting.begin(host="c"))
    ending = await connections.ending(
        bench.store, connecting.job, connecting.volume.id, [mine.id, uuid.uuid4()]
    )
    assert [one.id for one in ending] == [mine.id]
    await connections.ended(bench.store, connecting.job, mine)
    (left,) = await connections.of_volume(bench.store, connecting.volume.id)
    assert left == theirs


async def test_all_connections_of_a_volume_can_be_ended_and_none_twice(
    connecting: Connecting,
) -> None:
    bench, volume_id = connecting.bench, connecting.volume.id
    made = {(await connecting.begin(host=host)).id for host in "bcd"}
    ending = await connections.ending(bench.store, connecting.job, volume_id)
    assert {one.id for one in ending} == made
    for one in ending:
        await connections.ended(bench.store, connecting.job, one)
    assert await connections.ending(bench.store, connecting.job, volume_id) == []


async def test_secrets_are_stored_once_and_shown_to_the_connector_alone(
    connecting: Connecting,
) -> None:
    made = await connecting.live(await connecting.begin())
    assert connections.with_secrets(made) == {
        "target_iqn": "iqn.x",
        "auth_password": SECRET,
        "tls": {"kind": "psk", "key": SECRET},
    }
    masked = connections.masked(made)
    assert masked["auth_password"] == "***"
    assert masked["tls"] == {"kind": "psk", "key": "***"}
    assert SECRET not in repr(made)
    assert made.data == {"target_iqn": "iqn.x", "tls": {"kind": "psk"}}
    holding = [
        column for column, text in (await connecting.bench.columns()).items() if SECRET in text
    ]
    assert holding == ["connections.credentials"]


async def test_what_a_target_has_to_serve_is_known_after_a_restart(
    connecting: Connecting,
) -> None:
    bench, volume = connecting.bench, connecting.volume
    live = await connecting.live(await connecting.begin())
    await connecting.begin(host="half-made")
    await connecting.live(await connecting.begin(host="local", is_local=True))
    assert await connections.served(bench.store, HERE) == []
    await volumes.set_export(
        bench.store, connecting.job, volume.id, volumes.Export.IMPLICIT, "where"
    )
    ((served, its),) = await connections.served(bench.store, HERE)
    assert (served.id, served.export, served.provider_location) == (
        volume.id,
        "implicit",
        "where",
    )
    assert its == [live]
    assert await connections.served(bench.store, ELSEWHERE) == []
    await volumes.set_export(bench.store, connecting.job, volume.id, volumes.Export.NONE)
    assert await connections.served(bench.store, HERE) == []
    assert (await volumes.get(bench.store, volume.id)).provider_location is None


async def test_connections_and_attachments_go_with_their_volume(connecting: Connecting) -> None:
    bench, volume = connecting.bench, connecting.volume
    made = await connecting.live(await connecting.begin())
    await bench.finish(connecting.job)
    one = await bench.started(need(volume.id, known=True))
    ended = await bench.finish(one, change=jobs.VolumeChange(volume.id, drop=True))
    assert await connections.find(bench.store, made.id) is None
    assert ended.event is not None
    assert ended.event["volume"]["connections"] == []
    assert SECRET not in str(await bench.columns())


async def test_a_lost_job_neither_makes_nor_ends_connections(connecting: Connecting) -> None:
    bench = connecting.bench
    made = await connecting.live(await connecting.begin())
    await bench.finish(connecting.job)
    before = await bench.rows("SELECT * FROM connections")
    for attempt in (connecting.begin(), connecting.begin(host="c"), connecting.live(made)):
        with pytest.raises(Exception, match="_connection"):
            await attempt
    assert await connections.ending(bench.store, connecting.job, connecting.volume.id) == []
    await connections.ended(bench.store, connecting.job, made)
    assert await bench.rows("SELECT * FROM connections") == before
