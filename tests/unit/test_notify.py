import asyncio
import os
import pathlib
import select
import socket
import uuid
from collections.abc import Iterator

import pytest

from worker.telemetry import notify

WORKING = notify.Report("serves host-a@fast")
STARTING = notify.Report("starting", is_ready=False, is_patience_needed=True)


class Systemd:
    """The other end of the protocol."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(5)

    def listen(self) -> None:
        self._socket.bind(self.address.replace("@", "\0", 1))

    def hear(self) -> dict[str, str]:
        """The next message."""
        text = self._socket.recv(4096).decode()
        return dict(line.split("=", 1) for line in text.splitlines())

    def is_left_alone(self) -> bool:
        """Whether no message waits."""
        return not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Systemd]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@test-{uuid.uuid4()}"
    made = Systemd(address)
    made.listen()
    yield made
    made.close()


def test_ready_is_told_once(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address)
    notifier.tell(WORKING)
    assert systemd.hear() == {"READY": "1", "STATUS": "serves host-a@fast"}
    notifier.tell(notify.Report("not ready: database"))
    assert systemd.hear() == {"STATUS": "not ready: database"}


def test_what_has_not_changed_is_not_told_again(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address)
    notifier.tell(WORKING)
    systemd.hear()
    notifier.tell(WORKING)
    assert systemd.is_left_alone()


def test_a_long_start_asks_for_patience_again_and_again(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address)
    for _ in range(2):
        notifier.tell(STARTING)
        told = systemd.hear()
        assert int(told["EXTEND_TIMEOUT_USEC"]) > notify.STATUS_INTERVAL * 1_000_000
        assert "READY" not in told


def test_the_end_is_told_with_its_status_and_asks_for_patience(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address)
    notifier.tell(WORKING)
    systemd.hear()
    notifier.stopping("draining")
    told = systemd.hear()
    assert (told["STOPPING"], told["STATUS"]) == ("1", "draining")
    assert "EXTEND_TIMEOUT_USEC" in told


def test_a_status_is_one_line(systemd: Systemd) -> None:
    notify.Notifier(systemd.address).tell(notify.Report("two\nREADY=lines"))
    assert systemd.hear()["STATUS"] == "two READY=lines"


def test_the_watchdog_hears_of_the_worker_with_each_report(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address, watchdog=1.0)
    for _ in range(2):
        notifier.tell(WORKING)
        assert systemd.hear()["WATCHDOG"] == "1"


async def test_reports_come_as_often_as_the_watchdog_wants_them(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address, watchdog=0.1)
    running = asyncio.create_task(notifier.run(lambda: WORKING))
    for _ in range(3):
        assert (await asyncio.to_thread(systemd.hear))["WATCHDOG"] == "1"
    assert not running.done()
    running.cancel()


def test_what_could_not_be_told_is_told_later(tmp_path: pathlib.Path) -> None:
    late = Systemd(str(tmp_path / "notify"))
    notifier = notify.Notifier(late.address)
    notifier.tell(WORKING)
    late.listen()
    notifier.tell(WORKING)
    assert late.hear() == {"READY": "1", "STATUS": "serves host-a@fast"}
    late.close()


def test_a_full_socket_holds_nothing_up(systemd: Systemd) -> None:
    notifier = notify.Notifier(systemd.address, watchdog=1.0)
    for _ in range(5000):
        notifier.tell(WORKING)
    assert systemd.hear()["READY"] == "1"


# What systemd asks for


def test_the_variables_are_taken_away_so_that_no_child_speaks_for_the_worker(
    systemd: Systemd,
) -> None:
    variables = {
        "NOTIFY_SOCKET": systemd.address,
        "WATCHDOG_USEC": "4000000",
        "WATCHDOG_PID": str(os.getpid()),
        "PATH": "/bin",
    }
    notify.Notifier.from_environment(variables).tell(WORKING)
    assert variables == {"PATH": "/bin"}
    assert set(systemd.hear()) == {"READY", "STATUS", "WATCHDOG"}


@pytest.mark.parametrize(
    ("watchdog", "is_told"),
    [
        ({"WATCHDOG_USEC": "4000000"}, True),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_only_a_watchdog_that_means_this_process_is_fed(
    systemd: Systemd, watchdog: dict[str, str], *, is_told: bool
) -> None:
    variables = {"NOTIFY_SOCKET": systemd.address, **watchdog}
    notify.Notifier.from_environment(variables).tell(WORKING)
    assert ("WATCHDOG" in systemd.hear()) is is_told


@pytest.mark.parametrize("variables", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
async def test_without_a_socket_that_it_knows_nobody_is_told(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = notify.Notifier.from_environment(variables)
    opened: list[object] = []
    monkeypatch.setattr(socket, "socket", lambda *args: opened.append(args))
    notifier.tell(WORKING)
    await asyncio.wait_for(notifier.run(lambda: WORKING), 5)
    assert opened == []
