"""The error tree, on the wire and back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import envelope, errors

CLASSES = [cls for _, cls in sorted(errors.BY_CODE.items())]


def by_code(cls: type[errors.VolumeWorkerError]) -> str:
    return cls.code


@pytest.mark.parametrize("cls", CLASSES, ids=by_code)
def test_an_error_comes_back_as_the_class_that_was_raised(
    cls: type[errors.VolumeWorkerError],
) -> None:
    raised = cls("what to do", member="args.x", volume_id="v", nested={"a": [1, None]})
    back = errors.from_wire(json.loads(json.dumps(raised.to_wire())))
    assert type(back) is cls
    assert back.message == raised.message == str(back)
    assert back.details == raised.details
    assert back.retryable is raised.retryable
    assert back.to_wire() == raised.to_wire()


@pytest.mark.parametrize("cls", CLASSES, ids=by_code)
def test_an_error_without_a_text_says_what_its_class_means(
    cls: type[errors.VolumeWorkerError],
) -> None:
    message = cls().message
    assert message
    assert "\n" not in message
    assert message == str(cls())


@pytest.mark.parametrize("cls", CLASSES, ids=by_code)
def test_what_the_worker_tries_again_may_be_sent_again_by_the_caller_too(
    cls: type[errors.VolumeWorkerError],
) -> None:
    assert cls.retryable or not cls.transient


@pytest.mark.parametrize("retryable", [True, False])
def test_an_unknown_code_is_treated_by_its_retryable(retryable: bool) -> None:
    wire = {"code": "FromTheFuture", "message": "m", "retryable": retryable, "details": {"a": 1}}
    back = errors.from_wire(wire)
    assert type(back) is errors.RemoteError
    assert back.retryable is retryable
    assert back.message == "m"
    assert back.details == {"code": "FromTheFuture", "a": 1}


@pytest.mark.parametrize("code", ["VolumeWorkerError", "NotFound", "RemoteError", "Unreachable"])
def test_a_class_that_is_no_code_cannot_be_called_up_from_the_wire(code: str) -> None:
    assert type(errors.from_wire({"code": code, "message": ""})) is errors.RemoteError


def test_the_senders_word_on_retryable_wins() -> None:
    wire = {**errors.TargetError("x").to_wire(), "retryable": False}
    assert errors.from_wire(wire).retryable is False
    assert errors.TargetError("x").retryable is True


@pytest.mark.parametrize(
    "wire", [{}, {"code": None}, {"code": "VolumeNotFound"}, {"details": None}]
)
def test_an_error_with_members_missing_is_one_all_the_same(wire: dict[str, Any]) -> None:
    assert isinstance(errors.from_wire(wire), errors.VolumeWorkerError)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["code", "message", "retryable", "details", "more"]), JSON))
def test_no_error_from_the_wire_breaks_its_receiver(wire: dict[str, Any]) -> None:
    assert isinstance(errors.from_wire(wire), errors.VolumeWorkerError)


def test_an_error_does_not_share_its_details_with_the_reply_it_came_from() -> None:
    wire = errors.InvalidRequest("x", a=1).to_wire()
    errors.from_wire(wire).details["b"] = 2
    assert wire["details"] == {"a": 1}


def test_a_narrower_class_travels_under_the_code_of_the_wider() -> None:
    assert envelope.Malformed("x").to_wire()["code"] == "InvalidRequest"
    assert errors.RemoteError("x").to_wire()["code"] == "Internal"


def test_what_means_not_found_is_caught_together() -> None:
    kinds = {cls.code for cls in CLASSES if issubclass(cls, errors.NotFound)}
    assert kinds == {
        "VolumeNotFound",
        "SnapshotNotFound",
        "AttachmentNotFound",
        "ConnectionNotFound",
        "BackupNotFound",
        "ImageNotFound",
        "JobNotFound",
    }
