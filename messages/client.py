"""A client for schedulers, the command line, and workers that call each other.

    async with client.Client("amqp://guest:guest@127.0.0.1/") as volumes:
        volume = await volumes.call(
            "create_volume", "host-a@fast", {"volume": {"name": "v", "size_bytes": 2**30}}
        )

A call survives the loss of its connection: it is sent again under the same ``message_id``, which
the worker knows to be the same request, and whose stored result it gives.
"""

import asyncio
import contextlib
import datetime
import json
import logging
import types
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Self

import aio_pika
import aio_pika.abc
import pydantic

from messages import envelope, errors, link, replies, requests, topology

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT: Final = 60.0
REPLY_QUEUE_EXPIRES: Final = 30 * 60 * 1000
"""Milliseconds that a reply queue outlives its client, so that a short cut loses no reply."""

OnStatus = Callable[[Mapping[str, Any]], Awaitable[None] | None]


class _Call:
    """A call that waits for its result."""

    def __init__(self, on_status: OnStatus | None) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.on_status = on_status
        self.sent = False
        """Whether the broker has taken the request."""
        self._statuses: asyncio.Queue[Any] = asyncio.Queue()

    def take_status(self, body: Any) -> None:
        """Keeps a status message for :meth:`tell_statuses`."""
        if self.on_status is not None and not self.result.done():
            self._statuses.put_nowait(body)

    def take_result(self, body: Any) -> None:
        """Ends the call, after the status messages that came before."""
        if not self.result.done():
            self.result.set_result(body)
            self._statuses.put_nowait(None)

    async def tell_statuses(self) -> None:
        """Hands each status message on, one after the other, until the result is there."""
        while (body := await self._statuses.get()) is not None:
            assert self.on_status is not None
            try:
                answer = self.on_status(body)
                if answer is not None:
                    await answer
            except Exception:
                # The caller's own fault, and no reason to lose the result.
                log.exception("client.on_status_failed")


class Client:
    """Sends requests; an asynchronous context manager.

    Args:
        broker_url: ``amqp://USER:PASSWORD@HOST:PORT/VHOST``.
        namespace: the installation's.
        name: shown by the broker's management.
    """

    def __init__(
        self,
        broker_url: str | pydantic.SecretStr,
        *,
        namespace: str = "volume",
        name: str = "volume-worker client",
    ) -> None:
        url = pydantic.SecretStr(broker_url) if isinstance(broker_url, str) else broker_url
        self._url = url
        self._topology = topology.Topology(namespace)
        self._reply_queue = f"reply-{uuid.uuid4()}"
        self._calls: dict[str, _Call] = {}
        self._publisher = link.Publisher(url, name)
        self._replies = link.Link(url, f"{name} (replies)", self._consume_replies)
        self._lost = asyncio.Event()
        """Set once replies that went to the present connection may have been lost."""
        self._queue: aio_pika.abc.AbstractQueue | None = None
        self._consumer_tag = ""
        self._may_have_queue = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._publisher.link.run()),
            asyncio.create_task(self._replies.run()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        is_deleted = await self._delete_queue()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._may_have_queue and not is_deleted:
            await self._delete_queue_apart()

    async def _delete_queue(self) -> bool:
        if self._queue is None or not self._replies.is_up:
            return False
        with contextlib.suppress(*link.AWAY):
            await self._queue.cancel(self._consumer_tag, timeout=3)
            await self._queue.delete(if_unused=False, if_empty=False, timeout=3)
            return True
        return False

    async def _delete_queue_apart(self) -> None:
        """Over a connection for this alone; with the broker away, the queue expires by itself."""
        with contextlib.suppress(*link.AWAY):
            async with asyncio.timeout(3):
                connection = await aio_pika.connect(self._url.get_secret_value(), timeout=3)
                async with connection, connection.channel() as channel:
                    await channel.queue_delete(self._reply_queue, if_unused=False, if_empty=False)

    async def call(
        self,
        method: str,
        address: str,
        args: Mapping[str, Any] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        message_id: uuid.UUID | None = None,
        parent_job: uuid.UUID | None = None,
        on_status: OnStatus | None = None,
    ) -> Mapping[str, Any]:
        """Sends a request and waits for its result, ``timeout`` seconds at most.

        ``on_status`` is called with each status message. The job's id is ``message_id``.

        Raises:
            NoSuchAddress: no queue is bound for the address.
            ReplyTimeout: no result came in time; ``details["job_id"]`` tells what to ask for.
            Unreachable: the broker stayed away.
            VolumeWorkerError: the worker's answer, by its class.
            Exception: what has ended the connection for good, such as a URL that is none.
        """
        identity = message_id or uuid.uuid4()
        correlation = str(uuid.uuid4())
        message = self._message(
            method,
            args,
            identity,
            reply_to=self._reply_queue,
            correlation_id=correlation,
            deadline=timeout,
            parent_job=parent_job,
            status_updates=on_status is not None,
        )
        call = self._calls[correlation] = _Call(on_status)
        try:
            async with asyncio.timeout(timeout):
                await self._while_linked(self._carry_out(call, message, address))
        except TimeoutError:
            # What came in time is told, even where the callback was not done with its status.
            if not call.result.done():
                raise self._too_late(call, identity, timeout) from None
        finally:
            del self._calls[correlation]
        return _unpack(call.result.result())

    async def _carry_out(self, call: _Call, message: aio_pika.Message, address: str) -> None:
        """Sends a call until its result is there, and every status message told."""
        telling = asyncio.create_task(call.tell_statuses())
        try:
            while not call.result.done():
                await self._replies.ready()
                # Those of this connection, and not of one that has come while this was being sent.
                lost = self._lost
                if await self._send(message, address):
                    call.sent = True
                    await _result_or_loss(call, lost)
            await telling
        finally:
            telling.cancel()

    async def cast(
        self,
        method: str,
        address: str,
        args: Mapping[str, Any] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        message_id: uuid.UUID | None = None,
    ) -> uuid.UUID:
        """Sends a request that nobody waits for; returns the job's id once the broker has it.

        Raises:
            NoSuchAddress: no queue is bound for the address.
            Unreachable: the broker stayed away.
        """
        identity = message_id or uuid.uuid4()
        message = self._message(method, args, identity)
        try:
            async with asyncio.timeout(timeout):
                await self._while_linked(self._send_at_last(message, address))
        except TimeoutError:
            raise self._not_taken(timeout) from None
        return identity

    async def _while_linked(self, work: Coroutine[Any, Any, None]) -> None:
        """Does ``work``; an error that has ended a link is raised at once.

        Without its link the work would wait for its whole timeout, and tell of that alone.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                for ended in self._tasks:
                    if ended.cancelled():
                        raise errors.Unreachable("the client is closed")
                    if ended.done():
                        ended.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _message(
        self,
        method: str,
        args: Mapping[str, Any] | None,
        identity: uuid.UUID,
        *,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        deadline: float | None = None,
        parent_job: uuid.UUID | None = None,
        status_updates: bool = False,
    ) -> aio_pika.Message:
        major, minor = requests.VERSION
        body = {"method": method, "version": f"{major}.{minor}", "args": dict(args or {})}
        headers: dict[str, Any] = {}
        if deadline is not None:
            moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=deadline)
            headers["deadline"] = moment.isoformat()
        if parent_job is not None:
            headers["parent-job"] = str(parent_job)
        if status_updates:
            headers["status-updates"] = True
        return aio_pika.Message(
            json.dumps(body).encode(),
            headers=headers,
            content_type=envelope.CONTENT_TYPE,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            message_id=str(identity),
            reply_to=reply_to,
            correlation_id=correlation_id,
        )

    def _not_taken(self, timeout: float) -> errors.Unreachable:
        why = self._publisher.link.trouble or self._replies.trouble
        return errors.Unreachable(
            f"the broker took no request within {timeout:g} s; is broker_url right?"
            + (f" Last: {why}" if why else "")
        )

    def _too_late(
        self, call: _Call, identity: uuid.UUID, timeout: float
    ) -> errors.VolumeWorkerError:
        if not call.sent:
            return self._not_taken(timeout)
        return errors.ReplyTimeout(
            f"no result within {timeout:g} s; ask for it with get_job {identity}",
            job_id=str(identity),
        )

    async def _send_at_last(self, message: aio_pika.Message, address: str) -> None:
        while not await self._send(message, address):
            pass

    async def _send(self, message: aio_pika.Message, address: str) -> bool:
        """Publishes a request; False where it has to be tried again."""
        await self._publisher.link.ready()
        try:
            await self._publisher.publish(
                message, exchange=self._topology.requests, routing_key=address, mandatory=True
            )
        except link.Unroutable:
            raise errors.NoSuchAddress(
                f"there is no backend {address!r} in namespace {self._topology.namespace!r}: "
                "no worker has ever served it"
            ) from None
        except errors.Unreachable:
            await asyncio.sleep(0.2)
            return False
        return True

    async def _consume_replies(self, connection: aio_pika.abc.AbstractConnection) -> None:
        channel = await link.open_channel(connection)
        await channel.set_qos(prefetch_count=100)
        self._may_have_queue = True
        self._queue = await channel.declare_queue(
            self._reply_queue, durable=True, arguments={"x-expires": REPLY_QUEUE_EXPIRES}
        )
        lost = self._lost = asyncio.Event()
        connection.close_callbacks.add(lambda *_: lost.set())
        self._consumer_tag = await self._queue.consume(self._take_reply, no_ack=True)
        # A queue that is deleted takes its consumer along, and a channel that the broker closes
        # too: start over, with every call that waits.
        channel.close_callbacks.add(lambda *_: asyncio.ensure_future(connection.close()))
        underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(lambda _: connection.close())

    async def _take_reply(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        call = self._calls.get(message.correlation_id or "")
        if call is None or call.result.done():
            return  # the caller has stopped waiting, or has had this result already
        try:
            body = json.loads(message.body)
        except ValueError:
            log.warning("client.reply_unreadable", extra={"correlation_id": message.correlation_id})
            return
        if message.type == replies.ReplyType.STATUS:
            call.take_status(body)
        else:
            call.take_result(body)


async def _result_or_loss(call: _Call, lost: asyncio.Event) -> None:
    """Waits for the result, or until replies may have been lost."""
    losing: asyncio.Task[Any] = asyncio.create_task(lost.wait())
    try:
        await asyncio.wait([call.result, losing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        losing.cancel()


def _unpack(body: Any) -> Mapping[str, Any]:
    match body:
        case {"ok": True, "result": dict() as result}:
            return result
        case {"ok": False, "error": dict() as error}:
            raise errors.from_wire(error)
        case _:
            raise errors.RemoteError("what came back is no result as the contract has it")
