"""``volume-worker backend``: addresses with their state, and removing one that is not used."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final

import aio_pika.abc
import rich.text
import typer

from messages import errors, link, topology
from worker import settings
from worker.cli import options, output, queues, reach
from worker.store import database
from worker.store import reconciliation as records

commands = typer.Typer(
    help="Backends: every address that there is, and was.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

MISSED_STATS: Final = 3
"""Stats that may stay away until a backend counts as down."""


class Refused(errors.VolumeWorkerError):
    """The address cannot be removed."""


@commands.command("list")
def list_(*, config: options.Config = None, as_json: options.Json = False) -> None:
    """Lists addresses: those recorded, and those configured here."""
    found = asyncio.run(_list(settings.load(config)))
    if as_json:
        output.print_json({"backends": found})
        return
    output.print_table(
        (
            *("address", "state", "volumes", "queued", "running"),
            *("waiting", "workers", "free", "total", "last stats"),
        ),
        [_row(one) for one in found],
    )


@commands.command("remove")
def remove(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="HOST@BACKEND, such as host-a@fast.",
            callback=options.check_address,
        ),
    ],
    *,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Removes an address that has no volume, no unfinished job, no worker and no request."""
    asyncio.run(_remove(settings.load(config), address))
    if as_json:
        output.print_json({"removed": address})
    else:
        output.say(f"removed {address}")


async def _list(configured: settings.Settings) -> list[dict[str, Any]]:
    names = topology.Topology(configured.namespace)
    async with reach.records(configured) as store, reach.broker(configured.broker_url) as broker:
        recorded = {one.address: one for one in await _recorded(store, configured)}
        found = []
        for address in sorted({*recorded, *configured.addresses()}):
            queue = await queues.look(broker, names, address)
            workers = 0 if queue is None else queue.consumers
            one = {
                **_wire(recorded.get(address) or _unknown(address)),
                "configured": address in configured.addresses(),
                "waiting": None if queue is None else queue.waiting,
                "workers": workers,
            }
            if not workers:
                # Its last stats are not too old yet, and yet nobody is there.
                one["state"] = "down"
            found.append(one)
        return found


async def _recorded(
    store: database.Database, configured: settings.Settings
) -> list[records.Backend]:
    return await records.backends(store, patience=MISSED_STATS * configured.stats_interval)


def _unknown(address: str) -> records.Backend:
    return records.Backend(address, False, None, None, None, 0, 0, 0)  # noqa: FBT003


def _wire(one: records.Backend) -> dict[str, Any]:
    members = dataclasses.asdict(one)
    stats = members.pop("stats") or {}
    return {
        "address": members.pop("address"),
        "state": "up" if members.pop("is_up") else "down",
        **members,
        "free_capacity_bytes": stats.get("free_capacity_bytes"),
        "total_capacity_bytes": stats.get("total_capacity_bytes"),
    }


def _row(one: Mapping[str, Any]) -> list[rich.text.Text]:
    counts = [one[name] for name in ("volumes", "queued", "running", "waiting", "workers")]
    return [
        output.cell(one["address"]),
        output.cell(one["state"], "green" if one["state"] == "up" else "red"),
        *map(output.cell, counts),
        output.cell(_capacity(one["free_capacity_bytes"])),
        output.cell(_capacity(one["total_capacity_bytes"])),
        output.cell(output.moment(one["updated_at"])),
    ]


def _capacity(value: Any) -> str:
    return str(value) if isinstance(value, str) else output.size(value)


async def _remove(configured: settings.Settings, address: str) -> None:
    names = topology.Topology(configured.namespace)
    place = reach.place(configured.broker_url)
    try:
        async with (
            reach.records(configured) as store,
            reach.broker(configured.broker_url) as broker,
        ):
            await _Removal(store, broker, names, configured, address).run()
    except link.AWAY as error:
        raise errors.Unreachable(f"the broker at {place} went away: {error}; try again") from error


class _Removal:
    def __init__(
        self,
        store: database.Database,
        broker: aio_pika.abc.AbstractConnection,
        names: topology.Topology,
        configured: settings.Settings,
        address: str,
    ) -> None:
        self._store = store
        self._broker = broker
        self._names = names
        self._configured = configured
        self._address = address

    async def run(self) -> None:
        """Removes the address: first the way in, then the record, then the queue.

        Raises:
            Refused: it is used, or there is no such address.
        """
        queue = await self._check()
        if queue is not None:
            # Nothing new comes in from here on; what came in meanwhile is seen now.
            await self._bind(on=False)
            try:
                await self._check()
            except Refused:
                await self._bind(on=True)
                raise
        # Refuses by itself where a volume or a job has come after all.
        if self._is_recorded and not await records.remove_backend(self._store, self._address):
            if queue is not None:
                await self._bind(on=True)
            raise Refused(f"{self._address} is used again; try once more")
        if queue is not None:
            channel = await self._broker.channel()
            await channel.queue_delete(self._names.queue(self._address))

    async def _check(self) -> queues.Queue | None:
        rows = await _recorded(self._store, self._configured)
        row = next((one for one in rows if one.address == self._address), None)
        queue = await queues.look(self._broker, self._names, self._address)
        self._is_recorded = row is not None and row.updated_at is not None
        if row is None and queue is None:
            raise Refused(
                f"there is no address {self._address}; volume-worker backend list shows all"
            )
        if reasons := _reasons(row, queue):
            raise Refused(f"{self._address} cannot be removed: {', '.join(reasons)}")
        return queue

    async def _bind(self, *, on: bool) -> None:
        channel = await self._broker.channel()
        exchange = await channel.get_exchange(self._names.requests, ensure=False)
        queue = await channel.get_queue(self._names.queue(self._address), ensure=False)
        change = queue.bind if on else queue.unbind
        await change(exchange, routing_key=self._address)
        await channel.close()


def _reasons(row: records.Backend | None, queue: queues.Queue | None) -> list[str]:
    """What stands against the removal."""
    counts = {
        "volume(s): delete them first": row.volumes if row else 0,
        "unfinished job(s): see volume-worker jobs list": row.queued + row.running if row else 0,
        "worker(s) take requests from it: stop them first": queue.consumers if queue else 0,
        "request(s) wait in its queue: start a worker for it": queue.waiting if queue else 0,
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
