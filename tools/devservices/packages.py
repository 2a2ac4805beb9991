"""Installs the system packages that the services and the tests need (Debian and its children)."""

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from devservices.common import (
    BROKER_VARIABLE,
    DATABASE_VARIABLE,
    ServicesError,
    find_program,
    say,
)
from devservices.postgres import bin_directory
from devservices.rabbitmq import SERVER_PROGRAM

POLICY: Final = Path("/usr/sbin/policy-rc.d")
POLICY_SAVED: Final = Path("/usr/sbin/policy-rc.d.volume-worker-saved")
POLICY_TEXT: Final = """#!/bin/sh
# Written by volume-worker's tools/services.py while it installs packages: start no service.
exit 101
"""
INSTALL_LOCK: Final = Path("/run/volume-worker-install.lock")


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(find_program(name) for name in names)


def _files(folder: str, pattern: str) -> Callable[[], bool]:
    return lambda: any(Path(folder).glob(pattern))


def _python_makes_venvs() -> bool:
    """Debian splits `ensurepip` from python3; other builds of Python have it."""
    return importlib.util.find_spec("ensurepip") is not None


# Package: is what we need of it there? Only packages whose answer is no are installed.
NEEDS: Final[Mapping[str, Callable[[], bool]]] = {
    "rabbitmq-server": SERVER_PROGRAM.exists,
    "postgresql": lambda: bin_directory() is not None,
    "pgbouncer": _programs("pgbouncer"),
    "qemu-utils": _programs("qemu-img", "qemu-nbd", "qemu-io"),
    "qemu-system-common": _programs("qemu-storage-daemon"),
    "qemu-block-extra": _files("/usr/lib", "*/qemu/block-iscsi.so"),
    "tgt": _programs("tgtd", "tgtadm"),
    "libiscsi-bin": _programs("iscsi-ls", "iscsi-inq"),
    "libnbd-bin": _programs("nbdinfo", "nbdcopy"),
    "e2fsprogs": _programs("mkfs.ext4", "debugfs"),
    "fuse3": _programs("fusermount3"),
    "python3-venv": _python_makes_venvs,
}


# A service whose URL the environment gives is somewhere else.
GIVEN_BY: Final[Mapping[str, str]] = {
    "rabbitmq-server": BROKER_VARIABLE,
    "postgresql": DATABASE_VARIABLE,
}


def missing_packages() -> list[str]:
    return [
        package
        for package, is_there in NEEDS.items()
        if not (package in GIVEN_BY and os.environ.get(GIVEN_BY[package])) and not is_there()
    ]


def install(script: Path) -> None:
    """Install what is missing, or say exactly what a person has to do."""
    missing = missing_packages()
    if not missing:
        say("all system packages are here")
        return
    names = " ".join(missing)
    if find_program("apt-get") is None:
        raise ServicesError(_by_hand(names, "this is no Debian-like system"))
    if os.geteuid() == 0:
        _apt_install(missing)
    elif _passwordless_sudo():
        say(f"installing with sudo: {names}")
        given = [f"{name}={os.environ.get(name, '')}" for name in GIVEN_BY.values()]
        command = ["sudo", "-n", "env", *given, sys.executable, str(script), "install"]
        if subprocess.run(command, check=False).returncode != 0:
            raise ServicesError("the installation with sudo failed, see above")
    else:
        raise ServicesError(
            _by_hand(names, "you are neither root nor allowed sudo without a password")
        )
    still = missing_packages()
    if still:
        raise ServicesError(f"installed, but something is still missing of: {' '.join(still)}")
    say("installed")


def _by_hand(names: str, why: str) -> str:
    return (
        f"needed programs are missing, and {why}. Either install these packages"
        f" (names as in Debian 12):\n    apt-get install --no-install-recommends {names}\n"
        "or run the whole deployment in containers, which needs none of them:\n"
        "    docker compose up --build"
    )


def _passwordless_sudo() -> bool:
    sudo = find_program("sudo")
    if sudo is None:
        return False
    return subprocess.run([sudo, "-n", "true"], check=False, capture_output=True).returncode == 0


def _apt_install(packages: list[str]) -> None:
    say(f"installing, takes some minutes: {' '.join(packages)}")
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    with _no_service_starts():
        for arguments in (["update"], ["install", "--no-install-recommends", *packages]):
            done = subprocess.run(
                [*apt, *arguments],
                check=False,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            if done.returncode != 0:
                raise ServicesError(f"apt-get {arguments[0]} failed:\n{done.stdout[-4000:]}")


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Let Debian's packages start nothing: the ports and the data of this machine stay as they are.

    A run that was killed in between leaves its policy file behind, so the next one puts that right.
    """
    with INSTALL_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _restore_policy()
        if POLICY.exists() or POLICY.is_symlink():
            POLICY.rename(POLICY_SAVED)
        try:
            POLICY.write_text(POLICY_TEXT)
            POLICY.chmod(0o755)
            yield
        finally:
            _restore_policy()


def _restore_policy() -> None:
    if POLICY.is_file() and POLICY.read_text(errors="replace") == POLICY_TEXT:
        POLICY.unlink()
    if POLICY_SAVED.exists() or POLICY_SAVED.is_symlink():
        POLICY_SAVED.rename(POLICY)
