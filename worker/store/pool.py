"""Connections to PostgreSQL: asyncpg's pool, with a few of them at hand.

To take a connection out of that pool and to give it back makes tasks, and takes turns of the event
loop, that cost more than a short statement does.
"""

import contextlib
from typing import Any, Final

import asyncpg

RELEASE_TIMEOUT: Final = 1.0
"""Seconds for a connection to come to rest whose statement was cut short; then it is ended."""
AT_HAND: Final = 4
"""Connections that are not given back to asyncpg's pool, which closes those that idle."""

AWAY: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # its server had just ended the connection
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.ReadOnlySQLTransactionError,  # the server has become a standby
)
"""What says that this connection, or the server behind it, is of no use any more."""


class Pool:
    """Lends connections, each to one at a time."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]") -> None:
        self._pool = pool
        self._at_hand: list[Any] = []
        self._lent: set[Any] = set()
        """What may be kept at hand when it comes back."""
        self._waiting = 0
        """How many wait for asyncpg's pool, which tells them only of what it is given back."""

    async def acquire(self, timeout: float) -> Any:
        """Lends a connection, once one is free.

        Raises:
            TimeoutError: none was, for so many seconds. And what connecting raises.
        """
        connection = await self._take_at_hand()
        if connection is None:
            self._waiting += 1
            try:
                connection = await self._pool.acquire(timeout=timeout)
            finally:
                self._waiting -= 1
        self._lent.add(connection)
        return connection

    async def _take_at_hand(self) -> Any:
        while self._at_hand:
            connection = self._at_hand.pop()
            if not connection.is_closed():
                return connection
            await self._give_back(connection)
        return None

    async def release(self, connection: Any, *, is_at_rest: bool) -> None:
        """Takes a connection back.

        ``is_at_rest``: its statement has ended, and well.
        """
        may_stay = is_at_rest and connection in self._lent
        self._lent.discard(connection)
        if may_stay and not self._waiting and len(self._at_hand) < AT_HAND:
            self._at_hand.append(connection)
        else:
            await self._give_back(connection)

    async def expire(self) -> None:
        """Uses none of the connections that there are now again: their server may be gone."""
        self._lent.clear()
        await self._pool.expire_connections()
        at_hand, self._at_hand = self._at_hand, []
        for connection in at_hand:
            end(connection)
            await self._give_back(connection)

    async def _give_back(self, connection: Any) -> None:
        # The pool ends a connection that does not come to rest, and tells of it by an error.
        with contextlib.suppress(*AWAY):
            await self._pool.release(connection, timeout=RELEASE_TIMEOUT)

    async def close(self) -> None:
        """Closes all, politely: when those who borrowed have given back."""
        at_hand, self._at_hand = self._at_hand, []
        for connection in at_hand:
            await self._give_back(connection)
        await self._pool.close()

    def terminate(self) -> None:
        """Closes all at once."""
        self._pool.terminate()


def end(connection: Any) -> None:
    """Ends a connection without a good-bye: who does not answer may not answer that either."""
    with contextlib.suppress(asyncpg.InterfaceError):  # it has ended already
        connection.terminate()
