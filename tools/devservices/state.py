"""`.services/state.json`: what this tool started, and which ports it gave."""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from devservices.common import HOME, ServicesError, say
from devservices.processes import Process, boot_id

STATE: Final = HOME / "state.json"
LOCK: Final = HOME / "lock"
IN_USE: Final = HOME / "in-use.lock"
SECRET: Final = HOME / "secret"


@dataclass
class ServiceState:
    """One service: the processes are empty while it is not running."""

    ports: dict[str, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)


@dataclass
class State:
    """All services; `keep` is true from `start` until `stop`: then `run` leaves them running."""

    keep: bool = False
    services: dict[str, ServiceState] = field(default_factory=dict)

    def of(self, name: str) -> ServiceState:
        return self.services.setdefault(name, ServiceState())

    def save(self) -> None:
        text = json.dumps({"boot_id": boot_id(), **asdict(self)}, indent=1)
        new = STATE.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(STATE)


def load() -> State:
    """The recorded state; its processes only if they were recorded since this machine's boot."""
    try:
        data = json.loads(STATE.read_text())
        same_boot = data["boot_id"] == boot_id()
        services = {
            name: ServiceState(
                ports={key: int(port) for key, port in service["ports"].items()},
                processes=[Process(*map(int, pair)) for pair in service["processes"]]
                if same_boot
                else [],
            )
            for name, service in data["services"].items()
        }
        return State(keep=bool(data["keep"]) and same_boot, services=services)
    except FileNotFoundError:
        return State()
    except (ValueError, KeyError, TypeError, AttributeError):
        say(f"{STATE} is damaged; it is written anew")
        return State()


def prepare_home() -> None:
    """Make `.services`. Others may pass through it (a database runs as another user) but not look.

    Everything secret in it has a mode of its own.
    """
    try:
        HOME.mkdir(exist_ok=True)
        if HOME.stat().st_uid == os.geteuid():
            HOME.chmod(0o711)
        LOCK.touch(mode=0o600)
    except PermissionError as error:
        raise ServicesError(
            f"{error.filename}: no permission. The folder was made by another user: go on as that"
            " user, or have that user stop the services and remove the folder"
        ) from error


def secret() -> str:
    """A random word kept in `.services`: password of both services and RabbitMQ's cookie.

    Both listen on loopback, where every user of the machine could reach them.
    """
    if not SECRET.exists():
        new = SECRET.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(16))
        new.replace(SECRET)
    return SECRET.read_text()


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Only one call at a time starts or stops; the kernel ends the lock with the process."""
    prepare_home()
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another call that starts or stops the services")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Usage:
    """Counts the commands that use the services, by a shared lock that dies with its process."""

    def __init__(self, path: Path = IN_USE) -> None:
        self._file = path.open("w")

    def enter(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Give up our share; true if nobody else has one."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        else:
            alone = True
        self._file.close()
        return alone
