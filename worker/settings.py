"""Configuration: one TOML file, and the environment, which wins.

Each top-level key is also ``VOLUME_WORKER_<KEY>``. Unknown keys and values out of range are refused
with their place. A backend's options are those of its driver and of its target together.
"""

import dataclasses
import enum
import os
import pathlib
import shlex
import socket
import tomllib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import pydantic
import pydantic_settings

from messages import errors, topology
from worker import plugins

CONFIG_VARIABLE: Final = "VOLUME_WORKER_CONFIG"

Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


def _location(value: str) -> str:
    if not value.startswith(("file:///", "https://")) or value == "https://":
        raise ValueError("must begin with file:/// or https:// and a host")
    if not value.isprintable() or " " in value:
        raise ValueError("must not contain spaces or control characters")
    return value


Location = Annotated[str, pydantic.AfterValidator(_location)]
"""What URLs of images or backups may begin with."""


def _read_url(url: pydantic.SecretStr, *schemes: str, many_hosts: bool) -> pydantic.SecretStr:
    """Refuses a URL that a driver would take apart where its writer did not mean it.

    A password with a special character ends what should have been the host's part, and the rest of
    it would be taken for a host, a port or a name, and shown as such.
    """
    if not _is_readable(url.get_secret_value(), schemes, many_hosts=many_hosts):
        raise ValueError(
            f"cannot be read: it must look like {schemes[0]}://USER:PASSWORD@HOST:PORT/NAME; "
            "percent-encode the password's special characters"
        )
    return url


def _is_readable(url: str, schemes: Sequence[str], *, many_hosts: bool) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.query:
            urllib.parse.parse_qs(parts.query, strict_parsing=True)
        _, _, place = parts.netloc.rpartition("@")
        hosts = [
            urllib.parse.urlsplit(f"//{host}")
            for host in (place.split(",") if many_hosts else [place])
        ]
        # Of PostgreSQL's there may be none: then it is in the query, or the environment's.
        has_hosts = all(host.hostname and host.port != 0 for host in hosts)
    except ValueError:
        return False
    is_cut = "#" in url or "@" in parts.path + parts.query.partition("=")[0]
    # asyncpg ends the password at the first @.
    is_cut = is_cut or (many_hosts and parts.netloc.count("@") > 1)
    return parts.scheme in schemes and not is_cut and (has_hosts or (many_hosts and not place))


class ConfigurationError(errors.VolumeWorkerError):
    """The configuration is wrong; the text names the place."""


class Attach(enum.StrEnum):
    """How this host attaches volumes that live elsewhere."""

    USERLAND = "userland"
    KERNEL = "kernel"
    AUTO = "auto"


class _Common(pydantic.BaseModel):
    """What every backend has, whatever its driver and target."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    driver: str
    target: str
    attach: Attach = Attach.AUTO

    @pydantic.field_validator("attach")
    @classmethod
    def _userland_only(cls, value: Attach) -> Attach:
        if value is Attach.KERNEL:
            raise ValueError('"kernel" is not built yet; use "userland" or "auto"')
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One backend as configured."""

    name: str
    driver: str
    target: str
    options: Any
    """Has the options of the driver and those of the target."""


class Settings(pydantic_settings.BaseSettings):
    """The configuration of one worker."""

    model_config = pydantic_settings.SettingsConfigDict(
        env_prefix="VOLUME_WORKER_", extra="forbid", frozen=True
    )

    host: str = pydantic.Field(default_factory=socket.gethostname)
    broker_url: pydantic.SecretStr = pydantic.SecretStr("amqp://guest:guest@127.0.0.1:5672/")
    database_url: pydantic.SecretStr = pydantic.SecretStr(
        "postgresql://postgres@127.0.0.1:5432/volume_worker"
    )
    namespace: str = "volume"
    state_dir: pathlib.Path = pathlib.Path("/var/lib/volume-worker")
    http_listen: str = pydantic.Field("127.0.0.1:8776", description="empty: no HTTP")
    # These two are accepted and checked already, so that a configuration need not change later.
    image_locations: list[Location] = pydantic.Field(
        [], description="takes effect with the image methods, which are not built yet"
    )
    backup_locations: list[Location] | None = pydantic.Field(
        None, description="takes effect with the backup methods, which are not built yet"
    )
    root_helper: list[str] | str | None = None
    max_attempts: int = pydantic.Field(5, ge=1, le=100)
    max_request_bytes: int = pydantic.Field(1024 * 1024, ge=1024, le=16 * 1024 * 1024)
    job_retention: Seconds = 7 * 24 * 3600.0
    drain_timeout: float = pydantic.Field(300.0, ge=0, allow_inf_nan=False)
    lease: float = pydantic.Field(30.0, ge=3, allow_inf_nan=False)
    stats_interval: Seconds = 10.0
    reconcile_interval: Seconds = 60.0
    control_slots: int = pydantic.Field(32, ge=1, le=1000)
    data_slots: int = pydantic.Field(2, ge=1, le=1000)
    database_pool_size: int = pydantic.Field(8, ge=2, le=100)
    database_statement_cache_size: int = pydantic.Field(100, ge=0)
    backends: dict[str, dict[str, Any]] = {}

    @pydantic.field_validator("broker_url")
    @classmethod
    def _broker_url(cls, value: pydantic.SecretStr) -> pydantic.SecretStr:
        return _read_url(value, "amqp", "amqps", many_hosts=False)

    @pydantic.field_validator("database_url")
    @classmethod
    def _database_url(cls, value: pydantic.SecretStr) -> pydantic.SecretStr:
        return _read_url(value, "postgresql", "postgres", many_hosts=True)

    @pydantic.field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        if not topology.HOST.fullmatch(value):
            raise ValueError("must be letters, digits, _, - and ., at most 100")
        return value

    @pydantic.field_validator("namespace")
    @classmethod
    def _namespace(cls, value: str) -> str:
        if not topology.NAMESPACE.fullmatch(value):
            raise ValueError("must be letters, digits, _ and -, at most 100")
        return value

    @pydantic.field_validator("http_listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError("must be HOST:PORT, or empty for no HTTP")
        return value

    @pydantic.field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: pathlib.Path) -> pathlib.Path:
        if not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @pydantic.field_validator("backends")
    @classmethod
    def _backend_names(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in value:
            if not topology.BACKEND.fullmatch(name):
                raise ValueError(f"{name!r} must be letters, digits, _ and -, at most 100")
        return value

    @pydantic.model_validator(mode="after")
    def _queue_names(self) -> "Settings":
        names = topology.Topology(self.namespace)
        for address in self.addresses():
            size = len(names.queue(address))
            if size > topology.MAX_QUEUE_NAME:
                raise ValueError(
                    f"namespace, host and the name of backend {address.partition('@')[2]!r} make a "
                    f"queue's name of {size} bytes; the broker takes {topology.MAX_QUEUE_NAME}"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: pydantic_settings.PydanticBaseSettingsSource,
        env_settings: pydantic_settings.PydanticBaseSettingsSource,
        dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,
        file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        """The environment first, then the file (which :func:`load` hands over as arguments)."""
        return env_settings, init_settings

    def addresses(self) -> list[str]:
        """The address of every backend of this host."""
        return [topology.address(self.host, name) for name in self.backends]

    def root_command(self) -> tuple[str, ...]:
        """What goes before a program that needs root: nothing for root, else ``sudo -n``."""
        match self.root_helper:
            case None:
                return () if os.geteuid() == 0 else ("sudo", "-n")
            case str():
                return tuple(shlex.split(self.root_helper))
            case list():
                return tuple(self.root_helper)


def load(path: pathlib.Path | None = None) -> Settings:
    """Reads the configuration; without ``path``, what ``VOLUME_WORKER_CONFIG`` names, if anything.

    Raises:
        ConfigurationError: naming the place of what is wrong.
    """
    if path is None and (named := os.environ.get(CONFIG_VARIABLE)):
        path = pathlib.Path(named)
    _refuse_unknown_variables()
    try:
        return Settings(**({} if path is None else _read(path)))
    except pydantic.ValidationError as error:
        raise ConfigurationError(_describe(error, _place(path))) from None
    except pydantic_settings.SettingsError as error:
        raise ConfigurationError(f"the environment: {error}") from None


def backends(settings: Settings) -> list[Backend]:
    """Every backend with its options checked.

    Raises:
        ConfigurationError: naming the place of what is wrong.
    """
    return [_backend(name, raw) for name, raw in settings.backends.items()]


def _refuse_unknown_variables() -> None:
    prefix = "VOLUME_WORKER_"
    known = {f"{prefix}{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE}
    for name in os.environ:
        if name.startswith(prefix) and name not in known:
            raise ConfigurationError(f"the environment: {name}: unknown key")


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


_HELPERS: Final[Mapping[str, str]] = {
    "tgtadm": "tgt",
    "lioadm": "lio",
    "ietadm": "iet",
    "fake": "fake",
}
"""The targets by the names that ``iscsi_helper`` had."""


def _backend(name: str, raw: Mapping[str, Any]) -> Backend:
    place = f"backends.{name}"
    values = dict(raw)
    for key in ("driver", "target", "iscsi_helper"):
        if not isinstance(values.get(key, ""), str):
            raise ConfigurationError(f"{place}.{key}: must be a name")
    if "driver" not in values:
        raise ConfigurationError(f"{place}.driver: must name a driver")
    try:
        driver = plugins.load("drivers", values["driver"])
        named = _target_name(values, place) or driver.default_target
        values["target"] = driver.target_aliases.get(named, named)
        target = plugins.load("targets", values["target"])
    except plugins.UnknownPlugin as error:
        raise ConfigurationError(f"{place}: {error}") from None
    model: Any = type("BackendOptions", (_Common, driver.Options, target.Options), {})
    try:
        options = model.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigurationError(_describe(error, place, inside=True)) from None
    return Backend(name, values["driver"], values["target"], options)


def _target_name(values: dict[str, Any], place: str) -> str | None:
    named: str | None = values.pop("target", None)
    helper = values.pop("iscsi_helper", None)
    if helper is None:
        return named
    if helper not in _HELPERS:
        raise ConfigurationError(
            f"{place}.iscsi_helper: {helper!r} is none of {', '.join(sorted(_HELPERS))}"
        )
    if named not in (None, _HELPERS[helper]):
        raise ConfigurationError(
            f"{place}.iscsi_helper: {helper!r} contradicts target {named!r}; leave one away"
        )
    return _HELPERS[helper]


def _place(path: pathlib.Path | None) -> str:
    return "the environment" if path is None else f"{path} or the environment"


def _describe(error: pydantic.ValidationError, place: str, *, inside: bool = False) -> str:
    lines = []
    for fault in error.errors(include_input=False, include_url=False):
        key = ".".join(str(part) for part in fault["loc"])
        text = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text = "unknown key"
        separator = "." if inside and key else ": "
        lines.append(f"{place}{separator}{key}: {text}" if key else f"{place}: {text}")
    return "; ".join(lines)
