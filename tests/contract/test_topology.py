"""Names on the broker: what is declared there outlives every version."""

import uuid

import pytest

from messages import topology
from tests.contract import schema

NAMES = topology.Topology("volume")


def test_the_exchanges_are_named_after_the_namespace() -> None:
    assert (NAMES.requests, NAMES.events, NAMES.dead) == ("volume", "volume.events", "volume.dead")


def test_a_request_queue_is_named_after_its_address() -> None:
    assert NAMES.queue("host-a.example@fast") == "volume.host-a.example@fast"


def test_a_request_queue_has_the_arguments_of_the_contract() -> None:
    assert dict(NAMES.queue_arguments()) == {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "volume.dead",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": 100,
    }


def test_the_dead_letter_queue_never_drops_what_was_looked_at() -> None:
    assert dict(NAMES.dead_queue_arguments()) == {
        "x-queue-type": "quorum",
        "x-delivery-limit": 2147483647,
    }


def test_the_checked_in_names_are_those_of_the_contract() -> None:
    assert schema.document()["topology"] == {
        "requests": {"exchange": "NS", "type": "topic"},
        "events": {"exchange": "NS.events", "type": "topic"},
        "dead": {
            "exchange": "NS.dead",
            "type": "fanout",
            "queue": "NS.dead",
            "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 2147483647},
        },
        "address": {
            "queue": "NS.HOST@BACKEND",
            "bound_to": "NS",
            "routing_key": "HOST@BACKEND",
            "arguments": {
                "x-queue-type": "quorum",
                "x-dead-letter-exchange": "NS.dead",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
                "x-delivery-limit": 100,
            },
        },
        "event_keys": {
            "volume": "volume.VOLUME_ID.STATUS",
            "job": "job.JOB_ID.STATE",
            "stats": "backend.HOST@BACKEND.stats",
        },
    }


def test_event_keys_have_three_words() -> None:
    one = uuid.uuid4()
    assert NAMES.volume_event(one, "in-use") == f"volume.{one}.in-use"
    assert NAMES.job_event(one, "succeeded") == f"job.{one}.succeeded"
    assert NAMES.stats_event("host.a.example@fast") == "backend.host_a_example@fast.stats"


@pytest.mark.parametrize("queue", ["volume", "volume.dead", "volume.host-a@fast", "volume."])
def test_the_installations_own_names_are_reserved(queue: str) -> None:
    assert NAMES.is_reserved(queue)


@pytest.mark.parametrize("queue", ["volumes", "volume-replies", "reply-volume.", "", "my.volume"])
def test_other_names_are_free_for_replies(queue: str) -> None:
    assert not NAMES.is_reserved(queue)


@pytest.mark.parametrize("text", ["host-a@fast", "A_1.b-c@x-Y_2", "h" * 100 + "@" + "b" * 100])
def test_an_address_is_host_at_backend(text: str) -> None:
    assert topology.is_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "host",
        "host@",
        "@fast",
        "host@fa.st",
        "host@a@b",
        "ho st@fast",
        "host/a@fast",
        "host@fast\n",
        "hôst@fast",
        "h" * 101 + "@fast",
        "host@" + "b" * 101,
        "#@*",
    ],
)
def test_anything_else_is_no_address(text: str) -> None:
    assert not topology.is_address(text)


def test_an_address_is_put_together_and_taken_apart() -> None:
    assert topology.address("host-a", "fast") == "host-a@fast"
    assert topology.host_of("host-a@fast") == "host-a"
