"""A private tgtd: a real iSCSI target in user space, on a port and a control socket of its own.

It never meets a tgtd that the machine runs: tgtadm finds it only by :attr:`Tgtd.env`.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping

import pytest

READY_TIMEOUT = 20.0
"""Seconds."""
DIES_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL", "--")


class Tgtd:
    """One tgtd, which ends with the test process at the latest.

    Attributes:
        portal: ``127.0.0.1:PORT``.
        pid: of the running daemon, or None.
    """

    def __init__(self) -> None:
        self.port = 0
        self.pid: int | None = None
        self._folder: pathlib.Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def portal(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def env(self) -> Mapping[str, str]:
        """What a child's environment needs for tgtadm to find this daemon."""
        assert self._folder is not None, "tgtd was never started"
        return {"TGT_IPC_SOCKET": str(self._folder / "control")}

    def start(self) -> None:
        """Starts it, again on the same port and socket after a :meth:`stop`, and waits for it.

        The control socket's path must fit into 107 bytes, hence a folder right under /tmp.
        """
        if self._folder is None:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="tgtd-", dir="/tmp"))
        for _ in range(5):
            self.port = self.port or free_port()
            self._process = self._spawn()
            self.pid = self._process.pid
            if self._wait_until_ready():
                return
            # Somebody else took the port between the look and the start.
            self.kill()
            self.port = 0
        raise RuntimeError(f"tgtd does not start: {(self._folder / 'log').read_text()}")

    def adm(self, *arguments: str, check: bool = True) -> str:
        """Runs tgtadm against this daemon; returns its stdout."""
        result = subprocess.run(
            ["tgtadm", "--lld", "iscsi", *arguments],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if check and result.returncode:
            raise RuntimeError(f"tgtadm {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def add_target(
        self,
        tid: int,
        iqn: str,
        backing: pathlib.Path,
        *,
        account: tuple[str, str] | None = None,
        initiator: str = "ALL",
        thin: bool = True,
    ) -> None:
        """Exports ``backing`` as LUN 1, to one initiator address or name, or to all."""
        target = ("--mode", "target", "--tid", str(tid))
        self.adm("--op", "new", *target, "-T", iqn)
        lun = ("--mode", "logicalunit", "--tid", str(tid), "--lun", "1")
        self.adm("--op", "new", *lun, "-b", str(backing))
        if thin:
            self.adm("--op", "update", *lun, "--params", "thin_provisioning=1")
        if account is not None:
            user, password = account
            self.adm("--op", "new", "--mode", "account", "--user", user, "--password", password)
            self.adm("--op", "bind", "--mode", "account", "--tid", str(tid), "--user", user)
        option = "-Q" if initiator.startswith("iqn.") else "-I"
        self.adm("--op", "bind", *target, option, initiator)

    def targets(self) -> str:
        """The targets with their sessions, accounts and units, in tgtadm's words."""
        return self.adm("--op", "show", "--mode", "target")

    def stop(self) -> None:
        """Ends it with all its targets and removes what it left; twice is no error."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def kill(self) -> None:
        """Ends it as a crash would; :meth:`start` begins anew on the same port, without targets.

        SIGKILL: tgtd ignores SIGTERM while it has a target.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.pid = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self._folder is not None
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [*DIES_WITH_TESTS, "tgtd", "-f", "--iscsi", f"portal={self.portal}"],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline and self._process and self._process.poll() is None:
            state = self.adm("--op", "show", "--mode", "sys", check=False)
            if "iscsi: ready" in state and self._listens():
                return True
            time.sleep(0.02)
        return False

    def _listens(self) -> bool:
        # Where the port is a stranger's, tgtd says so and goes on without a portal.
        assert self._folder is not None
        if "failed to create/bind" in (self._folder / "log").read_text():
            self.kill()
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_program(*names: str) -> None:
    """Skips the test where a program is missing; fails it where CI is set."""
    for name in names:
        if shutil.which(name) is None:
            reason = f"{name} is not installed"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)


@contextlib.contextmanager
def running() -> Iterator[Tgtd]:
    """A tgtd for the time of a ``with`` block."""
    require_program("tgtd", "tgtadm", "setpriv")
    if os.geteuid() != 0:
        pytest.skip("tgtd takes commands from root only")
    daemon = Tgtd()
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()
