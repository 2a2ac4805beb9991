"""Which targets a backend has made in a tgtd that is not its alone, on disk."""

import json
import pathlib
from collections.abc import Mapping

import structlog

from worker import durable

log = structlog.get_logger(__name__)


class Records:
    """Which targets this backend has made: a file for each, with its account's name.

    One that cannot be read counts as one without an account.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def make(self) -> None:
        """Makes the folder."""
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def names(self) -> list[str]:
        """The targets' names."""
        return sorted(
            path.name for path in self._folder.iterdir() if path.name[0] != "." and path.is_file()
        )

    def has(self, iqn: str) -> bool:
        """Whether a target was made here."""
        return (self._folder / iqn).exists()

    def made_at(self, iqn: str) -> float:
        """Seconds since the epoch."""
        try:
            return (self._folder / iqn).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def user(self, iqn: str) -> str | None:
        """The name of its account, if it has one."""
        user = self._members(iqn).get("user")
        return None if user is None else str(user)

    async def add(self, iqn: str, user: str | None) -> None:
        """Records a target that is about to be made; a record that is there stays."""
        if "user" not in self._members(iqn):
            await durable.write(self._folder / iqn, json.dumps({"user": user}).encode())

    def _members(self, iqn: str) -> Mapping[str, object]:
        path = self._folder / iqn
        try:
            members = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("target.record_unreadable", path=str(path), error=str(error))
            return {}
        return members if isinstance(members, dict) else {}

    def remove(self, iqn: str) -> None:
        """Forgets a target that is gone; none is no error."""
        (self._folder / iqn).unlink(missing_ok=True)
