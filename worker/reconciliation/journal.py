"""What the rounds of reconciliation have found, logged when it is new and when it is gone.

What is mended is logged by whoever mends it: what is wrong with a host is found by each of its
backends at the same time, and mended once.
"""

from collections.abc import Iterable

import structlog

from messages.findings import Finding, Identity

log = structlog.get_logger(__name__)


class Journal:
    """Remembers what was found at each address, so that nothing is logged twice."""

    def __init__(self) -> None:
        self._known: dict[str, set[Identity]] = {}

    def note(self, addresses: Iterable[str], found: Iterable[Finding]) -> None:
        """Logs what is new at ``addresses``, and what is there no more."""
        now: dict[str, set[Identity]] = {address: set() for address in addresses}
        for one in found:
            if one.repaired:
                continue
            now[one.address].add(one.identity)
            if one.identity not in self._known.get(one.address, set()):
                log.warning("reconciliation.found", **described(one), error=one.error)
        for address, there in now.items():
            for gone in self._known.get(address, set()) - there:
                log.info("reconciliation.gone", **gone._asdict())
            self._known[address] = there


def described(one: Finding) -> dict[str, str | None]:
    """A finding as it is logged."""
    volume = None if one.volume_id is None else str(one.volume_id)
    return {**one.identity._asdict(), "volume_id": volume, "what": one.what}
