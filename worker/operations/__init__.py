"""What the worker does for each method: its needs, its slot, and the function that does it."""

from collections.abc import Mapping
from typing import Final

from worker.operations import (
    attachments,
    cancelling,
    connections,
    copies,
    exports,
    stats,
    throttling,
    volumes,
)
from worker.operations.base import Operation

OPERATIONS: Final[Mapping[str, Operation]] = {
    **volumes.OPERATIONS,
    **exports.OPERATIONS,
    **connections.OPERATIONS,
    **attachments.OPERATIONS,
    **copies.OPERATIONS,
    **stats.OPERATIONS,
    **cancelling.OPERATIONS,
    **throttling.OPERATIONS,
}
"""Every method that is carried out by a job."""
