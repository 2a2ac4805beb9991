#!/usr/bin/env python3
"""Makes `.venv` of this checkout, and makes it anew only where pyproject.toml has changed.

With --bench it makes `.venv-bench` instead, of what bench/rpc.py compares the project with: so that
none of that gets into the environment of the project.
"""

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
BENCH: Final = ROOT / ".venv-bench"
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
    parser.add_argument("--bench", action="store_true", help="make .venv-bench instead")
    options = parser.parse_args(arguments)
    if sys.version_info < OLDEST:
        say(f"error: needs Python 3.11 or newer, this is {sys.version.split()[0]}")
        return 1
    LOCK.parent.mkdir(exist_ok=True)
    try:
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if options.bench:
                make_bench()
            else:
                make(dev=options.dev)
    except (VenvError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def make(*, dev: bool) -> None:
    project = _project()
    done = _stamp(STAMP)
    if done.get("project") == project and (done.get("dev") or not dev) and _works(PYTHON):
        return
    # What was there for development stays up to date, else it would fall behind unseen.
    dev = dev or bool(done.get("dev"))
    STAMP.unlink(missing_ok=True)
    _make_environment(VENV)
    say(f"installing the project{' and its development tools' if dev else ''} into .venv")
    _pip(PYTHON, "-e", ".", *(["--group", "dev"] if dev else []))
    STAMP.write_text(json.dumps({"project": project, "dev": dev}) + "\n")


def make_bench() -> None:
    project = _project()
    python, stamp = BENCH / "bin/python", BENCH / "volume-worker-stamp.json"
    if _stamp(stamp).get("project") == project and _works(python):
        return
    stamp.unlink(missing_ok=True)
    _make_environment(BENCH)
    say("installing what the project is compared with into .venv-bench")
    _pip(python, "--group", "bench")
    stamp.write_text(json.dumps({"project": project}) + "\n")


def _project() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def _stamp(path: Path) -> dict[str, object]:
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _works(python: Path) -> bool:
    """Whether an environment's Python still runs; it goes with the one it was made of."""
    check = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        return (
            subprocess.run([python, "-c", check], check=False, capture_output=True).returncode == 0
        )
    except OSError:
        return False


def _make_environment(venv: Path) -> None:
    if not _works(venv / "bin/python"):
        say(f"making {venv.name} with Python {sys.version.split()[0]}")
        shutil.rmtree(venv, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(venv)])
    _pip(venv / "bin/python", "--upgrade", OLDEST_PIP)


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "-q", "--no-input", *arguments])


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
