"""The unit file for systemd, and the example configuration beside it."""

import configparser
import pathlib
import shutil
import subprocess
import sys
from typing import Final

import pytest
import yaml

from worker import service, settings, shutdown
from worker.cli import app, failures

PACKAGING: Final = pathlib.Path(__file__).resolve().parents[2] / "packaging"
UNIT: Final = PACKAGING / "volume-worker.service"

AFTER_DRAIN: Final = (
    service.PUT_BACK_TIMEOUT + service.PUT_BACK_REST + service.CLOSE_TIMEOUT + shutdown.LOG_PATIENCE
)
"""Seconds that a worker takes at most after its drain_timeout."""


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text("utf-8"))
    return parser


def test_the_unit_runs_a_command_that_there_is(unit: configparser.ConfigParser) -> None:
    program, command, option, config = unit["Service"]["ExecStart"].split()
    assert pathlib.Path(program).is_absolute()
    assert pathlib.Path(program).name == "volume-worker"
    assert command in {one.name for one in app.app.registered_commands}
    assert option == "--config"
    assert pathlib.Path(config).is_absolute()


def test_systemd_hears_of_the_worker_from_the_worker_alone(
    unit: configparser.ConfigParser,
) -> None:
    told = unit["Service"]
    assert told["Type"] == "notify"
    assert told["NotifyAccess"] == "main"
    assert 10 <= int(told["WatchdogSec"]) <= 120


def test_exports_outlive_the_worker_under_systemd(unit: configparser.ConfigParser) -> None:
    told = unit["Service"]
    assert told["KillMode"] == "process"
    # A mount or PID namespace of its own would end with the worker, or hide FUSE paths.
    assert not [name for name in told if name.startswith(("Private", "Protect", "Bind"))]


def test_the_unit_gives_the_worker_the_time_that_a_drain_takes(
    unit: configparser.ConfigParser,
) -> None:
    drain = settings.Settings.model_fields["drain_timeout"].default
    assert int(unit["Service"]["TimeoutStopSec"]) > drain + AFTER_DRAIN


def test_the_unit_keeps_what_the_worker_keeps(unit: configparser.ConfigParser) -> None:
    default = settings.Settings.model_fields["state_dir"].default
    assert pathlib.Path("/var/lib") / unit["Service"]["StateDirectory"] == default
    assert unit["Service"]["StateDirectoryMode"] == "0700"


def test_a_worker_that_failed_is_started_again_but_not_with_a_wrong_configuration(
    unit: configparser.ConfigParser,
) -> None:
    told = unit["Service"]
    assert told["Restart"] == "on-failure"
    assert int(told["RestartPreventExitStatus"]) == failures.ExitCode.WRONG_USAGE


def test_systemd_takes_the_unit(tmp_path: pathlib.Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # Only the program is looked for, and is not installed where the unit says.
    copy = tmp_path / UNIT.name
    text = UNIT.read_text("utf-8").replace("/opt/volume-worker/bin/volume-worker", sys.executable)
    copy.write_text(text)
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["host-a", "host-b"])
def test_a_container_has_an_init_and_the_time_that_a_drain_takes(name: str) -> None:
    compose = yaml.safe_load((PACKAGING.parent / "compose.yaml").read_text("utf-8"))
    container = compose["services"][name]
    assert container["init"] is True
    drain = float(container["environment"]["VOLUME_WORKER_DRAIN_TIMEOUT"])
    assert int(container["stop_grace_period"].rstrip("s")) > drain + AFTER_DRAIN


def test_the_example_configuration_is_valid() -> None:
    configured = settings.load(PACKAGING / "volume-worker.toml")
    assert [backend.name for backend in settings.backends(configured)] == ["fast"]
