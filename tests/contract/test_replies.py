"""Results, errors, status messages, events and dead letters, as they are sent."""

import datetime
import json
import uuid
from typing import Any

import pytest

from messages import errors, letters, replies, resources
from tests.contract import schema

NOW = datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
JOB_ID = uuid.UUID("6f2c1c52-6a8e-4b61-9f0c-0d6f5a0a9a11")
ERROR_CLASSES = [cls for _, cls in sorted(errors.BY_CODE.items())]


def a_volume(**changed: Any) -> resources.Volume:
    volume_id = uuid.uuid4()
    attachment = resources.Attachment(
        id=uuid.uuid4(),
        volume_id=volume_id,
        instance_uuid=None,
        host_name="host-b",
        mountpoint="/dev/vdb",
        mode=resources.AccessMode.READ_WRITE,
        status="attached",
        created_at=NOW,
    )
    connection = resources.Connection(
        id=uuid.uuid4(),
        volume_id=volume_id,
        connector_host=None,
        access_mode=resources.AccessMode.READ_ONLY,
        created_at=NOW,
    )
    values: dict[str, Any] = {
        "id": volume_id,
        "name": "v",
        "address": "host-a@fast",
        "size_bytes": 2**40,
        "status": "in-use",
        "migration_status": None,
        "attach_status": "attached",
        "metadata": {"a": "b"},
        "provider_location": None,
        "source": None,
        "user_id": None,
        "project_id": None,
        "exported": True,
        "attachments": [attachment],
        "connections": [connection],
        "created_at": NOW,
        "updated_at": NOW,
    }
    return resources.Volume(**{**values, **changed})


def a_job(**changed: Any) -> resources.Job:
    values: dict[str, Any] = {
        "id": JOB_ID,
        "method": "create_volume",
        "address": "host-a@fast",
        "state": "running",
        "attempt": 1,
        "args": {},
        "result": None,
        "error": None,
        "progress": None,
        "parent_job": None,
        "edited": False,
        "created_at": NOW,
        "started_at": NOW,
        "finished_at": None,
    }
    return resources.Job(**{**values, **changed})


def test_a_result_has_the_shape_of_the_contract() -> None:
    body = replies.result(JOB_ID, "get_volume", a_volume().to_wire())
    assert schema.faults(body, schema.message("result")) == []
    assert schema.faults(body["result"], schema.result("get_volume")) == []
    assert body["ok"] is True


@pytest.mark.parametrize("cls", ERROR_CLASSES, ids=lambda cls: cls.code)
def test_every_error_has_the_shape_of_the_contract(cls: type[errors.VolumeWorkerError]) -> None:
    body = replies.failure(JOB_ID, "create_volume", cls("it is so", volume_id=str(JOB_ID)))
    assert schema.faults(body, schema.message("failure")) == []
    assert body == {
        "job_id": str(JOB_ID),
        "method": "create_volume",
        "ok": False,
        "error": {
            "code": cls.__name__,
            "message": "it is so",
            "retryable": cls.retryable,
            "details": {"volume_id": str(JOB_ID)},
        },
    }


def test_what_could_not_be_read_is_answered_all_the_same() -> None:
    body = replies.failure(None, None, errors.InvalidRequest("no JSON"))
    assert schema.faults(body, schema.message("failure")) == []


@pytest.mark.parametrize(
    "progress", [None, {"done_bytes": 1, "total_bytes": 2, "bytes_per_second": 3}]
)
def test_a_status_message_has_the_shape_of_the_contract(progress: Any) -> None:
    job = {**a_job(progress=progress).to_wire(), "more": 1}
    body = replies.status(job, "2026-03-01T12:30:00.000000Z")
    assert schema.faults(body, schema.message("status")) == []
    assert set(body) == {"job_id", "method", "state", "attempt", "progress", "at"}


def test_records_have_the_shape_of_the_contract() -> None:
    for volume in (a_volume(), a_volume(error={"code": "Internal"}, attachments=[])):
        assert schema.faults(volume.to_wire(), schema.definition("Volume")) == []
    for job in (a_job(), a_job(state="failed", error={"code": "Internal"}, finished_at=NOW)):
        assert schema.faults(job.to_wire(), schema.definition("Job")) == []


def test_a_volume_without_an_error_has_no_member_for_it() -> None:
    assert "error" not in a_volume().to_wire()
    assert a_volume(error={"code": "Internal"}).to_wire()["error"] == {"code": "Internal"}


def test_times_are_rfc_3339_in_utc_whatever_zone_they_came_in() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    local = NOW.astimezone(zone)
    assert a_volume(created_at=local).to_wire()["created_at"] == "2026-03-01T12:30:00.000000Z"


@pytest.mark.parametrize("record", [a_volume(), a_job()], ids=["volume", "job"])
def test_a_record_survives_the_wire(record: resources.Record) -> None:
    wire = json.loads(json.dumps(record.to_wire()))
    assert type(record).model_validate(wire) == record
    assert type(record).model_validate({**wire, "what_comes_later": 1}) == record


def test_a_reply_published_again_keeps_its_id_and_a_later_ending_has_another() -> None:
    assert replies.reply_id(JOB_ID, 1) == replies.reply_id(JOB_ID, 1)
    assert replies.reply_id(JOB_ID, 1) != replies.reply_id(JOB_ID, 2)
    assert replies.reply_id(uuid.uuid4(), 1) != replies.reply_id(JOB_ID, 1)


def test_a_dead_letter_says_why_where_and_when() -> None:
    headers = letters.reason_headers(
        error=errors.TargetError("tgtd is away"),
        origin="host-a@fast",
        job_id=JOB_ID,
        attempts=5,
        first_failed_at=NOW,
    )
    assert headers == {
        "reason": "TargetError",
        "origin": "host-a@fast",
        "job-id": str(JOB_ID),
        "attempts": 5,
        "first-failed-at": "2026-03-01T12:30:00+00:00",
        "last-error": "tgtd is away",
    }


def test_a_letter_that_never_was_a_job_carries_no_job_id() -> None:
    headers = letters.reason_headers(error=errors.InvalidRequest("x"), origin="host-a@fast")
    message = letters.restore(b"", {}, headers)
    assert "job-id" not in message.headers
    assert set(message.headers) == set(letters.REASON_HEADERS) - {"job-id"}


def test_the_headers_of_a_dead_letter_hold_no_secret() -> None:
    error = errors.TargetError("tgtadm --password hunter2 failed")
    headers = letters.reason_headers(error=error, origin="host-a@fast")
    assert "hunter2" not in json.dumps(headers)
    assert "***" in headers["last-error"]
