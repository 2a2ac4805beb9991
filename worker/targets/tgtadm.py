"""Talking to tgtd by its tool, tgtadm(8).

The tool finds the daemon by ``TGT_IPC_SOCKET``, as it does for everybody. It takes a password only
as an argument: whoever may see other users' processes can see it for the milliseconds that the tool
runs (proc(5), ``hidepid``), and so does the log of a root helper that keeps one (sudoers(5),
``Defaults!/usr/sbin/tgtadm !syslog``). No process that lasts has it, and no log or error of ours.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Final

from messages import errors
from worker import process
from worker.targets import iscsi

PROGRAM: Final = "tgtadm"
SOCKET_VARIABLE: Final = "TGT_IPC_SOCKET"
_TIMEOUT: Final = 10.0
"""Seconds; tgtd answers in milliseconds, or hangs."""
_SHOW_LIMIT: Final = 64 * 1024 * 1024
"""Bytes; a target takes about 1,200."""
_NOT_CONNECTED: Final = 107
"""ENOTCONN: what the tool ends with where no daemon listens."""

_NAME_TYPES: Final = ("iqn.", "eui.", "naa.")
"""How a name begins (RFC 7143, 4.2.7); else it is an address, or ALL."""

# With these on stderr the tool ends with exit code 0, although nothing was done.
_SILENT_FAILURES: Final = ("closed the socket", "a partial response")


class DaemonAway(errors.TargetError):
    """tgtd does not answer."""


class Refused(errors.TargetError):
    """tgtd answered that it will not."""


@dataclasses.dataclass(slots=True)
class Unit:
    """One logical unit of a target."""

    path: str = ""
    serial: str = ""
    read_only: bool = False
    thin: bool = False


@dataclasses.dataclass(slots=True)
class Target:
    """One target as tgtd shows it."""

    tid: int
    iqn: str
    connections: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Session and connection ids."""
    units: dict[int, Unit] = dataclasses.field(default_factory=dict)
    accounts: list[str] = dataclasses.field(default_factory=list)
    initiators: list[str] = dataclasses.field(default_factory=list)
    """Names and addresses that may log in."""
    sessions: dict[int, str] = dataclasses.field(default_factory=dict)
    """Whose each session is: the initiator's name."""


class Tgtadm:
    """The tool's calls, each done when its method returns."""

    def __init__(self, execute: process.Executor) -> None:
        self._execute = execute

    async def targets(self) -> dict[str, Target]:
        """All targets by their names, those of others too."""
        return {target.iqn: target for target in parse_targets(await self._run("show", "target"))}

    async def portals(self) -> list[iscsi.Portal]:
        """Where tgtd listens."""
        return parse_portals(await self._run("show", "portal"))

    async def new_target(self, tid: int, iqn: str) -> None:
        """Raises ``Refused`` where the id or the name is taken."""
        await self._run("new", "target", "--tid", str(tid), "--targetname", iqn)

    async def delete_target(self, tid: int) -> None:
        """Ends its sessions too; can leave the target there without a word."""
        await self._run("delete", "target", "--tid", str(tid), "--force")

    async def new_unit(self, tid: int, lun: int, path: os.PathLike[str]) -> None:
        """Opens a file or block device as a logical unit."""
        text = os.fspath(path)
        if "," in text:
            # tgtd splits what it is told at commas, without a way to quote one.
            raise errors.TargetError(f"tgtd cannot serve {text}: its path has a comma")
        unit = ("--tid", str(tid), "--lun", str(lun))
        await self._run("new", "logicalunit", *unit, "--backing-store", text)

    async def delete_unit(self, tid: int, lun: int) -> None:
        """Closes a logical unit."""
        await self._run("delete", "logicalunit", "--tid", str(tid), "--lun", str(lun))

    async def update_unit(self, tid: int, lun: int, parameters: Sequence[str]) -> None:
        """Sets parameters, ``NAME=VALUE`` each (tgtadm(8), LUN PARAMETERS)."""
        unit = ("--tid", str(tid), "--lun", str(lun))
        await self._run("update", "logicalunit", *unit, "--params", ",".join(parameters))

    async def accounts(self) -> set[str]:
        """The names of all accounts."""
        lines = (await self._run("show", "account")).splitlines()
        return {line.strip() for line in lines if line.startswith((" ", "\t"))}

    async def new_account(self, user: str, password: str) -> None:
        """Raises ``Refused`` where the name is taken."""
        account = ("--user", user, "--password", password)
        await self._run("new", "account", *account, secrets=[password])

    async def delete_account(self, user: str) -> None:
        """Takes it away from its target too."""
        await self._run("delete", "account", "--user", user)

    async def bind_account(self, tid: int, user: str) -> None:
        """Demands CHAP with this account of whoever logs in to the target."""
        await self._run("bind", "account", "--tid", str(tid), "--user", user)

    async def bind_initiator(self, tid: int, initiator: str) -> None:
        """Lets an initiator in; nobody is before the first."""
        await self._run("bind", "target", "--tid", str(tid), "--initiator-name", initiator)

    async def unbind_account(self, tid: int, user: str) -> None:
        """Takes an account away from a target; it may be another target's too."""
        await self._run("unbind", "account", "--tid", str(tid), "--user", user)

    async def unbind_initiator(self, tid: int, initiator: str) -> None:
        """Keeps an initiator, by name or address, from logging in again; its sessions go on."""
        kind = "name" if initiator.lower().startswith(_NAME_TYPES) else "address"
        await self._run("unbind", "target", "--tid", str(tid), f"--initiator-{kind}", initiator)

    async def close_connection(self, tid: int, session: int, connection: int) -> None:
        """Cuts a connection."""
        ids = ("--tid", str(tid), "--sid", str(session), "--cid", str(connection))
        await self._run("delete", "conn", *ids)

    async def _run(
        self, operation: str, mode: str, *arguments: str, secrets: Sequence[str] = ()
    ) -> str:
        socket = os.environ.get(SOCKET_VARIABLE)
        command = (PROGRAM, "--lld", "iscsi", "--op", operation, "--mode", mode, *arguments)
        try:
            # tgtd talks to root only, whoever may open its socket.
            result = await self._execute.run(
                *command,
                env={SOCKET_VARIABLE: socket} if socket else None,
                timeout=_TIMEOUT,
                run_as_root=True,
                secrets=secrets,
                capture_limit=_SHOW_LIMIT,
            )
        except errors.CommandTimeout as error:
            raise DaemonAway(f"tgtd does not answer: {error}") from error
        except errors.CommandFailed as error:
            raise _explained(error, f"{operation} {mode}") from error
        if any(words in result.stderr for words in _SILENT_FAILURES):
            raise DaemonAway(
                f"tgtd refuses to talk ({result.stderr.strip()}): it does so to anyone but root;"
                " see root_helper"
            )
        return result.stdout


def _explained(error: errors.CommandFailed, what: str) -> errors.TargetError:
    stderr = str(error.details.get("stderr", "")).strip()
    if "exit_code" not in error.details:
        return DaemonAway(f"{error}; install the package tgt", program=PROGRAM)
    if error.details["exit_code"] == _NOT_CONNECTED or "tgt daemon" in stderr:
        where = os.environ.get(SOCKET_VARIABLE, "/var/run/tgtd/socket")
        return DaemonAway(
            f"tgtd does not run, or not with the control socket {where}: start it with"
            " systemctl start tgt"
        )
    code = error.details["exit_code"]
    return Refused(f"tgtadm cannot {what}: {stderr or error}", exit_code=code, stderr=stderr)


_TARGET: Final = re.compile(r"Target (\d+): (\S+)")
_PORTAL: Final = re.compile(r"Portal: (\S+):(\d+),\d+")
_BELOW_SECTION: Final = " " * 8


def parse_portals(text: str) -> list[iscsi.Portal]:
    """Reads what ``tgtadm --op show --mode portal`` prints."""
    found = [_PORTAL.fullmatch(line) for line in text.splitlines()]
    return [iscsi.Portal(line[1].strip("[]"), int(line[2])) for line in found if line]


def parse_targets(text: str) -> list[Target]:
    """Reads what ``tgtadm --op show --mode target`` prints, field by field.

    Raises:
        TargetError: it is not what tgt 1.0 prints.
    """
    readers: list[_Reader] = []
    for line in text.splitlines():
        try:
            if line.startswith("Target ") and (heading := _TARGET.fullmatch(line)):
                readers.append(_Reader(Target(int(heading[1]), heading[2])))
            else:
                readers[-1].read(line)
        except (ValueError, IndexError):
            raise errors.TargetError(f"tgtadm printed {line[:100]!r}: cannot be read") from None
    return [reader.target for reader in readers]


class _Reader:
    """Reads the lines below one target's heading."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._section = ""
        self._session = 0
        self._unit = Unit()

    def read(self, line: str) -> None:
        if not line.startswith(_BELOW_SECTION):
            self._section = line.strip().removesuffix(":")
            return
        text = line.strip()
        name, _, value = text.partition(":")
        match self._section:
            case "LUN information":
                self._read_unit(name, value.lstrip())
            case "I_T nexus information":
                self._read_nexus(name, value.lstrip())
            case "Account information":
                self.target.accounts.append(text)
            case "ACL information":
                self.target.initiators.append(text)

    def _read_nexus(self, name: str, value: str) -> None:
        match name:
            case "I_T nexus":
                self._session = int(value)
            case "Initiator":
                self.target.sessions[self._session] = value.partition(" ")[0]
            case "Connection":
                self.target.connections.append((self._session, int(value)))

    def _read_unit(self, name: str, value: str) -> None:
        match name:
            case "LUN":
                self._unit = self.target.units[int(value)] = Unit()
            case "SCSI SN":
                self._unit.serial = value
            case "Readonly":
                self._unit.read_only = value == "Yes"
            case "Thin-provisioning":
                self._unit.thin = value == "Yes"
            case "Backing store path":
                self._unit.path = value
