"""A clock that can be moved: the database's, by which leases, deadlines and delays are measured.

PostgreSQL's own clock stays as it is. What is stored is moved back instead, which is the same to
every comparison with it: a lease has run out, a deadline has passed, a retry is due. Workers keep
the time of their running jobs by their own clocks as well: move only what belongs to a host whose
worker is dead, or is meant to find its lease gone.
"""

from tests.services import environment

_JOBS = """
UPDATE jobs SET
    lease_until = lease_until - make_interval(secs => $1),
    run_at = run_at - make_interval(secs => $1),
    deadline = deadline - make_interval(secs => $1),
    finished_at = finished_at - make_interval(secs => $1)
WHERE $2::text IS NULL OR split_part(address, '@', 1) = $2
"""
_OUTBOX = """
UPDATE outbox SET touched_at = touched_at - make_interval(secs => $1)
WHERE $2::text IS NULL OR split_part(address, '@', 1) = $2
"""


async def advance(
    site: environment.Installation, seconds: float, *, host: str | None = None
) -> None:
    """Lets seconds pass at once for the jobs of a host, of all hosts where none is named."""
    for statement in (_JOBS, _OUTBOX):
        await site.rows(statement, seconds, host)
