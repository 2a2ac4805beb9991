"""``volume-worker run`` and ``migrate``: the service, and the schema that it needs."""

import asyncio
import logging
import sys

from worker import service, settings, shutdown
from worker.cli import options, output
from worker.store import installation
from worker.telemetry import logs


def run(
    *,
    config: options.Config = None,
    log_format: options.LogFormat = logs.Format.JSON,
    verbose: options.Verbose = False,
) -> None:
    """Runs the service in the foreground; SIGTERM drains, a second one hurries."""
    level = logging.DEBUG if verbose else logging.INFO
    # The log is what this command prints; stderr has what keeps it from running.
    logs.configure(log_format, level=level, stream=sys.stdout)
    configured = settings.load(config)
    backends = settings.backends(configured)
    if not backends:
        raise settings.ConfigurationError(
            "no configuration was given: --config FILE or VOLUME_WORKER_CONFIG names it"
            if config is None
            else f"{config}: no backends; add a table [backends.NAME] with its driver"
        )
    asyncio.run(_serve(configured, backends))


async def _serve(configured: settings.Settings, backends: list[settings.Backend]) -> None:
    signals = shutdown.Signals()
    made = service.Service(configured, backends, signals=signals, limit=shutdown.Limit())
    with signals.heard():
        await made.run()


def migrate(*, config: options.Config = None, as_json: options.Json = False) -> None:
    """Brings the database schema up to date, and records the namespace."""
    configured = settings.load(config)
    steps = asyncio.run(installation.migrate(configured.database_url, configured.namespace))
    if as_json:
        output.print_json({"namespace": configured.namespace, "applied": steps})
    for step in () if as_json else steps:
        output.say(f"applied {step}")
    if not steps and not as_json:
        output.say("the schema is up to date")
