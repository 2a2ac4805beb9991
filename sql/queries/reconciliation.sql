-- Reconciliation: what the records say that must be there, and where they contradict themselves.

-- name: reconciled_volumes
-- The volumes of a backend, each with what changes whenever a job has touched what is served of it,
-- and whether an unfinished job needs it. $1 address.
SELECT id, name, size_bytes, status, metadata, provider_location,
    concat_ws('/', seq,
        (SELECT count(*) FROM connections WHERE volume_id = volumes.id),
        (SELECT count(*) FROM connections WHERE volume_id = volumes.id AND state = 'live')) AS mark,
    EXISTS (SELECT FROM job_locks WHERE volume_id = volumes.id) AS is_held
FROM volumes WHERE address = $1;

-- name: needed_volumes
-- Volumes that unfinished jobs of a backend need, those among them that have no record (yet).
-- $1 address.
SELECT DISTINCT job_locks.volume_id FROM job_locks JOIN jobs ON jobs.id = job_locks.job_id
WHERE jobs.address = $1;

-- name: recorded_volumes
-- Those of some volumes that are recorded, wherever they live. $1 ids.
SELECT id FROM volumes WHERE id = ANY ($1::uuid[]);

-- name: misplaced_volumes
-- Volumes in a passing status that no unfinished job accounts for, and those whose attachments say
-- something else than their status; with the status where they belong. $1 address, $2 the passing
-- statuses.
SELECT id, status, seq, status = ANY ($2::text[]) AS is_stuck,
    coalesce(
        CASE WHEN status = ANY ($2::text[]) THEN settled_status(volumes) END,
        CASE WHEN EXISTS (SELECT FROM attachments WHERE volume_id = volumes.id)
            THEN 'in-use' ELSE 'available' END) AS belongs
FROM volumes
WHERE address = $1
    AND CASE
        WHEN status = ANY ($2::text[]) THEN true
        WHEN status = 'available'
            THEN EXISTS (SELECT FROM attachments WHERE volume_id = volumes.id)
        WHEN status = 'in-use'
            THEN NOT EXISTS (SELECT FROM attachments WHERE volume_id = volumes.id)
        ELSE false END
    AND NOT EXISTS (SELECT FROM job_locks WHERE volume_id = volumes.id)
    AND NOT EXISTS (
        SELECT FROM jobs WHERE jobs.id = volumes.status_job AND jobs.finished_at IS NULL);

-- name: settle_volume
-- Moves a volume where it belongs, if nothing has touched it since it was looked at; an attachment that
-- was being made goes. $1 volume, $2 its seq then, $3 status, $4 error, kept with a status that is one.
WITH settled AS (
    UPDATE volumes SET
        status = $3,
        attach_status = CASE $3 WHEN 'in-use' THEN 'attached' WHEN 'available' THEN 'detached'
            ELSE attach_status END,
        error = CASE WHEN $3 LIKE 'error%' THEN $4::jsonb END,
        previous_status = NULL, status_job = NULL, seq = seq + 1, updated_at = now()
    WHERE id = $1 AND seq = $2
        AND NOT EXISTS (SELECT FROM job_locks WHERE volume_id = volumes.id)
    RETURNING volumes AS volume
), unattached AS (
    DELETE FROM attachments USING settled
    WHERE attachments.volume_id = (settled.volume).id AND attachments.status = 'attaching'
)
SELECT volume_event(volume) AS event FROM settled;

-- name: abandoned_jobs
-- Running jobs whose lease ran out $2 seconds ago and that nobody has taken over. $1 address.
SELECT id, method, rfc3339(lease_until) AS lease_until FROM jobs
WHERE state = 'running' AND address = $1 AND lease_until < now() - make_interval(secs => $2);

-- name: begun_jobs
-- Unfinished jobs that have begun at a host, whichever of its backends, and the processes that work
-- for them. $1 host.
SELECT id, children FROM jobs
WHERE finished_at IS NULL AND started_at IS NOT NULL
    AND split_part(address, '@', 1) = $1;

-- name: backends
-- Every address that a worker has served or a volume or unfinished job names: its state by its last
-- stats, which are too old after $1 seconds, and what it has.
WITH addresses AS (
    SELECT address FROM backends
    UNION SELECT address FROM volumes
    UNION SELECT address FROM jobs WHERE finished_at IS NULL
)
SELECT addresses.address,
    coalesce(backends.state = 'up' AND backends.updated_at > now() - make_interval(secs => $1), false)
        AS is_up,
    rfc3339(backends.updated_at) AS updated_at, backends.stats, backends.error,
    (SELECT count(*) FROM volumes WHERE volumes.address = addresses.address) AS volumes,
    (SELECT count(*) FROM jobs
        WHERE jobs.address = addresses.address AND state = 'queued') AS queued,
    (SELECT count(*) FROM jobs
        WHERE jobs.address = addresses.address AND state = 'running') AS running
FROM addresses LEFT JOIN backends USING (address)
ORDER BY addresses.address;

-- name: remove_backend
-- Forgets an address that has no volume and no unfinished job. $1 address.
DELETE FROM backends
WHERE address = $1
    AND NOT EXISTS (SELECT FROM volumes WHERE volumes.address = $1)
    AND NOT EXISTS (
        SELECT FROM jobs WHERE jobs.address = $1 AND jobs.finished_at IS NULL)
RETURNING address;
