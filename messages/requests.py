"""What can be asked: the arguments of every method, and what kind of method it is."""

import dataclasses
import enum
import uuid
from typing import Annotated, Any, Final, Literal

import pydantic

from messages import errors, redaction, resources

MAX_SIZE: Final = 2**63 - 1
MAX_MEMBERS: Final = 4096
"""Of an object or list in arguments: each that is wrong costs a check of its own."""
VERSION: Final = (1, 0)
"""The contract's version: major, minor."""


def _canonical_id(value: object) -> object:
    if not isinstance(value, str | uuid.UUID):
        raise ValueError("must be a UUID in text form")  # noqa: TRY004 - pydantic wants ValueError
    if isinstance(value, str) and len(value) != 36:
        raise ValueError("must be a UUID in its text form of 36 characters")
    return value


def _plain_name(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    if len(value.encode()) > 255:
        raise ValueError("must have at most 255 bytes")
    if value.startswith("-"):
        raise ValueError("must not begin with -")
    if "/" in value or ".." in value:
        raise ValueError("must not contain / or ..")
    return _printable(value)


def _printable(value: str) -> str:
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in value):
        raise ValueError("must not contain control characters")
    return value


Id = Annotated[uuid.UUID, pydantic.BeforeValidator(_canonical_id)]
Name = Annotated[pydantic.StrictStr, pydantic.AfterValidator(_plain_name)]
Text = Annotated[
    pydantic.StrictStr, pydantic.Field(max_length=1024), pydantic.AfterValidator(_printable)
]
Size = Annotated[pydantic.StrictInt, pydantic.Field(ge=1, le=MAX_SIZE)]
Names = Annotated[list[Text], pydantic.Field(fail_fast=True)]
Metadata = Annotated[dict[Text, Text], pydantic.Field(max_length=256)]
Address = Annotated[Text, pydantic.Field(pattern=r"^[A-Za-z0-9_.-]{1,100}@[A-Za-z0-9_-]{1,100}$")]


class Args(pydantic.BaseModel):
    """Arguments of a method; unknown members are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class NewVolume(Args):
    """The volume to be made; a missing id is made by the worker."""

    id: Id | None = None
    name: Name
    size_bytes: Size
    metadata: Metadata = {}


class CreateVolume(Args):
    volume: NewVolume


class VolumeOnly(Args):
    """Arguments of the methods that take a volume and nothing else."""

    volume_id: Id


class DeleteVolume(Args):
    volume_id: Id
    cascade: pydantic.StrictBool = False


class ExtendVolume(Args):
    volume_id: Id
    new_size_bytes: Size


class Connector(pydantic.BaseModel):
    """What a host tells about itself: os-brick's connector properties, unknown members too."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    host: Text | None = None
    ip: Text | None = None
    initiator: Text | None = None
    nqn: Text | None = None
    wwpns: Names | None = None
    wwnns: Names | None = None
    mode: resources.AccessMode = resources.AccessMode.READ_WRITE
    connection_key: Text = ""
    do_local_attach: pydantic.StrictBool = False

    def properties(self) -> dict[str, Any]:
        """As given, without the members that are missing."""
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def identity(self) -> str:
        """What tells one host's initiator from another's: its names, compared without case."""
        wwpns = sorted(wwpn.lower() for wwpn in self.wwpns or ())
        return (self.initiator or self.nqn or ",".join(wwpns)).lower()

    def is_same_as(self, other: "Connector") -> bool:
        """Whether both mean the same connection to a volume."""
        mine = (self.host or "", self.identity, self.connection_key)
        return mine == (other.host or "", other.identity, other.connection_key)


class ValidateConnector(Args):
    connector: Connector


class InitializeConnection(Args):
    volume_id: Id
    connector: Connector


class TerminateConnection(Args):
    volume_id: Id
    connector: Connector | None = None
    connection_id: Id | None = None
    force: pydantic.StrictBool = False

    @pydantic.model_validator(mode="after")
    def _names_one(self) -> "TerminateConnection":
        if self.connector is not None and self.connection_id is not None:
            raise ValueError("give connector or connection_id, not both")
        if self.connector is None and self.connection_id is None and not self.force:
            raise ValueError("give connector or connection_id (or force, which ends all)")
        return self


class AttachVolume(Args):
    volume_id: Id
    instance_uuid: Id | None = None
    host_name: Text | None = None
    mountpoint: Annotated[Text, pydantic.Field(min_length=1)]
    mode: resources.AccessMode = resources.AccessMode.READ_WRITE


class DetachVolume(Args):
    volume_id: Id
    attachment_id: Id | None = None


class CopyVolumeData(Args):
    source_volume_id: Id
    destination_volume_id: Id
    remote: Literal["src", "dest", "both"] | None = None
    verify: pydantic.StrictBool | None = None
    bytes_per_second: Size | None = None


class Reconcile(Args):
    repair: pydantic.StrictBool = False


class GetJob(Args):
    """With ``offset``, the record's JSON text from that character on; a long one has parts."""

    job_id: Id
    offset: Annotated[pydantic.StrictInt, pydantic.Field(ge=0)] | None = None


class GetVolumeStats(Args):
    refresh: pydantic.StrictBool = False


class JobOnly(Args):
    """Arguments of the methods that take a job and nothing else."""

    job_id: Id


class ThrottleJob(Args):
    """How fast a job may go from now on; null for as fast as it goes."""

    job_id: Id
    bytes_per_second: Size | None


class _Page(Args):
    all: pydantic.StrictBool = False
    limit: Annotated[pydantic.StrictInt, pydantic.Field(ge=1, le=1000)] = 100
    after: Id | None = None


class ListVolumes(_Page):
    status: resources.VolumeStatus | None = None


class ListJobs(_Page):
    state: resources.JobState | None = None
    volume_id: Id | None = None


class AnyArgs(pydantic.BaseModel):
    """Arguments of a method of the contract that this version does not carry out."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)


class Kind(enum.Enum):
    """How a method is carried out."""

    READ = enum.auto()
    """Answered at once from the records; leaves no job."""
    JOB = enum.auto()
    """Stored, then carried out."""
    UPKEEP = enum.auto()
    """Carried out at once, beside all jobs; leaves no job itself. Sent again, it is done again."""
    UNSUPPORTED = enum.auto()
    """Part of the contract, answered ``NotSupported`` for now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A method of the contract."""

    name: str
    args: type[pydantic.BaseModel]
    kind: Kind = Kind.JOB
    despite_deadline: bool = False
    """Carried out even where the caller has stopped waiting: it gives something back."""

    only_reads: bool = False
    """It changes nothing, so that nothing is lost with a request for it."""


def _read(name: str, args: type[pydantic.BaseModel]) -> Method:
    return Method(name, args, Kind.READ, only_reads=True)


_UNSUPPORTED = [
    "create_volume_from_snapshot",
    "create_cloned_volume",
    "clone_image",
    "create_snapshot",
    "delete_snapshot",
    "revert_to_snapshot",
    "copy_image_to_volume",
    "copy_volume_to_image",
    "backup_volume",
    "restore_backup",
    "delete_backup",
    "migrate_volume",
    "accept_transfer",
]

_UNSUPPORTED_READS = [
    "get_snapshot",
    "get_backup",
    "list_snapshots",
    "list_backups",
]

METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        Method("create_volume", CreateVolume),
        Method("delete_volume", DeleteVolume),
        Method("extend_volume", ExtendVolume),
        Method("create_export", VolumeOnly),
        Method("ensure_export", VolumeOnly),
        Method("remove_export", VolumeOnly, despite_deadline=True),
        _read("validate_connector", ValidateConnector),
        Method("initialize_connection", InitializeConnection),
        Method("terminate_connection", TerminateConnection, despite_deadline=True),
        Method("attach_volume", AttachVolume),
        Method("detach_volume", DetachVolume, despite_deadline=True),
        Method("copy_volume_data", CopyVolumeData),
        Method("get_volume_stats", GetVolumeStats, only_reads=True),
        Method("cancel_job", JobOnly, despite_deadline=True),
        Method("throttle_job", ThrottleJob),
        Method("reconcile", Reconcile, Kind.UPKEEP),
        _read("get_volume", VolumeOnly),
        _read("get_job", GetJob),
        _read("list_volumes", ListVolumes),
        _read("list_jobs", ListJobs),
        *(Method(name, AnyArgs, Kind.UNSUPPORTED) for name in _UNSUPPORTED),
        *(Method(name, AnyArgs, Kind.UNSUPPORTED, only_reads=True) for name in _UNSUPPORTED_READS),
    )
}
"""Every method of the contract by its name."""


def parse_args(method: Method, args: object) -> pydantic.BaseModel:
    """Checks a method's arguments.

    Raises:
        InvalidRequest: naming the member; a value is never repeated, since it may be a secret.
    """
    if not isinstance(args, dict):
        raise errors.InvalidRequest("args must be an object", member="args")
    _check_members(args)
    try:
        return method.args.model_validate(args)
    except pydantic.ValidationError as error:
        raise invalid(error, "args") from None


def _check_members(args: dict[Any, Any]) -> None:
    """Refuses what has more members than anything in the contract could need."""
    left: list[tuple[str, dict[Any, Any] | list[Any]]] = [("args", args)]
    while left:
        place, value = left.pop()
        if len(value) > MAX_MEMBERS:
            member = place[:200]
            raise errors.InvalidRequest(
                f"{member}: has {len(value)} members; at most {MAX_MEMBERS} are accepted",
                member=member,
            )
        members = value.items() if isinstance(value, dict) else enumerate(value)
        left += [
            (f"{place}.{name}"[:201], member)
            for name, member in members
            if isinstance(member, dict | list)
        ]


def invalid(error: pydantic.ValidationError, root: str) -> errors.InvalidRequest:
    """The error of the contract for the first thing that pydantic found wrong."""
    first = error.errors(include_input=False, include_url=False)[0]
    member = ".".join([root, *(str(part) for part in first["loc"])])[:200]
    text = str(first["msg"]).removeprefix("Value error, ")
    return errors.InvalidRequest(f"{member}: {redaction.mask_text(text)}", member=member)
