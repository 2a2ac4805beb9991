"""``volume-worker reconcile``: what is there, compared with the records, and mended.

Each backend of this host is asked for by its worker; where none takes requests for it, this process
does the work itself.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import rich.text
import typer

from messages import errors, topology
from messages.findings import Finding, Identity
from worker import settings
from worker.cli import failures, options, output, queues, reach, reconciling

TIMEOUT: Final = 120.0
"""Seconds that a worker has to answer: it waits for what its target is at, and for its target."""

Repair = Annotated[
    bool,
    typer.Option("--repair", help="Mend what is safe to mend: nothing that holds data is removed."),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", min=0.1, max=10**6, help="Seconds that a worker has to answer."),
]


def reconcile(
    *,
    repair: Repair = False,
    timeout: Timeout = TIMEOUT,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Compares exports, access, devices and children with the records of this host's backends."""
    configured = settings.load(config)
    backends = settings.backends(configured)
    if not backends:
        raise settings.ConfigurationError("no backends; --config FILE names where they are")
    found, truncated = asyncio.run(_reconcile(configured, backends, repair=repair, timeout=timeout))
    if as_json:
        cut = {"truncated": True} if truncated else {}
        output.print_json({"findings": [one.to_wire() for one in found], **cut})
    elif found:
        titles = ("kind", "address", "subject", "what is wrong", "repair")
        output.print_table(titles, [_row(one) for one in found])
    else:
        looked_at = ", ".join(f"{configured.host}@{one.name}" for one in backends)
        output.say(f"nothing is wrong at {looked_at}")
    wrong = [one for one in found if not one.repaired]
    if wrong:
        output.fail(_advice(wrong, repair=repair))
        raise typer.Exit(failures.ExitCode.FAILED)


def _row(one: Finding) -> list[rich.text.Text]:
    return [
        output.cell(one.kind, "green" if one.repaired else "red"),
        output.cell(one.address),
        output.cell(one.subject),
        output.cell(one.what),
        output.cell(_repair(one)),
    ]


def _repair(one: Finding) -> str:
    match one.repaired:
        case None:
            return one.action or "by hand"
        case True:
            return "repaired"
        case False:
            return f"failed: {one.error}" if one.error else "failed: it is there still"


def _advice(wrong: Sequence[Finding], *, repair: bool) -> str:
    mendable = sum(one.action is not None for one in wrong)
    if repair or not mendable:
        return f"{len(wrong)} thing(s) need mending"
    return f"{len(wrong)} thing(s) need mending; --repair mends {mendable} of them"


async def _reconcile(
    configured: settings.Settings,
    backends: Sequence[settings.Backend],
    *,
    repair: bool,
    timeout: float,
) -> tuple[list[Finding], bool]:
    """The findings about each backend, and whether there are more."""
    names = topology.Topology(configured.namespace)
    found: dict[Identity, Finding] = {}
    truncated = False
    async with reach.broker(configured.broker_url) as broker:
        for backend in backends:
            address = topology.address(configured.host, backend.name)
            queue = await queues.look(broker, names, address)
            result = None
            if queue is not None and queue.consumers:
                result = await _ask(configured, address, repair=repair, timeout=timeout)
            if result is None:
                here = await reconciling.here(configured, backend, repair=repair)
                _merge(found, here)
            else:
                _merge(found, map(Finding.model_validate, result["findings"]))
                truncated = truncated or bool(result.get("truncated"))
    return list(found.values()), truncated


def _merge(found: dict[Identity, Finding], more: Iterable[Finding]) -> None:
    """Keeps each finding once: what is wrong with the host is found by each of its backends."""
    for one in more:
        found.setdefault(one.identity, one)


async def _ask(
    configured: settings.Settings, address: str, *, repair: bool, timeout: float
) -> Mapping[str, Any] | None:
    """A worker's answer; None where none came."""
    async with reach.caller(configured) as calls:
        try:
            return await calls.call("reconcile", address, {"repair": repair}, timeout=timeout)
        except errors.ReplyTimeout:
            output.note(f"the worker of {address} does not answer; looking without it")
            return None
