"""What becomes of the worker with much to do, much done, and nothing to do.

Run it with the services up: ``tools/services.py run -- .venv/bin/python bench/scale.py``, or by
``make bench``.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from bench import backlog, facts, history, hosts, start

ADDRESS = "bench@fake"
FEW_JOBS = 1000
IDLE_SECONDS = 20.0


def main() -> None:
    """Measures what is asked for, and prints a table of each."""
    options = _options()
    with hosts.opened() as site:
        found = facts.of_site(site)
    for name in options.only:
        # Each with a database of its own, so that none is measured on what another left.
        with hosts.opened() as site:
            print(f"{PARTS[name](site, options)}\n", flush=True)
    print(facts.lines(found))


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000, help="that wait for a worker")
    parser.add_argument("--history", type=int, default=1_000_000, help="finished jobs")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS)
    )
    options = parser.parse_args()
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only takes some of {','.join(PARTS)}, not {','.join(sorted(unknown))}")
    return options


def _drain(site: hosts.Site, options: Any) -> str:
    """One worker drains what was published while it was down."""
    count = options.jobs
    few = min(FEW_JOBS, count // 10)
    worker = hosts.Worker(site)
    held: dict[int, float] = {}

    async def watch(replies: backlog.Replies) -> None:
        for done in (few, count):
            await replies.wait_for(done)
            held[done] = worker.resident()

    rows = asyncio.run(_carried_out(site, [worker], count, watch))
    rows += [(f"memory held after {done:,} jobs", f"{one:.1f} MiB") for done, one in held.items()]
    rows.append(("more", f"{held[count] - held[few]:+.1f} MiB"))
    return _table(f"{count:,} queued jobs, one worker", rows)


def _share(site: hosts.Site, options: Any) -> str:
    """Two workers on one address."""
    count = options.jobs
    workers = [hosts.Worker(site), hosts.Worker(site)]

    async def watch(replies: backlog.Replies) -> None:
        await replies.wait_for(count)

    rows = asyncio.run(_carried_out(site, workers, count, watch))
    done = " and ".join(f"{_succeeded(worker):,}" for worker in workers)
    rows.append(("done by the one and the other", done))
    return _table(f"{count:,} queued jobs, two workers on one address", rows)


async def _carried_out(
    site: hosts.Site,
    workers: Sequence[hosts.Worker],
    count: int,
    watch: Callable[[backlog.Replies], Awaitable[None]],
) -> list[tuple[str, str]]:
    """Publishes while no worker runs, then starts the workers; ``watch`` sees it done."""
    with workers[0].running():
        pass  # The queue is there from now on.
    async with backlog.published(site, ADDRESS, count) as replies:
        began = time.monotonic()
        for worker in workers:
            worker.spawn()
        try:
            await watch(replies)
            seconds = time.monotonic() - began
            await asyncio.sleep(backlog.AFTERWARDS)
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.stop)
    return [
        ("replies", replies.told()),
        ("rate", f"{replies.rate():.0f} jobs/s"),
        ("from the start to the last reply", f"{seconds:.1f} s"),
    ]


def _succeeded(worker: hosts.Worker) -> int:
    lines = worker.log.read_text().splitlines()
    return sum(json.loads(line).get("event") == "job.succeeded" for line in lines)


def _history(site: hosts.Site, options: Any) -> str:
    """What the store takes with few and with many finished jobs."""
    few, many = asyncio.run(history.measure(site, [FEW_JOBS, options.history]))
    rows = [
        f"| ms, median of {history.ROUNDS} | {few.jobs:,} finished | {many.jobs:,} finished"
        " | ratio |",
        "|---|---:|---:|---:|",
    ]
    for name, before in few.by_name.items():
        after = many.by_name[name]
        rows.append(f"| {name} | {before:.2f} | {after:.2f} | {after / before:.2f} |")
    return "\n".join(rows)


def _idle(site: hosts.Site, _options: Any) -> str:
    """The processor time of workers that have nothing to do."""
    kinds = {
        "one fake_iscsi backend": hosts.FAKE,
        "one file backend with an NBD target": {"files": start.BACKENDS["files"]},
    }
    rows = []
    for number, (name, backends) in enumerate(kinds.items()):
        with hosts.Worker(site, host=f"idle-{number}", backends=backends).running() as worker:
            time.sleep(2)  # It has just started.
            before = worker.cpu_seconds()
            time.sleep(IDLE_SECONDS)
            share = (worker.cpu_seconds() - before) / IDLE_SECONDS
        rows.append((name, f"{share:.2%} of a core"))
    return _table(f"idle for {IDLE_SECONDS:.0f} s", rows)


def _start(site: hosts.Site, _options: Any) -> str:
    seconds, mebibytes = start.measure(site)
    return _table(
        f"start, median of {start.ROUNDS}",
        [("ready after", f"{seconds:.2f} s"), ("memory held then", f"{mebibytes:.0f} MiB")],
    )


PARTS: dict[str, Callable[[hosts.Site, Any], str]] = {
    "drain": _drain,
    "share": _share,
    "history": _history,
    "idle": _idle,
    "start": _start,
}


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"| {title} | |", "|---|---:|", *(f"| {a} | {b} |" for a, b in rows)])


if __name__ == "__main__":
    main()
