"""A private PostgreSQL server on loopback."""

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from devservices.common import DATABASE_VARIABLE, HOME, ServicesError, say
from devservices.processes import arguments, working_directory
from devservices.state import secret

FOLDER: Final = HOME / "postgres"
DATABASE: Final = "volume_worker"
VERSIONS: Final = Path("/usr/lib/postgresql")

SETTINGS: Final = {
    "cluster_name": "volume-worker",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    # Durability is what the product promises, so its tests run with it.
    "fsync": "on",
    "synchronous_commit": "on",
    "logging_collector": "off",
    "log_destination": "stderr",
}


def bin_directory() -> Path | None:
    """The programs of the newest PostgreSQL as Debian lays them out."""
    found = [path.parent for path in VERSIONS.glob("*/bin/postgres")]
    numbered = [path for path in found if path.parent.name.isdecimal()]
    return max(numbered, key=lambda path: int(path.parent.name), default=None)


class PostgreSQL:
    """See `devservices.control.Service`.

    Args:
        folder: where all of it lives; two servers with folders of their own do not meet.
        settings: what differs from those that are here.
    """

    name = "postgres"
    title = "PostgreSQL"
    variable = DATABASE_VARIABLE
    port_names = ("postgres",)
    start_seconds = 60.0
    ends_last = frozenset[str]()
    # Fast, then immediate shutdown; the latter makes the next start run a recovery.
    stop_signals = ((signal.SIGINT, 15.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))

    def __init__(self, folder: Path = FOLDER, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.log = folder / "postgres.log"
        self._data = folder / "data"
        self._data_new = folder / "data.new"
        self._settings = SETTINGS | dict(settings or {})

    def prepare(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o711)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
            return
        # Left by a crash. We know that the server has ended, but it takes any process with that
        # pid, even a zombie, for another server.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        have = (self._data / "PG_VERSION").read_text().strip()
        program = self._bin().parent.name
        if have != program:
            raise ServicesError(
                f"{self._data} was made by PostgreSQL {have}, here is {program}:"
                f" stop and remove {self.folder}"
            )

    def launch(self, ports: dict[str, int]) -> list[subprocess.Popen[bytes]]:
        settings = self._settings | {"port": str(ports["postgres"])}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with self.log.open("wb") as log:
            server = subprocess.Popen(
                [*self._as_user(), str(self._bin() / "postgres"), "-D", str(self._data), *options],
                cwd="/",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return [server]

    def is_ready(self, ports: dict[str, int]) -> bool:
        command = ["-q", "-h", "127.0.0.1", "-p", str(ports["postgres"]), "-d", DATABASE]
        program = str(self._bin() / "pg_isready")
        return subprocess.run([program, *command], check=False).returncode == 0

    def is_ours(self, pid: int) -> bool:
        """Recognised by arguments; PostgreSQL itself overwrites those of all but the first."""
        name, *rest = arguments(pid) or [""]
        if Path(name).name in {"postgres", "initdb"}:
            return bool({str(self._data), str(self._data_new)} & set(rest))
        title = f"postgres: {self._settings['cluster_name']}: "
        return name.startswith(title) and working_directory(pid) == self._data

    def url(self, ports: dict[str, int]) -> str:
        return f"postgresql://postgres:{secret()}@127.0.0.1:{ports['postgres']}/{DATABASE}"

    def _bin(self) -> Path:
        directory = bin_directory()
        if directory is None:
            raise ServicesError("no PostgreSQL server here: run `make packages`")
        return directory

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return kept | {"LC_ALL": "C", "HOME": str(self.folder)}

    def _initialise(self) -> None:
        """Make the data folder under another name first, so that a kill leaves no half of it."""
        say("PostgreSQL: making its data folder (once)")
        shutil.rmtree(self._data_new, ignore_errors=True)
        if self._data.exists():
            raise ServicesError(f"{self._data} is damaged: remove {self.folder} and start again")
        self._data_new.mkdir(mode=0o700)
        password = self.folder / "password.new"
        password.unlink(missing_ok=True)
        password.touch(mode=0o600)
        password.write_text(secret())
        user = _server_user()
        if user is not None:
            for path in (self._data_new, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        # A password and not SCRAM: it stays on loopback, and a login costs no thousand hashes.
        # SQL of this server can run programs, so other users of the machine must not get in.
        flags = ["-A", "password", f"--pwfile={password}", "-U", "postgres"]
        flags += ["--encoding=UTF8", "--locale=C"]
        self._once("initdb", [*flags, "-D", str(self._data_new)])
        password.unlink()
        single = ["--single", "-D", str(self._data_new), "-c", "exit_on_error=true", "postgres"]
        self._once("postgres", single, text=f"CREATE DATABASE {DATABASE}\n")
        self._data_new.rename(self._data)

    def _once(self, program: str, arguments: list[str], text: str = "") -> None:
        done = subprocess.run(
            [*self._as_user(), str(self._bin() / program), *arguments],
            cwd="/",
            env=self._environment(),
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServicesError(f"PostgreSQL's {program} failed:\n{done.stdout}")

    def _as_user(self) -> list[str]:
        """What goes before a command so that it does not run as root, which PostgreSQL refuses.

        A checkout below a closed folder, /root above all, is out of that user's reach. Then the
        server gets the one capability that leads there.
        """
        user = _server_user()
        if user is None:
            return []
        drop = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        reach = [*drop, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
        for prefix in (drop, reach):
            # Not `test -x`: access(2) leaves capabilities out of account.
            probe = [*prefix, "stat", f"{self.folder}/."]
            if subprocess.run(probe, check=False, capture_output=True, cwd="/").returncode == 0:
                return prefix
        raise ServicesError(
            f"the user {user.pw_name}, which has to run PostgreSQL, cannot reach {self.folder}:"
            " move the checkout to a folder that others may pass through"
        )


def _server_user() -> pwd.struct_passwd | None:
    """The user for the server; None where we are an ordinary user already."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServicesError("PostgreSQL refuses to run as root, and there is no other user here")
