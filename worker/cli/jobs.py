"""``volume-worker jobs``: jobs as recorded, with the broker there or away."""

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final

import rich.text
import typer

from messages import client, replies, resources
from worker import reads, settings
from worker.cli import arguments, failures, listing, options, output, progress, reach
from worker.store import jobs

commands = typer.Typer(
    help="Jobs: accepted requests, and what became of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

WATCH_INTERVAL: Final = 0.5
"""Seconds between looks at a job that is watched."""

_STYLES = {"succeeded": "green", "failed": "red", "dead": "bold red", "running": "cyan"}


@commands.command("list")
def list_(
    *,
    state: Annotated[
        resources.JobState | None, typer.Option("--state", help="Only in this state.")
    ] = None,
    address: options.Address = None,
    volume: Annotated[
        uuid.UUID | None, typer.Option("--volume", metavar="ID", help="Only of this volume.")
    ] = None,
    limit: options.Limit = 100,
    after: options.After = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Lists jobs in the order of their acceptance."""
    configured = settings.load(config)
    page = asyncio.run(
        _list(configured, address=address, state=state, volume_id=volume, after=after, limit=limit)
    )
    listing.print_page(
        page,
        "jobs",
        titles=("id", "method", "address", "state", "attempt", "accepted", "progress or error"),
        row=_row,
        limit=limit,
        as_json=as_json,
    )


@commands.command("show")
def show(
    job_id: Annotated[uuid.UUID, typer.Argument(metavar="ID")],
    *,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Prints all that is recorded of a job; secrets are masked."""
    job = asyncio.run(_get(settings.load(config), job_id))
    if as_json:
        output.print_json(job)
        return
    readable = {
        **job,
        "state": _state(job),
        "progress": progress.amounts(job["progress"]) if job["progress"] else None,
        **{name: output.moment(job[name]) for name in job if name.endswith("_at")},
    }
    output.print_record(readable.items())


@commands.command("cancel")
def cancel(
    job_id: Annotated[uuid.UUID, typer.Argument(metavar="ID")],
    *,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=10**7, help="Seconds to wait for its end.")
    ] = client.DEFAULT_TIMEOUT,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Cancels a job and waits until it has ended, and what it did is undone."""
    job = asyncio.run(_cancel(settings.load(config), job_id, timeout))
    if as_json:
        output.print_json(job)
    else:
        output.say(f"{job_id} is {job['state']}")


@commands.command("throttle")
def throttle(
    job_id: Annotated[uuid.UUID, typer.Argument(metavar="ID")],
    rate: Annotated[
        str,
        typer.Argument(metavar="RATE", help="Bytes a second, such as 50MiB; none for no limit."),
    ],
    *,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Changes how fast a copy may go, while it runs or before."""
    most = None if rate == "none" else arguments.parse_size("RATE", rate)
    job = asyncio.run(_throttle(settings.load(config), job_id, most))
    if as_json:
        output.print_json(job)
    else:
        output.say(f"{job_id} is {job['state']}")


@commands.command("watch")
def watch(
    job_id: Annotated[uuid.UUID, typer.Argument(metavar="ID")],
    *,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Shows how far a job has come until it has ended; fails where the job does."""
    job = asyncio.run(_watch(settings.load(config), job_id, as_json=as_json))
    if as_json:
        output.print_json(job)
    else:
        output.say(f"{job_id} is {job['state']}" + (f": {news}" if (news := _news(job)) else ""))
    if job["state"] != resources.JobState.SUCCEEDED:
        raise typer.Exit(failures.ExitCode.FAILED)


async def _cancel(
    configured: settings.Settings, job_id: uuid.UUID, timeout: float
) -> Mapping[str, Any]:
    return await _call(configured, "cancel_job", job_id, {}, timeout)


async def _throttle(
    configured: settings.Settings, job_id: uuid.UUID, most: int | None
) -> Mapping[str, Any]:
    said = {"bytes_per_second": most}
    return await _call(configured, "throttle_job", job_id, said, client.DEFAULT_TIMEOUT)


async def _call(
    configured: settings.Settings,
    method: str,
    job_id: uuid.UUID,
    args: Mapping[str, Any],
    timeout: float,
) -> Mapping[str, Any]:
    """Calls a method about a job, at the job's own address."""
    async with reach.records(configured) as store:
        address = (await jobs.get(store, job_id)).address
    async with reach.caller(configured) as volumes:
        return await volumes.call(method, address, {"job_id": str(job_id), **args}, timeout=timeout)


async def _watch(
    configured: settings.Settings, job_id: uuid.UUID, *, as_json: bool
) -> Mapping[str, Any]:
    async with reach.records(configured) as store:
        job = await jobs.get(store, job_id)
        with progress.watch(job.method, as_json=as_json) as shown:
            version = -1
            while True:
                if job.version != version:
                    version = job.version
                    shown(replies.status(dataclasses.asdict(job), output.now()))
                if job.state in resources.ENDED:
                    return job.to_wire()
                await asyncio.sleep(WATCH_INTERVAL)
                job = await jobs.get(store, job_id)


async def _list(configured: settings.Settings, **filters: Any) -> reads.Page:
    async with reach.records(configured) as store:
        return await reads.list_jobs(store, **filters)


async def _get(configured: settings.Settings, job_id: uuid.UUID) -> dict[str, Any]:
    async with reach.records(configured) as store:
        return (await jobs.get(store, job_id)).to_wire()


def _row(job: Mapping[str, Any]) -> list[rich.text.Text]:
    return [
        output.cell(job["id"]),
        output.cell(job["method"]),
        output.cell(job["address"]),
        _state(job),
        output.cell(job["attempt"]),
        output.cell(output.moment(job["created_at"])),
        output.cell(_news(job)),
    ]


def _state(job: Mapping[str, Any]) -> rich.text.Text:
    return output.cell(job["state"], _STYLES.get(job["state"], ""))


def _news(job: Mapping[str, Any]) -> str | None:
    if job["error"] is not None:
        return f"{job['error'].get('code')}: {job['error'].get('message')}"
    if job["progress"] is not None and job["finished_at"] is None:
        return progress.amounts(job["progress"])
    return None
