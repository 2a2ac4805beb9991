"""The configuration: a file and the environment, and what is refused with its place."""

import os
import pathlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from worker import plugins, settings

Write = Callable[[str], pathlib.Path]


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("VOLUME_WORKER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    def write_file(text: str) -> pathlib.Path:
        path = tmp_path / "worker.toml"
        path.write_text(text)
        return path

    return write_file


def backend_of(path: pathlib.Path) -> settings.Backend:
    (one,) = settings.backends(settings.load(path))
    return one


def refusal_of(path: pathlib.Path | None) -> str:
    """What the configuration is refused with, top-level keys or backends."""
    with pytest.raises(settings.ConfigurationError) as refused:
        settings.backends(settings.load(path))
    return refused.value.message


# Files and the environment


def test_defaults_are_those_of_the_contract() -> None:
    configured = settings.load()
    assert configured.broker_url.get_secret_value() == "amqp://guest:guest@127.0.0.1:5672/"
    assert (
        configured.database_url.get_secret_value()
        == "postgresql://postgres@127.0.0.1:5432/volume_worker"
    )
    assert configured.namespace == "volume"
    assert configured.state_dir == pathlib.Path("/var/lib/volume-worker")
    assert configured.http_listen == "127.0.0.1:8776"
    assert configured.image_locations == []
    assert configured.max_attempts == 5
    assert configured.job_retention == 7 * 24 * 3600
    assert configured.drain_timeout == 300
    assert configured.lease == 30
    assert (configured.control_slots, configured.data_slots) == (32, 2)
    assert configured.stats_interval == 10
    assert configured.max_request_bytes == 1024 * 1024
    assert configured.backends == {}


def test_the_host_is_the_machines_name_by_default() -> None:
    assert settings.load().host == socket.gethostname()


def test_a_file_is_read(write: Write) -> None:
    configured = settings.load(
        write('host = "host-a"\nmax_attempts = 7\nlease = 12.5\n[backends.fast]\ndriver = "file"')
    )
    assert (configured.host, configured.max_attempts, configured.lease) == ("host-a", 7, 12.5)
    assert configured.addresses() == ["host-a@fast"]


def test_the_environment_names_the_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLUME_WORKER_CONFIG", str(write('host = "host-a"')))
    assert settings.load().host == "host-a"


def test_a_file_that_is_named_goes_before_the_one_of_the_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLUME_WORKER_CONFIG", "/nonexistent/other.toml")
    assert settings.load(write('host = "host-a"')).host == "host-a"


def test_the_environment_wins(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('host = "host-a"\nmax_attempts = 7\nlease = 12.5')
    monkeypatch.setenv("VOLUME_WORKER_HOST", "host-b")
    monkeypatch.setenv("VOLUME_WORKER_MAX_ATTEMPTS", "2")
    configured = settings.load(path)
    assert (configured.host, configured.max_attempts, configured.lease) == ("host-b", 2, 12.5)


def test_lists_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLUME_WORKER_IMAGE_LOCATIONS", '["file:///a/", "https://b/c/"]')
    monkeypatch.setenv("VOLUME_WORKER_BACKUP_LOCATIONS", '["file:///d/"]')
    configured = settings.load()
    assert configured.image_locations == ["file:///a/", "https://b/c/"]
    assert configured.backup_locations == ["file:///d/"]


@pytest.mark.parametrize("text", ["file:///a/", "[", '"file:///a/"', "{}", "5"])
def test_a_list_in_the_environment_that_is_none_is_refused_by_its_name(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLUME_WORKER_IMAGE_LOCATIONS", text)
    assert "image_locations" in refusal_of(None).lower()


def test_backends_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLUME_WORKER_HOST", "host-a")
    monkeypatch.setenv("VOLUME_WORKER_BACKENDS", '{"fast": {"driver": "fake_iscsi"}}')
    configured = settings.load()
    assert configured.addresses() == ["host-a@fast"]
    assert settings.backends(configured)[0].driver == "fake_iscsi"


def test_an_empty_http_listen_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLUME_WORKER_HTTP_LISTEN", "")
    assert settings.load().http_listen == ""


def test_urls_are_not_shown_where_the_settings_are() -> None:
    assert "guest:guest" not in repr(settings.load())


@pytest.mark.parametrize(
    ("helper", "command"),
    [
        ('root_helper = "doas -n"', ("doas", "-n")),
        ('root_helper = ["run0", "a b"]', ("run0", "a b")),
        ('root_helper = ""', ()),
        ("root_helper = []", ()),
    ],
)
def test_the_root_helper_is_a_command(write: Write, helper: str, command: tuple[str, ...]) -> None:
    assert settings.load(write(helper)).root_command() == command


def test_the_root_helper_of_the_environment_may_be_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLUME_WORKER_ROOT_HELPER", "sudo -n")
    assert settings.load().root_command() == ("sudo", "-n")
    monkeypatch.setenv("VOLUME_WORKER_ROOT_HELPER", '["doas"]')
    assert settings.load().root_command() == ("doas",)


@pytest.mark.parametrize(("uid", "command"), [(0, ()), (1000, ("sudo", "-n"))])
def test_without_a_root_helper_sudo_is_used_unless_root(
    uid: int, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert settings.load().root_command() == command


# Refusals at the top


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('hots = "a"', "hots"),
        ("backend = {}", "backend"),
        ('host = "a/b"', "host"),
        ('host = ""', "host"),
        (f'host = "{"h" * 101}"', "host"),
        ('host = "a@b"', "host"),
        ("host = 5", "host"),
        ('namespace = "a.b"', "namespace"),
        ('namespace = ""', "namespace"),
        ('namespace = "a#"', "namespace"),
        ('state_dir = "state"', "state_dir"),
        ("state_dir = 5", "state_dir"),
        ("max_attempts = 0", "max_attempts"),
        ("max_attempts = 101", "max_attempts"),
        ('max_attempts = "many"', "max_attempts"),
        ("max_request_bytes = 1", "max_request_bytes"),
        ("max_request_bytes = 1073741824", "max_request_bytes"),
        ("job_retention = 0", "job_retention"),
        ("job_retention = -1", "job_retention"),
        ("drain_timeout = -1", "drain_timeout"),
        ("drain_timeout = nan", "drain_timeout"),
        ("lease = 1", "lease"),
        ("lease = nan", "lease"),
        ("lease = inf", "lease"),
        ("stats_interval = 0", "stats_interval"),
        ("stats_interval = inf", "stats_interval"),
        ("control_slots = 0", "control_slots"),
        ("data_slots = 0", "data_slots"),
        ("data_slots = 1.5", "data_slots"),
        ("data_slots = 1001", "data_slots"),
        ('image_locations = "file:///a/"', "image_locations"),
        ("image_locations = [5]", "image_locations"),
        ('image_locations = ["http://images/"]', "image_locations.0"),
        ('image_locations = ["file://images/"]', "image_locations.0"),
        ('image_locations = ["https://"]', "image_locations.0"),
        ('image_locations = ["/srv/images/"]', "image_locations.0"),
        ('backup_locations = ["file:///a/", "ftp://b/"]', "backup_locations.1"),
        ('backup_locations = ["https://b/c d"]', "backup_locations.0"),
        ("backends = []", "backends"),
        ("backends = {fast = 5}", "backends.fast"),
        ('[backends."fa.st"]', "backends"),
        ('[backends."a@b"]', "backends"),
        ('http_listen = "nonsense"', "http_listen"),
        ('http_listen = "127.0.0.1:99999"', "http_listen"),
        ("http_listen = 8776", "http_listen"),
        ("root_helper = 5", "root_helper"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_place(write: Write, line: str, key: str) -> None:
    path = write(line)
    text = refusal_of(path)
    assert key in text
    assert str(path) in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOST", "a/b"),
        ("LEASE", "1"),
        ("MAX_ATTEMPTS", "many"),
        ("DATA_SLOTS", "0"),
        ("BACKENDS", "{"),
    ],
)
def test_a_wrong_value_in_the_environment_is_refused_with_its_place(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"VOLUME_WORKER_{name}", value)
    text = refusal_of(None)
    assert "environment" in text
    assert name.lower() in text.lower()


def test_an_unknown_key_in_the_environment_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VOLUME_WORKER_MAX_ATTEMPT", "3")
    text = refusal_of(None)
    assert "VOLUME_WORKER_MAX_ATTEMPT" in text


def test_all_faults_are_told_at_once(write: Write) -> None:
    text = refusal_of(write('lease = 1\nhost = "a/b"'))
    assert "lease" in text
    assert "host" in text


def test_names_that_make_no_name_of_a_queue_are_refused_together(write: Write) -> None:
    lines = 'namespace = "{}"\nhost = "{}"\n[backends.{}]\ndriver = "fake_iscsi"'
    assert settings.load(write(lines.format("n" * 100, "h" * 100, "b" * 53)))
    text = refusal_of(write(lines.format("n" * 100, "h" * 100, "b" * 54)))
    assert "namespace, host and the name of backend" in text
    assert "256 bytes" in text


def test_a_refusal_does_not_repeat_a_password(write: Write) -> None:
    text = refusal_of(write('broker_url = ["amqp://u:hunter2@h/"]\ndatabase_url = 5'))
    assert "broker_url" in text
    assert "hunter2" not in text


@pytest.mark.parametrize("special", ["/", "#", "?", "[", "/x@", "?x@", "@x/y@", "#x@", "?a=b&c#"])
@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("broker_url", "amqp://guest:{}@127.0.0.1:5672/"),
        ("database_url", "postgresql://guest:{}@127.0.0.1:5432/volume_worker"),
    ],
)
@pytest.mark.parametrize("secret", ["hunter2", "4711"])
def test_a_password_with_a_special_character_is_refused_and_not_shown(
    write: Write, key: str, url: str, special: str, secret: str
) -> None:
    text = refusal_of(write(f"{key} = '{url.format(f'{secret}{special}{secret}')}'"))
    assert f"{key}: cannot be read" in text
    assert "percent-encode" in text
    assert secret not in text


@pytest.mark.parametrize(
    "line",
    [
        'broker_url = ""',
        'broker_url = "hunter2"',
        'broker_url = "http://guest:hunter2@127.0.0.1/"',
        'broker_url = "amqp://guest:hunter2@/"',
        'broker_url = "amqp://guest:hunter2@broker:port/"',
        'broker_url = "amqp://guest:hunter2@broker:65536/"',
        'broker_url = "amqp://guest:hunter2@[::1/"',
        'database_url = "hunter2"',
        'database_url = "mysql://u:hunter2@db/x"',
        'database_url = "postgresql://u:hunter2@db:port/x"',
        'database_url = "postgresql://u:hunter2@db,other:port/x"',
        'database_url = "postgresql://u:hunter2@hunter2@db/x"',
        'database_url = "postgresql://db/x?hunter2"',
    ],
)
def test_a_url_that_leads_nowhere_is_refused_and_not_shown(write: Write, line: str) -> None:
    text = refusal_of(write(line))
    assert "_url: cannot be read" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "line",
    [
        'broker_url = "amqp://broker"',
        'broker_url = "amqps://u:a%2F%23%3F%40b@broker/%2Fvhost?heartbeat=10&cafile=/etc/ca.pem"',
        'broker_url = "amqp://u:p@[::1]:5672/"',
        'database_url = "postgres://u:p,q:r@db/x"',
        'database_url = "postgresql://u@first:5432,[::1]:5433,third/x?target_session_attrs=any"',
        'database_url = "postgresql:///x?host=/var/run/postgresql"',
        'database_url = "postgresql://u:a%2F%23%3F%40b@%2Fvar%2Frun/x?password=a@b"',
    ],
)
def test_a_url_of_each_kind_is_read(write: Write, line: str) -> None:
    path = write(line)
    assert settings.load(path)


def test_a_file_that_is_missing_or_no_toml_is_named(write: Write, tmp_path: pathlib.Path) -> None:
    missing = tmp_path / "missing.toml"
    assert str(missing) in refusal_of(missing)
    assert str(tmp_path) in refusal_of(tmp_path)
    path = write("host = ")
    assert f"{path} is not TOML" in refusal_of(path)
    path.write_bytes(b'host = "\xff"')
    assert f"{path} is not TOML" in refusal_of(path)


# Backends


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("", "backends.fast.driver"),
        ("driver = 5", "backends.fast.driver"),
        ('driver = "file"', "backends.fast.directory"),
        ('driver = "file"\ndirectory = "relative"', "backends.fast.directory"),
        ('driver = "fake_iscsi"\ntypo = 1', "backends.fast.typo: unknown key"),
        ('driver = "fake_iscsi"\nattach = "magic"', "backends.fast.attach"),
        ('driver = "fake_iscsi"\ntarget = 5', "backends.fast"),
        ('driver = "fake_iscsi"\ntarget = ["nbd"]', "backends.fast"),
        ('driver = "fake_iscsi"\niscsi_helper = "iscsictl"', "backends.fast.iscsi_helper"),
        ('driver = "fake_iscsi"\niscsi_helper = ["tgtadm"]', "backends.fast.iscsi_helper"),
        ('driver = "fake_iscsi"\niscsi_helper = 5', "backends.fast.iscsi_helper"),
        ('driver = "fake_iscsi"\ncopy_verify = "perhaps"', "backends.fast.copy_verify"),
    ],
)
def test_a_wrong_backend_is_refused_with_its_place(write: Write, lines: str, place: str) -> None:
    assert place in refusal_of(write(f"[backends.fast]\n{lines}"))


@pytest.mark.parametrize("kind", ["driver", "target"])
def test_an_unknown_plug_in_is_refused_and_those_that_there_are_named(
    write: Write, kind: str
) -> None:
    other = "" if kind == "driver" else 'driver = "fake_iscsi"\n'
    text = refusal_of(write(f'[backends.fast]\n{other}{kind} = "floppy"'))
    assert "backends.fast" in text
    assert "floppy" in text
    for name in plugins.names(f"{kind}s"):
        assert name in text


def test_a_backend_without_a_target_has_its_drivers() -> None:
    raw = {"driver": "fake_iscsi"}
    configured = settings.Settings(backends={"fast": raw})
    assert settings.backends(configured)[0].target == "fake"


def test_a_target_that_is_named_goes_before_the_drivers(
    write: Write, tmp_path: pathlib.Path
) -> None:
    path = write(f'[backends.fast]\ndriver = "file"\ndirectory = "{tmp_path}"\ntarget = "fake"')
    assert backend_of(path).target == "fake"


@pytest.mark.parametrize(("helper", "target"), [("tgtadm", "tgt"), ("fake", "fake")])
def test_iscsi_helper_is_an_alias_of_target(write: Write, helper: str, target: str) -> None:
    path = write(f'[backends.fast]\ndriver = "fake_iscsi"\niscsi_helper = "{helper}"')
    assert backend_of(path).target == target


def test_iscsi_helper_and_target_may_say_the_same(write: Write) -> None:
    path = write('[backends.fast]\ndriver = "fake_iscsi"\niscsi_helper = "tgtadm"\ntarget = "tgt"')
    assert backend_of(path).target == "tgt"


def test_iscsi_helper_that_contradicts_target_is_refused(write: Write) -> None:
    text = refusal_of(
        write('[backends.fast]\ndriver = "fake_iscsi"\niscsi_helper = "tgtadm"\ntarget = "fake"')
    )
    assert "backends.fast.iscsi_helper" in text
    assert "contradicts" in text


# The options that have their names, defaults and choices from Cinder

SEED_OPTIONS: dict[str, Any] = {
    "num_shell_tries": 3,
    "reserved_percentage": 0,
    "num_volume_device_scan_tries": 3,
    "volume_backend_name": None,
    "use_multipath_for_image_xfer": False,
    "volume_clear": "zero",
    "volume_clear_size": 0,
    "iscsi_target_prefix": "iqn.2010-10.org.openstack:",
    "iscsi_ip_address": None,
    "iscsi_port": 3260,
    "max_over_subscription_ratio": 20.0,
}


@pytest.mark.parametrize("name", sorted(SEED_OPTIONS))
def test_an_option_keeps_its_name_and_default(write: Write, name: str) -> None:
    options = backend_of(write('[backends.fast]\ndriver = "fake_iscsi"\ntarget = "tgt"')).options
    assert getattr(options, name) == SEED_OPTIONS[name]


@pytest.mark.parametrize(
    "line",
    [
        "num_shell_tries = 5",
        "reserved_percentage = 100",
        'volume_backend_name = "gold"',
        'volume_clear = "none"',
        'volume_clear = "shred"',
        "volume_clear_size = 1024",
        'iscsi_target_prefix = "iqn.2020-01.org.example:"',
        'iscsi_ip_address = "192.0.2.7"',
        "iscsi_port = 3261",
        "num_volume_device_scan_tries = 9",
        "use_multipath_for_image_xfer = true",
    ],
)
def test_an_option_is_taken_inside_a_backend(write: Write, line: str) -> None:
    path = write(f'[backends.fast]\ndriver = "fake_iscsi"\ntarget = "tgt"\n{line}')
    name, _, value = line.partition(" = ")
    assert str(getattr(backend_of(path).options, name)).lower() == value.strip('"').lower()


def test_num_iscsi_scan_tries_is_the_older_name_of_the_device_scan_tries(write: Write) -> None:
    path = write('[backends.fast]\ndriver = "fake_iscsi"\nnum_iscsi_scan_tries = 7')
    assert backend_of(path).options.num_volume_device_scan_tries == 7


def test_an_older_name_that_contradicts_its_newer_one_is_refused(write: Write) -> None:
    text = refusal_of(
        write(
            '[backends.fast]\ndriver = "fake_iscsi"\n'
            "num_iscsi_scan_tries = 7\nnum_volume_device_scan_tries = 3"
        )
    )
    assert "num_iscsi_scan_tries" in text


@pytest.mark.parametrize(
    "line",
    [
        "num_shell_tries = 0",
        'num_shell_tries = "x"',
        "reserved_percentage = -1",
        "reserved_percentage = 101",
        'volume_clear = "burn"',
        "volume_clear_size = -1",
        "volume_clear_size = 1025",
        'iscsi_target_prefix = "openstack:"',
        'iscsi_ip_address = "0.0.0.0"',
        'iscsi_ip_address = "not an address"',
        "iscsi_port = 0",
        "iscsi_port = 65536",
        "num_volume_device_scan_tries = 0",
        "max_over_subscription_ratio = 0.5",
        'use_multipath_for_image_xfer = "perhaps"',
    ],
)
def test_an_option_out_of_range_is_refused_with_its_place(write: Write, line: str) -> None:
    path = write(f'[backends.fast]\ndriver = "fake_iscsi"\ntarget = "tgt"\n{line}')
    assert f"backends.fast.{line.partition(' = ')[0]}: " in refusal_of(path)


# An NBD server that strangers can reach


def nbd(tmp_path: pathlib.Path, lines: str) -> str:
    return f'[backends.fast]\ndriver = "file"\ndirectory = "{tmp_path}"\ntarget = "nbd"\n{lines}'


@pytest.mark.parametrize(
    "lines",
    [
        'target_listen = "192.0.2.7:10809"',
        'target_listen = "[2001:db8::7]:10809"',
        'target_listen = "storage-a:10809"',
        'target_listen = "0.0.0.0:10809"\ntarget_address = "192.0.2.7"',
        'target_listen = "[::]:10809"\ntarget_address = "192.0.2.7"',
        'target_listen = "192.0.2.7:10809"\ntarget_insecure = false',
    ],
)
def test_nbd_off_loopback_is_refused_without_tls(
    write: Write, tmp_path: pathlib.Path, lines: str
) -> None:
    text = refusal_of(write(nbd(tmp_path, lines)))
    assert "backends.fast" in text
    assert "target_insecure" in text


@pytest.mark.parametrize(
    "lines",
    [
        "",
        'target_listen = "127.0.0.1:10809"',
        'target_listen = "127.9.9.9:10809"',
        'target_listen = "[::1]:10809"',
        'target_listen = "localhost:10809"',
        'target_listen = "192.0.2.7:10809"\ntarget_tls = "psk"',
        'target_listen = "192.0.2.7:10809"\ntarget_insecure = true',
        'target_listen = "0.0.0.0:10809"\ntarget_address = "192.0.2.7"\ntarget_tls = "psk"',
    ],
)
def test_nbd_is_served_on_loopback_or_with_tls_or_knowingly_without(
    write: Write, tmp_path: pathlib.Path, lines: str
) -> None:
    assert backend_of(write(nbd(tmp_path, lines))).target == "nbd"


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:10809", "[::]:10809", ":10809", "127.0.0.1", "127.0.0.1:0", "::1:10809"]
)
def test_an_nbd_address_that_nobody_could_be_told_is_refused(
    write: Write, tmp_path: pathlib.Path, listen: str
) -> None:
    text = refusal_of(write(nbd(tmp_path, f'target_listen = "{listen}"\ntarget_insecure = true')))
    assert "target_listen" in text
