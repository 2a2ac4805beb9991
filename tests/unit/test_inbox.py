"""What a worker's intake makes of messages, without a broker."""

import types
from typing import Any
from unittest import mock

import pytest

from messages import envelope
from worker import inbox


def _inbox(limit: int) -> inbox.Inbox:
    parts: Any = mock.Mock()
    return inbox.Inbox(
        parts, parts, runner=parts, outbox=parts, reader=parts, max_request_bytes=limit
    )


def test_a_body_over_the_limit_is_parsed_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"method":"get_volume","version":"1.0","args":{}}'
    message: Any = types.SimpleNamespace(
        body=body, reply_to="caller", message_id=None, correlation_id=None, headers={}
    )
    delivery = inbox.Delivery("host-a@fast", message)
    assert _inbox(len(body))._method_name(delivery) == "get_volume"
    monkeypatch.setattr(envelope, "parse_json", mock.Mock(side_effect=AssertionError("parsed")))
    small = _inbox(len(body) - 1)
    with pytest.raises(envelope.Malformed):
        small._read(delivery)
    error = envelope.Malformed("too large")
    assert small._is_to_be_kept(delivery, error)
    assert small._method_name(delivery) is None
