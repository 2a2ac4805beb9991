"""What is written down about a daemon, so that a later worker finds that one and no other."""

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from typing import Final

import structlog

from messages import errors
from worker import children, durable

log = structlog.get_logger(__name__)

SOCKET_PATH_LIMIT: Final = 107
"""Bytes; sun_path has 108 and wants a NUL, unix(7)."""
LONGEST_SOCKET_NAME: Final = "/sockets/data"

FILE: Final = "daemon.json"
"""The record's name in its folder."""
_SOCKETS: Final = "sockets"


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One daemon: the folder of its sockets, and the process once it is known.

    ``configuration`` is whatever the daemon was started with that cannot be changed while it runs.
    """

    sockets: pathlib.Path
    configuration: str
    pid: int | None = None
    started: int | None = None
    """In clock ticks since the boot that ``boot_id`` names."""
    boot_id: str = ""


def read(folder: pathlib.Path) -> Record | None:
    """The record in ``folder``, or None.

    Of one that cannot be read only the sockets are guessed: a daemon that listens there can be
    found, and ended.
    """
    try:
        members = json.loads((folder / FILE).read_bytes())
        found = Record(**{**members, "sockets": pathlib.Path(members["sockets"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        log.warning("storage_daemon.record_unreadable", path=str(folder / FILE))
        sockets = (folder / _SOCKETS).resolve()
        return Record(sockets, configuration="") if sockets.is_dir() else None
    # Ticks since another boot name nothing.
    same_boot = found.boot_id == children.boot_id()
    return found if same_boot else dataclasses.replace(found, pid=None, started=None)


async def write(folder: pathlib.Path, record: Record) -> None:
    """Replaces the record in ``folder``: whoever reads sees the old one or the new one, whole."""
    members = {**dataclasses.asdict(record), "sockets": str(record.sockets)}
    await durable.write(folder / FILE, json.dumps(members).encode())


def make_sockets_folder(folder: pathlib.Path) -> pathlib.Path:
    """A folder for sockets: in ``folder``, or, where that is too long a path, a short one."""
    sockets = folder / _SOCKETS
    if sockets.is_symlink():
        sockets.unlink()
    shutil.rmtree(sockets, ignore_errors=True)
    if len(os.fsencode(folder)) + len(LONGEST_SOCKET_NAME) <= SOCKET_PATH_LIMIT:
        durable.make_private(sockets)
        return sockets
    try:
        short = pathlib.Path(tempfile.mkdtemp(prefix="volume-worker-", dir=_short_folder()))
        # So that it is found where the record cannot be read.
        sockets.symlink_to(short)
    except OSError as error:
        raise errors.TargetError(f"no folder for sockets can be made: {error}") from error
    return short


def _short_folder() -> str:
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), "/run"):
        short = 0 < len(os.fsencode(folder)) < SOCKET_PATH_LIMIT // 2
        if short and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return "/tmp"  # noqa: S108 - the folder made there is private


def remove(folder: pathlib.Path) -> None:
    """Removes the record and the sockets' folder that it names; none is no error."""
    found = read(folder)
    if found is not None:
        shutil.rmtree(found.sockets, ignore_errors=True)
    if (folder / _SOCKETS).is_symlink():
        (folder / _SOCKETS).unlink()
    (folder / FILE).unlink(missing_ok=True)
