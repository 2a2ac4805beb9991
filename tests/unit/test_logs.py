"""Log lines: no value that is named like a secret is in one, wherever it was put."""

import contextlib
import io
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import pytest
import structlog

from worker.telemetry import logs

Configure = Callable[..., None]
SECRET = "s3cr3t-Hunter.2"


@pytest.fixture
def configure() -> Iterator[Configure]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    noisy = {name: logging.getLogger(name).level for name in ("aio_pika", "aiormq", "qemu")}
    yield logs.configure
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level
    for name, before in noisy.items():
        logging.getLogger(name).setLevel(before)


@pytest.fixture
def lines(configure: Configure) -> io.StringIO:
    stream = io.StringIO()
    configure(stream=stream)
    return stream


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


def test_nothing_that_is_logged_for_people_can_play_with_their_terminal(
    configure: Configure,
) -> None:
    stream = io.StringIO()
    configure(logs.Format.CONSOLE, stream=stream)
    hostile = "a\x1b]0;title\x07\x1b[2J\x9b1m\r\n\x7f\u202e\u2028z"
    told = {"value": hostile, hostile: 1, "inner": [{hostile: (hostile,)}], "ö": "ü"}
    structlog.get_logger("test").info(hostile, **told, error=ValueError(hostile))
    structlog.get_logger("test").error("failed", exc_info=ValueError(hostile))
    logging.getLogger("test").warning(hostile, extra={"value": hostile})
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text), ascii(text)
    assert r"a\x1b]0;title\x07" in text
    assert "ü" in text
    assert "Traceback" not in text
    assert "ValueError: a" in text


def _full() -> TextIO:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def _without_a_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("opened", [_full, _without_a_reader, _closed])
def test_a_line_that_cannot_be_written_fails_nothing(
    configure: Configure, opened: Callable[[], TextIO], capsys: pytest.CaptureFixture[str]
) -> None:
    stream = opened()
    configure(stream=stream)
    for _ in range(3):
        structlog.get_logger("test").warning("told", value="x" * 10_000)
        structlog.get_logger("test").error("failed", exc_info=ValueError())
        logging.getLogger("test").warning("told")
    if not stream.closed:
        assert capsys.readouterr().err == ""
    with contextlib.suppress(OSError):
        stream.close()
