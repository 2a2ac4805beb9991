import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from worker import shutdown


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def test_the_first_signal_stops_and_the_second_hurries_and_more_do_nothing() -> None:
    signals = shutdown.Signals()
    with handlers_kept(), signals.heard():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.stop.wait(), 5)
        assert not signals.hurry.is_set()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        await asyncio.wait_for(signals.hurry.wait(), 5)


def test_a_signal_that_comes_late_does_not_make_a_failure_of_the_end() -> None:
    ended = run("""
        import asyncio, os, signal
        from worker import shutdown

        async def main():
            with shutdown.Signals().heard():
                pass

        asyncio.run(main())
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    """)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "hang",
    [
        "asyncio.run(asyncio.to_thread(time.sleep, 300))",
        "time.sleep(300)",
        "threading.Thread(target=time.sleep, args=[300]).start()",
    ],
    ids=["a thread that asyncio waits for", "the event loop", "a thread that Python waits for"],
)
def test_a_process_that_hangs_ends_when_its_time_is_up(hang: str) -> None:
    ended = run(f"""
        import asyncio, threading, time
        from worker import shutdown

        limit = shutdown.Limit()
        limit.exit_code = 7
        limit.last = lambda: print("last", flush=True)
        limit.within(600)
        limit.within(0.2)
        limit.within(600)
        {hang}
    """)
    assert ended.returncode == 7
    assert "last" in ended.stdout
    assert "service.end_forced" in ended.stdout


def test_a_log_that_nobody_reads_does_not_hold_up_the_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    ended = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; from worker import shutdown; shutdown.Limit().within(0.1);"
            " time.sleep(300)",
        ],
        stdout=writer,
        cwd=pathlib.Path(__file__).parents[2],
    )
    os.close(writer)
    assert ended.wait(60) == 0
    os.close(reader)


def test_a_process_that_ends_by_itself_is_not_held_up() -> None:
    ended = run("""
        from worker import shutdown
        shutdown.Limit().within(600)
    """)
    assert (ended.returncode, ended.stdout) == (0, "")
