"""The installed command, run as an operator runs it."""

import asyncio
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from tests.services import workers

TIMEOUT: Final = 60.0
"""Seconds for a command to end."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.stdout)


async def run(
    *arguments: str | pathlib.Path,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Ended:
    """Runs ``volume-worker`` to its end, with no configuration but what is given."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")}
    process = await asyncio.create_subprocess_exec(
        workers.COMMAND,
        *arguments,
        env={**outside, "COLUMNS": "200", **(env or {})},
        cwd="/",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    ended = Ended(process.returncode or 0, out.decode(), err.decode())
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended
