"""``volume-worker call``: sends a request, prints the result."""

import asyncio
import json
from typing import Annotated, Any

import typer

from messages import client, errors
from worker import settings
from worker.cli import options


def call(
    method: Annotated[str, typer.Argument(help="create_volume, get_volume, …")],
    address: Annotated[str, typer.Argument(help="HOST@BACKEND")],
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Arguments; values are JSON or text."),
    ] = None,
    args: Annotated[str | None, typer.Option("--args", help="Arguments as a JSON object.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds.")] = 60.0,
    cast: Annotated[bool, typer.Option("--cast", help="Do not wait for a result.")] = False,
    config: options.Config = None,
) -> None:
    """Sends a request and prints its result."""
    configured = settings.load(config)
    arguments = _arguments(pairs or [], args)
    result = asyncio.run(_send(configured, method, address, arguments, timeout))
    options.print_json(result)


def _arguments(pairs: list[str], as_json: str | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(as_json) if as_json else {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


async def _send(
    configured: settings.Settings, method: str, address: str, args: dict[str, Any], timeout: float
) -> Any:
    async with client.Client(configured.broker_url, namespace=configured.namespace) as volumes:
        return await volumes.call(method, address, args, timeout=timeout)
