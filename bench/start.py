"""How long a worker takes to get ready, and what it holds then.

Run it with the services up: ``tools/services.py run -- .venv/bin/python bench/start.py``.
"""

import asyncio
import os
import pathlib
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import pydantic

from worker.store import installation

ROUNDS = 5


def main() -> None:
    """Prints the median of some starts."""
    name = f"volume_worker_bench_{secrets.token_hex(4)}"
    url = pydantic.SecretStr(os.environ["VOLUME_WORKER_DATABASE_URL"])
    own = urllib.parse.urlsplit(url.get_secret_value())._replace(path=f"/{name}").geturl()
    asyncio.run(installation.create_database(url, name))
    try:
        asyncio.run(installation.migrate(pydantic.SecretStr(own), name))
        with tempfile.TemporaryDirectory() as folder:
            measured = [_start(pathlib.Path(folder), name, own) for _ in range(ROUNDS)]
    finally:
        asyncio.run(installation.drop_database(url, name))
    seconds, mebibytes = zip(*measured, strict=True)
    print(f"start to ready: {statistics.median(seconds):.2f} s, median of {ROUNDS}")
    print(f"resident memory when ready: {statistics.median(mebibytes):.0f} MiB")


def _start(folder: pathlib.Path, namespace: str, database_url: str) -> tuple[float, float]:
    http = f"127.0.0.1:{_free_port()}"
    (folder / "worker.toml").write_text(
        f'host = "bench"\nnamespace = "{namespace}"\nhttp_listen = "{http}"\n'
        f'state_dir = "{folder}/state"\n'
        f'[backends.files]\ndriver = "file"\ndirectory = "{folder}/volumes"\n'
        f'target_listen = "127.0.0.1:{_free_port()}"\n'
        '[backends.simulated]\ndriver = "fake_iscsi"\n'
    )
    command = pathlib.Path(sys.executable).parent / "volume-worker"
    began = time.monotonic()
    process = subprocess.Popen(
        [command, "run", "--config", folder / "worker.toml"],
        env={**os.environ, "VOLUME_WORKER_DATABASE_URL": database_url},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not _is_ready(http):
            if process.poll() is not None or time.monotonic() - began > 30:
                raise SystemExit("the worker does not get ready; run it by hand to see why")
            time.sleep(0.01)
        return time.monotonic() - began, _resident(process.pid)
    finally:
        process.terminate()
        process.wait()


def _is_ready(http: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _resident(pid: int) -> float:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
