"""One operator at a time: the lock that work on the dead letters is done under.

It is a row with a lease, and no lock of a session: between the command and PostgreSQL there may be
a pooler that has no sessions.
"""

import asyncio
import contextlib
import datetime
import getpass
import os
import socket
import uuid
from collections.abc import AsyncIterator
from typing import Final

from messages import errors
from worker.store import database, replays

NAME: Final = "dead-letters"
LEASE: Final = 15.0
"""Seconds after which the lock of a command that was killed is free."""


class Busy(errors.VolumeWorkerError):
    """Another operator is at work on the dead letters."""


class LockLost(errors.VolumeWorkerError):
    """The command was held up for longer than its lease, and another operator may be at work."""


@contextlib.asynccontextmanager
async def held(store: database.Database) -> AsyncIterator[None]:
    """The lock, for the time of the block.

    Raises:
        Busy: another operator has it; the text says who.
        LockLost: it could not be kept; the block was cut short.
    """
    holder = uuid.uuid4()
    other = await replays.take_lock(store, NAME, holder, who=_who(), lease=LEASE)
    if other is not None:
        until = other.until.astimezone(datetime.UTC).strftime("%H:%M:%SZ")
        raise Busy(
            f"{other.who} is at work on the dead letters: nothing was done; try again when that "
            f"is over (or after {until}, if it was killed)"
        )
    try:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(_keep(store, holder))
            yield
            keeper.cancel()
    finally:
        await replays.drop_lock(store, NAME, holder)


async def _keep(store: database.Database, holder: uuid.UUID) -> None:
    while True:
        await asyncio.sleep(LEASE / 3)
        try:
            async with asyncio.timeout(LEASE / 2):
                is_kept = await replays.keep_lock(store, NAME, holder, lease=LEASE)
        except (TimeoutError, errors.Unreachable):
            is_kept = False
        if not is_kept:
            raise LockLost(
                "the lock of the dead letters could not be kept, so that another operator may be "
                "at work: the rest was left as it is; look at dead list, and try again"
            )


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user} at {socket.gethostname()} (process {os.getpid()})"
