-- Replays: jobs taken back from the dead, and the operator who does it.

-- name: revive_job
-- Takes a dead job back to be run again; the parameters are those of the function, see the migrations.
SELECT outcome, why FROM revive_job($1, $2, $3, $4, $5, $6);

-- name: get_fingerprint
-- What a repeat of a job's request must have. $1 job.
SELECT fingerprint FROM jobs WHERE id = $1;

-- name: take_operator_lock
-- Takes a lock, or keeps it; no row: somebody else holds it. $1 name, $2 holder, $3 who that is,
-- $4 seconds.
INSERT INTO operator_locks (name, holder, who, until)
VALUES ($1, $2, $3, now() + make_interval(secs => $4))
ON CONFLICT (name) DO UPDATE SET
    holder = excluded.holder, who = excluded.who, until = excluded.until
    WHERE operator_locks.holder = excluded.holder OR operator_locks.until < now()
RETURNING holder;

-- name: get_operator_lock
-- Who holds a lock, and until when. $1 name.
SELECT who, until FROM operator_locks WHERE name = $1 AND until >= now();

-- name: keep_operator_lock
-- Holds a lock for longer; no row: it was taken over. $1 name, $2 holder, $3 seconds.
UPDATE operator_locks SET until = now() + make_interval(secs => $3)
WHERE name = $1 AND holder = $2
RETURNING holder;

-- name: drop_operator_lock
-- Gives a lock back. $1 name, $2 holder.
DELETE FROM operator_locks WHERE name = $1 AND holder = $2;
