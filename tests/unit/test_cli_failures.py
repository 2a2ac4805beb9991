"""Which error ends the command with which code."""

import asyncio

import asyncpg
import pydantic
import pytest

from messages import errors
from worker import settings
from worker.cli import failures, reach


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (settings.ConfigurationError("x: bad"), 2, "configuration: x: bad"),
        (errors.VolumeNotFound("none"), 1, "VolumeNotFound: none"),
        (errors.RemoteError("odd", code="Newer"), 1, "Newer: odd"),
        (errors.NoSuchAddress("nobody"), 1, "nobody"),
        (errors.ReplyTimeout("late"), 1, "late"),
        (errors.Unreachable("away"), 3, "away"),
        (asyncpg.PostgresError("no"), 1, "refused: no"),
    ],
)
def test_errors_have_codes_and_texts(
    error: Exception, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    assert failures.guarded(command) == code
    assert words in capsys.readouterr().err


def test_the_error_that_is_for_people_is_found_in_a_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> None:
        inner = ExceptionGroup("", [errors.VolumeIsBusy("busy")])
        raise ExceptionGroup("", [ValueError("noise"), inner])

    assert failures.guarded(command) == 1
    assert "busy" in capsys.readouterr().err


def test_an_error_that_nobody_has_foreseen_is_raised() -> None:
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failures.guarded(command)


def test_ctrl_c_is_no_traceback() -> None:
    def command() -> None:
        raise KeyboardInterrupt

    assert failures.guarded(command) == 130


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:geheim@127.0.0.1:1/",
        "amqp://user:geheim@127.0.0.1:not-a-port/",
        "http://user:geheim@127.0.0.1:1/",
        "amqp://user:geheim@[::1/",
        "geheim",
        "",
    ],
)
def test_a_broker_url_that_leads_nowhere_is_unreachable_and_not_shown(url: str) -> None:
    async def connect() -> None:
        async with reach.broker(pydantic.SecretStr(url)):
            pass

    with pytest.raises(errors.Unreachable) as caught:
        asyncio.run(connect())
    assert "geheim" not in str(caught.value)
    assert "broker_url" in str(caught.value)
