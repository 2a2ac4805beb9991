"""All SQL of the project, by name: ``queries/*.sql`` and the numbered ``migrations/``.

A query file holds blocks that begin with ``-- name: NAME``; the comment below says what it does
and what its parameters are.
"""

import dataclasses
import functools
import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_MIGRATION = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema; its ``checksum`` tells whether it was changed after it was taken."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@functools.cache
def queries() -> Mapping[str, str]:
    """Every query by its name."""
    found: dict[str, str] = {}
    for path in importlib.resources.files(__name__).joinpath("queries").iterdir():
        if not path.name.endswith(".sql"):
            continue
        _, *parts = _NAME.split(path.read_text("utf-8"))
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            if name in found:
                raise ValueError(f"two queries are named {name}")
            found[name] = text.strip()
    return found


@functools.cache
def migrations() -> Sequence[Migration]:
    """Every step of the schema, in order."""
    found = [
        Migration(int(match[1]), match[2], path.read_text("utf-8"))
        for path in importlib.resources.files(__name__).joinpath("migrations").iterdir()
        if (match := _MIGRATION.fullmatch(path.name))
    ]
    return sorted(found, key=lambda migration: migration.version)
