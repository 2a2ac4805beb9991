import contextlib
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import errors
from worker import process
from worker.targets import iscsi, tgtadm

SHOWN = """\
Target 1: iqn.2010-10.org.openstack:volume-1
    System information:
        Driver: iscsi
        State: ready
    I_T nexus information:
        I_T nexus: 2
            Initiator: iqn.1993-08.org.debian:01:a alias: host: one
            Connection: 0
                IP Address: 127.0.0.1
            Connection: 1
                IP Address: fe80::1
        I_T nexus: 7
            Initiator: iqn.1993-08.org.debian:01:b alias: none
    LUN information:
        LUN: 0
            Type: controller
            SCSI ID: IET     00010000
            SCSI SN: beaf10
            Size: 0 MB, Block size: 1
            Online: Yes
            Readonly: No
            Thin-provisioning: No
            Backing store type: null
            Backing store path: None
            Backing store flags: \n\
        LUN: 1
            Type: disk
            SCSI ID: 6abc
            SCSI SN: def
            Size: 17 MB, Block size: 512
            Online: Yes
            Readonly: Yes
            Thin-provisioning: Yes
            Backing store type: rdwr
            Backing store path: /srv/LUN: 5/volume-1
            Backing store flags: direct
    Account information:
        u1
        u2 (outgoing)
    ACL information:
        iqn.1993-08.org.debian:01:a
        ALL
Target 10: iqn.2010-10.org.openstack:volume-10
    System information:
        Driver: iscsi
        State: ready
    I_T nexus information:
    LUN information:
    Account information:
    ACL information:
"""


def test_every_field_is_read() -> None:
    first, tenth = tgtadm.parse_targets(SHOWN)
    assert first == tgtadm.Target(
        1,
        "iqn.2010-10.org.openstack:volume-1",
        connections=[(2, 0), (2, 1)],
        units={
            0: tgtadm.Unit("None", "beaf10"),
            1: tgtadm.Unit("/srv/LUN: 5/volume-1", "def", read_only=True, thin=True),
        },
        accounts=["u1", "u2 (outgoing)"],
        initiators=["iqn.1993-08.org.debian:01:a", "ALL"],
        sessions={2: "iqn.1993-08.org.debian:01:a", 7: "iqn.1993-08.org.debian:01:b"},
    )
    assert tenth == tgtadm.Target(10, "iqn.2010-10.org.openstack:volume-10")


def test_a_name_that_begins_like_another_is_another() -> None:
    by_name = {target.iqn: target.tid for target in tgtadm.parse_targets(SHOWN)}
    assert by_name == {
        "iqn.2010-10.org.openstack:volume-1": 1,
        "iqn.2010-10.org.openstack:volume-10": 10,
    }


def test_no_targets_are_an_empty_list() -> None:
    assert tgtadm.parse_targets("") == []


@pytest.mark.parametrize(
    "text",
    [
        "Segmentation fault\n",
        "Target 1: iqn.x:a\n    LUN information:\n        LUN: one\n",
        "Target 1: iqn.x:a\n    I_T nexus information:\n        I_T nexus:\n",
    ],
)
def test_words_that_cannot_be_read_are_an_error(text: str) -> None:
    with pytest.raises(errors.TargetError, match="cannot be read"):
        tgtadm.parse_targets(text)


@given(st.text(alphabet="Target 1:\n LUNIconxus/._-"))
def test_any_text_is_read_or_refused(text: str) -> None:
    found = {}
    with contextlib.suppress(errors.TargetError):
        found = dict(enumerate(tgtadm.parse_targets(text)))
    assert len(found) <= text.count("Target")


def test_portals_are_read_with_ipv6_addresses() -> None:
    text = "Portal: 0.0.0.0:3260,1\nPortal: [fd00::1]:3261,1\n"
    assert tgtadm.parse_portals(text) == [
        iscsi.Portal("0.0.0.0", 3260),
        iscsi.Portal("fd00::1", 3261),
    ]


def program(folder: pathlib.Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a tgtadm on PATH that does as it is told."""
    path = folder / "tgtadm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.fixture
def tool() -> tgtadm.Tgtadm:
    return tgtadm.Tgtadm(process.Executor())


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ('echo "tgtadm: can\'t find the target" >&2; exit 22', tgtadm.Refused, "find the target"),
        (
            "echo 'tgtadm: failed to send request hdr to tgt daemon, Transport endpoint is not"
            " connected' >&2; exit 107",
            tgtadm.DaemonAway,
            "systemctl start tgt",
        ),
        (
            'echo "tgtadm: can\'t connect to the tgt daemon, Connection refused" >&2; exit 111',
            tgtadm.DaemonAway,
            "systemctl start tgt",
        ),
        ("echo 'tgtadm: tgtd closed the socket' >&2", tgtadm.DaemonAway, "root_helper"),
        ("echo 'tgtadm: a partial response' >&2", tgtadm.DaemonAway, "refuses to talk"),
    ],
)
async def test_each_way_to_fail_is_told_apart(
    tool: tgtadm.Tgtadm,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    script: str,
    kind: type[Exception],
    words: str,
) -> None:
    program(tmp_path, script, monkeypatch)
    with pytest.raises(errors.TargetError, match=words) as caught:
        await tool.targets()
    assert type(caught.value) is kind
    assert caught.value.to_wire()["code"] == "TargetError"
    assert caught.value.retryable


async def test_a_tool_that_hangs_is_given_up_on(
    tool: tgtadm.Tgtadm, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "exec sleep 300", monkeypatch)
    monkeypatch.setattr(tgtadm, "_TIMEOUT", 0.3)
    with pytest.raises(tgtadm.DaemonAway, match="does not answer"):
        await tool.targets()


async def test_a_path_with_a_comma_is_refused_in_plain_words(tool: tgtadm.Tgtadm) -> None:
    with pytest.raises(errors.TargetError, match="comma"):
        await tool.new_unit(1, 1, pathlib.Path("/srv/a,b/volume-1"))
