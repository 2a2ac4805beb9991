"""What jobs do to volumes, one step at a time, in the database and in the model of it."""

import dataclasses
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import pytest
from hypothesis import stateful

from messages import errors, requests
from messages.resources import JobState, VolumeStatus
from tests.integration import machine_bench, machine_volume_rows, machine_volumes, store_bench
from tests.integration.machine_bench import pick
from tests.integration.machine_volumes import Kind
from tests.integration.store_bench import HERE, PLENTY
from worker.store import acceptance, connections, database, jobs, reconciliation, volumes

LEASE: Final = 3600.0
SIZE: Final = 1024
VOLUMES: Final = 2
"""How many volumes there are at first."""
MOST_VOLUMES: Final = 6
STEPS: Final = (Kind.CREATE, *machine_volumes.PASSING)
"""Kinds that take more than one step."""


@dataclasses.dataclass(frozen=True)
class Export:
    """A job records who asked for its volume's export."""

    export: volumes.Export


@dataclasses.dataclass(frozen=True)
class Connect:
    """A job begins a connection, or finds it."""

    key: str
    access_mode: str
    is_local: bool


@dataclasses.dataclass(frozen=True)
class Complete:
    """A job has got from its target what a connection needs."""

    key: str


@dataclasses.dataclass(frozen=True)
class Disconnect:
    """A job begins to end a connection, or all, and may stop half-way."""

    key: str | None
    is_cut_short: bool


Step = Export | Connect | Complete | Disconnect


class Actions(stateful.RuleBasedStateMachine):
    """What a machine, or a test, has done."""

    def __init__(self, ground: machine_bench.Ground) -> None:
        super().__init__()
        ground.clear()
        self.ground = ground
        self.store = ground.store
        self.ids = machine_bench.ids()
        self.volumes = [next(self.ids) for _ in range(VOLUMES)]
        self.owner = next(self.ids)
        self.model = machine_volumes.Model()
        self.held: dict[uuid.UUID, jobs.Job] = {}
        self.lost: list[jobs.Job] = []
        self.rows = machine_volume_rows.read(ground)

    def running(self, *kinds: Kind) -> list[machine_volumes.Job]:
        """Jobs of some kinds at work."""
        return [job for job in self.model.jobs if job.id in self.held and job.kind in kinds]

    def holding(self, *kinds: Kind) -> list[machine_volumes.Job]:
        """Jobs of some kinds that hold their volume in a passing status."""
        return [job for job in self.running(*kinds) if self._is_held_by(job)]

    def _is_held_by(self, job: machine_volumes.Job) -> bool:
        volume = self.model.volumes.get(job.volume_id)
        return volume is not None and volume.holder == job.id

    def _volume(self, job: machine_volumes.Job) -> machine_volumes.Volume:
        return self.model.volumes[job.volume_id]

    def _fitting(self, kind: Kind, which: int) -> uuid.UUID:
        """Mostly a volume that a kind of job can do something with."""
        if kind is Kind.CREATE:
            return self._new_volume() if which % 3 else pick(self.volumes, which)
        allowed = machine_volumes.PASSING[kind].allowed
        fitting = [one.id for one in self.model.volumes.values() if one.status in allowed]
        return pick(fitting if fitting and which % 3 else self.volumes, which)

    def _new_volume(self) -> uuid.UUID:
        if len(self.volumes) < MOST_VOLUMES:
            self.volumes.append(next(self.ids))
        return self.volumes[-1]

    def _carry_out(
        self,
        kind: Kind,
        volume_id: uuid.UUID,
        steps: int,
        state: JobState | None,
        *,
        is_lost: bool,
    ) -> None:
        self._request(kind, volume_id)
        job = self.model.jobs[-1]
        if job.id not in self.held:
            return
        self.check()
        self._steps(job, steps)
        self._end(job, state, is_lost=is_lost)

    def _end(self, job: machine_volumes.Job, state: JobState | None, *, is_lost: bool) -> None:
        """It ends, perhaps after another worker has taken it over."""
        if is_lost:
            lost = self.held[job.id]
            self._lose(lost)
            self.check()
            self._write_too_late(lost, job.volume_id, job.kind, JobState.FAILED)
        if state is None:
            self._succeed(job)
        else:
            self._fail(job, state, is_known=False)

    def _request(self, kind: Kind, volume_id: uuid.UUID) -> None:
        job = machine_volumes.Job(next(self.ids), kind, volume_id)
        (stored,) = self.ground.run(
            acceptance.accept(
                self.store,
                [store_bench.job(_need(job), id=job.id)],
                owner=self.owner,
                lease=LEASE,
                free=PLENTY,
            )
        )
        self.model.accept(job)
        assert stored.verdict == str(job.state)
        assert (stored.job.refusal or {"code": None})["code"] == job.refusal
        if job.refusal is not None:
            self._finish(job, stored.job, JobState.FAILED, None)
        elif job.is_running:
            self.held[job.id] = stored.job

    def _lose(self, job: jobs.Job) -> None:
        """Another worker takes a job over, and what waits for its turn with it."""
        self.ground.execute(
            "UPDATE jobs SET lease_until = now() - interval '1 second' WHERE id = $1", job.id
        )
        self.lost.append(job)
        claimed = self.ground.run(
            jobs.claim(self.store, owner=self.owner, lease=LEASE, free=PLENTY, addresses=[HERE])
        )
        for one in self.model.next_jobs():
            one.state = JobState.RUNNING
        self.held.update({one.id: one for one in claimed})
        assert self.held[job.id].lease_token > job.lease_token

    def _steps(self, job: machine_volumes.Job, steps: int) -> None:
        for _ in range(steps):
            self._go_on(job)
            self.check()

    def _go_on(self, job: machine_volumes.Job) -> None:
        """The next step of a job's method; once it holds its volume, what comes then."""
        attachment_id = _attachment_id(job.id)
        match job.kind:
            case Kind.CREATE:
                self._begin_volume(job)
            case Kind.ATTACH if self._is_held_by(job):
                if attachment_id in self._volume(job).attachments:
                    self._complete_attachment(job)
                else:
                    self._add_attachment(job)
            case Kind.DETACH if self._is_held_by(job):
                self._end_attachments(job)
            case _:
                self._take_volume(job)

    def _begin_volume(self, job: machine_volumes.Job) -> None:
        begin = self._begin(self.held[job.id], job.volume_id)
        there = self.model.volumes.get(job.volume_id)
        if there is not None and there.created_by != job.id:
            with pytest.raises(errors.VolumeExists):
                self.ground.run(begin)
            return
        made = self.ground.run(begin)
        if there is None:
            volume = machine_volumes.Volume(job.volume_id, job.id, job.id)
            self.model.volumes[job.volume_id] = volume
        else:
            there.seq += 1
        assert made.seq == self._volume(job).seq

    async def _begin(self, job: jobs.Job, volume_id: uuid.UUID) -> volumes.Volume:
        return await volumes.begin(self.store, job, acceptance.NewVolume(volume_id, "v", SIZE, {}))

    def _take_volume(self, job: machine_volumes.Job) -> None:
        volume = self.model.volumes.get(job.volume_id)
        if volume is not None and job.kind in machine_volumes.IDLE and not volume.is_idle:
            return  # its operation looks for that first
        take = self._take(self.held[job.id], job.kind, job.volume_id)
        allowed = machine_volumes.PASSING[job.kind].allowed
        if volume is None:
            with pytest.raises(errors.VolumeNotFound):
                self.ground.run(take)
        elif volume.status not in allowed and volume.holder != job.id:
            with pytest.raises(errors.InvalidVolumeStatus):
                self.ground.run(take)
        else:
            taken = self.ground.run(take)
            volume.take(job)
            assert (taken.seq, taken.status) == (volume.seq, volume.status)

    async def _take(self, job: jobs.Job, kind: Kind, volume_id: uuid.UUID) -> volumes.Volume:
        passing = machine_volumes.PASSING[kind]
        return await volumes.take(
            self.store,
            job,
            volume_id,
            allowed=passing.allowed,
            status=passing.status,
            attach_status=passing.attach_status,
        )

    def _add_attachment(self, job: machine_volumes.Job) -> None:
        self.ground.run(self._begin_attachment(self.held[job.id], job.volume_id))
        self._volume(job).attachments.setdefault(
            _attachment_id(job.id), volumes.AttachmentStatus.ATTACHING
        )

    async def _begin_attachment(self, job: jobs.Job, volume_id: uuid.UUID) -> object:
        return await volumes.begin_attachment(
            self.store,
            job,
            _attachment_id(job.id),
            volume_id=volume_id,
            instance_uuid=None,
            host_name="b",
            mountpoint="/dev/vdb",
            mode="rw",
        )

    def _complete_attachment(self, job: machine_volumes.Job) -> None:
        attached = volumes.AttachmentStatus.ATTACHED
        attachment_id = _attachment_id(job.id)
        if attachment_id in self._volume(job).attachments:
            self.ground.run(
                volumes.set_attachment(self.store, self.held[job.id], attachment_id, attached)
            )
            self._volume(job).attachments[attachment_id] = attached

    def _end_attachments(self, job: machine_volumes.Job) -> None:
        self.ground.run(volumes.end_attachments(self.store, self.held[job.id], job.volume_id, None))
        self._volume(job).attachments.clear()

    def _share(self, job: machine_volumes.Job, steps: Sequence[Step]) -> None:
        for step in steps:
            if job.volume_id not in self.model.volumes:
                return
            match step:
                case Export(export):
                    self._set_export(job, export)
                case Connect(key, access_mode, is_local):
                    self._begin_connection(job, key, access_mode, is_local)
                case Complete(key):
                    self._complete_connection(job, key)
                case Disconnect(which, is_cut_short):
                    self._disconnect(job, which, is_cut_short)
            self.check()

    def _set_export(self, job: machine_volumes.Job, export: volumes.Export) -> None:
        self.ground.run(
            volumes.set_export(self.store, self.held[job.id], job.volume_id, export, "at")
        )
        self._volume(job).set_export(job, export)

    def _begin_connection(
        self, job: machine_volumes.Job, key: str, access_mode: str, local: bool
    ) -> None:
        begin = self._connect(self.held[job.id], job.volume_id, key, access_mode, local)
        there = self._volume(job).live(key)
        if there is None:
            made = self.ground.run(begin)
            self._volume(job).connections[made.id] = machine_volumes.Connection(
                key, access_mode, local, job.id
            )
            return
        connection_id, one = there
        is_same = (one.access_mode, one.is_local) == (access_mode, local)
        if is_same:
            assert self.ground.run(begin).id == connection_id
        else:
            with pytest.raises(errors.InvalidConnector):
                self.ground.run(begin)
        if one.state is connections.State.ENDING:
            one.made_by = job.id
            one.state = connections.State.MAKING if is_same else one.state

    async def _connect(
        self, job: jobs.Job, volume_id: uuid.UUID, key: str, access_mode: str, local: bool
    ) -> connections.Connection:
        return await connections.begin(
            self.store,
            job,
            volume_id,
            connector(key, access_mode),
            is_local=local,
            credentials={"password": "secret"},
        )

    def _complete_connection(self, job: machine_volumes.Job, key: str) -> None:
        there = self._volume(job).live(key)
        if there is None or there[1].state is connections.State.ENDING:
            return
        live = self.ground.run(self._complete(self.held[job.id], there[0]))
        assert connections.with_secrets(live) == {"lun": 1, "auth_password": "secret"}
        there[1].state = connections.State.LIVE

    async def _complete(self, job: jobs.Job, connection_id: uuid.UUID) -> connections.Connection:
        connection = await connections.find(self.store, connection_id)
        assert connection is not None
        return await connections.live(
            self.store,
            job,
            connection,
            driver_volume_type="iscsi",
            data={"lun": 1},
            secrets={"auth_password": "secret"},
        )

    def _disconnect(self, job: machine_volumes.Job, key: str | None, is_cut_short: bool) -> None:
        held, volume = self.held[job.id], self._volume(job)
        chosen = {
            one_id: one
            for one_id, one in volume.connections.items()
            if not one.has_ended and key in {None, one.key}
        }
        ids = None if key is None else list(chosen)
        ending = self.ground.run(connections.ending(self.store, held, volume.id, ids))
        assert {one.id for one in ending} == set(chosen)
        for one in ending:
            chosen[one.id].state = connections.State.ENDING
            if not is_cut_short:
                self.ground.run(connections.ended(self.store, held, one))
                chosen[one.id].state = connections.State.ENDED

    def _succeed(self, job: machine_volumes.Job) -> None:
        columns = self._good_end(job)
        if columns is None:
            return
        held = self.held.pop(job.id)
        self._finish(job, held, JobState.SUCCEEDED, jobs.VolumeChange(job.volume_id, **columns))

    def _good_end(self, job: machine_volumes.Job) -> dict[str, Any] | None:
        """What becomes of a volume whose job has done all its steps; None where it has not."""
        volume = self.model.volumes.get(job.volume_id)
        if job.kind is Kind.SHARE:
            return None if volume is None else {}
        if volume is None or volume.holder != job.id:
            return None
        attached = volumes.AttachmentStatus.ATTACHED in volume.attachments.values()
        match job.kind:
            case Kind.CREATE:
                return {"columns": {"status": VolumeStatus.AVAILABLE}}
            case Kind.DELETE:
                return {"drop": True}
            case Kind.EXTEND | Kind.OVERWRITE:
                return {"columns": {"status": volume.previous}}
            case Kind.ATTACH if attached:
                return {"columns": {"status": VolumeStatus.IN_USE, "attach_status": "attached"}}
            case Kind.DETACH if not attached:
                return {"columns": {"status": VolumeStatus.AVAILABLE, "attach_status": "detached"}}
            case _:
                return None

    def _fail(self, job: machine_volumes.Job, state: JobState, *, is_known: bool) -> None:
        change = None
        if is_known and self._is_held_by(job):
            # Nothing has come of it, and its worker knows.
            match job.kind:
                case Kind.CREATE:
                    change = jobs.VolumeChange(job.volume_id, drop=True)
                case Kind.DELETE | Kind.EXTEND | Kind.OVERWRITE:
                    columns = {"status": self._volume(job).previous}
                    change = jobs.VolumeChange(job.volume_id, columns)
        self._finish(job, self.held.pop(job.id), state, change)

    def _finish(
        self,
        job: machine_volumes.Job,
        held: jobs.Job,
        state: JobState,
        change: jobs.VolumeChange | None,
    ) -> None:
        ended = self.ground.run(jobs.finish(self.store, _ending(held, state, change)))
        self.lost.append(held)
        job.state = state
        volume = self.model.volumes.get(job.volume_id)
        is_held = volume is not None and volume.holder == job.id
        if volume is None or (change is None and not is_held):
            assert ended.event is None
            return
        assert ended.event is not None
        if change is not None and change.drop:
            del self.model.volumes[volume.id]
            assert ended.event["seq"] == volume.seq + 1
            assert ended.event["volume"]["status"] == VolumeStatus.DELETED
            return
        columns = {} if change is None else change.columns
        if "status" not in columns and is_held:
            volume.settle()
        volume.status = columns.get("status", volume.status)
        volume.attach_status = columns.get("attach_status", volume.attach_status)
        volume.release(job, state)
        assert ended.event["seq"] == volume.seq
        assert ended.event["volume"]["status"] == volume.status

    def _write_too_late(
        self, job: jobs.Job, volume_id: uuid.UUID, kind: Kind, state: JobState
    ) -> None:
        for write in self._late_writes(job, volume_id, kind, state):
            # What has no row to answer with says nothing, or what else is in its way.
            with pytest.raises((database.LeaseLost, errors.VolumeWorkerError)):
                self.ground.run(write())
        for connection in self._connections(volume_id):
            self.ground.run(connections.ended(self.store, job, connection))
        assert self.ground.run(connections.ending(self.store, job, volume_id)) == []
        self.ground.run(volumes.end_attachments(self.store, job, volume_id, None))
        assert machine_volume_rows.read(self.ground) == self.rows

    def _late_writes(
        self, job: jobs.Job, volume_id: uuid.UUID, kind: Kind, state: JobState
    ) -> Sequence[Callable[[], Coroutine[Any, Any, object]]]:
        store, attached = self.store, volumes.AttachmentStatus.ATTACHED
        change = jobs.VolumeChange(volume_id, {"status": VolumeStatus.AVAILABLE})
        taken = kind if kind in machine_volumes.PASSING else Kind.EXTEND
        return [
            lambda: self._begin(job, volume_id),
            lambda: self._take(job, taken, volume_id),
            lambda: volumes.set_export(store, job, volume_id, volumes.Export.EXPLICIT),
            lambda: self._begin_attachment(job, volume_id),
            *(
                lambda one=row["id"]: volumes.set_attachment(store, job, one, attached)
                for row in self.rows.attachments
            ),
            lambda: self._connect(job, volume_id, "one", "rw", local=False),
            *(
                lambda one=connection: self._complete(job, one.id)
                for connection in self._connections(volume_id)
            ),
            lambda: jobs.finish(store, _ending(job, state, change)),
        ]

    def _connections(self, volume_id: uuid.UUID) -> Sequence[connections.Connection]:
        return self.ground.run(connections.of_volume(self.store, volume_id))

    async def _to_mend(
        self,
    ) -> tuple[list[reconciliation.Misplaced], list[connections.Leftover]]:
        return (
            await reconciliation.misplaced(self.store, HERE),
            await connections.leftovers(self.store, HERE),
        )

    def _is_left(self, volume: machine_volumes.Volume) -> bool:
        """Whether no job will end a connection or an export that nobody needs any more."""
        states = {one.state for one in volume.connections.values()}
        is_served = any(
            not one.has_ended and not one.is_local for one in volume.connections.values()
        )
        is_half = bool(states & {connections.State.MAKING, connections.State.ENDING})
        is_unused = volume.export is volumes.Export.IMPLICIT and not is_served
        return not self.model.at_work_on(volume.id) and (is_half or is_unused)

    def check(self) -> None:
        """Looks whether the rows are as they should be."""
        before, self.rows = self.rows, machine_volume_rows.read(self.ground)
        machine_volume_rows.check_alone(self.rows)
        machine_volume_rows.check_step(before, self.rows)
        machine_volume_rows.check_model(self.rows, self.model)


def connector(key: str, access_mode: str) -> requests.Connector:
    return requests.Connector.model_validate(
        {"host": "b", "initiator": "iqn.b", "connection_key": key, "mode": access_mode}
    )


def _need(job: machine_volumes.Job) -> acceptance.Need:
    passing = machine_volumes.PASSING.get(job.kind)
    return acceptance.Need(
        job.volume_id,
        job.mode,
        known=job.kind is not Kind.CREATE,
        idle=job.kind in machine_volumes.IDLE,
        statuses=passing.allowed
        if passing is not None and job.kind in machine_volumes.CHECKED
        else None,
    )


def _attachment_id(job_id: uuid.UUID) -> uuid.UUID:
    return uuid.uuid5(job_id, "attachment")


def _ending(job: jobs.Job, state: JobState, change: jobs.VolumeChange | None) -> jobs.Ending:
    is_good = state is JobState.SUCCEEDED
    error = None if is_good else errors.TargetError("away")
    result: Mapping[str, Any] | None = {} if is_good else None
    return jobs.Ending(job, state, result=result, error=error, change=change)
