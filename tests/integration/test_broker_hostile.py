"""Messages made to do harm: each is refused, and the next request is served by the same service."""

import asyncio
import datetime
import json
import pathlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration import service_bench
from tests.services import amqp, environment
from worker.drivers import fake

ADDRESS = "host-a@fast"
SLOW = "host-a@slow"
GET = json.dumps(
    {"method": "get_volume", "version": "1.0", "args": {"volume_id": str(uuid.uuid4())}}
).encode()
DELETE = GET.replace(b"get_volume", b"delete_volume")


@pytest.fixture
async def service(
    installation: environment.Installation,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[service_bench.InProcess]:
    backends = {"fast": {"driver": "fake_iscsi"}, "slow": {"driver": "fake_iscsi"}}
    async with service_bench.running(installation, tmp_path, monkeypatch, backends) as running:
        yield running


HOSTILE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "a header that looks like stored bytes": (b"x", {"headers": {"h": {"$bytes": "x"}}}),
    "a header that looks like a stored time": (b"x", {"headers": {"h": {"$time": "x"}}}),
    "a stored text that is none, on a job": (DELETE, {"headers": {"h": {"$text": "x"}}}),
    "a deadline beyond UTC": (DELETE, {"headers": {"deadline": "9999-12-31T23:59:59-23:00"}}),
    "a deadline before UTC": (DELETE, {"headers": {"deadline": "0001-01-01T00:00:00+23:00"}}),
    "a NUL in the correlation id": (DELETE, {"correlation_id": "a\0b"}),
    "a NUL in the name of a header": (DELETE, {"headers": {"a\0b": 1}}),
    "a number out of range": (
        b'{"method": "delete_volume", "version": "1.0", "args": {"volume_id": 1e999}}',
        {},
    ),
    "a number out of range that is kept": (
        b'{"method": "initialize_connection", "version": "1.0", "args": {"volume_id": "'
        + str(uuid.uuid4()).encode()
        + b'", "connector": {"x": -1e999}}}',
        {},
    ),
    "a timestamp long ago": (
        DELETE,
        {"timestamp": datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)},
    ),
    "a priority": (DELETE, {"priority": 255}),
}


@pytest.mark.parametrize("is_call", [True, False], ids=["call", "cast"])
@pytest.mark.parametrize("what", sorted(HOSTILE))
async def test_the_service_goes_on_after(
    service: service_bench.InProcess, caller: amqp.Caller, what: str, is_call: bool
) -> None:
    body, properties = HOSTILE[what]
    if not is_call:
        properties = {**properties, "reply_to": None}
    sent = await caller.publish(body, ADDRESS, **properties)
    new = {"volume": {"name": "v", "size_bytes": 1024}}
    assert (await caller.call("create_volume", ADDRESS, new, timeout=15))["status"] == "available"
    assert service.is_alive
    if is_call and "\0" not in str(properties.get("correlation_id")):
        assert not (await caller.result(sent, timeout=10)).body["ok"]
    elif not is_call:
        letter = await caller.letter(sent, timeout=15)
        assert letter.body == body
    assert service.is_alive


async def test_a_request_that_waits_for_a_create_elsewhere_is_told_the_right_address(
    installation: environment.Installation,
    tmp_path: pathlib.Path,
    caller: amqp.Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be refused when it comes, since the volume's record is not there yet."""
    gate = asyncio.Event()
    create = fake.FakeISCSIDriver.create_volume
    deleted = []

    async def slow_create(self: Any, volume: Any) -> Any:
        await gate.wait()
        return await create(self, volume)

    async def delete(self: Any, volume: Any) -> None:
        deleted.append(volume.id)

    monkeypatch.setattr(fake.FakeISCSIDriver, "create_volume", slow_create)
    monkeypatch.setattr(fake.FakeISCSIDriver, "delete_volume", delete)
    backends = {"fast": {"driver": "fake_iscsi"}, "slow": {"driver": "fake_iscsi"}}
    volume_id = str(uuid.uuid4())
    new = {"name": "v", "size_bytes": 1024}
    async with service_bench.running(
        installation, tmp_path, monkeypatch, backends, control_slots=1
    ):
        # Takes the only slot, so that the next create waits and has no record yet.
        await caller.send("create_volume", ADDRESS, {"volume": new})
        await asyncio.sleep(0.3)
        creating = await caller.send("create_volume", ADDRESS, {"volume": {**new, "id": volume_id}})
        await asyncio.sleep(0.3)
        deleting = await caller.send("delete_volume", SLOW, {"volume_id": volume_id})
        await asyncio.sleep(0.3)
        gate.set()
        assert (await caller.result(creating)).body["ok"]
        body = (await caller.result(deleting)).body
        assert not deleted
        assert not body["ok"]
        assert body["error"]["code"] == "WrongAddress"
        assert body["error"]["details"]["address"] == ADDRESS
        found = await caller.call("get_volume", ADDRESS, {"volume_id": volume_id})
        assert found["id"] == volume_id
