"""How fast a copy may go, how fast it goes, and the threads that share it."""

import threading
import time
from collections.abc import Iterator

import pytest

from worker.transfer import crew, pace


def test_a_rate_is_roughly_held() -> None:
    throttle = pace.Throttle(10_000_000)
    started = time.monotonic()
    for _ in range(11):
        throttle.take(500_000)
    assert 0.25 < time.monotonic() - started < 5


def test_no_rate_does_not_wait() -> None:
    throttle = pace.Throttle(None)
    throttle.take(10**15)
    assert throttle.step() == pace.CHUNK


def test_a_low_rate_goes_in_small_steps() -> None:
    assert pace.Throttle(1_000_000).step() < 256 * 1024


def test_a_new_rate_counts_for_those_who_wait() -> None:
    throttle = pace.Throttle(1)
    throttle.take(1000)
    waiting = threading.Thread(target=throttle.take, args=(1,))
    waiting.start()
    time.sleep(0.05)
    throttle.set(None)
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_meter_counts_what_is_done_and_rates_only_data() -> None:
    meter = pace.Meter(100)
    meter.count(copied=10)
    meter.count(zeroed=50)
    report = meter.report()
    assert (report["done_bytes"], report["total_bytes"]) == (60, 100)
    meter.count(read=5)
    assert meter.report()["done_bytes"] == 60


def test_a_crew_does_every_task_once() -> None:
    done: list[int] = []
    crew.run(range(1000), lambda: done.append, threads=4)
    assert sorted(done) == list(range(1000))


def test_the_first_error_of_a_crew_ends_the_work_at_once() -> None:
    held = threading.Event()

    def work(task: int) -> None:
        if task == 0:
            held.wait(30)
        elif task == 3:
            raise ValueError(task)

    started = time.monotonic()
    with pytest.raises(ValueError, match="3"):
        crew.run(range(1000), lambda: work, threads=2)
    held.set()
    assert time.monotonic() - started < 10


def test_an_error_in_the_list_of_tasks_is_an_error_of_the_crew() -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise LookupError

    done: list[int] = []
    with pytest.raises(LookupError):
        crew.run(tasks(), lambda: done.append, threads=3)
