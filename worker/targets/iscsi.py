"""What every iSCSI target shares: names, portals, CHAP accounts, and what a connector is told.

The volume's export is the target ``PREFIX`` + ``volume-VOLUME_ID``. Each connection has a target of
its own, that name with ``-CONNECTION_ID`` after it and an account of its own, so that its access
mode is enforced and its end touches nobody else, whatever other connections its host has.
"""

import ipaddress
import re
import secrets
import string
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

import pydantic

from messages import errors
from worker.drivers import base as drivers
from worker.targets import base

LUN: Final = 1
"""LUN 0 is the controller's where tgt serves."""
_LONGEST_NAME: Final = 223
"""Bytes; RFC 7143, section 4.2.7.2."""
_LONGEST_PREFIX: Final = _LONGEST_NAME - len(f"volume-{uuid.UUID(int=0)}-{uuid.UUID(int=0)}")

# Date and domain in an initiator's name are not judged: there are those that get them wrong.
_INITIATOR: Final = re.compile(
    r"iqn\.[a-z0-9][a-z0-9._:-]*|eui\.[0-9a-f]{16}|naa\.(?:[0-9a-f]{16}){1,2}", re.IGNORECASE
)
_PREFIX: Final = re.compile(
    rf"(?=.{{1,{_LONGEST_PREFIX}}}$)iqn\.\d{{4}}-(?:0[1-9]|1[0-2])\.[a-z0-9-]+(?:\.[a-z0-9-]+)*"
    r":[a-z0-9.:-]*"
)

# 64 characters of 6 bits: 16 of them are the 96 random bits that RFC 7143, section 9.2.1, demands,
# and no more than the 16 bytes that some initiators take. None needs quoting anywhere.
_SECRET_ALPHABET: Final = string.ascii_letters + string.digits + "._"
_USERNAME_LENGTH: Final = 20
_SECRET_LENGTH: Final = 16


class Portal(NamedTuple):
    """Where a target is reached; an IPv6 address is without brackets."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self[0]}]:{self[1]}" if ":" in self[0] else f"{self[0]}:{self[1]}"


def check_prefix(text: str) -> str:
    """Returns the beginning of target names.

    Raises:
        ValueError: it is none (RFC 7143, section 4.2.7.3), or leaves too few bytes for the ids.
    """
    if not _PREFIX.fullmatch(text):
        raise ValueError(
            "must be iqn.YYYY-MM.REVERSED-DOMAIN: and perhaps more in lower case, at most"
            f" {_LONGEST_PREFIX} characters, such as iqn.2010-10.org.openstack:"
        )
    return text


def check_address(text: str) -> str:
    """Returns an IP address as connections carry it.

    Raises:
        ValueError: it is none that a connection can be made to. Host names are refused, since
            initiators compare portals and name devices by the address.
    """
    address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    if address.is_unspecified:
        raise ValueError("must be an address that initiators can connect to, not a wildcard")
    return str(address)


def check_agreement(address: str | None, older: str | None, older_name: str) -> None:
    """Raises ``ValueError`` where ``target_address`` and its older name say two things."""
    if address and older and address != older:
        raise ValueError(f"{older_name} contradicts target_address; leave one away")


Prefix = Annotated[str, pydantic.AfterValidator(check_prefix)]
Address = Annotated[str, pydantic.AfterValidator(check_address)]
Port = Annotated[int, pydantic.Field(ge=1, le=65535)]


class Options(base.Options):
    """Options of every iSCSI target; the names are Cinder's."""

    target_address: Address | None = pydantic.Field(None, description="what connections carry")
    iscsi_target_prefix: Prefix = "iqn.2010-10.org.openstack:"
    iscsi_ip_address: Address | None = pydantic.Field(
        None, description="the older name of target_address; 127.0.0.1 where neither is given"
    )
    iscsi_port: Port = 3260

    @pydantic.model_validator(mode="after")
    def _one_address(self) -> Self:
        check_agreement(self.target_address, self.iscsi_ip_address, "iscsi_ip_address")
        return self

    @property
    def prefix(self) -> str:
        """What every target's name begins with."""
        return self.iscsi_target_prefix

    @property
    def portal(self) -> Portal:
        """Where every target is reached."""
        return Portal(self.target_address or self.iscsi_ip_address or "127.0.0.1", self.iscsi_port)


class IscsiTarget(base.Target):
    """The part of an iSCSI target that no target service is needed for."""

    Options: ClassVar[type[pydantic.BaseModel]] = Options
    storage_protocol: ClassVar[str] = "iSCSI"
    driver_volume_type: ClassVar[str] = "iscsi"

    def __init__(self, context: base.Context) -> None:
        self.prefix: str = context.options.prefix
        self.portal: Portal = context.options.portal

    async def close(self) -> None:
        """Holds nothing."""

    def volume_iqn(self, volume_id: uuid.UUID) -> str:
        """The name of a volume's export."""
        return f"{self.prefix}volume-{volume_id}"

    def connection_iqn(self, volume_id: uuid.UUID, connection_id: uuid.UUID) -> str:
        """The name of a connection's target."""
        return f"{self.volume_iqn(volume_id)}-{connection_id}"

    def provider_location(self, volume_id: uuid.UUID) -> str:
        """A volume's export in Cinder's form: ``PORTAL,GROUP IQN LUN``."""
        return f"{self.portal},1 {self.volume_iqn(volume_id)} {LUN}"

    def validate_connector(self, connector: Mapping[str, Any]) -> None:
        """Wants the initiator's name, in one of the forms of RFC 7143, section 4.2.7.

        Raises:
            InvalidConnector: it is missing, empty or no name.
        """
        initiator = connector.get("initiator")
        if not isinstance(initiator, str) or not initiator:
            raise errors.InvalidConnector(
                "the connector needs the name of its iSCSI initiator", member="initiator"
            )
        if len(initiator) > _LONGEST_NAME or not _INITIATOR.fullmatch(initiator):
            raise errors.InvalidConnector(
                "the connector's initiator is no iSCSI name: iqn.…, eui.… or naa.…",
                member="initiator",
            )

    def new_credentials(self) -> Mapping[str, str]:
        """A CHAP account of a connection's own."""
        return {
            "auth_username": _random_text(_USERNAME_LENGTH, string.ascii_letters + string.digits),
            "auth_password": _random_text(_SECRET_LENGTH, _SECRET_ALPHABET),
        }

    def account(self, connection: base.Connection) -> tuple[str, str]:
        """A connection's CHAP name and secret.

        Raises:
            TargetError: it has none, having been made by a target of another kind.
        """
        try:
            return (
                connection.credentials["auth_username"],
                connection.credentials["auth_password"],
            )
        except KeyError:
            raise errors.TargetError(
                "the connection was made without a CHAP account: end it, and make it anew"
            ) from None

    def info(self, volume: drivers.Volume, connection: base.Connection) -> base.Info:
        """What a connector needs to log in, under Cinder's names."""
        user, secret = self.account(connection)
        return base.Info(
            self.driver_volume_type,
            {
                "target_discovered": False,
                "target_iqn": self.connection_iqn(volume.id, connection.id),
                "target_portal": str(self.portal),
                "target_lun": LUN,
                "volume_id": str(volume.id),
                "auth_method": "CHAP",
                "auth_username": user,
                "access_mode": connection.access_mode.value,
                "encrypted": False,
                "discard": True,
            },
            {"auth_password": secret},
        )


def _random_text(length: int, alphabet: str) -> str:
    return "".join(secrets.choice(alphabet) for _ in range(length))
