"""Log lines: no value that is named like a secret is in one, wherever it was put."""

import io
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from worker.telemetry import logs

SECRET = "s3cr3t-Hunter.2"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    noisy = {name: logging.getLogger(name).level for name in ("aio_pika", "aiormq", "qemu")}
    stream = io.StringIO()
    logs.configure(stream=stream)
    yield stream
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level
    for name, before in noisy.items():
        logging.getLogger(name).setLevel(before)


class Holder:
    def __repr__(self) -> str:
        return f"Holder(password={SECRET!r})"


@pytest.mark.parametrize(
    "value",
    [
        f"password={SECRET}",
        [f"password={SECRET}"],
        {"why": {"text": [f"tgtadm --password {SECRET}"]}},
        ["tgtadm", "--user", "u", "--password", SECRET],
        ("iscsiadm", "-n", "node.session.auth.password", "-v", SECRET),
        [["tgtadm", "--password", SECRET], 5],
        {"auth_password": SECRET},
        {f"password={SECRET}"},
        ValueError(f"password={SECRET}"),
        Holder(),
        f"password={SECRET}".encode(),
        ['auth_password="a b', f'password="{SECRET}"'],
    ],
    ids=str,
)
def test_a_value_named_like_a_secret_is_masked_at_any_depth(lines: io.StringIO, value: Any) -> None:
    structlog.get_logger("test").info("told", value=value, nested={"inner": [value]})
    logging.getLogger("test").warning("told", extra={"value": value})
    text = lines.getvalue()
    assert SECRET not in text
    assert text.count("***") >= 3


def test_an_exceptions_text_is_masked(lines: io.StringIO) -> None:
    error = ValueError(f"amqp://guest:{SECRET}@127.0.0.1/ refused")
    structlog.get_logger("test").error("failed", exc_info=error)
    assert SECRET not in lines.getvalue()
    assert "ValueError" in lines.getvalue()


def test_what_is_no_secret_stays_as_it_was(lines: io.StringIO) -> None:
    plain = {"a": [1, 2.5, None, True], "command": ["ls", "-l", 'it\'s "here"'], "empty": []}
    structlog.get_logger("test").info("told", value=plain, path=pathlib.Path("/srv"))
    told = json.loads(lines.getvalue())
    assert told["value"] == plain
    assert told["path"] == "PosixPath('/srv')"
    assert (told["event"], told["level"]) == ("told", "info")
