"""Properties that no AMQP library can decode: the broker passes them on all the same."""

import asyncio

import pytest

from tests.services import amqp, environment, raw_amqp, workers

MESSAGE_ID, CORRELATION_ID, REPLY_TO, HEADERS, TIMESTAMP = 0x0080, 0x0400, 0x0200, 0x2000, 0x0040
BODY = b'{"method": "list_volumes", "version": "1.0", "args": {}}'


@pytest.mark.parametrize(
    ("flags", "properties", "named"),
    [
        (MESSAGE_ID, raw_amqp.short(b"\xff\xfe\x00"), "message_id"),
        (CORRELATION_ID, raw_amqp.short(b"\xff"), "correlation_id"),
        (REPLY_TO, raw_amqp.short(b"reply-\xff"), "reply_to"),
        (TIMESTAMP, b"\xff" * 8, "timestamp"),
        (
            HEADERS,
            raw_amqp.long(raw_amqp.short(b"\xff\xfe") + b"S" + raw_amqp.long(b"")),
            "headers",
        ),
        (HEADERS, raw_amqp.long(raw_amqp.short(b"moment") + b"T" + b"\xff" * 8), "headers"),
    ],
    ids=["message_id", "correlation_id", "reply_to", "timestamp", "header name", "header time"],
)
async def test_a_property_that_cannot_be_decoded_is_dead_lettered_and_stops_nobody(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    flags: int,
    properties: bytes,
    named: str,
) -> None:
    worker = start_worker.new("host-a", backends={"sim": workers.SIM})
    await worker.start()
    async with raw_amqp.publisher(installation.broker_url) as raw:
        await raw.publish(installation.namespace, worker.at("sim"), flags, properties, BODY)

    while not (letters := await caller.letters()):
        await asyncio.sleep(0.05)
    [letter] = letters
    assert letter.headers["reason"] == "InvalidRequest"
    assert named in letter.headers["last-error"]
    assert letter.body == BODY
    assert (await caller.call("list_volumes", worker.at("sim")))["volumes"] == []
    lost = [line for line in worker.log_lines() if line["event"] == "broker.connection_lost"]
    assert lost == []
