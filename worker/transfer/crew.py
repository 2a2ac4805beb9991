"""Several threads that share one list of work, each with hands of its own."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

Task = TypeVar("Task")
Worker = Callable[[Task], None]

TICK: Final = 0.5
"""Seconds between two calls of ``tick``."""


def run(
    tasks: Iterable[Task],
    make_worker: Callable[[], Worker[Task]],
    *,
    threads: int,
    tick: Callable[[], None] | None = None,
) -> None:
    """Does every task, in the order given as far as several threads can.

    The first error ends the work and is raised at once: threads that are in the middle of a task
    end after it, and are not waited for.

    Args:
        tasks: taken by one thread at a time; may be a generator.
        make_worker: called once in each thread.
        tick: called from the caller's thread meanwhile.
    """
    crew = _Crew(iter(tasks), make_worker, threads)
    due = time.monotonic() + TICK
    while not crew.ended.wait(max(0.0, due - time.monotonic())):
        if tick:
            tick()
        due = time.monotonic() + TICK
    if crew.error:
        raise crew.error


class _Crew(Generic[Task]):
    def __init__(
        self, tasks: Iterator[Task], make_worker: Callable[[], Worker[Task]], threads: int
    ) -> None:
        self._tasks = tasks
        self._make_worker = make_worker
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        self._at_work = threads
        self.error: BaseException | None = None
        self.ended = threading.Event()
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            worker = self._make_worker()
            for task in self._take():
                worker(task)
        except BaseException as caught:
            # It is raised again in the caller's thread.
            error = caught
        with self._lock:
            self._at_work -= 1
            self.error = self.error or error
            if error or not self._at_work:
                self.ended.set()

    def _take(self) -> Iterator[Task]:
        while True:
            with self._taking:
                if self.error:
                    return
                task = next(self._tasks, None)
            if task is None:
                return
            yield task
