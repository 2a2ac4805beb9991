"""The checked-in schemas are those of the code, and say what the contract says."""

import contract_schemas
import pytest

from messages import errors, requests
from tests.contract import schema

METHODS = {
    "create_volume",
    "create_volume_from_snapshot",
    "create_cloned_volume",
    "clone_image",
    "delete_volume",
    "extend_volume",
    "create_snapshot",
    "delete_snapshot",
    "revert_to_snapshot",
    "create_export",
    "ensure_export",
    "remove_export",
    "validate_connector",
    "initialize_connection",
    "terminate_connection",
    "attach_volume",
    "detach_volume",
    "copy_volume_data",
    "copy_image_to_volume",
    "copy_volume_to_image",
    "backup_volume",
    "restore_backup",
    "delete_backup",
    "migrate_volume",
    "accept_transfer",
    "get_volume_stats",
    "get_volume",
    "get_snapshot",
    "get_backup",
    "get_job",
    "list_volumes",
    "list_snapshots",
    "list_backups",
    "list_jobs",
    "cancel_job",
    "throttle_job",
    "reconcile",
}
RECORDS = {
    "Volume": "id name address size_bytes status migration_status attach_status metadata"
    " provider_location source user_id project_id exported attachments connections created_at"
    " updated_at error?",
    "Attachment": "id volume_id instance_uuid host_name mountpoint mode status created_at",
    "Connection": "id volume_id connector_host access_mode created_at",
    "Job": "id method address state attempt args result error progress parent_job edited"
    " created_at started_at finished_at",
    "Finding": "kind address subject volume_id? what action repaired? error?",
    "Progress": "done_bytes total_bytes bytes_per_second",
}
RETRYABLE = {
    "CommandFailed",
    "CommandTimeout",
    "DeviceUnavailable",
    "DriverNotInitialized",
    "TargetError",
    "WorkerLost",
}
CODES = {
    "InvalidRequest",
    "UnknownMethod",
    "UnsupportedVersion",
    "WrongAddress",
    "VolumeNotFound",
    "SnapshotNotFound",
    "AttachmentNotFound",
    "ConnectionNotFound",
    "BackupNotFound",
    "ImageNotFound",
    "JobNotFound",
    "VolumeExists",
    "InvalidVolumeStatus",
    "VolumeIsBusy",
    "InvalidConnector",
    "InsufficientSpace",
    "DeviceUnavailable",
    "TargetError",
    "ImageUnacceptable",
    "CommandFailed",
    "CommandTimeout",
    "NotSupported",
    "DriverNotInitialized",
    "DeadlineExceeded",
    "Cancelled",
    "WorkerLost",
    "Internal",
}


def test_the_checked_in_file_is_up_to_date() -> None:
    assert contract_schemas.FILE.read_text("utf-8") == contract_schemas.text(), (
        "run tools/contract_schemas.py, and see whether the change breaks the contract"
    )


def test_every_method_of_the_contract_is_there_and_no_other() -> None:
    assert set(schema.document()["methods"]) == METHODS


def test_every_method_that_is_carried_out_has_a_result() -> None:
    without = {
        name for name, method in schema.document()["methods"].items() if method["result"] is None
    }
    unsupported = {
        name
        for name, method in requests.METHODS.items()
        if method.kind is requests.Kind.UNSUPPORTED
    }
    assert without == unsupported


@pytest.mark.parametrize("record", sorted(RECORDS))
def test_a_record_has_the_members_of_the_contract(record: str) -> None:
    wanted = RECORDS[record].split()
    found = schema.definition(record)
    assert set(found["properties"]) == {name.removesuffix("?") for name in wanted}
    assert set(found["required"]) == {name for name in wanted if not name.endswith("?")}


@pytest.mark.parametrize("record", sorted(RECORDS))
def test_receivers_of_a_record_ignore_members_that_they_do_not_know(record: str) -> None:
    assert "additionalProperties" not in schema.definition(record)


def test_every_error_code_of_the_contract_is_there_and_no_other() -> None:
    assert set(schema.document()["errors"]) == CODES


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_error_says_whether_sending_it_again_may_help(code: str) -> None:
    assert schema.document()["errors"][code]["retryable"] is (code in RETRYABLE)
    assert errors.BY_CODE[code]().retryable is (code in RETRYABLE)


def test_what_is_carried_out_despite_its_deadline_gives_something_back() -> None:
    despite = {
        name for name, method in schema.document()["methods"].items() if method["despite_deadline"]
    }
    assert despite == {"terminate_connection", "remove_export", "detach_volume", "cancel_job"}


@pytest.mark.parametrize("state", ["queued", "running", "succeeded", "failed", "cancelled", "dead"])
def test_job_states_are_those_of_the_contract(state: str) -> None:
    assert state in schema.definition("JobState")["enum"]
    assert len(schema.definition("JobState")["enum"]) == 6


@pytest.mark.parametrize(
    "status",
    ["creating", "available", "in-use", "error", "error_deleting", "maintenance", "deleting"],
)
def test_volume_statuses_are_cinders_words(status: str) -> None:
    assert status in schema.definition("VolumeStatus")["enum"]


def test_the_headers_of_a_dead_letter_are_those_of_the_contract() -> None:
    assert schema.document()["headers"]["dead_letter"] == [
        "reason",
        "origin",
        "job-id",
        "attempts",
        "first-failed-at",
        "last-error",
    ]


def test_a_reply_is_a_result_or_a_status() -> None:
    assert schema.document()["headers"]["reply_types"] == ["result", "status"]


def test_the_checker_of_these_tests_finds_faults() -> None:
    good = {"done_bytes": 1, "total_bytes": 2, "bytes_per_second": 3}
    progress = schema.definition("Progress")
    assert schema.faults(good, progress) == []
    assert schema.faults({**good, "done_bytes": "1"}, progress)
    assert schema.faults({**good, "done_bytes": True}, progress)
    assert schema.faults({"done_bytes": 1}, progress)
    assert schema.faults([], progress)
    assert schema.faults(
        {"at": "2026-01-01 00:00:00"},
        {"properties": {"at": {"type": "string", "format": "date-time"}}},
    )
