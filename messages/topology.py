"""Names on the broker, and how they are declared. Nothing else is declared there by a worker."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
BACKEND: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")

MAX_QUEUE_NAME: Final = 255
"""Bytes: AMQP has no room for more."""

DELIVERY_LIMIT: Final = 100
DEAD_DELIVERY_LIMIT: Final = 2147483647
"""Looking at a dead letter counts as a delivery; it must never be what removes it."""


def address(host: str, backend: str) -> str:
    """``HOST@BACKEND``: where a volume lives and where its requests go."""
    return f"{host}@{backend}"


def host_of(text: str) -> str:
    """The host in an address."""
    return text.partition("@")[0]


def is_address(text: str) -> bool:
    """Whether ``text`` has the form of an address."""
    host, at, backend = text.partition("@")
    return bool(at and HOST.fullmatch(host) and BACKEND.fullmatch(backend))


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """The broker names of one installation."""

    namespace: str

    @property
    def requests(self) -> str:
        """The topic exchange that requests are published to, by address."""
        return self.namespace

    @property
    def events(self) -> str:
        """The topic exchange of status updates."""
        return f"{self.namespace}.events"

    @property
    def dead(self) -> str:
        """The fanout exchange, and the queue behind it, of dead letters."""
        return f"{self.namespace}.dead"

    def queue(self, at: str) -> str:
        """The request queue of an address."""
        return f"{self.namespace}.{at}"

    def queue_arguments(self) -> Mapping[str, Any]:
        """Arguments of a request queue; fixed, since the broker refuses others once declared."""
        return {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": self.dead,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
            "x-delivery-limit": DELIVERY_LIMIT,
        }

    def dead_queue_arguments(self) -> Mapping[str, Any]:
        """Arguments of the dead-letter queue."""
        return {"x-queue-type": "quorum", "x-delivery-limit": DEAD_DELIVERY_LIMIT}

    def is_reserved(self, queue: str) -> bool:
        """Whether a reply queue's name is one of the installation's own."""
        return queue == self.namespace or queue.startswith(f"{self.namespace}.")

    @staticmethod
    def volume_event(volume_id: object, status: str) -> str:
        """Routing key of a volume's event."""
        return f"volume.{volume_id}.{status}"

    @staticmethod
    def job_event(job_id: object, state: str) -> str:
        """Routing key of a job's event."""
        return f"job.{job_id}.{state}"

    @staticmethod
    def stats_event(at: str) -> str:
        """Routing key of a backend's stats."""
        return f"backend.{at.replace('.', '_')}.stats"
