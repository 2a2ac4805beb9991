"""How requests are taken: repeats, deadlines, addresses, order, and many at once."""

import asyncio
import datetime
import json
import uuid
from typing import Any

import aio_pika
import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp
from tests.services.volumes import MIB


def _new(name: str = "v", size_bytes: int = MIB) -> dict[str, object]:
    return {"volume": {"name": name, "size_bytes": size_bytes}}


async def test_fifty_creates_at_once_all_succeed(hosts: Hosts) -> None:
    sent = await asyncio.gather(
        *(
            hosts.caller.send("create_volume", hosts.a.at("fast"), _new(f"v-{number}"))
            for number in range(50)
        )
    )
    replies = [await hosts.caller.result(one) for one in sent]
    made = [hosts.volumes.adopt(reply.body["result"]) for reply in replies]
    assert len({volume.id for volume in made}) == 50
    names = {reply.body["result"]["name"] for reply in replies}
    assert names == {f"v-{number}" for number in range(50)}
    assert {reply.body["result"]["status"] for reply in replies} == {"available"}
    await asyncio.sleep(amqp.QUIET)
    assert all(len(hosts.caller.results(one)) == 1 for one in sent)


async def test_a_result_is_as_the_contract_has_it(hosts: Hosts) -> None:
    sent = await hosts.caller.send(
        "create_volume",
        hosts.a.at("fast"),
        {"volume": {"name": "Ü 1.x", "size_bytes": 4096 + 1, "metadata": {"k": "ä"}}},
    )
    reply = await hosts.caller.only_result(sent)
    assert reply.content_type == "application/json"
    assert reply.kind == "result"
    assert uuid.UUID(reply.message_id)
    assert reply.body["job_id"] == sent.message_id
    assert reply.body["method"] == "create_volume"
    assert reply.body["ok"] is True
    volume = reply.body["result"]
    hosts.volumes.adopt(volume)
    assert volume["name"] == "Ü 1.x"
    assert volume["size_bytes"] == 4097
    assert volume["metadata"] == {"k": "ä"}
    assert volume["address"] == hosts.a.at("fast")
    assert volume["attach_status"] == "detached"
    assert volume["migration_status"] is None
    assert volume["source"] is None
    assert volume["attachments"] == volume["connections"] == []
    assert volume["exported"] is False
    for moment in (volume["created_at"], volume["updated_at"]):
        assert datetime.datetime.fromisoformat(moment).utcoffset() == datetime.timedelta(0)
    assert {"provider_location", "user_id", "project_id"} <= set(volume)


async def test_a_missing_message_id_is_made_and_a_missing_correlation_id_is_the_message_id(
    hosts: Hosts,
) -> None:
    sent = await hosts.caller.send("create_volume", hosts.a.at("sim"), _new(), message_id=None)
    reply = await hosts.caller.result(sent)
    hosts.volumes.adopt(reply.body["result"])
    job = await hosts.caller.call(
        "get_job", hosts.a.at("sim"), {"job_id": reply.body["job_id"]}, correlation_id=None
    )
    assert job["state"] == "succeeded"

    identity = str(uuid.uuid4())
    sent = await hosts.caller.send(
        "create_volume", hosts.a.at("sim"), _new(), message_id=identity, correlation_id=None
    )
    reply = await hosts.caller.result(sent)
    assert reply.correlation_id == identity
    hosts.volumes.adopt(reply.body["result"])


async def test_a_direct_reply_queue_gets_its_result(hosts: Hosts) -> None:
    connection = await aio_pika.connect(hosts.installation.broker_url)
    async with connection:
        channel = await connection.channel()
        direct = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
        came: asyncio.Queue[bytes] = asyncio.Queue()

        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            await came.put(message.body)

        await direct.consume(take, no_ack=True)
        exchange = await channel.get_exchange(hosts.caller.namespace, ensure=False)
        for method, args in (("list_volumes", {}), ("create_volume", _new())):
            body = {"method": method, "version": "1.0", "args": args}
            message = aio_pika.Message(
                json.dumps(body).encode(),
                message_id=str(uuid.uuid4()),
                reply_to="amq.rabbitmq.reply-to",
            )
            await exchange.publish(message, hosts.a.at("sim"))
            reply = json.loads(await asyncio.wait_for(came.get(), 20))
            assert reply["ok"], reply
            assert reply["method"] == method
        hosts.volumes.adopt(reply["result"])


# Repeats


async def test_a_repeat_while_the_job_runs_gets_the_only_result(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    destination = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 2 * MIB})
    args = {**hosts.volumes.pair(source, destination), "bytes_per_second": MIB}
    first = await hosts.caller.send("copy_volume_data", hosts.a.at("fast"), args)
    async with amqp.Caller.open(hosts.installation.broker_url, hosts.caller.namespace) as other:
        await asyncio.sleep(0.3)
        second = await other.send(
            "copy_volume_data",
            hosts.a.at("fast"),
            args,
            message_id=first.message_id,
            headers={"deadline": "2999-01-01T00:00:00Z"},
        )
        reply = await other.only_result(second)
        assert reply.body["ok"]
        assert reply.body["job_id"] == first.message_id
    assert hosts.caller.results(first) == []
    job = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": first.message_id})
    assert job["attempt"] == 1


async def test_a_repeat_after_the_end_gets_the_stored_result_at_once(hosts: Hosts) -> None:
    first = await hosts.caller.send("create_volume", hosts.a.at("fast"), _new())
    reply = await hosts.caller.result(first)
    volume = hosts.volumes.adopt(reply.body["result"])
    await hosts.volumes.attach(volume)
    async with amqp.Caller.open(hosts.installation.broker_url, hosts.caller.namespace) as other:
        # The same members in another order, with other spaces: the same request.
        body = json.dumps(
            {"args": _new(), "version": "1.0", "method": "create_volume"}, indent=2
        ).encode()
        second = await other.publish(body, hosts.a.at("fast"), message_id=first.message_id)
        again = await other.only_result(second)
    assert again.body == reply.body
    assert again.message_id == reply.message_id
    assert len(hosts.caller.results(first)) == 1


async def test_a_repeat_of_a_failure_gets_the_stored_error(hosts: Hosts) -> None:
    args = {"volume_id": str(uuid.uuid4())}
    first = await hosts.caller.send("delete_volume", hosts.a.at("fast"), args)
    reply = await hosts.caller.result(first)
    assert reply.body["error"]["code"] == "VolumeNotFound"
    second = await hosts.caller.send(
        "delete_volume", hosts.a.at("fast"), args, message_id=first.message_id
    )
    assert (await hosts.caller.only_result(second)).body == reply.body


async def test_ten_copies_of_one_create_make_one_volume(hosts: Hosts) -> None:
    identity = str(uuid.uuid4())
    name = f"one-{identity}"
    sent = await asyncio.gather(
        *(
            hosts.caller.send("create_volume", hosts.a.at("fast"), _new(name), message_id=identity)
            for _ in range(10)
        )
    )
    await asyncio.sleep(1)
    replies = [reply for one in sent for reply in hosts.caller.results(one)]
    assert replies
    assert len({reply.body["result"]["id"] for reply in replies}) == 1
    hosts.volumes.adopt(replies[0].body["result"])
    listed = await hosts.caller.call("list_volumes", hosts.a.at("fast"), {"limit": 1000})
    assert [volume["name"] for volume in listed["volumes"]].count(name) == 1


@pytest.mark.parametrize("other", ["args", "method", "address"])
async def test_a_used_message_id_with_another_request_is_refused_and_changes_nothing(
    hosts: Hosts, other: str
) -> None:
    first = await hosts.caller.send("create_volume", hosts.a.at("fast"), _new())
    reply = await hosts.caller.result(first)
    volume = hosts.volumes.adopt(reply.body["result"])
    before = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": first.message_id})
    request: dict[str, tuple[str, str, dict[str, Any]]] = {
        "args": ("create_volume", hosts.a.at("fast"), _new("w")),
        "method": ("delete_volume", hosts.a.at("fast"), volume.at),
        "address": ("create_volume", hosts.b.at("fast"), _new()),
    }
    method, address, args = request[other]
    error = await hosts.caller.fails(method, address, args, message_id=first.message_id)
    assert error.code == "InvalidRequest"
    assert error.details["reason"] == "message_id_reused"
    after = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": first.message_id})
    assert after == before
    assert await hosts.volumes.status(volume) == "available"


async def test_reads_are_not_remembered(hosts: Hosts) -> None:
    identity = str(uuid.uuid4())
    one = await hosts.volumes.create(hosts.a.at("sim"))
    two = await hosts.volumes.create(hosts.a.at("sim"))
    for volume in (one, two):
        record = await hosts.caller.call(
            "get_volume", hosts.a.at("sim"), volume.at, message_id=identity
        )
        assert record["id"] == volume.id
    error = await hosts.caller.fails("get_job", hosts.a.at("sim"), {"job_id": identity})
    assert error.code == "JobNotFound"


# Deadlines

PAST: dict[str, Any] = {"headers": {"deadline": "2020-01-01T00:00:00Z"}}


@pytest.mark.parametrize("deadline", ["2020-01-01T00:00:00Z", "2020-01-01T00:00:00.123456+02:00"])
async def test_a_request_whose_deadline_has_passed_is_not_carried_out(
    hosts: Hosts, deadline: str
) -> None:
    volume_id = str(uuid.uuid4())
    args = {"volume": {"id": volume_id, "name": "late", "size_bytes": MIB}}
    sent = await hosts.caller.send(
        "create_volume", hosts.a.at("fast"), args, headers={"deadline": deadline}
    )
    reply = await hosts.caller.only_result(sent)
    assert reply.body["error"]["code"] == "DeadlineExceeded"
    job = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": sent.message_id})
    assert job["state"] == "failed"
    error = await hosts.caller.fails("get_volume", hosts.a.at("fast"), {"volume_id": volume_id})
    assert error.code == "VolumeNotFound"


async def test_what_gives_back_is_carried_out_whatever_its_deadline(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    await hosts.caller.call("create_export", volume.address, volume.at)
    info = await hosts.volumes.connect(volume)
    await hosts.volumes.attach(volume)
    await hosts.caller.call(
        "terminate_connection",
        volume.address,
        {**volume.at, "connection_id": info["connection_id"]},
        **PAST,
    )
    await hosts.caller.call("remove_export", volume.address, volume.at, **PAST)
    await hosts.caller.call("detach_volume", volume.address, volume.at, **PAST)
    record = await hosts.volumes.record(volume)
    assert record["connections"] == record["attachments"] == []
    assert record["exported"] is False
    assert record["status"] == "available"
    error = await hosts.caller.fails("delete_volume", volume.address, volume.at, **PAST)
    assert error.code == "DeadlineExceeded"


async def test_a_deadline_to_come_changes_nothing(hosts: Hosts) -> None:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
    record = await hosts.caller.call(
        "create_volume", hosts.a.at("sim"), _new(), headers={"deadline": moment.isoformat()}
    )
    assert hosts.volumes.adopt(record).id == record["id"]
    assert record["status"] == "available"


async def test_a_deadline_that_passes_while_the_job_runs_does_not_end_it(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    destination = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 2 * MIB})
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
    result = await hosts.caller.call(
        "copy_volume_data",
        hosts.a.at("fast"),
        {**hosts.volumes.pair(source, destination), "bytes_per_second": MIB},
        headers={"deadline": moment.isoformat()},
    )
    assert result["copied_bytes"] == 2 * MIB


# Addresses


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("delete_volume", {}),
        ("extend_volume", {"new_size_bytes": 2 * MIB}),
        ("create_export", {}),
        ("ensure_export", {}),
        ("remove_export", {}),
        ("initialize_connection", {"connector": {"host": "x"}}),
        ("terminate_connection", {"connector": None, "force": True}),
        ("attach_volume", {"mountpoint": "/dev/vdb"}),
        ("detach_volume", {}),
    ],
)
@pytest.mark.parametrize("backend", ["sim", "fast"])
async def test_a_request_about_a_volume_that_lives_elsewhere_is_told_where(
    hosts: Hosts, method: str, more: dict[str, object], backend: str
) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    # Another backend of the same host is another address too.
    address = hosts.b.at("fast") if backend == "fast" else hosts.a.at("sim")
    error = await hosts.caller.fails(method, address, {**volume.at, **more})
    assert error.code == "WrongAddress"
    assert error.details["address"] == volume.address
    assert await hosts.volumes.status(volume) == "available"


async def test_an_address_that_nobody_serves_is_returned_by_the_broker(hosts: Hosts) -> None:
    with pytest.raises(aio_pika.exceptions.PublishError):
        await hosts.caller.send("list_volumes", "host-x@fast")


# Order


async def test_jobs_on_one_volume_start_in_the_order_of_acceptance(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    address, at = volume.address, volume.at
    steps: list[tuple[str, dict[str, Any]]] = [
        ("extend_volume", {**at, "new_size_bytes": 2 * MIB}),
        ("extend_volume", {**at, "new_size_bytes": 3 * MIB}),
        ("create_export", at),
        ("ensure_export", at),
        ("terminate_connection", {**at, "connector": {"host": "x"}}),
        ("remove_export", at),
        ("extend_volume", {**at, "new_size_bytes": 4 * MIB}),
        ("attach_volume", {**at, "mountpoint": "/dev/vdb"}),
        ("detach_volume", at),
    ]
    sent = [await hosts.caller.send(method, address, args) for method, args in steps]
    replies = [await hosts.caller.result(one) for one in sent]
    failed = [reply.body for reply in replies if not reply.body["ok"]]
    assert failed == []
    jobs = [await hosts.caller.call("get_job", address, {"job_id": one.message_id}) for one in sent]
    starts = [job["started_at"] for job in jobs]
    assert starts == sorted(starts)


# Methods that this version does not carry out


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("create_volume_from_snapshot", {**_new(), "snapshot_id": str(uuid.UUID(int=1))}),
        ("create_cloned_volume", {**_new(), "source_volume_id": str(uuid.UUID(int=1))}),
        ("clone_image", {**_new(), "image": {"location": "file:///x"}}),
        ("create_snapshot", {"snapshot": {"name": "s"}, "volume_id": str(uuid.UUID(int=1))}),
        ("delete_snapshot", {"snapshot_id": str(uuid.UUID(int=1))}),
        (
            "revert_to_snapshot",
            {"volume_id": str(uuid.UUID(int=1)), "snapshot_id": str(uuid.UUID(int=1))},
        ),
        (
            "copy_image_to_volume",
            {"volume_id": str(uuid.UUID(int=1)), "image": {"location": "file:///x"}},
        ),
        (
            "copy_volume_to_image",
            {"volume_id": str(uuid.UUID(int=1)), "image": {"location": "file:///x"}},
        ),
        ("backup_volume", {"volume_id": str(uuid.UUID(int=1)), "backup": {}}),
        (
            "restore_backup",
            {"backup_id": str(uuid.UUID(int=1)), "volume_id": str(uuid.UUID(int=1))},
        ),
        ("delete_backup", {"backup_id": str(uuid.UUID(int=1))}),
        ("migrate_volume", {"volume_id": str(uuid.UUID(int=1)), "destination": "host-b@fast"}),
        (
            "accept_transfer",
            {"volume_id": str(uuid.UUID(int=1)), "new_user": "u", "new_project": "p"},
        ),
        ("get_snapshot", {"snapshot_id": str(uuid.UUID(int=1))}),
        ("get_backup", {"backup_id": str(uuid.UUID(int=1))}),
        ("list_snapshots", {}),
        ("list_backups", {}),
    ],
)
async def test_what_is_not_built_is_not_supported(
    hosts: Hosts, method: str, args: dict[str, object]
) -> None:
    error = await hosts.caller.fails(method, hosts.a.at("fast"), args)
    assert error.code == "NotSupported"
    assert error.retryable is False
