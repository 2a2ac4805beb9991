"""An echo by oslo.messaging: ``python -m bench.peers.oslo_rpc server|caller NAME``."""

import os
import sys
import time
from typing import Any

import oslo_messaging
from oslo_config import cfg

from bench import measuring
from bench.peers import request

CONNECTIONS = 64
"""Of the caller, one for each call in flight; the server has as many threads by default."""
QUEUES_EXPIRE = 30
"""Seconds after which the broker removes what oslo.messaging leaves there under random names."""


def main(role: str, name: str) -> None:
    """Serves or calls."""
    transport = _transport(name)
    match role:
        case "server":
            _serve(transport, name)
        case "caller":
            _call(transport, name)
        case _:
            raise SystemExit(__doc__)


def _transport(name: str) -> Any:
    conf = cfg.CONF
    conf([])
    # Registers the driver's options, so that they can be set.
    url = os.environ[measuring.BROKER_URL].replace("amqp://", "rabbit://", 1)
    transport = oslo_messaging.get_rpc_transport(conf, url)
    group = "oslo_messaging_rabbit"
    conf.set_override("rabbit_quorum_queue", group=group, override=True)
    conf.set_override("rabbit_transient_queues_ttl", QUEUES_EXPIRE, group)
    conf.set_override("rpc_conn_pool_size", CONNECTIONS, group)
    conf.set_override("control_exchange", name)
    transport.cleanup()
    return oslo_messaging.get_rpc_transport(conf, url)


class Endpoint:
    """What is called."""

    def create_volume(self, _context: Any, **arguments: Any) -> dict[str, Any]:
        """Echoes."""
        return arguments


def _serve(transport: Any, name: str) -> None:
    target = oslo_messaging.Target(topic=name, server="server")
    server = oslo_messaging.get_rpc_server(transport, target, [Endpoint()])
    server.start()
    print(measuring.READY, flush=True)
    while True:
        time.sleep(60)


def _call(transport: Any, name: str) -> None:
    target = oslo_messaging.Target(topic=name, server="server")
    client = oslo_messaging.get_rpc_client(transport, target)

    def call() -> None:
        sent = request.arguments()
        request.check(sent, client.call({}, "create_volume", **sent))

    measuring.serve(measuring.by_threads(call))


if __name__ == "__main__":
    main(*sys.argv[1:])
