"""Signals: as exceptions while starting, held back while stopping, passed on while running."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final, NoReturn

from devservices.common import say

# What asks a program to end; SIGINT already is an exception in Python.
ENDING: Final = (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
PASSED_ON: Final = (signal.SIGINT, *ENDING, signal.SIGUSR1, signal.SIGUSR2)
NOT_RUN: Final = 127  # as shells say it
SENT_BY_KERNEL: Final = 0x80  # SI_KERNEL of <signal.h>: a key in the terminal


class InterruptedBySignal(BaseException):
    """Not an Exception, like KeyboardInterrupt: only clean-up may hold it up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise InterruptedBySignal(number)


def raise_on_signals() -> None:
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets SIGHUP
            signal.signal(number, _raise)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that come meanwhile take effect afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_passing_signals(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its exit code, 128 + N if signal N ended it.

    The command stays in our process group, so that it can read from the terminal. A Ctrl-C
    there reaches it from the kernel; only what was sent to us alone is passed on.
    """
    watched = {*PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        try:
            child = os.posix_spawnp(command[0], [*command], environment, setsigmask=before)
        except OSError as error:
            say(f"error: {command[0]}: {error.strerror}")
            return NOT_RUN
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            received = signal.sigwaitinfo(watched)
            if received.si_signo != signal.SIGCHLD and received.si_code != SENT_BY_KERNEL:
                os.kill(child, received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
