"""What every module here needs: saying things, failing, finding programs and ports."""

import os
import random
import shutil
import socket
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
HOME: Final = ROOT / ".services"
BROKER_VARIABLE: Final = "VOLUME_WORKER_BROKER_URL"
DATABASE_VARIABLE: Final = "VOLUME_WORKER_DATABASE_URL"

# Debian keeps daemons in sbin, which an ordinary user's PATH often lacks.
SEARCH_PATH: Final = os.pathsep.join(
    (os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin")
)
# Below the range that Linux gives to outgoing connections, so that none of these takes our port.
PORTS: Final = range(20000, 32000)


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


def port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def choose_ports(names: tuple[str, ...], recorded: dict[str, int]) -> dict[str, int]:
    """The recorded ports where these are free still (so URLs stay the same), else new ones."""
    chosen: dict[str, int] = {}
    for name in names:
        port = recorded.get(name)
        while port is None or port in chosen.values() or not port_is_free(port):
            port = random.choice(PORTS)
        chosen[name] = port
    return chosen
