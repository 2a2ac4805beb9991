"""The NBD client, whose calls block, for the event loop: each visit to an export has its thread."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from worker.nbd import link as links
from worker.nbd import session
from worker.nbd import uri as uris

PATIENCE: Final = 20.0
"""Seconds that one wait for the server may take; a flush may take as long as it takes."""

Answer = TypeVar("Answer")


async def visit(uri: str, work: Callable[[session.Session], Answer]) -> Answer:
    """Has ``work`` use the export that ``uri`` names, in a thread.

    Who cancels it does not wait for the server; the thread loses its connection, and ends then.

    Raises:
        DeviceUnavailable: nobody answers, what answers is no NBD server, or has no such export.
    """
    made = _Visit(uri, work)
    try:
        return await asyncio.to_thread(made.run)
    except asyncio.CancelledError:
        made.give_up()
        raise


class _Visit(Generic[Answer]):
    def __init__(self, uri: str, work: Callable[[session.Session], Answer]) -> None:
        self._uri = uri
        self._where = uris.parse(uri)
        self._work = work
        self._link: links.Link | None = None
        self._given_up = False

    def run(self) -> Answer:
        self._link = link = links.Link(self._where, patience=PATIENCE)
        # Given up before there was a link to abort.
        if self._given_up:
            link.abort()
        opened = session.begin(link, self._where.export, name=self._uri)
        with contextlib.closing(opened):
            return self._work(opened)

    def give_up(self) -> None:
        self._given_up = True
        if self._link is not None:
            self._link.abort()
