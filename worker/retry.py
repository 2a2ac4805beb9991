"""Trying again what may succeed the second time.

What is tried again is listed, never "everything but": a cancelled call stays cancelled, and a fault
in the program shows at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import structlog
import tenacity

from messages import errors
from worker import process

log = structlog.get_logger(__name__)

Sleep = Callable[[float], Awaitable[None]]

_RETRIED: Final = (errors.CommandFailed, errors.CommandTimeout)


async def try_execute(
    execute: process.Executor,
    *argv: process.Argument,
    num_shell_tries: int,
    no_retry_list: Sequence[str] = (),
    sleep: Sleep = asyncio.sleep,
    **run_options: Any,
) -> process.Result:
    """Runs a program, again where it fails: 1, 4, 9, … seconds after the first, second, third try.

    Args:
        num_shell_tries: how often it is run at most.
        no_retry_list: texts of which one in stderr makes the failure final.
        run_options: those of :meth:`worker.process.Executor.run`.

    Raises:
        CommandFailed, CommandTimeout: of the last try.
        TypeError: ``no_retry_list`` is one text instead of a list: its letters would be looked for.
        ValueError: ``num_shell_tries`` is less than 1.
    """
    if isinstance(no_retry_list, str):
        raise TypeError("no_retry_list must be a list of texts, not one text")
    if num_shell_tries < 1:
        raise ValueError("num_shell_tries must be at least 1")

    def is_worth_it(error: BaseException) -> bool:
        if not isinstance(error, _RETRIED):
            return False
        stderr = str(error.details.get("stderr") or "")
        return not any(text in stderr for text in no_retry_list)

    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(num_shell_tries),
        wait=lambda state: float(state.attempt_number**2),
        retry=tenacity.retry_if_exception(is_worth_it),
        before_sleep=_tell,
        sleep=sleep,
        reraise=True,
    )
    return await retrying(execute.run, *argv, **run_options)


def backoff(attempt: int, base: float, cap: float) -> float:
    """Seconds to wait after an attempt (the first is 1): anything up to ``base`` · 2^(attempt-1).

    Full jitter: what failed together does not come back together.

    Args:
        base: seconds, the most after the first attempt.
        cap: seconds, the most ever.
    """
    # Beyond 2**64 any cap is reached, and a float would overflow.
    most = min(cap, base * 2.0 ** min(attempt - 1, 64))
    return random.uniform(0, most)  # noqa: S311 - nothing secret is made of it


def _tell(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning(
        "process.retried",
        attempt=state.attempt_number,
        wait_seconds=state.upcoming_sleep,
        error=str(error),
    )
