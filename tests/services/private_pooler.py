"""A pgbouncer of the tests' own: PostgreSQL connections that are shared by the transaction."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from devservices import common

from tests.services import environment, tgtd

PATIENCE: Final = 20.0
"""Seconds for it to start or to end."""

_SETTINGS: Final = """\
[databases]
* = host={host} port={server_port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {folder}/users
pool_mode = transaction
max_client_conn = 200
default_pool_size = {size}
logfile = {folder}/pgbouncer.log
pidfile = {folder}/pgbouncer.pid
ignore_startup_parameters = {ignored}
"""


def _write(folder: pathlib.Path, database_url: str, port: int, *, size: int, ignored: str) -> None:
    server = urlsplit(database_url)
    settings = _SETTINGS.format(
        host=server.hostname,
        server_port=server.port or 5432,
        port=port,
        folder=folder,
        size=size,
        ignored=ignored,
    )
    (folder / "pgbouncer.ini").write_text(settings)
    users = folder / "users"
    users.touch(0o600)
    users.write_text(f'"{server.username}" "{server.password or ""}"\n')


@contextlib.contextmanager
def before(
    database_url: str, folder: pathlib.Path, *, size: int, ignored: str = ""
) -> Iterator[str]:
    """A pooler with ``size`` connections to a server; the URL that leads through it.

    ``ignored`` are the settings that a client may name at its start, to no effect.
    """
    program = common.find_program("pgbouncer")
    if program is None:
        environment.give_up("no pgbouncer on this machine: `make packages` installs it")
    port = tgtd.free_port()
    folder.mkdir()
    _write(folder, database_url, port, size=size, ignored=ignored)
    # It refuses to be root, which has to name the user that it becomes.
    user: list[str] = []
    if os.geteuid() == 0:
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        user += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    child = subprocess.Popen([*user, program, "-q", str(folder / "pgbouncer.ini")], cwd="/")
    try:
        _wait(child, port)
        parts = urlsplit(database_url)
        login = parts.netloc.rpartition("@")[0]
        yield urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}"))
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(PATIENCE)


def _wait(child: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return
