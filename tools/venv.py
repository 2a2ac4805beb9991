#!/usr/bin/env python3
"""Makes `.venv` of this checkout, and makes it anew only where pyproject.toml has changed."""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
VENV: Final = ROOT / ".venv"
PYTHON: Final = VENV / "bin/python"
STAMP: Final = VENV / "volume-worker-stamp.json"
LOCK: Final = ROOT / ".services/venv.lock"
OLDEST: Final = (3, 11)
OLDEST_PIP: Final = "pip>=25.1"  # the first that knows dependency groups


class VenvError(Exception):
    """Its text says what to do."""


def say(text: str) -> None:
    print(f"venv: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/venv.py", description=__doc__)
    parser.add_argument("--dev", action="store_true", help="with the tools for tests and checks")
    options = parser.parse_args(arguments)
    if sys.version_info < OLDEST:
        say(f"error: needs Python 3.11 or newer, this is {sys.version.split()[0]}")
        return 1
    LOCK.parent.mkdir(exist_ok=True)
    try:
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            make(dev=options.dev)
    except (VenvError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def make(*, dev: bool) -> None:
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    done = _stamp()
    if done.get("project") == project and (done.get("dev") or not dev) and _works():
        return
    # What was there for development stays up to date, else it would fall behind unseen.
    dev = dev or bool(done.get("dev"))
    STAMP.unlink(missing_ok=True)
    if not _works():
        say(f"making .venv with Python {sys.version.split()[0]}")
        shutil.rmtree(VENV, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(VENV)])
    say(f"installing the project{' and its development tools' if dev else ''} into .venv")
    _pip("--upgrade", OLDEST_PIP)
    _pip("-e", ".", *(["--group", "dev"] if dev else []))
    STAMP.write_text(json.dumps({"project": project, "dev": dev}) + "\n")


def _stamp() -> dict[str, object]:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _works() -> bool:
    """Whether the environment's Python still runs; it goes with the one it was made of."""
    check = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        return (
            subprocess.run([PYTHON, "-c", check], check=False, capture_output=True).returncode == 0
        )
    except OSError:
        return False


def _pip(*arguments: str) -> None:
    _run([str(PYTHON), "-m", "pip", "install", "-q", "--no-input", *arguments])


def _run(command: Sequence[str]) -> None:
    environment = os.environ | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    # It would make the new environment look for its library elsewhere.
    environment.pop("PYTHONHOME", None)
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise VenvError(f"this command failed, see above: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
