"""A private RabbitMQ node: own ports, own folders, own epmd, nothing shared with the system's."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Final

from devservices.common import BROKER_VARIABLE, HOME, ServicesError, find_program
from devservices.processes import environment_has
from devservices.state import secret

# The wrapper in /usr/sbin insists on the user `rabbitmq`; this script does not.
SERVER_PROGRAM: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
FOLDER: Final = HOME / "rabbitmq"
NODE: Final = "volume_worker@localhost"
USER: Final = "volume-worker"
MARK: Final = "VOLUME_WORKER_SERVICES_FOLDER"

CONFIG: Final = """\
# Written by tools/services.py at every start.
default_user = {user}
default_pass = {password}
disk_free_limit.absolute = 50MB
vm_memory_high_watermark.relative = 0.4
log.file = rabbitmq.log
log.file.level = warning
log.console = false
# Quorum queues write here first; the default of 512 MB is for production.
raft.wal_max_size_bytes = 64000000
"""


class RabbitMQ:
    """See `devservices.control.Service`.

    Args:
        folder: where all of it lives; two nodes with folders of their own do not meet.
        settings: lines for its configuration file beside those that are here.
    """

    name = "rabbitmq"
    title = "RabbitMQ"
    variable = BROKER_VARIABLE
    port_names = ("amqp", "distribution", "epmd")
    start_seconds = 90.0
    ends_last = frozenset({"epmd"})  # the node says good-bye to it
    stop_signals = ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0))

    def __init__(self, folder: Path = FOLDER, settings: str = "") -> None:
        self.folder = folder
        self.log = folder / "log/start.log"
        self._settings = settings

    def prepare(self) -> None:
        if not SERVER_PROGRAM.exists() or find_program("epmd") is None:
            raise ServicesError("no RabbitMQ here: run `make packages`")
        for part in ("home", "log", "data", "generated", "plugins"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self._write("rabbitmq.conf", CONFIG.format(user=USER, password=secret()) + self._settings)
        self._write("advanced.config", "[].\n")
        self._write("enabled_plugins", "[].\n")
        self._write("home/.erlang.cookie", secret(), mode=0o400)

    def launch(self, ports: dict[str, int]) -> list[subprocess.Popen[bytes]]:
        environment = self.environment(ports)
        epmd = find_program("epmd")
        if epmd is None:
            raise ServicesError("no epmd here: run `make packages`")
        # The node would start an epmd itself, as a daemon on all addresses that outlives it.
        epmd_command = [epmd, "-address", "127.0.0.1", "-port", str(ports["epmd"])]
        with self.log.open("wb") as log:
            return [
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for command in (epmd_command, [str(SERVER_PROGRAM)])
            ]

    def is_ready(self, ports: dict[str, int]) -> bool:
        """Whether an AMQP handshake is answered with a method frame: Connection.Start."""
        try:
            with socket.create_connection(("127.0.0.1", ports["amqp"]), timeout=2) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"
        except OSError:
            return False

    def is_ours(self, pid: int) -> bool:
        return environment_has(pid, MARK, str(self.folder))

    def url(self, ports: dict[str, int]) -> str:
        return f"amqp://{USER}:{secret()}@127.0.0.1:{ports['amqp']}/"

    def environment(self, ports: dict[str, int]) -> dict[str, str]:
        """What the node and the programs that talk to it run with."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RABBITMQ_", "ERL_", "ERLANG_", "NOTIFY_SOCKET"))
        }
        return kept | {
            MARK: str(self.folder),
            "HOME": str(self.folder / "home"),
            "ERL_CRASH_DUMP_SECONDS": "0",  # write none: a failed start is told sooner
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(ports["epmd"]),
            "RABBITMQ_NODENAME": NODE,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(ports["amqp"]),
            "RABBITMQ_DIST_PORT": str(ports["distribution"]),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PLUGINS_EXPAND_DIR": str(self.folder / "plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            "RABBITMQ_PID_FILE": str(self.folder / "node.pid"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "no-environment-file"),
            # Two schedulers are enough and keep an idle node quiet.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
                " -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            # Makes the script become the node instead of waiting for it, so that the pid is its.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _write(self, name: str, text: str, mode: int = 0o600) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
        path.chmod(mode)
