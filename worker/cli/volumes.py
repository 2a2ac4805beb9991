"""``volume-worker volumes``: volumes as recorded, with the broker there or away."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

import rich.text
import typer

from messages import resources
from worker import reads, settings
from worker.cli import listing, options, output, reach
from worker.store import volumes

commands = typer.Typer(
    help="Volumes with their attachments and connections.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@commands.command("list")
def list_(
    *,
    status: Annotated[
        resources.VolumeStatus | None, typer.Option("--status", help="Only in this status.")
    ] = None,
    address: options.Address = None,
    limit: options.Limit = 100,
    after: options.After = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Lists volumes by id."""
    configured = settings.load(config)
    page = asyncio.run(_list(configured, address=address, status=status, after=after, limit=limit))
    listing.print_page(
        page,
        "volumes",
        titles=("id", "name", "address", "size", "status", "exported", "used by"),
        row=_row,
        limit=limit,
        as_json=as_json,
    )


@commands.command("show")
def show(
    volume_id: Annotated[uuid.UUID, typer.Argument(metavar="ID")],
    *,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Prints all that is recorded of a volume."""
    volume = asyncio.run(_get(settings.load(config), volume_id))
    if as_json:
        output.print_json(volume)
        return
    readable = {
        **volume,
        "size_bytes": f"{volume['size_bytes']} ({output.size(volume['size_bytes'])})",
        "status": _status(volume),
        **{name: output.moment(volume[name]) for name in ("created_at", "updated_at")},
    }
    output.print_record(readable.items())


async def _list(configured: settings.Settings, **filters: Any) -> reads.Page:
    async with reach.records(configured) as store:
        return await reads.list_volumes(store, **filters)


async def _get(configured: settings.Settings, volume_id: uuid.UUID) -> dict[str, Any]:
    async with reach.records(configured) as store:
        return _wire(await volumes.record(store, volume_id))


def _wire(record: Mapping[str, Any]) -> dict[str, Any]:
    return resources.Volume.model_validate(record).to_wire()


def _row(volume: Mapping[str, Any]) -> list[rich.text.Text]:
    return [
        output.cell(volume["id"]),
        output.cell(volume["name"]),
        output.cell(volume["address"]),
        output.cell(output.size(volume["size_bytes"])),
        _status(volume),
        output.cell("yes" if volume["exported"] else "no"),
        output.cell(_users(volume)),
    ]


def _status(volume: Mapping[str, Any]) -> rich.text.Text:
    status = volume["status"]
    style = "red" if "error" in status else "green" if status == "available" else "cyan"
    return output.cell(status, style)


def _users(volume: Mapping[str, Any]) -> str:
    attachments = [
        str(a["instance_uuid"] or a["host_name"] or a["mountpoint"]) for a in volume["attachments"]
    ]
    connections = [f"{c['connector_host']} ({c['access_mode']})" for c in volume["connections"]]
    return ", ".join(attachments + connections)
