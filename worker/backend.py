"""One backend at work: its driver and its target, and whether they are set up."""

import asyncio
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import structlog

from messages import errors, topology
from worker import gate, plugins, process, settings
from worker.drivers import base as drivers
from worker.targets import base as targets
from worker.transfer import budget

log = structlog.get_logger(__name__)

GIB: Final = 1024**3


class Backend:
    """A driver and its target under one address.

    Until :meth:`set_up` has succeeded, :meth:`require` refuses work.
    """

    def __init__(
        self,
        configured: settings.Backend,
        *,
        host: str,
        execute: process.Executor,
        state_dir: pathlib.Path,
    ) -> None:
        self.address = topology.address(host, configured.name)
        self.name = configured.name
        self.options = configured.options
        own_dir = state_dir / "backends" / configured.name
        own_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        driver_class = plugins.load("drivers", configured.driver)
        target_class = plugins.load("targets", configured.target)
        self.driver: drivers.Driver = driver_class(
            drivers.Context(host, configured.name, configured.options, execute, own_dir)
        )
        self.target: targets.Target = target_class(
            targets.Context(host, configured.name, configured.options, execute, own_dir)
        )
        self.serving = gate.Gate()
        """Entered together to change what the target serves, alone to restore what it serves."""
        self.copies = budget.Budget(configured.options.copy_bytes_per_second)
        """What the copies that this backend was asked for may move together."""
        self.changed = asyncio.Event()
        """Set when a volume came, went or grew: the stats are worth telling again."""
        self.error: errors.VolumeWorkerError | None = errors.DriverNotInitialized(
            f"backend {self.address} is being set up"
        )
        self.target_error: errors.VolumeWorkerError | None = None
        """Why the target cannot serve now; work is let in all the same, and says so by itself."""

    @property
    def ready(self) -> bool:
        """Whether the last set-up succeeded."""
        return self.error is None

    @property
    def is_standby(self) -> bool:
        """Whether another process of this host serves it, so that this one takes no work for it."""
        return isinstance(self.error, targets.ServedElsewhere)

    @property
    def up(self) -> bool:
        """Whether it is set up and, as far as is known, its target serves."""
        return self.error is None and self.target_error is None

    def note_target(self, error: errors.VolumeWorkerError | None) -> None:
        """Notes what keeps the target from serving, None for nothing; a change is told."""
        before, self.target_error = self.target_error, error
        if (before is None) != (error is None):
            self.changed.set()

    def require(self) -> None:
        """Raises ``DriverNotInitialized`` while the backend is not set up."""
        if self.error is not None:
            raise errors.DriverNotInitialized(
                f"backend {self.address} is not set up: {self.error.message}",
                address=self.address,
                cause=self.error.code,
            )

    async def set_up(self) -> None:
        """Tries to set the driver and the target up, once.

        Raises: what keeps the backend from working; its supervisor keeps it as :attr:`error`.
        """
        await self.driver.do_setup()
        await self.driver.check_for_setup_error()
        await self.target.do_setup()

    def mark_ready(self) -> None:
        """Opens the backend for work: it is set up, and what was exported is served again."""
        self.error = None

    async def stats(self, *, refresh: bool = False) -> dict[str, Any]:
        """The stats fields of Cinder, capacities also in bytes."""
        found = await self.driver.get_volume_stats(refresh=refresh)
        return {
            "address": self.address,
            "volume_backend_name": self.options.volume_backend_name or self.name,
            "vendor_name": self.driver.vendor_name,
            "driver_version": self.driver.VERSION,
            "storage_protocol": self.target.storage_protocol,
            "reserved_percentage": self.options.reserved_percentage,
            "max_over_subscription_ratio": self.options.max_over_subscription_ratio,
            "QoS_support": False,
            "backend_state": "up" if self.up else "down",
            **found,
            **_in_gib(found),
            "online_extend_support": bool(
                found.get("online_extend_support", False) and self.target.extends_online
            ),
        }

    async def close(self) -> None:
        """Lets go of the driver and the target; what is served stays served."""
        for part in (self.driver, self.target):
            try:
                await part.close()
            except Exception:
                log.exception("backend.close_failed", address=self.address)


def _in_gib(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Cinder's names for the capacities: ``total_capacity_gb`` beside ``total_capacity_bytes``."""
    return {
        name.replace("_bytes", "_gb"): round(value / GIB, 2)
        if isinstance(value, int | float)
        else value
        for name, value in stats.items()
        if name.endswith("_capacity_bytes")
    }
