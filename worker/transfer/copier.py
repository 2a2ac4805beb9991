"""The child process that copies: ``python -m worker.transfer.copier``.

It reads one request, a JSON object on one line of stdin::

    {"source": {"path": …} or {"nbd_uri": …}, "destination": …, "size_bytes": …, "verify": …,
     "source_changes": …, "bytes_per_second": … or null, "lease_seconds": … or null,
     "resume_from": …}

and writes JSON lines to stdout: ``{"progress": …}`` at most twice a second and once at the end,
``{"mark": …}`` with the first byte before which all is safe, to be resumed from, where the source
does not change, then one ``{"result": …}`` (exit code 0) or ``{"error": {"code", "message",
"details"}}`` (exit code 1).

Each further line on stdin feeds it for another lease, and may hold a new ``bytes_per_second``. It
ends when stdin does, and when it is not fed: whoever started it is gone then, or has lost the job.

It imports little, so that it starts at once.
"""

import json
import os
import pathlib
import select
import signal
import sys
import threading
import time
from typing import Any, Final, NoReturn

from messages import errors
from worker import libc
from worker.transfer import digest, endpoint, extents, file, mover, nbd, pace, verifier

_STDIN: Final = 0
_STDOUT: Final = 1
_LOOKED_AT_AGAIN: Final = 16 * extents.PIECE
"""Bytes before the mark of an earlier attempt that are compared before a copy goes on from it."""


class Lines:
    """Lines of a descriptor, without a lock that a thread could hold while the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def next(self, timeout: float | None = None) -> bytes:
        """The next line, or b"" at the end.

        Raises:
            TimeoutError: nothing came for so many seconds.
        """
        while b"\n" not in self._buffer:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise TimeoutError
            data = os.read(self._descriptor, 64 * 1024)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def main() -> int:
    """Carries out one request; returns the exit code."""
    libc.die_with_parent(signal.SIGKILL)
    lines = Lines(_STDIN)
    try:
        request = json.loads(lines.next())
        throttle = pace.Throttle(request["bytes_per_second"])
        lease = request.get("lease_seconds")
        threading.Thread(target=_listen, args=(lines, throttle, lease), daemon=True).start()
        result = _copy(request, throttle)
    except errors.VolumeWorkerError as error:
        return _give_up(error)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return _give_up(errors.Internal(f"the copier failed: {error!r}"))
    _say({"result": result})
    return 0


def _copy(request: dict[str, Any], throttle: pace.Throttle) -> dict[str, Any]:
    started = time.monotonic()
    size = request["size_bytes"]
    source = _open(request["source"], writable=False)
    destination = _open(request["destination"], writable=True)
    _check_ends(source, destination, size)
    start = _start(source, destination, request["resume_from"])
    meter = pace.Meter(size, before=start)
    sent = digest.Record(size) if request["verify"] and request["source_changes"] else None

    def tick() -> None:
        _say({"progress": meter.report()})

    mover.move(
        source,
        destination,
        size,
        sent=sent,
        throttle=throttle,
        meter=meter,
        tick=tick,
        start=start,
        mark=None if request["source_changes"] else lambda mark: _say({"mark": mark}),
    )
    text = None
    if request["verify"]:
        text = verifier.verify(source, destination, size, sent=sent, meter=meter, tick=tick)
    tick()
    source.close()
    destination.close()
    return {
        "total_bytes": size,
        "copied_bytes": meter.copied,
        "zeroed_bytes": meter.zeroed,
        "resumed_from_bytes": start,
        "seconds": round(time.monotonic() - started, 3),
        "digest": text,
    }


def _start(source: endpoint.Endpoint, destination: endpoint.Endpoint, mark: int) -> int:
    """Where to begin: at the mark, if the last part before it is there."""
    before = max(mark - _LOOKED_AT_AGAIN, 0)
    return mark if not mark or verifier.agrees(source, destination, before, mark) else 0


def _open(device: dict[str, str], *, writable: bool) -> endpoint.Endpoint:
    if path := device.get("path"):
        return file.File(pathlib.Path(path), writable=writable)
    return nbd.Nbd(device["nbd_uri"], writable=writable)


def _check_ends(source: endpoint.Endpoint, destination: endpoint.Endpoint, size: int) -> None:
    if size < 1:
        raise errors.InvalidRequest(f"{size} bytes cannot be copied", size_bytes=size)
    if source.size < size:
        raise errors.InvalidRequest(
            f"{source.name} has {source.size} bytes, {size} are to be copied",
            device=source.name,
            device_bytes=source.size,
            size_bytes=size,
        )
    if destination.size < size:
        raise errors.InvalidRequest(
            f"{destination.name} has {destination.size} bytes, too few for the {size} to be copied",
            device=destination.name,
            device_bytes=destination.size,
            size_bytes=size,
        )
    if source.identity == destination.identity:
        raise errors.InvalidRequest(f"{source.name} and {destination.name} are the same volume")


def _listen(lines: Lines, throttle: pace.Throttle, lease: float | None) -> NoReturn:
    reason = "stdin was closed"
    try:
        while line := lines.next(lease):
            control = json.loads(line)
            if "bytes_per_second" in control:
                throttle.set(control["bytes_per_second"])
    except TimeoutError:
        reason = f"not fed for {lease} s"
    except ValueError as error:
        reason = f"stdin cannot be read: {error}"
    sys.stderr.write(f"the copier ends: {reason}\n")
    # At once, whatever the other threads wait for.
    os._exit(1)


def _give_up(error: errors.VolumeWorkerError) -> int:
    _say({"error": {"code": error.code, "message": error.message, "details": error.details}})
    return 1


def _say(message: dict[str, Any]) -> None:
    data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    while data:
        data = data[os.write(_STDOUT, data) :]


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads may be left in the middle of a system call; nobody needs what they would bring.
    os._exit(code)
