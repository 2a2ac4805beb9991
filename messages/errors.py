"""Every error that a caller, a driver or an operator can meet: one tree with the wire's codes.

Raise the class that names the fault; the worker makes it the reply's ``error`` and the client turns
that back into the same class. ``retryable`` tells the caller that the same request, sent again
under a new id, may succeed. ``transient`` tells the worker that a second attempt of its own may.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class VolumeWorkerError(Exception):
    """The root of the tree.

    ``message`` is for people and says what to do; ``details`` is for programs. Neither may hold a
    secret.
    """

    code: ClassVar[str] = "Internal"
    retryable: bool = False
    transient: ClassVar[bool] = False

    def __init__(self, message: str = "", /, **details: Any) -> None:
        self.message = message or (type(self).__doc__ or type(self).code).strip().splitlines()[0]
        self.details: dict[str, Any] = details
        super().__init__(self.message)

    def to_wire(self) -> dict[str, Any]:
        """The ``error`` member of a reply."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "details": self.details,
        }


class InvalidRequest(VolumeWorkerError):
    """The request is not one that this worker can read."""

    code = "InvalidRequest"


class UnknownMethod(VolumeWorkerError):
    """No such method."""

    code = "UnknownMethod"


class UnsupportedVersion(VolumeWorkerError):
    """This worker does not speak that version of the contract."""

    code = "UnsupportedVersion"


class WrongAddress(VolumeWorkerError):
    """The volume lives elsewhere; send the request to ``details.address``."""

    code = "WrongAddress"


class NotFound(VolumeWorkerError):
    """There is no such thing."""


class VolumeNotFound(NotFound):
    """There is no such volume."""

    code = "VolumeNotFound"


class SnapshotNotFound(NotFound):
    """There is no such snapshot."""

    code = "SnapshotNotFound"


class AttachmentNotFound(NotFound):
    """There is no such attachment."""

    code = "AttachmentNotFound"


class ConnectionNotFound(NotFound):
    """There is no such connection, or it has ended."""

    code = "ConnectionNotFound"


class BackupNotFound(NotFound):
    """There is no such backup."""

    code = "BackupNotFound"


class ImageNotFound(NotFound):
    """There is no such image."""

    code = "ImageNotFound"


class JobNotFound(NotFound):
    """There is no such job, or it is past its retention."""

    code = "JobNotFound"


class VolumeExists(VolumeWorkerError):
    """The volume's id is in use."""

    code = "VolumeExists"


class InvalidVolumeStatus(VolumeWorkerError):
    """The volume's status does not allow this."""

    code = "InvalidVolumeStatus"


class VolumeIsBusy(VolumeWorkerError):
    """The volume is in use by a connection, an attachment or a snapshot."""

    code = "VolumeIsBusy"


class InvalidConnector(VolumeWorkerError):
    """The connector lacks what this backend's target needs, or contradicts a live connection."""

    code = "InvalidConnector"


class InsufficientSpace(VolumeWorkerError):
    """The backend has not enough space."""

    code = "InsufficientSpace"


class DeviceUnavailable(VolumeWorkerError):
    """An attached device cannot be reached, read or written."""

    code = "DeviceUnavailable"
    retryable = True
    transient = True


class TargetError(VolumeWorkerError):
    """The target service (tgtd, qemu-storage-daemon, …) is away or refused."""

    code = "TargetError"
    retryable = True
    transient = True


class ImageUnacceptable(VolumeWorkerError):
    """The image is not what it should be, or not safe."""

    code = "ImageUnacceptable"


class CommandFailed(VolumeWorkerError):
    """A program ended with an error; ``details`` has its exit code and the end of its stderr."""

    code = "CommandFailed"
    retryable = True
    transient = True


class CommandTimeout(VolumeWorkerError):
    """A program did not end in time and was killed with its process group."""

    code = "CommandTimeout"
    retryable = True
    transient = True


class NotSupported(VolumeWorkerError):
    """This backend, or this version of the worker, cannot do that."""

    code = "NotSupported"


class DriverNotInitialized(VolumeWorkerError):
    """The backend's driver is not (yet) set up; the set-up is being tried again."""

    code = "DriverNotInitialized"
    retryable = True


class DeadlineExceeded(VolumeWorkerError):
    """The caller's deadline had passed before the work began."""

    code = "DeadlineExceeded"


class Cancelled(VolumeWorkerError):
    """The job was cancelled."""

    code = "Cancelled"


class WorkerLost(VolumeWorkerError):
    """The worker that ran the job was lost, each time, until no attempt was left."""

    code = "WorkerLost"
    retryable = True


class Internal(VolumeWorkerError):
    """A fault in the worker itself; its log has the traceback."""

    code = "Internal"


class RemoteError(VolumeWorkerError):
    """An error whose code this version does not know: ``retryable`` says how to treat it."""

    code = "Internal"


class Unreachable(VolumeWorkerError):
    """The broker or the database cannot be reached. Never on the wire: nobody could hear it."""

    transient = True
    retryable = True


class NoSuchAddress(Unreachable):
    """No queue is bound for the address: no such backend was ever started."""

    retryable = False


class ReplyTimeout(Unreachable):
    """No reply came in time; what became of it, ``get_job`` with ``details.job_id`` tells."""


def _leaves(cls: type[VolumeWorkerError]) -> list[type[VolumeWorkerError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


BY_CODE: Mapping[str, type[VolumeWorkerError]] = {
    cls.code: cls for cls in _leaves(VolumeWorkerError) if cls.code == cls.__name__
}
"""Error classes by their code on the wire."""


def from_wire(error: Mapping[str, Any]) -> VolumeWorkerError:
    """Rebuilds the error of a reply; an unknown code becomes :class:`RemoteError`."""
    code = str(error.get("code", ""))
    message = str(error.get("message", ""))
    details = error.get("details")
    cls = BY_CODE.get(code, RemoteError)
    rebuilt = cls(message)
    rebuilt.details = dict(details) if isinstance(details, Mapping) else {}
    if cls is RemoteError:
        rebuilt.details.setdefault("code", code)
    rebuilt.retryable = bool(error.get("retryable", cls.retryable))
    return rebuilt
