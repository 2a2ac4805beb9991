"""What every module here needs: saying things, failing, and finding programs."""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Debian keeps daemons in sbin, which an ordinary user's PATH often lacks.
SEARCH_PATH = os.pathsep.join(
    (os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin")
)


class ServicesError(Exception):
    """Something a person has to look at; its text says what to do."""


def say(text: str) -> None:
    """Tell what happens, on stderr: stdout is for `env` and for the command that `run` runs."""
    print(f"services: {text}", file=sys.stderr, flush=True)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=SEARCH_PATH)


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log file, for an error message."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])
