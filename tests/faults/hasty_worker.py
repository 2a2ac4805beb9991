"""A worker with less patience: ``python -m tests.faults.hasty_worker run --config FILE``.

It is ``volume-worker run --config FILE``, except for how long it waits for what may hang.
"""

from worker import cli, service
from worker.targets import tgtadm

service.PUT_BACK_TIMEOUT = 2.0  # type: ignore[misc]
service.PUT_BACK_REST = 3.0  # type: ignore[misc]
service.FLUSH_TIMEOUT = 0.5  # type: ignore[misc]
service.BACKEND_CLOSE_TIMEOUT = 1.0  # type: ignore[misc]
service.CLOSE_TIMEOUT = 4.0  # type: ignore[misc]
tgtadm._TIMEOUT = 1.5  # type: ignore[misc]

if __name__ == "__main__":
    cli.main()
