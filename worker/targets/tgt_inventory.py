"""How the targets that a tgtd shows differ from those that a backend has to have.

tgtd is shared: a target is the backend's own where it has recorded it, or where it is named after
one of the backend's volumes. All others are passed over.
"""

import dataclasses
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence

from worker.targets import base, iscsi, tgtadm


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A target as it has to be; the export itself lets nobody in."""

    iqn: str
    volume_id: uuid.UUID
    path: str
    initiator: str | None = None
    user: str | None = None
    is_read_only: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Ours:
    """What tells this backend's targets from those of others."""

    prefix: str
    volumes: Collection[uuid.UUID]
    records: Collection[str]

    def volume_of(self, iqn: str) -> uuid.UUID | None:
        """The volume that a target is named after, whosever it is."""
        try:
            return uuid.UUID(iqn.removeprefix(self.prefix)[:36])
        except ValueError:
            return None

    def has(self, iqn: str) -> bool:
        """Whether a target is this backend's."""
        named = iqn.startswith(self.prefix) and self.volume_of(iqn) in self.volumes
        return named or iqn in self.records


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A difference, with what it takes to end it."""

    difference: base.Difference
    iqn: str
    target: tgtadm.Target | None = None
    intruder: str | None = None
    """Who is let in and should not be: an account, or an initiator's name or address."""
    initiator: str | None = None
    """Who alone should be let in."""


def compare(
    wanted: Sequence[Wanted], shown: Mapping[str, tgtadm.Target], ours: Ours
) -> Iterator[Found]:
    """Compares the targets that there are with those that there have to be."""
    for entry in wanted:
        target = shown.get(entry.iqn)
        if reason := _fault(entry, target):
            what = f"the target {entry.iqn} of volume {entry.volume_id} {reason}"
            missing = base.Difference(base.Fault.MISSING, entry.iqn, what, entry.volume_id)
            yield Found(missing, entry.iqn, target)
        if target is not None:
            yield from _intruders(entry, target)
    names = {entry.iqn for entry in wanted}
    for iqn in sorted(set(shown) | set(ours.records)):
        if iqn not in names and ours.has(iqn):
            yield _unowned(iqn, shown.get(iqn), ours.volume_of(iqn))


def _unowned(iqn: str, target: tgtadm.Target | None, volume_id: uuid.UUID | None) -> Found:
    what = (
        f"the target {iqn} belongs to no export and no connection"
        if target is not None
        else f"a target {iqn} is recorded as made, and nothing needs it"
    )
    return Found(base.Difference(base.Fault.UNOWNED, iqn, what, volume_id), iqn, target)


def _fault(entry: Wanted, target: tgtadm.Target | None) -> str | None:
    if target is None:
        return "is not there"
    unit = target.units.get(iscsi.LUN)
    if unit is None:
        return "serves nothing"
    if unit.path != entry.path:
        return f"serves {unit.path} instead of {entry.path}"
    if entry.initiator is None:
        return None
    if unit.read_only != entry.is_read_only:
        return f"is {'read-only' if unit.read_only else 'writable'} against its record"
    if entry.initiator not in target.initiators:
        return f"does not let {entry.initiator} in"
    if entry.user not in target.accounts:
        return "does not ask for its account"
    return None


def _intruders(entry: Wanted, target: tgtadm.Target) -> Iterator[Found]:
    let_in = [one for one in target.initiators if one != entry.initiator]
    accounts = [one for one in target.accounts if one != entry.user]
    for kind, names in (("the initiator", let_in), ("the account", accounts)):
        for name in names:
            what = f"the target {entry.iqn} lets {kind} {name} in, which no record does"
            yield Found(
                base.Difference(base.Fault.UNOWNED, f"{entry.iqn} {name}", what, entry.volume_id),
                entry.iqn,
                target,
                intruder=name,
                initiator=entry.initiator,
            )
