"""The command itself."""

import asyncio
import signal
import sys

import typer

from messages import client
from worker import settings
from worker.cli import options, output
from worker.cli.demo import content, narrator, stage, story


def demo(*, config: options.Config = None, as_json: options.Json = False) -> None:
    """Shows the main job, start to end, on this machine, and leaves nothing behind."""
    configured = settings.load(config)
    told = narrator.Narrator(sys.stderr if as_json else sys.stdout)
    if not asyncio.run(_run(configured, told)):
        raise typer.Exit(128 + signal.SIGTERM)
    if as_json:
        output.print_json({"seconds": round(told.elapsed, 3), "steps": told.steps})


async def _run(configured: settings.Settings, told: narrator.Narrator) -> bool:
    """Returns False where SIGTERM ended it early."""
    running = asyncio.create_task(_play(configured, told))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            # Ctrl-C: not only the story, this task as well was cancelled.
            raise
        return False
    return True


async def _play(configured: settings.Settings, told: narrator.Narrator) -> None:
    told.step("Two storage hosts on this machine, in a namespace and a database of their own")
    stage.isolate()
    content.check_programs()
    async with stage.prepare(configured, told) as set_up:
        told.good("/readyz of both: 200")
        async with client.Client(
            set_up.broker_url, namespace=set_up.namespace, name="volume-worker demo"
        ) as volumes:
            await story.Story(set_up, told, volumes).tell()
    told.step("Done")
    told.good("the demo's database, its queues and its files are removed")
