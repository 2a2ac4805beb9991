"""Work on dead letters: what may be typed, and what an edit makes of a request."""

import datetime
import json
import types
import uuid
from typing import Any

import asyncpg
import pytest
import typer
import typer.testing

from messages import topology
from worker.cli import app, arguments, dead, dead_edit, dead_queue, dead_replay, letter, output


@pytest.mark.parametrize(
    "arguments",
    [
        "replay",
        "discard",
        "replay --dry-run",
        "replay --edit {}",
        "replay --all --edit []",
        "replay --all --edit {",
        'replay --all --edit {"a":NaN}',
        "replay --since yesterday",
        "discard --all --edit {}",
        "replay --all --limit 1",
    ],
)
def test_wrong_usage_ends_with_2(arguments: str) -> None:
    ended = typer.testing.CliRunner().invoke(app.app, ["dead", *arguments.split(" ")])
    assert ended.exit_code == 2, ended.output


REQUEST = {"method": "m", "version": "1.0", "args": {"a": 1, "b": {"c": 2, "d": [1, 2]}}}


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        ({"a": 2}, {"args": {"a": 2, "b": {"c": 2, "d": [1, 2]}}}),
        ({"b": {"c": None, "d": [3]}}, {"args": {"a": 1, "b": {"d": [3]}}}),
        ({"b": 1, "e": {"f": {"g": None}}}, {"args": {"a": 1, "b": 1, "e": {"f": {}}}}),
        ({"method": "n"}, {"method": "n"}),
        ({"args": {"b": None}, "version": "1.1"}, {"args": {"a": 1}, "version": "1.1"}),
        ({}, {}),
    ],
)
def test_an_edit_is_a_merge_patch_of_the_arguments_or_of_all(
    edit: dict[str, Any], changed: dict[str, Any]
) -> None:
    edited = dead_edit.apply(edit, json.dumps(REQUEST).encode())
    assert json.loads(edited) == {**REQUEST, **changed}


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"{", b"1", b'"\\u0000"'])
def test_what_cannot_be_read_is_replaced_by_a_whole_request(body: bytes) -> None:
    edited = json.loads(dead_edit.apply({"method": "m", "args": {"a": None}}, body))
    assert edited == {"method": "m", "version": "1.0", "args": {"a": None}}
    parts: list[dict[str, Any]] = [{"a": 1}, {"method": "m"}, {"args": {}}]
    for part in parts:
        with pytest.raises(dead_edit.NotEditable, match="method and args"):
            dead_edit.apply(part, body)


def test_an_edit_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="deep"):
        arguments.parse_object("--edit", '{"a":' * 100_000)


def _taken(**changed: Any) -> dead_queue.Taken:
    headers = {
        "reason": "InvalidRequest",
        "origin": "host-a@fast",
        "first-failed-at": "2026-03-01T12:30:00.000001+00:00",
        **changed.pop("headers", {}),
    }
    values = {"message_id": "odd", "reply_to": None, "correlation_id": None, "body": b"{"}
    message: Any = types.SimpleNamespace(
        **{**values, "routing_key": "", **changed}, headers=headers
    )
    return dead_queue.Taken(message, letter.read(message, topology.Topology("volume")))


def test_a_letter_without_a_valid_id_gets_the_same_one_each_time_and_another_letter_another() -> (
    None
):
    ones = [
        _taken(),
        _taken(message_id="other"),
        _taken(message_id=None),
        _taken(body=b"{}"),
        _taken(headers={"origin": "host-b@fast"}),
        _taken(headers={"first-failed-at": "2026-03-01T12:30:00.000002+00:00"}),
    ]
    made = [dead_replay.new_id(one) for one in ones]
    assert made == [dead_replay.new_id(one) for one in ones]
    assert len(set(made)) == len(made)
    assert all(uuid.UUID(one) for one in made)


def test_what_the_broker_made_of_messages_without_ids_stays_apart() -> None:
    death = {
        "queue": "volume.host-a@fast",
        "reason": "rejected",
        "time": datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC),
    }
    one = _taken(message_id=None, headers={"x-death": [death]})
    assert dead_replay.new_id(one) != dead_replay.new_id(one)


@pytest.mark.parametrize("said", ["9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00+23:00"])
def test_a_letter_from_the_end_of_time_is_shown_and_compared(said: str) -> None:
    death = {"queue": "volume.host-a@fast", "reason": "rejected", "time": said}
    for headers in ({"first-failed-at": said}, {"x-death": [death]}):
        one = _taken(headers=headers).letter
        assert output.moment(one.summary()["first_failed_at"]) == said
        for since in ("1h", "999999999d", "0001-01-01T00:00:00+23:00", said):
            found = dead_queue.Filter(since=dead.moment(since)).matches(one)
            assert found or said.startswith("0001") or since == said


@pytest.mark.parametrize("body", [b'{"method":"m","args":{"a":NaN}}', b"[-Infinity]", b"[1e999]"])
def test_what_is_no_number_of_json_is_shown_as_text(body: bytes) -> None:
    one = _taken(body=body).letter
    json.loads(json.dumps(one.to_wire()), parse_constant=pytest.fail)
    assert one.body_text == body.decode()


@pytest.mark.parametrize("said", [-1, 2**31, "1", 1.5, None])
def test_a_count_of_replays_that_is_none_is_taken_for_0(said: object) -> None:
    assert _taken(headers={"replays": said}).letter.replays == 0
    assert _taken(headers={"replays": 3}).letter.replays == 3


class _Refusing:
    """A database that has something against every statement."""

    async def row(self, _query: str, *_: object) -> None:
        raise asyncpg.UntranslatableCharacterError("unsupported Unicode escape sequence")


async def test_what_the_database_has_against_a_letter_is_its_refusal() -> None:
    nothing: Any = None
    store: Any = _Refusing()
    names = topology.Topology("volume")
    replayer = dead_replay.Replayer(
        store, nothing, nothing, names, limit=1024, edit=None, dry_run=False
    )
    done = await replayer.replay(_taken(headers={"job-id": str(uuid.uuid4())}))
    assert done.outcome is dead_replay.Outcome.REFUSED
    assert "unsupported Unicode escape sequence" in (done.text or "")
