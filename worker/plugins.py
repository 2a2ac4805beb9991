"""Drivers, targets and connectors by their names, found by entry points.

A vendor's package adds its own to the groups ``volume_worker.drivers``, ``volume_worker.targets``
and ``volume_worker.connectors``.
"""

import importlib.metadata
from typing import Any

from messages import errors


class UnknownPlugin(errors.VolumeWorkerError):
    """No installed package has a plug-in of that name."""


def load(kind: str, name: str) -> Any:
    """The class behind a name; ``kind`` is ``drivers``, ``targets`` or ``connectors``.

    Raises:
        UnknownPlugin: naming those that there are.
    """
    found = importlib.metadata.entry_points(group=f"volume_worker.{kind}")
    if name not in found.names:
        known = ", ".join(sorted(found.names))
        raise UnknownPlugin(
            f"there is no {kind.removesuffix('s')} {name!r}; installed are: {known}"
        )
    return found[name].load()


def names(kind: str) -> list[str]:
    """The names of every plug-in of a kind."""
    return sorted(importlib.metadata.entry_points(group=f"volume_worker.{kind}").names)
