"""The proxy by which tests put networks in trouble."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.services import tcp_proxy

SOON = 0.2
"""Seconds after which what has not come is taken not to come."""
TIMEOUT = 10.0


class Peer:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def say(self, text: bytes) -> None:
        self.writer.write(text)
        await self.writer.drain()

    async def hears(self, text: bytes, *, within: float = TIMEOUT) -> bool:
        try:
            async with asyncio.timeout(within):
                return await self._reader.readexactly(len(text)) == text
        except TimeoutError:
            return False

    async def ends(self, *, within: float = TIMEOUT) -> bool:
        """Whether it is told that the other end is gone, by an end or by a reset."""
        try:
            async with asyncio.timeout(within):
                return await self._reader.read(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


class Pair:
    """A proxy with a server behind it, and the ends of the newest connection through it."""

    def __init__(self, proxy: tcp_proxy.Proxy, accepted: "asyncio.Queue[Peer]") -> None:
        self.proxy = proxy
        self._accepted = accepted
        self.peers: list[Peer] = []
        self.client: Peer
        self.server: Peer

    async def connect(self) -> None:
        self.client = Peer(*await asyncio.open_connection("127.0.0.1", self.proxy.port))
        self.server = await self._accepted.get()
        self.peers += [self.client, self.server]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    accepted: asyncio.Queue[Peer] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(Peer(reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, tcp_proxy.before(f"x://a:b@127.0.0.1:{port}/") as (proxy, _):
        made = Pair(proxy, accepted)
        await made.connect()
        yield made
        for peer in made.peers:
            peer.writer.transport.abort()


async def test_bytes_and_ends_go_through_both_ways(pair: Pair) -> None:
    await pair.client.say(b"question")
    assert await pair.server.hears(b"question")
    await pair.server.say(b"answer")
    assert await pair.client.hears(b"answer")
    pair.client.writer.close()
    assert await pair.server.ends()


async def test_a_cut_ends_both_sides_and_lets_new_ones_in(pair: Pair) -> None:
    old = pair.client
    await pair.proxy.cut()
    assert await old.ends()
    assert await pair.server.ends()
    await pair.connect()
    await pair.client.say(b"again")
    assert await pair.server.hears(b"again")
    assert pair.proxy.accepted == 2


async def test_a_stalled_way_takes_everything_and_passes_it_on_when_healed(pair: Pair) -> None:
    pair.proxy.stall()
    much = bytes(16 * 1024 * 1024)
    async with asyncio.timeout(TIMEOUT):
        await pair.client.say(much)
        while pair.client.writer.transport.get_write_buffer_size():
            await asyncio.sleep(0.01)
    assert not await pair.server.hears(b"\0", within=SOON)
    pair.proxy.heal()
    assert await pair.server.hears(much)


async def test_one_way_alone_can_stall(pair: Pair) -> None:
    pair.proxy.stall(tcp_proxy.Way.BACK)
    await pair.client.say(b"question")
    assert await pair.server.hears(b"question")
    await pair.server.say(b"answer")
    assert not await pair.client.hears(b"answer", within=SOON)


async def test_a_half_open_way_holds_up_its_sender_and_tells_no_end(pair: Pair) -> None:
    pair.proxy.half_open(tcp_proxy.Way.OUT)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SOON):
            await pair.client.say(bytes(64 * 1024 * 1024))
    assert pair.client.writer.transport.get_write_buffer_size()
    await pair.server.say(b"are you there")
    assert await pair.client.hears(b"are you there")
    pair.client.writer.transport.abort()
    assert not await pair.server.ends(within=SOON)


async def test_a_delay_holds_everything_back_in_order(pair: Pair) -> None:
    pair.proxy.delay(0.5)
    started = asyncio.get_running_loop().time()
    await pair.client.say(b"one ")
    await pair.client.say(b"two")
    assert await pair.server.hears(b"one two")
    assert asyncio.get_running_loop().time() - started >= 0.5


async def test_what_was_set_is_undone_by_healing(pair: Pair) -> None:
    pair.proxy.half_open(tcp_proxy.Way.BACK)
    await pair.server.say(b"late")
    assert not await pair.client.hears(b"late", within=SOON)
    pair.proxy.heal()
    assert await pair.client.hears(b"late")
