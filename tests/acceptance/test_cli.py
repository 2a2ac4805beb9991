"""The command line as an operator has it: requests, records, digests, and what goes wrong."""

import asyncio
import json
import os
import pathlib
import signal
import uuid

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import command, environment, settled, tgtd, workers
from tests.services.volumes import MIB, blake2b_4m

NOWHERE = "00000000-0000-4000-8000-00000000dead"
AWAY = {"VOLUME_WORKER_BROKER_URL": "amqp://guest:geheim@127.0.0.1:1/"}
NO_DATABASE = {"VOLUME_WORKER_DATABASE_URL": "postgresql://postgres:geheim@127.0.0.1:1/x"}


# call


async def test_a_call_prints_its_result(hosts: Hosts) -> None:
    ended = await command.run(
        "call",
        "create_volume",
        hosts.a.at("fast"),
        "volume.name=müsli",
        "volume.size_bytes=1MiB",
        'volume.metadata={"a": "b"}',
        "--config",
        hosts.a.config,
    )
    assert (ended.code, ended.stderr) == (0, "")
    hosts.volumes.adopt(ended.data)
    assert ended.data["name"] == "müsli"
    assert ended.data["size_bytes"] == MIB
    assert ended.data["metadata"] == {"a": "b"}


async def test_arguments_may_be_one_json_object(hosts: Hosts) -> None:
    args = json.dumps({"volume": {"name": "v", "size_bytes": MIB}})
    ended = await command.run(
        "call", "create_volume", hosts.a.at("fast"), "--args", args, "--config", hosts.a.config
    )
    assert ended.code == 0
    hosts.volumes.adopt(ended.data)


async def test_a_failed_job_is_told_on_stderr_and_as_json(hosts: Hosts) -> None:
    arguments = ("call", "delete_volume", hosts.a.at("fast"), f"volume_id={NOWHERE}")
    ended = await command.run(*arguments, "--config", hosts.a.config)
    assert (ended.code, ended.stdout) == (1, "")
    assert "VolumeNotFound" in ended.stderr
    assert NOWHERE in ended.stderr
    ended = await command.run(*arguments, "--json", "--config", hosts.a.config)
    assert ended.code == 1
    assert ended.data["code"] == "VolumeNotFound"
    assert ended.data["retryable"] is False
    assert "VolumeNotFound" in ended.stderr


async def test_a_cast_prints_the_id_of_a_job_that_can_be_shown(hosts: Hosts) -> None:
    identity = str(uuid.uuid4())
    ended = await command.run(
        "call",
        "create_volume",
        hosts.a.at("fast"),
        f"volume.id={identity}",
        "volume.name=v",
        "volume.size_bytes=1MiB",
        "--cast",
        "--config",
        hosts.a.config,
    )
    assert ended.code == 0
    job_id = ended.stdout.strip()
    for _ in range(100):
        shown = await command.run("jobs", "show", job_id, "--json", "--config", hosts.a.config)
        if shown.code == 0 and shown.data["state"] == "succeeded":
            break
        await asyncio.sleep(0.05)
    hosts.volumes.adopt(shown.data["result"])
    assert shown.data["method"] == "create_volume"
    assert shown.data["result"]["id"] == identity


async def test_a_watched_copy_shows_its_progress_beside_the_result(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 64 * MIB)
    destination = await hosts.volumes.create(hosts.a.at("fast"), 64 * MIB)
    await hosts.volumes.write(source, {0: b"x" * 16 * MIB})
    arguments = (
        "call",
        "copy_volume_data",
        hosts.a.at("fast"),
        f"source_volume_id={source.id}",
        f"destination_volume_id={destination.id}",
        "bytes_per_second=16MiB",
        "--watch",
        "--config",
        hosts.a.config,
    )
    ended = await command.run(*arguments)
    assert ended.code == 0
    assert ended.data["total_bytes"] == 64 * MIB
    assert "running  attempt 1" in ended.stderr
    assert "of 64.0 MiB" in ended.stderr
    ended = await command.run(*arguments, "--json")
    statuses = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.data["total_bytes"] == 64 * MIB
    assert {status["state"] for status in statuses} - {"queued"} == {"running"}
    assert any(status["progress"] for status in statuses)


async def test_secrets_are_not_printed(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("sim"))
    ended = await command.run(
        "call",
        "initialize_connection",
        volume.address,
        f"volume_id={volume.id}",
        "connector.host=client",
        "connector.initiator=iqn.2004-10.org.example:host",
        "--config",
        hosts.a.config,
    )
    assert ended.code == 0
    assert ended.data["data"]["auth_method"] == "CHAP"
    assert ended.data["data"]["auth_password"] == "***"


async def test_an_address_that_nobody_serves_is_told_with_help(hosts: Hosts) -> None:
    ended = await command.run("call", "list_volumes", "host-z@fast", "--config", hosts.a.config)
    assert ended.code == 1
    assert "host-z@fast" in ended.stderr
    assert "volume-worker run" in ended.stderr


async def test_a_timeout_tells_how_to_ask_later(
    start_worker: workers.Starter,
) -> None:
    worker = await start_worker()
    await worker.terminate()
    ended = await command.run(
        "call",
        "create_volume",
        worker.at("sim"),
        "volume.name=v",
        "volume.size_bytes=1MiB",
        "--timeout",
        "0.5",
        "--config",
        worker.config,
    )
    assert ended.code == 1
    assert "volume-worker jobs show " in ended.stderr
    uuid.UUID(ended.stderr.strip().rpartition(" ")[2])


async def test_ctrl_c_ends_the_watching_and_not_the_job(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 16 * MIB)
    destination = await hosts.volumes.create(hosts.a.at("fast"), 16 * MIB)
    process = await asyncio.create_subprocess_exec(
        workers.COMMAND,
        *("call", "copy_volume_data", hosts.a.at("fast"), "bytes_per_second=8MiB", "--watch"),
        *("--timeout", "20"),
        *(f"source_volume_id={source.id}", f"destination_volume_id={destination.id}"),
        *("--config", str(hosts.a.config)),
        env={k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"running" not in (line := await process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    job_id = err.decode().strip().rpartition(" ")[2]
    job = (await command.run("jobs", "show", job_id, "--json", "--config", hosts.a.config)).data
    assert job["state"] in ("running", "succeeded")
    # The reply is kept for who asked until the deadline, and no longer.
    await settled.wait(hosts.installation, timeout=60)
    assert await hosts.volumes.status(destination) == "available"


@pytest.mark.parametrize(
    "arguments",
    [
        ("call",),
        ("call", "create_volume"),
        ("call", "create_volume", "nobody"),
        ("call", "create volume", "host-a@fast"),
        ("call", "create_volume", "host-a@fast", "volume"),
        ("call", "create_volume", "host-a@fast", "--args", "{"),
        ("call", "create_volume", "host-a@fast", "--args", "[]"),
        ("call", "create_volume", "host-a@fast", "--cast", "--watch"),
        ("call", "create_volume", "host-a@fast", "--timeout", "soon"),
        ("call", "create_volume", "host-a@fast", "--timeout", "-1"),
        ("jobs", "show", "x"),
        ("jobs", "list", "--state", "odd"),
        ("jobs", "list", "--limit", "0"),
        ("jobs", "list", "--after", "x"),
        ("jobs", "list", "--address", "x"),
        ("volumes", "show", "x"),
        ("volumes", "list", "--status", "odd"),
        ("dead", "list", "--since", "yesterday"),
        ("digest",),
        ("odd",),
        ("run", "--config", "/nonexistent/worker.toml"),
        ("check", "--config", "/nonexistent/worker.toml"),
    ],
    ids=" ".join,
)
async def test_wrong_usage_has_its_own_exit_code(arguments: tuple[str, ...]) -> None:
    ended = await command.run(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr


async def test_every_command_explains_itself() -> None:
    for arguments in (
        (),
        *((name,) for name in ("run", "migrate", "check", "call", "digest", "demo")),
        *((noun, verb) for noun in ("jobs", "volumes", "dead") for verb in ("list", "show")),
    ):
        ended = await command.run(*arguments, "--help")
        assert ended.code == 0
        assert "Usage: volume-worker" in ended.stdout
        assert not arguments or "--config" in ended.stdout
        assert not arguments or arguments == ("run",) or "--json" in ended.stdout


# Services away


@pytest.mark.parametrize(
    ("arguments", "away", "named"),
    [
        (("call", "list_volumes", "host-a@fast"), AWAY, "broker_url"),
        (("call", "list_volumes", "host-a@fast", "--cast"), AWAY, "broker_url"),
        (("dead", "list"), AWAY, "broker_url"),
        (("check",), AWAY, "broker_url"),
        (("demo",), AWAY, "make demo"),
        (("jobs", "list"), NO_DATABASE, "database_url"),
        (("volumes", "show", NOWHERE), NO_DATABASE, "database_url"),
        (("migrate",), NO_DATABASE, "database"),
        (("check",), NO_DATABASE, "database_url"),
        (("demo",), NO_DATABASE, "make demo"),
    ],
)
async def test_a_service_that_is_away_is_told_at_once(
    installation: environment.Installation,
    arguments: tuple[str, ...],
    away: dict[str, str],
    named: str,
) -> None:
    here = {
        "VOLUME_WORKER_BROKER_URL": installation.broker_url,
        "VOLUME_WORKER_DATABASE_URL": installation.database_url,
        "VOLUME_WORKER_NAMESPACE": installation.namespace,
    }
    ended = await command.run(*arguments, env={**here, **away}, timeout=20)
    assert ended.code == 3
    assert named in ended.stderr
    assert "geheim" not in ended.stderr + ended.stdout


async def test_records_can_be_read_with_the_broker_away(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    ended = await command.run(
        "volumes", "show", volume.id, "--json", "--config", hosts.a.config, env=AWAY
    )
    assert ended.code == 0
    assert ended.data == await hosts.volumes.record(volume)


# Records


async def test_volumes_are_listed_by_filters_and_in_pages(hosts: Hosts) -> None:
    made = [await hosts.volumes.create(hosts.a.at("sim"), name=f"v{n}") for n in range(3)]
    config = ("--config", hosts.a.config)
    address = ("--address", hosts.a.at("sim"))
    everything = await command.run("volumes", "list", "--json", *address, *config)
    ids = sorted(volume.id for volume in made)
    assert [one["id"] for one in everything.data["volumes"] if one["id"] in ids] == ids
    page = await command.run(
        "volumes", "list", "--json", *address, "--after", ids[0], "--limit", "1", *config
    )
    assert len(page.data["volumes"]) == 1
    assert page.data["volumes"][0]["id"] > ids[0]
    none = await command.run("volumes", "list", "--json", "--status", "error_deleting", *config)
    assert none.data == {"volumes": []}


async def test_a_volume_is_shown_with_its_users(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("sim"))
    await hosts.volumes.connect(volume)
    attachment = await hosts.volumes.attach(volume)
    ended = await command.run("volumes", "show", volume.id, "--config", hosts.a.config)
    assert ended.code == 0
    assert attachment["id"] in ended.stdout
    assert '"connector_host": "client"' in ended.stdout
    assert "in-use" in ended.stdout
    listed = await command.run("volumes", "list", "--config", hosts.a.config)
    assert "client (rw)" in listed.stdout


async def test_jobs_are_listed_in_the_order_of_acceptance(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("sim"))
    await hosts.caller.call("create_export", volume.address, volume.at)
    await hosts.caller.call("remove_export", volume.address, volume.at)
    await hosts.caller.fails(
        "initialize_connection", volume.address, {**volume.at, "connector": {}}
    )
    config = ("--config", hosts.a.config)
    ended = await command.run("jobs", "list", "--json", "--volume", volume.id, *config)
    methods = [job["method"] for job in ended.data["jobs"]]
    assert methods == ["create_volume", "create_export", "remove_export", "initialize_connection"]
    failed = await command.run(
        "jobs", "list", "--volume", volume.id, "--state", "failed", "--json", *config
    )
    [job] = failed.data["jobs"]
    assert job["error"]["code"] == "InvalidConnector"
    for_people = await command.run("jobs", "list", "--volume", volume.id, *config)
    assert len(for_people.stdout.splitlines()) == 5
    assert "InvalidConnector" in for_people.stdout
    shown = await command.run("jobs", "show", job["id"], *config)
    assert job["error"]["message"] in shown.stdout


@pytest.mark.parametrize("noun", ["jobs", "volumes"])
async def test_what_is_not_there_is_told(hosts: Hosts, noun: str) -> None:
    ended = await command.run(noun, "show", NOWHERE, "--config", hosts.a.config)
    assert (ended.code, ended.stdout) == (1, "")
    assert NOWHERE in ended.stderr


async def test_a_reader_that_has_had_enough_is_no_traceback(hosts: Hosts) -> None:
    for number in range(3):
        await hosts.volumes.create(hosts.a.at("sim"), name=f"v{number}")
    process = await asyncio.create_subprocess_exec(
        workers.COMMAND,
        *("jobs", "list", "--json", "--config", str(hosts.a.config)),
        env={k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    # Closed before anything is written: the first byte meets nobody.
    process.stdout._transport.close()  # type: ignore[attr-defined]
    assert await process.stderr.read() == b""
    assert await process.wait() == 1


# digest


async def test_the_digest_is_the_contracts(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    content = b"a" * (5 * MIB) + bytes(3 * MIB) + b"z"
    path.write_bytes(content)
    ended = await command.run("digest", path)
    assert (ended.code, ended.stdout.strip()) == (0, blake2b_4m(content))
    ended = await command.run("digest", path, "--json")
    assert ended.data["digest"] == blake2b_4m(content)


async def test_a_digest_of_nothing_is_told(tmp_path: pathlib.Path) -> None:
    ended = await command.run("digest", tmp_path / "none")
    assert (ended.code, ended.stdout) == (1, "")
    assert str(tmp_path / "none") in ended.stderr
    assert (await command.run("digest", tmp_path)).code == 1


# migrate and run


async def test_migrating_twice_changes_nothing(installation: environment.Installation) -> None:
    env = {
        "VOLUME_WORKER_DATABASE_URL": installation.database_url,
        "VOLUME_WORKER_NAMESPACE": installation.namespace,
    }
    ended = await command.run("migrate", "--json", env=env)
    assert (ended.code, ended.data["applied"]) == (0, [])
    other = await command.run("migrate", env={**env, "VOLUME_WORKER_NAMESPACE": "other"})
    assert other.code == 1
    assert "namespace" in other.stderr


async def test_a_worker_without_configuration_says_how_to_give_one() -> None:
    ended = await command.run("run")
    assert ended.code == 2
    assert "--config" in ended.stderr


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("odd = 1", "odd"),
        ("lease = 0", "lease"),
        ("[backends.x]\ndriver = 'nope'", "backends.x"),
        ("[backends.x]\ndriver = 'file'", "backends.x"),
        ("[backends.x]\ndriver = 'file'\ndirectory = '/x'\nodd = 1", "backends.x.odd"),
        ("= 1", "line 1"),
    ],
)
async def test_a_bad_configuration_is_refused_with_its_place(
    tmp_path: pathlib.Path, line: str, place: str
) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(line)
    ended = await command.run("run", "--config", path)
    assert ended.code == 2
    assert place in ended.stderr


async def test_a_worker_whose_database_is_away_does_not_start(
    start_worker: workers.Starter,
) -> None:
    worker = start_worker.new(database_url="postgresql://postgres:geheim@127.0.0.1:1/x")
    ended = await command.run("run", "--config", worker.config, timeout=20)
    assert ended.code == 3
    assert "database" in ended.stderr
    assert "geheim" not in ended.stderr


async def test_a_worker_whose_schema_is_missing_says_how_to_make_it(
    start_worker: workers.Starter, installation: environment.Installation
) -> None:
    await installation.rows("DROP TABLE schema_migrations")
    worker = start_worker.new()
    ended = await command.run("run", "--config", worker.config)
    assert ended.code == 1
    assert "volume-worker migrate" in ended.stderr


async def test_a_worker_whose_port_is_taken_says_so(hosts: Hosts) -> None:
    ended = await command.run("run", "--config", hosts.a.config)
    assert ended.code in (1, 2)
    assert "http_listen" in ended.stderr
    await hosts.assert_at_work()


async def test_a_worker_whose_state_dir_cannot_be_made_says_so(
    start_worker: workers.Starter, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").touch()
    worker = start_worker.new(state_dir=str(tmp_path / "file" / "state"))
    ended = await command.run("run", "--config", worker.config)
    assert ended.code == 2
    assert "state_dir" in ended.stderr


async def test_a_worker_waits_for_a_broker_that_is_away(start_worker: workers.Starter) -> None:
    worker = start_worker.new(broker_url=f"amqp://guest:geheim@127.0.0.1:{tgtd.free_port()}/")
    worker.spawn()
    checks: dict[str, bool] = {}
    for _ in range(200):
        status, checks = await asyncio.to_thread(worker.readyz)
        if checks.get(worker.at("fast")) and checks.get(worker.at("sim")):
            break
        await asyncio.sleep(0.05)
    assert status == 503
    assert checks == {
        "broker": False,
        "database": True,
        worker.at("fast"): True,
        worker.at("sim"): True,
    }
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert "geheim" not in worker.log.read_text()
