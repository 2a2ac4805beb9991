"""A RabbitMQ node of the tests' own, which they may stop, kill and set an alarm on."""

import contextlib
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Final

from devservices import common, processes, rabbitmq, state

from tests.services import environment

CTL: Final = rabbitmq.SERVER_PROGRAM.with_name("rabbitmqctl")
PATIENCE: Final = 60.0
"""Seconds for the node to start, to end, or to answer its command line."""
# No node has as much of a disk.
_MORE_THAN_THERE_IS: Final = 2**60


class PrivateBroker:
    """One node; :meth:`ensure` brings it back to how every test may expect it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._node = rabbitmq.RabbitMQ(folder, "loopback_users = none\n")
        self._ports = common.choose_ports(self._node.port_names, {})
        self._children: list[subprocess.Popen[bytes]] = []
        self._has_alarm = False

    @property
    def url(self) -> str:
        """What clients connect to; the same after a restart."""
        return self._node.url(self._ports)

    @property
    def is_running(self) -> bool:
        """Whether the node's process runs."""
        return bool(self._children) and self._children[-1].poll() is None

    def ensure(self) -> None:
        """Starts the node if it is down, and ends an alarm."""
        if not self.is_running:
            self.start()
        if self._has_alarm:
            self.end_alarm()

    def start(self) -> None:
        """Starts the node and waits until it answers clients."""
        self._node.prepare()
        self._children = self._node.launch(self._ports)
        deadline = time.monotonic() + PATIENCE
        while not self._node.is_ready(self._ports):
            waits = self.is_running and time.monotonic() < deadline
            assert waits, f"RabbitMQ does not start: {common.tail(self._node.log)}"
            time.sleep(0.1)
        self._has_alarm = False

    def stop(self) -> None:
        """Ends the node as an operator does."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the node as a crash would; new queues need :meth:`settle` before."""
        self._end(signal.SIGKILL)

    def settle(self) -> None:
        """Lets the node forget no queue that is there now, should it be killed.

        RabbitMQ 3.10 writes down only a moment later which log is a new quorum queue's, and has
        lost the queue if it dies before; tests are about queues that are there for longer.
        """
        self.control("eval", "[dets:sync(Table) || Table <- dets:all()].")

    def _end(self, number: signal.Signals) -> None:
        if not self._children:
            return
        *_, node = self._children
        node.send_signal(number)
        node.wait(PATIENCE)
        self.end_rest()

    def end_rest(self) -> None:
        """Ends whatever else belongs to the node."""
        for child in self._children:
            child.kill()
            child.wait()
        self._children = []
        for entry in processes.table():
            if self._node.is_ours(entry.process.pid):
                processes.send(entry.process, signal.SIGKILL)

    def control(self, *arguments: str) -> str:
        """Runs ``rabbitmqctl`` with these arguments; returns what it prints."""
        done = subprocess.run(
            [CTL, "--silent", *arguments],
            env=self._node.environment(self._ports),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            check=False,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def set_alarm(self) -> None:
        """Lets the node find that its disk is full: it takes no message any more."""
        self._has_alarm = True
        self.control("set_disk_free_limit", str(_MORE_THAN_THERE_IS))

    def end_alarm(self) -> None:
        """Ends :meth:`set_alarm`."""
        self.control("set_disk_free_limit", "50000000")
        self._has_alarm = False

    def set_consumer_timeout(self, seconds: float, *, look_every: float) -> None:
        """How long a delivery may stay unacknowledged, and how often channels are looked at.

        Both concern channels that are opened from now on.
        """
        values = {"consumer_timeout": seconds, "channel_tick_interval": look_every}
        for name, value in values.items():
            self.control("eval", f"application:set_env(rabbit, {name}, {int(value * 1000)}).")


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[PrivateBroker]:
    """A node for the time of the block; the test is given up where there is no RabbitMQ."""
    if not rabbitmq.SERVER_PROGRAM.exists() or common.find_program("epmd") is None:
        environment.give_up("no RabbitMQ on this machine: `make packages` installs it")
    state.prepare_home()
    broker = PrivateBroker(folder)
    try:
        broker.start()
        yield broker
    finally:
        try:
            broker.stop()
        finally:
            broker.end_rest()
