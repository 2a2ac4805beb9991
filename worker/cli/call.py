"""``volume-worker call``: sends a request, prints the result."""

import asyncio
import contextlib
import dataclasses
import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from messages import client, errors, redaction, requests
from worker import settings
from worker.cli import arguments, failures, options, output, progress, reach

WATCH_TIMEOUT: Final = 24 * 3600.0
"""Seconds for which a job is watched that nobody has set a time for."""
_METHOD: Final = re.compile(r"[a-z][a-z0-9_]{0,99}")


def call(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="create_volume, get_volume, …")],
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="HOST@BACKEND, such as host-a@fast.",
            callback=options.check_address,
        ),
    ],
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Arguments: volume.name=v volume.size_bytes=1GiB; values are JSON or text.",
        ),
    ] = None,
    *,
    args: Annotated[
        str | None, typer.Option("--args", metavar="JSON", help="Arguments as a JSON object.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.1, max=10**7, help="Seconds to wait: 60, with --watch a day."
        ),
    ] = None,
    cast: Annotated[
        bool, typer.Option("--cast", help="Do not wait for a result; print the job's id.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show how far the job has come.")] = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Sends a request and prints its result."""
    if not _METHOD.fullmatch(method):
        raise typer.BadParameter(f"{output.plain(method)!r} is no method, such as create_volume")
    if cast and watch:
        raise typer.BadParameter("--cast does not wait, so there is nothing to --watch")
    given = arguments.parse(pairs or [], args)
    patience = timeout or (WATCH_TIMEOUT if watch else client.DEFAULT_TIMEOUT)
    request = _Request(settings.load(config), method, address, given, patience)
    if cast:
        _print_cast(asyncio.run(request.cast()), as_json)
        return
    # Secrets are for the connector that asks for them, never for a terminal or a file.
    output.print_json(redaction.mask_tree(_answer(request, watch=watch, as_json=as_json)))


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is asked for, and where."""

    configured: settings.Settings
    method: str
    address: str
    args: Mapping[str, Any]
    timeout: float
    id: uuid.UUID = dataclasses.field(default_factory=uuid.uuid4)

    async def call(self, shown: progress.Watch | None) -> Mapping[str, Any]:
        async with reach.caller(self.configured) as volumes:
            with shown or contextlib.nullcontext():
                return await volumes.call(
                    self.method,
                    self.address,
                    self.args,
                    timeout=self.timeout,
                    message_id=self.id,
                    on_status=shown,
                )

    async def cast(self) -> str:
        async with reach.caller(self.configured) as volumes:
            return str(
                await volumes.cast(self.method, self.address, self.args, timeout=self.timeout)
            )


def _answer(request: _Request, *, watch: bool, as_json: bool) -> Mapping[str, Any]:
    """The result; an error is told, with what can be done about it."""
    shown = progress.watch(request.method, as_json=as_json) if watch else None
    if watch and not as_json:
        output.note(f"job {request.id}")
    try:
        return asyncio.run(request.call(shown))
    except KeyboardInterrupt:
        if not _is_read(request.method):
            output.note(f"the job goes on: volume-worker jobs show {request.id}")
        raise
    except errors.VolumeWorkerError as error:
        if as_json and not isinstance(error, errors.Unreachable | settings.ConfigurationError):
            output.print_json(redaction.mask_tree(error.to_wire()))
        told = _with_advice(error, request.method, request.configured)
        raise typer.Exit(failures.report(told)) from None


def _print_cast(job_id: str, as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    if as_json:
        output.print_json({"job_id": job_id})
    else:
        output.say(job_id)


def _is_read(method: str) -> bool:
    known = requests.METHODS.get(method)
    return known is not None and known.kind is requests.Kind.READ


def _with_advice(
    error: errors.VolumeWorkerError, method: str, configured: settings.Settings
) -> errors.VolumeWorkerError:
    """The error, with what this command line can do about it."""
    match error:
        case errors.ReplyTimeout():
            if _is_read(method):
                advice = "is its worker running? Send it again; a read is not kept"
            else:
                advice = f"ask for it later with: volume-worker jobs show {error.details['job_id']}"
            waited = error.message.partition(";")[0]
            return errors.ReplyTimeout(f"{waited}; {advice}", **error.details)
        case errors.NoSuchAddress():
            return errors.NoSuchAddress(
                f"{error.message}. Is the namespace ({configured.namespace}) right, and has "
                "`volume-worker run` been started on that host?"
            )
        case _:
            return error
