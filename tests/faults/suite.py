"""One combination of the suite: a worker dies at a point of a case, another one takes over."""

import dataclasses
import time
from typing import Any

from tests.faults import checks, points, world
from tests.faults.cases import Case, Scene
from tests.faults.checks import Findings, Kind
from tests.services import amqp


@dataclasses.dataclass(frozen=True)
class Combination:
    """A case and where its worker dies."""

    case: Case
    at: points.At

    def __str__(self) -> str:
        return f"{self.case.name}-{self.at}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a combination, and how many seconds passed from the death to the answer."""

    found: Findings
    seconds: float


async def run(made: world.World, combination: Combination) -> Outcome:
    """Lets the worker die there, starts it again, and looks at everything.

    Raises:
        AssertionError: the worker does not come to the point, so that nothing was tried.
    """
    case, at = combination.case, combination.at
    await start(made, case.scene, at)
    async with made.caller.events("job.#", "volume.#") as events:
        request = await case.prepare(made, f"host-a@{case.scene.backend}")
        await made.arm()
        sent = await made.send(case.method, request)
        has_died = await made.death(case.scene.dies, sent)
        assert has_died, f"{combination} is not reached: {made.reached()}"
        died = time.monotonic()
        found = Findings()
        if orphans := await made.orphans(case.scene.dies):
            found.note(Kind.LEFT, f"children outlive their worker: {orphans}")
        made.disarm()
        made.mend()
        await made.restart(case.scene.dies)
        result = await checks.answer(made, sent, request.address, found)
        seconds = time.monotonic() - died
        await look(made, request, result, found)
        await checks.told(events, request, result, sent, found)
    await checks.repeats(made, case.method, request, sent, found)
    await checks.storage(made, request, result, found)
    await end(made, result, found)
    return Outcome(found, seconds)


async def trace(made: world.World, case: Case, found: Findings) -> list[points.Point]:
    """Carries a request out without a death; returns the points that it came to."""
    request = await case.prepare(made, f"host-a@{case.scene.backend}")
    await made.arm()
    before = len(made.reached())
    sent = await made.send(case.method, request)
    if request.hidden is not None:
        await amqp.eventually(lambda: points.Point.REQUEUED in made.reached()[before:])
        made.mend()
    result = await checks.answer(made, sent, request.address, found)
    await checks.settled(made, found)
    await checks.storage(made, request, result, found)
    made.disarm()
    await remove(made, result, found)
    return made.reached()[before:]


async def start(made: world.World, scene: Scene, at: points.At | None, **settings: Any) -> None:
    """Starts the workers of a scene, the one that is to die armed."""
    for host in scene.hosts:
        if host == scene.dies:
            await made.add_host(host, made.crashing(at), **settings)
        else:
            await made.add_host(host, **settings)


async def look(
    made: world.World, request: world.Request, result: dict[str, Any] | None, found: Findings
) -> None:
    """Everything that must hold once a request has been answered, and a while has passed."""
    await checks.settled(made, found)
    await checks.storage(made, request, result, found)
    await checks.served(made, found)


async def end(made: world.World, result: dict[str, Any] | None, found: Findings) -> None:
    """Removes all volumes and ends all workers; nothing must be left of anything."""
    await remove(made, result, found)
    await made.stop()
    await checks.nothing(made, found)


async def remove(made: world.World, result: dict[str, Any] | None, found: Findings) -> None:
    """Removes all volumes, that of a result too."""
    if result is not None and "size_bytes" in result:
        made.volumes.adopt(result)
    try:
        await made.volumes.clean()
    except AssertionError as error:
        found.note(Kind.LEFT, f"what cannot be removed: {error}")
