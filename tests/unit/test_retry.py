import asyncio
import pathlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from messages import errors
from worker import process, retry


class Naps:
    """Sleeps for no time and remembers for how long it was asked to."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
def execute() -> process.Executor:
    return process.Executor()


def counting(folder: pathlib.Path, *, fails: int, words: str = "no luck") -> list[str]:
    """A program that fails the first times, and says the how manyth time it ran."""
    script = f"""
        n=$(($(cat {folder}/n 2>/dev/null || echo 0) + 1)); echo $n >{folder}/n
        if [ $n -le {fails} ]; then echo "{words}" >&2; exit 5; fi
        echo "ran $n"
    """
    return ["sh", "-c", script]


def runs(folder: pathlib.Path) -> int:
    return int((folder / "n").read_text())


async def test_the_result_of_the_first_success_is_returned(
    execute: process.Executor, naps: Naps, tmp_path: pathlib.Path
) -> None:
    result = await retry.try_execute(
        execute, *counting(tmp_path, fails=0), num_shell_tries=3, sleep=naps
    )
    assert result.stdout == "ran 1\n"
    assert naps.taken == []


async def test_a_failing_program_is_run_again_after_growing_waits(
    execute: process.Executor, naps: Naps, tmp_path: pathlib.Path
) -> None:
    with capture_logs() as logs:
        result = await retry.try_execute(
            execute, *counting(tmp_path, fails=3), num_shell_tries=4, sleep=naps
        )
    assert result.stdout == "ran 4\n"
    assert naps.taken == [1, 4, 9]
    warnings = [line for line in logs if line["event"] == "process.retried"]
    assert [line["attempt"] for line in warnings] == [1, 2, 3]
    assert {line["log_level"] for line in warnings} == {"warning"}
    assert "exc_info" not in warnings[0]


async def test_the_last_failure_is_raised_and_not_slept_upon(
    execute: process.Executor, naps: Naps, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(errors.CommandFailed, match="exit code 5"):
        await retry.try_execute(
            execute, *counting(tmp_path, fails=9), num_shell_tries=3, sleep=naps
        )
    assert runs(tmp_path) == 3
    assert naps.taken == [1, 4]


async def test_a_text_of_the_list_makes_a_failure_final(
    execute: process.Executor, naps: Naps, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(errors.CommandFailed):
        await retry.try_execute(
            execute,
            *counting(tmp_path, fails=9, words="volume not found"),
            num_shell_tries=3,
            no_retry_list=["busy", "not found"],
            sleep=naps,
        )
    assert runs(tmp_path) == 1
    assert naps.taken == []


async def test_an_empty_stderr_is_no_match(
    execute: process.Executor, naps: Naps, tmp_path: pathlib.Path
) -> None:
    script = f"echo x >>{tmp_path}/n; exit 1"
    with pytest.raises(errors.CommandFailed):
        await retry.try_execute(
            execute, "sh", "-c", script, num_shell_tries=2, no_retry_list=["x"], sleep=naps
        )
    assert naps.taken == [1]


async def test_a_plain_text_as_list_is_refused_before_anything_runs(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(TypeError, match="not one text"):
        await retry.try_execute(
            execute, *counting(tmp_path, fails=0), num_shell_tries=3, no_retry_list="not found"
        )
    assert not (tmp_path / "n").exists()


async def test_no_tries_at_all_are_refused(execute: process.Executor) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        await retry.try_execute(execute, "true", num_shell_tries=0)


async def test_a_timeout_is_tried_again(execute: process.Executor, naps: Naps) -> None:
    with pytest.raises(errors.CommandTimeout):
        await retry.try_execute(execute, "sleep", "300", num_shell_tries=2, timeout=0.1, sleep=naps)
    assert naps.taken == [1]


async def test_a_program_that_is_not_there_is_tried_again_like_any_other_failure(
    execute: process.Executor, naps: Naps
) -> None:
    with pytest.raises(errors.CommandFailed, match="cannot be started"):
        await retry.try_execute(execute, "no-such-program", num_shell_tries=2, sleep=naps)
    assert naps.taken == [1]


async def test_cancellation_ends_it_at_once_even_while_it_waits(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    task = asyncio.create_task(
        retry.try_execute(execute, *counting(tmp_path, fails=9), num_shell_tries=9)
    )
    await asyncio.sleep(0.3)
    before = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - before < 0.5
    assert runs(tmp_path) == 1


async def test_the_loop_goes_on_while_it_waits(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    task = asyncio.create_task(
        retry.try_execute(execute, *counting(tmp_path, fails=1), num_shell_tries=2)
    )
    turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert (await task).stdout == "ran 2\n"
    assert turns > 30


async def test_options_of_a_run_are_handed_on(execute: process.Executor) -> None:
    result = await retry.try_execute(
        execute, "sh", "-c", "cat; exit 3", num_shell_tries=1, ok_codes=[3], stdin=b"in"
    )
    assert (result.exit_code, result.stdout) == (3, "in")


@given(attempt=st.integers(1, 10**6), base=st.floats(0.001, 1000), cap=st.floats(0.001, 10**6))
def test_a_backoff_stays_within_its_bounds(attempt: int, base: float, cap: float) -> None:
    assert 0 <= retry.backoff(attempt, base, cap) <= cap
    assert retry.backoff(1, base, cap) <= base


def test_a_backoff_grows_and_spreads() -> None:
    early = [retry.backoff(1, 1, 60) for _ in range(200)]
    late = [retry.backoff(7, 1, 60) for _ in range(200)]
    assert max(early) <= 1 < max(late) <= 60
    assert len(set(late)) > 100
