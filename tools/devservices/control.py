"""Starts and stops the services, and knows what runs."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from signal import Signals
from typing import Final, Protocol

from devservices.common import ServicesError, choose_ports, port_is_free, say, tail
from devservices.postgres import PostgreSQL
from devservices.processes import Process, all_gone, family, is_alive, look_up, send, wait_until
from devservices.rabbitmq import RabbitMQ
from devservices.signals import signals_held
from devservices.state import State

ATTEMPTS: Final = 3


class Service(Protocol):
    """What is particular to one service."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def variable(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def log(self) -> Path: ...
    @property
    def port_names(self) -> tuple[str, ...]: ...
    @property
    def start_seconds(self) -> float: ...
    @property
    def ends_last(self) -> frozenset[str]: ...  # names of processes that the others need to end
    @property
    def stop_signals(self) -> tuple[tuple[Signals, float], ...]: ...

    def prepare(self) -> None:
        """Make folders and settings; must be fast when they are there."""

    def launch(self, ports: dict[str, int]) -> list[subprocess.Popen[bytes]]:
        """Start the processes, each in a session of its own; the service itself is the last."""

    def is_ready(self, ports: dict[str, int]) -> bool:
        """Whether it answers clients."""

    def is_ours(self, pid: int) -> bool:
        """Whether this process is one of this folder's, even if no state file says so."""

    def url(self, ports: dict[str, int]) -> str:
        """What clients connect to."""


SERVICES: Final[tuple[Service, ...]] = (RabbitMQ(), PostgreSQL())


def wanted() -> list[Service]:
    """The services that the environment does not name already."""
    return [service for service in SERVICES if not os.environ.get(service.variable)]


def is_up(service: Service, state: State) -> bool:
    record = state.of(service.name)
    return (
        bool(record.processes) and is_alive(record.processes[0]) and service.is_ready(record.ports)
    )


def variables(state: State) -> dict[str, str]:
    """Both URLs: as the environment has them, else of what we run."""
    return {
        service.variable: os.environ.get(service.variable)
        or service.url(state.of(service.name).ports)
        for service in SERVICES
    }


def start(services: Sequence[Service], state: State) -> None:
    """Start together what is not up. A failure or an interrupt ends what was started here."""
    down = [service for service in services if not is_up(service, state)]
    if not down:
        return
    stop(down, state, quiet=True)
    began = time.monotonic()
    say(f"starting {' and '.join(service.title for service in down)}")
    try:
        attempts = {service.name: 1 for service in down}
        servers = {service.name: _launch(service, state) for service in down}
        waiting = list(down)
        while waiting:
            for service in list(waiting):
                if _came_up(service, state, servers[service.name], began):
                    waiting.remove(service)
                elif servers[service.name].poll() is not None:
                    _explain_or_retry(service, state, attempts)
                    servers[service.name] = _launch(service, state)
            time.sleep(0.1)
    except BaseException:
        stop(down, state, quiet=True)
        raise
    say(f"ready after {time.monotonic() - began:.1f} s")


def _launch(service: Service, state: State) -> subprocess.Popen[bytes]:
    service.prepare()
    record = state.of(service.name)
    record.ports = choose_ports(service.port_names, record.ports)
    children = service.launch(record.ports)
    # The service itself comes first in the record.
    entries = [look_up(child.pid) for child in reversed(children)]
    record.processes = [entry.process for entry in entries if entry is not None]
    state.save()
    return children[-1]


def _came_up(service: Service, state: State, server: subprocess.Popen[bytes], began: float) -> bool:
    record = state.of(service.name)
    if server.poll() is not None:
        return False
    if service.is_ready(record.ports):
        leader = record.processes[0]
        rest = [one for one in family(record.processes, service.is_ours) if one != leader]
        record.processes = [leader, *rest]
        state.save()
        return True
    if time.monotonic() - began > service.start_seconds:
        raise ServicesError(_failure(service, f"was not ready in {service.start_seconds:.0f} s"))
    return False


def _explain_or_retry(service: Service, state: State, attempts: dict[str, int]) -> None:
    """Another program may have taken a port at the same moment: then try again with another."""
    stop([service], state, quiet=True)
    taken = [port for port in state.of(service.name).ports.values() if not port_is_free(port)]
    if not taken or attempts[service.name] == ATTEMPTS:
        raise ServicesError(_failure(service, "ended while it started"))
    attempts[service.name] += 1
    say(f"{service.title}: a port was taken, trying others")


def _failure(service: Service, what: str) -> str:
    return (
        f"{service.title} {what}. The end of {service.log}:\n{tail(service.log)}\n"
        f"If its data is damaged, remove {service.folder} and start again."
    )


def stop(services: Sequence[Service], state: State, *, quiet: bool = False) -> None:
    """End all that belongs to the services, and make sure that nothing remains.

    Signals wait meanwhile: a second Ctrl-C must not leave half of it running.
    """
    with signals_held():
        running = [service for service in services if _members(service, state)]
        if running and not quiet:
            say(f"stopping {' and '.join(service.title for service in running)}")
        first = {service.name: _first(service, _members(service, state)) for service in running}
        for service in running:
            number, _ = service.stop_signals[0]
            for process in first[service.name]:
                send(process, number)
        for service in running:
            _finish(service, state, first[service.name])
        for service in services:
            state.of(service.name).processes = []
        state.save()


def _members(service: Service, state: State) -> list[Process]:
    return family(state.of(service.name).processes, service.is_ours)


def _first(service: Service, members: Sequence[Process]) -> list[Process]:
    """Those that started the others, and end them when asked to end."""
    entries = [entry for entry in (look_up(one.pid) for one in members) if entry is not None]
    pids = {entry.process.pid for entry in entries}
    return [
        entry.process
        for entry in entries
        if entry.parent not in pids and entry.name not in service.ends_last
    ]


def _finish(service: Service, state: State, first: Sequence[Process]) -> None:
    """Wait for the first signal, which was sent; then send the stronger ones, to the rest too."""
    (_, seconds), *stronger = service.stop_signals
    wait_until(lambda: all_gone(first), seconds)
    for number, patience in stronger:
        for process in first:
            send(process, number)
        wait_until(lambda: all_gone(first), patience)
    # Helpers end by themselves a moment after their server; epmd has to be told.
    wait_until(lambda: len(_members(service, state)) <= len(service.ends_last), 1.0)
    for number in (Signals.SIGTERM, Signals.SIGKILL):
        for process in _members(service, state):
            send(process, number)
        if wait_until(lambda: not _members(service, state), 5.0):
            return
    left = " ".join(str(one.pid) for one in _members(service, state))
    raise ServicesError(f"{service.title}: could not end the processes {left}")
