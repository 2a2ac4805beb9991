"""The rules on arguments that no example shows well."""

import time
import uuid

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import errors, requests

ID = uuid.UUID("6f2c1c52-6a8e-4b61-9f0c-0d6f5a0a9a11")


def volume_named(name: str) -> requests.NewVolume:
    return requests.NewVolume.model_validate({"name": name, "size_bytes": 1})


@settings(deadline=None)
@given(st.text(max_size=300))
def test_a_name_that_passes_names_no_place_and_no_option(name: str) -> None:
    try:
        volume_named(name)
    except pydantic.ValidationError:
        return
    assert 0 < len(name.encode()) <= 255
    assert "/" not in name
    assert ".." not in name
    assert not name.startswith("-")
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in name)


@pytest.mark.parametrize("name", ["v", ".", "a.b", "a b", "a-b", "Ünïcödé", "$(reboot)", "x" * 255])
def test_other_names_are_good(name: str) -> None:
    assert volume_named(name).name == name


@pytest.mark.parametrize(
    ("connector", "identity"),
    [
        ({"initiator": "IQN.1994-05.com.Example:B"}, "iqn.1994-05.com.example:b"),
        ({"nqn": "NQN.x"}, "nqn.x"),
        ({"wwpns": ["B2", "a1"]}, "a1,b2"),
        ({}, ""),
    ],
)
def test_a_connector_is_known_by_its_initiators_without_case(
    connector: dict[str, object], identity: str
) -> None:
    assert requests.Connector.model_validate(connector).identity == identity


def test_the_order_and_case_of_wwpns_do_not_tell_connectors_apart() -> None:
    first = requests.Connector(wwpns=["500A", "500b"])
    second = requests.Connector(wwpns=["500B", "500a"])
    assert first.identity == second.identity


def test_a_connectors_properties_are_json_data_without_what_is_missing() -> None:
    connector = requests.Connector.model_validate({"host": "b", "ip": None, "uuid": "x"})
    assert connector.properties() == {
        "host": "b",
        "mode": "rw",
        "connection_key": "",
        "do_local_attach": False,
        "uuid": "x",
    }


@pytest.mark.parametrize("text", [str(ID), str(ID).upper()])
def test_an_id_is_taken_in_its_text_form(text: str) -> None:
    assert requests.VolumeOnly.model_validate({"volume_id": text}).volume_id == ID


@settings(deadline=None)
@given(st.text(alphabet="0123456789abcdefABCDEF-{}urn: \n", min_size=30, max_size=45))
def test_no_other_form_of_an_id_is_taken(text: str) -> None:
    try:
        args = requests.VolumeOnly.model_validate({"volume_id": text})
    except pydantic.ValidationError:
        return
    assert str(args.volume_id) == text.lower()


def test_arguments_cannot_be_changed_after_they_were_checked() -> None:
    args = requests.VolumeOnly(volume_id=ID)
    with pytest.raises(pydantic.ValidationError):
        args.volume_id = uuid.uuid4()  # type: ignore[misc]


def test_the_first_fault_is_named_with_its_place() -> None:
    args = {"volume": {"name": "v", "size_bytes": 1, "metadata": {"a": "b", "c": 5}}}
    with pytest.raises(errors.InvalidRequest) as refused:
        requests.parse_args(requests.METHODS["create_volume"], args)
    assert refused.value.details == {"member": "args.volume.metadata.c"}
    assert refused.value.message.startswith("args.volume.metadata.c: ")


def test_too_many_metadata_are_refused() -> None:
    metadata = {str(number): "x" for number in range(257)}
    args = {"volume": {"name": "v", "size_bytes": 1, "metadata": metadata}}
    with pytest.raises(errors.InvalidRequest, match="metadata"):
        requests.parse_args(requests.METHODS["create_volume"], args)


@pytest.mark.parametrize("text", ["host-a@fast", "a.b_c-d@X", "h" * 100 + "@" + "b" * 100])
def test_an_address_as_an_argument_is_one(text: str) -> None:
    assert pydantic.TypeAdapter(requests.Address).validate_python(text) == text


@pytest.mark.parametrize("text", ["", "host", "host@", "@b", "h@b@c", "h@b\n", "h" * 101 + "@b"])
def test_what_is_no_address_is_refused_as_an_argument(text: str) -> None:
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(requests.Address).validate_python(text)


def test_what_only_reads_is_what_gets_lists_or_validates() -> None:
    """Nothing is lost with a request for one of these; every other one is kept as a letter."""
    names = {name for name, method in requests.METHODS.items() if method.only_reads}
    assert names == {
        *("get_volume", "get_job", "get_volume_stats", "get_snapshot", "get_backup"),
        *("list_volumes", "list_jobs", "list_snapshots", "list_backups"),
        "validate_connector",
    }
    for method in requests.METHODS.values():
        assert method.only_reads or method.kind is not requests.Kind.READ


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("validate_connector", ("connector", "wwpns")),
        ("validate_connector", ("connector", "unknown", "inner")),
        ("create_volume", ("volume", "metadata")),
        ("list_volumes", ()),
    ],
)
@pytest.mark.parametrize("as_list", [True, False])
def test_half_a_million_wrong_members_are_refused_as_one(
    method: str, place: tuple[str, ...], as_list: bool
) -> None:
    wrong: object = [1] * 500_000 if as_list and place else {str(n): n for n in range(500_000)}
    for name in reversed(place):
        wrong = {name: wrong}
    began = time.monotonic()
    with pytest.raises(errors.InvalidRequest) as refused:
        requests.parse_args(requests.METHODS[method], wrong)
    assert time.monotonic() - began < 0.5
    assert refused.value.details["member"] == ".".join(["args", *place])


def test_a_connector_with_more_names_than_any_host_has_is_good() -> None:
    args = {"connector": {"wwpns": [f"{number:016x}" for number in range(requests.MAX_MEMBERS)]}}
    assert requests.parse_args(requests.METHODS["validate_connector"], args)
