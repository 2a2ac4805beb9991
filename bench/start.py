"""How long a worker takes to get ready, and what it holds then.

Run it with the services up: ``tools/services.py run -- .venv/bin/python bench/start.py``.
"""

import statistics
import time

from bench import hosts

ROUNDS = 5
BACKENDS = {
    "files": {
        "driver": "file",
        "directory": "{folder}/volumes",
        "target_listen": "127.0.0.1:{port}",
    },
    "simulated": {"driver": "fake_iscsi"},
}


def main() -> None:
    """Prints the median of some starts."""
    with hosts.opened() as site:
        seconds, mebibytes = measure(site)
    print(f"start to ready: {seconds:.2f} s, median of {ROUNDS}")
    print(f"resident memory when ready: {mebibytes:.0f} MiB")


def measure(site: hosts.Site) -> tuple[float, float]:
    """The medians of some starts: seconds until ready, and MiB held then."""
    measured = [_start(site) for _ in range(ROUNDS)]
    seconds, mebibytes = zip(*measured, strict=True)
    return statistics.median(seconds), statistics.median(mebibytes)


def _start(site: hosts.Site) -> tuple[float, float]:
    worker = hosts.Worker(site, host="starting", backends=BACKENDS)
    began = time.monotonic()
    with worker.running():
        return time.monotonic() - began, worker.resident()


if __name__ == "__main__":
    main()
