"""An echo by Celery: ``python -m bench.peers.celery_rpc server|caller NAME``."""

import collections
import os
import sys
import time
from typing import Any

import celery
import celery.signals
import celery.worker.consumer
import kombu

from bench import measuring
from bench.peers import request

TASK = "create_volume"


def main(role: str, name: str) -> None:
    """Serves or calls."""
    app = _app(name)
    match role:
        case "server":
            celery.signals.worker_ready.connect(_tell_ready)
            # It leaves 28 queues on the broker, and this has no use for delays.
            celery.worker.consumer.Consumer.Blueprint.default_steps.remove(
                "celery.worker.consumer.delayed_delivery:DelayedDelivery"
            )
            # One process, as the others have: the pool that answers within its own process.
            app.worker_main(
                [
                    "worker",
                    "--pool=solo",
                    "--without-gossip",
                    "--without-mingle",
                    "--without-heartbeat",
                    "--loglevel=WARNING",
                ]
            )
        case "caller":
            measuring.serve(_measured_by(app))
        case _:
            raise SystemExit(__doc__)


def _app(name: str) -> Any:
    app = celery.Celery(name, broker=os.environ[measuring.BROKER_URL], backend="rpc://")
    exchange = kombu.Exchange(name, type="direct", durable=True)
    queue = kombu.Queue(
        name, exchange, routing_key=name, queue_arguments={"x-queue-type": "quorum"}
    )
    app.conf.update(
        task_queues=[queue],
        task_default_queue=name,
        task_default_exchange=name,
        task_default_routing_key=name,
        task_default_delivery_mode="persistent",
        # Else a request is acknowledged before it is carried out, and lost with its worker.
        task_acks_late=True,
        result_persistent=True,
        broker_transport_options={"confirm_publish": True},
        broker_connection_retry_on_startup=True,
        worker_enable_remote_control=False,
        worker_redirect_stdouts=False,
        worker_prefetch_multiplier=256,
    )
    app.task(name=TASK)(_create_volume)
    return app


def _create_volume(**arguments: Any) -> dict[str, Any]:
    return arguments


def _tell_ready(**_: Any) -> None:
    print(measuring.READY, flush=True)


def _measured_by(app: Any) -> measuring.Measure:
    """One thread keeps the calls in flight: a thread for each is slower here."""
    task = app.tasks[TASK]

    def measure(in_flight: int, seconds: float) -> measuring.Measured:
        clock = measuring.Clock(seconds)
        waiting: collections.deque[tuple[float, Any, Any]] = collections.deque()
        while not clock.is_over or waiting:
            while not clock.is_over and len(waiting) < in_flight:
                sent = request.arguments()
                waiting.append((time.perf_counter(), sent, task.apply_async(kwargs=sent)))
            # They are answered in their order.
            called_at, sent, result = waiting.popleft()
            request.check(sent, result.get(timeout=30))
            clock.answered(called_at)
        return clock.measured()

    return measure


if __name__ == "__main__":
    main(*sys.argv[1:])
