"""As much of compose.yaml as can be checked without a compose program, so that CI always does."""

import json
import pathlib
import re
import shlex
from typing import Any, Final

import pytest
import yaml

from worker import settings
from worker.cli import app

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
WORKERS: Final = ("host-a", "host-b")
SERVICES: Final = ("broker", "database", "migrate", *WORKERS)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (ROOT / "compose.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return loaded


def test_the_services_are_those_of_the_deployment(compose: dict[str, Any]) -> None:
    assert sorted(compose["services"]) == sorted(SERVICES)
    assert {name for name in compose if not name.startswith("x-")} == {"services", "volumes"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_an_image_and_only_known_keys(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert re.fullmatch(r"[a-z-]+:[a-z0-9.]+", service["image"])
    assert set(service) <= {
        *("build", "command", "depends_on", "environment", "healthcheck", "hostname", "image"),
        *("init", "ports", "restart", "shm_size", "stop_grace_period", "volumes"),
    }
    assert service["restart"] in ("no", "unless-stopped")
    assert all(isinstance(value, str) for value in service["environment"].values())
    if "build" in service:
        assert (ROOT / service["build"] / "Dockerfile").is_file()


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "migrate"])
def test_what_stays_up_has_a_healthcheck_in_exec_form(compose: dict[str, Any], name: str) -> None:
    check = compose["services"][name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert all(isinstance(word, str) for word in check["test"])
    assert all(re.fullmatch(r"\d+s", check[key]) for key in ("interval", "timeout", "start_period"))
    assert check["retries"] > 0


def test_dependencies_and_volumes_are_there(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for name, wanted in service.get("depends_on", {}).items():
            match wanted["condition"]:
                case "service_healthy":
                    assert "healthcheck" in services[name]
                case condition:
                    assert condition == "service_completed_successfully"
                    assert services[name]["restart"] == "no"
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose["volumes"]


def test_the_workers_ports_are_on_loopback_and_apart(compose: dict[str, Any]) -> None:
    published = [port for s in compose["services"].values() for port in s.get("ports", ())]
    assert len({port.rsplit(":", 1)[0] for port in published}) == len(published) == len(WORKERS)
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", [*WORKERS, "migrate"])
def test_the_configuration_of_each_is_valid(
    compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = compose["services"][name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    configured = settings.load()
    assert "@broker:" in configured.broker_url.get_secret_value()
    assert "@database:" in configured.database_url.get_secret_value()
    found = settings.backends(configured)
    if name == "migrate":
        return
    assert configured.host == name == service["hostname"]
    assert [backend.name for backend in found] == ["fast"]
    # What the worker keeps is on a volume, and it is given the time that it takes to drain.
    mounted = [volume.split(":")[1] for volume in service["volumes"]]
    assert str(configured.state_dir) in mounted
    assert str(found[0].options.directory) in mounted
    assert int(service["stop_grace_period"].rstrip("s")) > configured.drain_timeout
    # The port that is published, and asked for health, is the one that the worker listens on.
    port = configured.http_listen.rpartition(":")[2]
    assert service["ports"][0].endswith(f":{port}")
    assert f":{port}/readyz" in service["healthcheck"]["test"][-1]


def test_the_image_starts_a_command_that_there_is(compose: dict[str, Any]) -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    told = {
        key: json.loads(rest)
        for key, _, rest in (line.partition(" ") for line in lines)
        if key in ("ENTRYPOINT", "CMD")
    }  # JSON: the exec form
    assert told["ENTRYPOINT"] == ["volume-worker"]
    names = {command.name for command in app.app.registered_commands}
    for command in (told["CMD"], compose["services"]["migrate"]["command"]):
        assert isinstance(command, list), shlex.join(command)
        assert command[0] in names
