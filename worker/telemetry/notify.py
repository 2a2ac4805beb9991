"""Telling systemd how the service is: the protocol of sd_notify(3).

Ready, stopping, a status line, and that the event loop runs. Without ``NOTIFY_SOCKET`` nobody is
told. The variables are taken out of the environment: children must not speak for the worker.
"""

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Final, Self

import structlog

log = structlog.get_logger(__name__)

STATUS_INTERVAL: Final = 1.0
"""Seconds between looks at the status, at most."""
EXTENSION: Final = 30.0
"""Seconds that systemd is asked for, again and again, to wait for the start or the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """How the service is."""

    status: str
    """One line for ``systemctl status``."""
    is_ready: bool = True
    """Whether it works; it stays ready once it was."""
    is_patience_needed: bool = False
    """Whether it starts or ends, which may take longer than systemd would wait."""


class Notifier:
    """Tells systemd.

    Args:
        address: of systemd's socket; None where there is nobody to tell.
        watchdog: seconds within which systemd has to hear of the service, again and again.
    """

    def __init__(self, address: str | None, *, watchdog: float | None = None) -> None:
        self._address = address
        self._interval = min(STATUS_INTERVAL, watchdog / 2 if watchdog else STATUS_INTERVAL)
        self._has_watchdog = watchdog is not None
        self._untold: dict[str, str] = {}
        self._last: Report | None = None
        self._was_ready = False
        self._is_failing = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """As systemd has asked for it; takes its variables away."""
        address = environ.pop("NOTIFY_SOCKET", None)
        microseconds = environ.pop("WATCHDOG_USEC", "")
        of = environ.pop("WATCHDOG_PID", None)
        watchdog = None
        if of in (None, str(os.getpid())) and microseconds.isdecimal():
            watchdog = int(microseconds) / 1_000_000 or None
        if address and address[0] not in "/@":
            log.warning("notify.unknown_address", address=address)
            address = None
        return cls(address or None, watchdog=watchdog)

    async def run(self, look: Callable[[], Report]) -> None:
        """Tells what ``look`` reports until cancelled."""
        if self._address is None:
            return
        while True:
            self.tell(look())
            await asyncio.sleep(self._interval)

    def tell(self, report: Report) -> None:
        """Tells one report, as far as it has changed, and that the event loop runs."""
        if self._last is None or report.status != self._last.status:
            self._untold["STATUS"] = " ".join(report.status.split())
        if report.is_ready and not self._was_ready:
            self._was_ready = True
            self._untold["READY"] = "1"
        if report.is_patience_needed:
            self._untold["EXTEND_TIMEOUT_USEC"] = str(int(EXTENSION * 1_000_000))
        if self._has_watchdog:
            self._untold["WATCHDOG"] = "1"
        self._last = report
        self._send()

    def stopping(self, status: str) -> None:
        """Tells that the service has begun to end."""
        self._untold["STOPPING"] = "1"
        self.tell(Report(status, is_ready=False, is_patience_needed=True))

    def _send(self) -> None:
        """Sends what is untold; what cannot be sent now goes with the next report."""
        if self._address is None or not self._untold:
            return
        lines = "\n".join(f"{name}={value}" for name, value in self._untold.items())
        address = self._address
        if address.startswith("@"):
            # An abstract socket, unix(7).
            address = f"\0{address[1:]}"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
                to.settimeout(0)
                to.sendto(lines.encode(), address)
        except OSError as error:
            if not self._is_failing:
                log.warning("notify.failed", address=self._address, error=error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False
            self._untold.clear()
