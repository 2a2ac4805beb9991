import asyncio
import pathlib
import re
import uuid
from typing import Any

import pytest

from messages import errors
from worker import process
from worker.drivers import base as drivers
from worker.drivers import fake as fake_drivers
from worker.targets import base, fake, iscsi

PREFIX = "iqn.2010-10.org.openstack:"


def target_of(cls: Any, **options: Any) -> Any:
    context = base.Context(
        "host-a", "fast", cls.Options(**options), process.Executor(), pathlib.Path("/nowhere")
    )
    return cls(context)


def connection_for(target: Any, **connector: str) -> base.Connection:
    return base.Connection(
        uuid.uuid4(), connector, base.AccessMode.READ_WRITE, target.new_credentials()
    )


VOLUME = drivers.Volume(uuid.uuid4(), "v", 1)


@pytest.mark.parametrize(
    ("cls", "kind", "protocol", "prefix"),
    [
        (fake.FakeTarget, "iscsi", "iSCSI", PREFIX),
        (fake.FakeIserTarget, "iser", "iSER", "iqn.2010-10.org.iser.openstack:"),
    ],
)
async def test_a_fake_target_tells_all_that_a_real_one_would(
    cls: Any, kind: str, protocol: str, prefix: str
) -> None:
    target = target_of(cls)
    connection = connection_for(target, initiator="iqn.1993-08.org.debian:01:a")
    info = await target.initialize_connection(VOLUME, pathlib.Path(), connection)
    assert target.storage_protocol == protocol
    assert info.driver_volume_type == kind
    assert info.data["target_iqn"] == f"{prefix}volume-{VOLUME.id}-{connection.id}"
    assert info.data["target_portal"] == "127.0.0.1:3260"
    assert info.data["target_lun"] == 1
    assert info.data["auth_method"] == "CHAP"
    assert len(info.data["auth_username"]) == 20
    assert len(info.secrets["auth_password"]) == 16
    assert info.secrets["auth_password"] not in repr(info)


def test_a_secret_has_the_96_random_bits_of_the_rfc_and_needs_no_quoting() -> None:
    made = [target_of(fake.FakeTarget).new_credentials() for _ in range(300)]
    secrets = "".join(each["auth_password"] for each in made)
    assert len(set(secrets)) == 64
    assert re.fullmatch(r"[A-Za-z0-9._]+", secrets)
    assert len({each["auth_password"] for each in made}) == len(made)
    assert all(each["auth_username"].isalnum() for each in made)


@pytest.mark.parametrize(
    ("options", "portal"),
    [
        ({}, "127.0.0.1:3260"),
        ({"target_address": "192.0.2.7"}, "192.0.2.7:3260"),
        ({"iscsi_ip_address": "192.0.2.7", "iscsi_port": 3261}, "192.0.2.7:3261"),
        ({"target_address": "::1", "iscsi_ip_address": "[::1]"}, "[::1]:3260"),
        ({"target_address": "FD00::A"}, "[fd00::a]:3260"),
    ],
)
def test_the_portal_is_an_address_and_a_port(options: dict[str, Any], portal: str) -> None:
    target = target_of(fake.FakeTarget, **options)
    assert str(target.portal) == portal
    assert target.provider_location(VOLUME.id) == f"{portal},1 {PREFIX}volume-{VOLUME.id} 1"


@pytest.mark.parametrize(
    "options",
    [
        {"iscsi_port": 0},
        {"iscsi_port": 65536},
        {"iscsi_ip_address": "storage.example.org"},
        {"iscsi_ip_address": "127.0.0.0.1"},
        {"target_address": "0.0.0.0"},
        {"target_address": "::"},
        {"target_address": "192.0.2.1", "iscsi_ip_address": "192.0.2.2"},
        {"iscsi_target_prefix": "iqn.2010-10.org.openstack"},
        {"iscsi_target_prefix": "iqn.2010-13.org.openstack:"},
        {"iscsi_target_prefix": "iqn.2010-10.org.openstack:a,b"},
        {"iscsi_target_prefix": "iqn.2010-10.org.openstack:A"},
        {"iscsi_target_prefix": "iqn.2010-10.org.openstack:" + "x" * 200},
        {"iscsi_target_prefix": "iqn.2010-10.org.openstack:\n"},
        {"iscsi_num_targets": 100},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        iscsi.Options(**options)


def test_iser_options_are_checked_alike() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        fake.IserOptions(target_address="192.0.2.1", iser_ip_address="192.0.2.2")


@pytest.mark.parametrize(
    "initiator",
    [
        "iqn.1993-08.org.debian:01:abcdef",
        "iqn.1991-05.com.microsoft:host_1.example.org",
        "iqn.2008-11.org.linux-kvm",
        "IQN.1998-01.com.VMware:esx-1",
        "eui.02004567A425678D",
        "naa.52004567BA64678D",
        "naa.62004567BA64678D0123456789ABCDEF",
    ],
)
def test_an_initiators_name_may_have_any_form_of_the_rfc(initiator: str) -> None:
    target = target_of(fake.FakeTarget)
    connector = {"initiator": initiator, "host": "h"}
    before = dict(connector)
    target.validate_connector(connector)
    assert connector == before


@pytest.mark.parametrize(
    "connector",
    [
        {},
        {"initiator": None},
        {"initiator": ""},
        {"initiator": ["iqn.1993-08.org.debian:01:a"]},
        {"initiator": "host-a"},
        {"initiator": "iqn."},
        {"initiator": "iqn.1993-08.org.debian:01:a b"},
        {"initiator": "iqn.1993-08.org.debian:01:a,ALL"},
        {"initiator": "iqn.1993-08.org.debian:01:a\n"},
        {"initiator": "eui.123"},
        {"initiator": "iqn.1993-08.org.debian:" + "x" * 250},
        {"nqn": "nqn.2014-08.org.nvmexpress:uuid:1"},
    ],
)
def test_a_connector_without_an_initiators_name_is_refused(connector: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidConnector, match="initiator"):
        target_of(fake.FakeTarget).validate_connector(connector)


async def test_a_fake_does_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is done without a turn of the event loop, a thread, a file or a program."""

    def forbid(*_: object, **__: object) -> None:
        raise AssertionError("this costs something")

    driver: Any = fake_drivers.FakeISCSIDriver  # a Protocol's own empty methods are no faults
    made = driver(
        drivers.Context(
            "host-a", "fast", drivers.Options(), process.Executor(), pathlib.Path("/nowhere")
        )
    )
    monkeypatch.setattr(asyncio, "to_thread", forbid)
    monkeypatch.setattr(process.Executor, "run", forbid)
    monkeypatch.setattr(pathlib.Path, "open", forbid)
    call = made.create_volume(VOLUME)
    with pytest.raises(StopIteration) as done:
        call.send(None)
    assert done.value.value == drivers.Update()
