-- Jobs: their life from acceptance to the end. Every write by a worker names its fencing token.

-- name: accept_jobs
-- Stores a batch of requests; the parameters are those of the function, see the migrations.
SELECT * FROM accept_jobs(
    $1, make_interval(secs => $2), $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13,
    $14, $15, $16, $17);

-- name: claim_jobs
-- Takes jobs to run. $1 owner, $2 lease in seconds, $3 $4 free control and data slots, $5 addresses.
SELECT * FROM claim_jobs($1, make_interval(secs => $2), $3, $4, $5);

-- name: renew_leases
-- Keeps the lease of running jobs; returns those still held. $1 lease in seconds, $2 ids, $3 their
-- fencing tokens.
UPDATE jobs SET lease_until = now() + make_interval(secs => $1)
FROM unnest($2::uuid[], $3::bigint[]) AS held (id, lease_token)
WHERE jobs.id = held.id AND jobs.lease_token = held.lease_token AND jobs.state = 'running'
RETURNING jobs.id;

-- name: finish_job
-- Ends a job together with what becomes of its volume, and notes what has to be told. A volume that
-- the job holds in a passing status, and of which nothing is said, is settled.
-- $1 job, $2 fencing token, $3 state, $4 result, $5 error, $6 connection whose secrets belong into
-- the result, $7 owner, $8 volume change: id, drop, and the columns to set, $9 whether the result is
-- the changed volume's record.
WITH mine AS (
    SELECT id FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR UPDATE
), changed AS (
    UPDATE volumes SET
        status = coalesce(
            $8::jsonb ->> 'status',
            CASE WHEN status_job = $1 THEN settled_status(volumes) ELSE status END),
        attach_status = coalesce(
            $8::jsonb ->> 'attach_status',
            CASE WHEN status_job = $1 THEN settled_attach_status(volumes) ELSE attach_status END),
        provider_location = CASE WHEN $8::jsonb ? 'provider_location'
            THEN $8::jsonb ->> 'provider_location' ELSE provider_location END,
        size_bytes = coalesce(($8::jsonb ->> 'size_bytes')::bigint, size_bytes),
        export = coalesce($8::jsonb ->> 'export', export),
        metadata = coalesce($8::jsonb -> 'metadata', metadata),
        error = CASE WHEN coalesce(
            $8::jsonb ->> 'status',
            CASE WHEN status_job = $1 THEN settled_status(volumes) ELSE status END)
            LIKE 'error%' THEN coalesce($5, error) END,
        previous_status = CASE WHEN status_job = $1 THEN NULL ELSE previous_status END,
        status_job = nullif(status_job, $1), seq = seq + 1, updated_at = now()
    FROM mine
    WHERE CASE WHEN $8::jsonb IS NULL THEN volumes.status_job = $1
        ELSE volumes.id = ($8::jsonb ->> 'id')::uuid AND NOT $8::jsonb ? 'drop' END
    RETURNING volumes AS volume
), unattached AS (
    DELETE FROM attachments USING changed
    WHERE $3 <> 'succeeded' AND attachments.volume_id = (changed.volume).id
        AND attachments.status = 'attaching'
), dropped AS (
    DELETE FROM volumes USING mine
    WHERE volumes.id = ($8::jsonb ->> 'id')::uuid AND $8::jsonb ? 'drop'
    RETURNING volumes AS volume
), gone AS (
    SELECT (volume).id, jsonb_build_object(
        'at', rfc3339(now()), 'seq', (volume).seq + 1,
        'volume', volume_record(volume) || jsonb_build_object(
            'status', 'deleted', 'updated_at', rfc3339(now()), 'exported', false,
            'attachments', '[]'::jsonb, 'connections', '[]'::jsonb)) AS event
    FROM dropped
), done AS (
    UPDATE jobs SET
        state = $3, error = $5, connection_id = $6,
        result = CASE WHEN $9 THEN (SELECT volume_record(volume) FROM changed) ELSE $4 END,
        finished_at = now(), owner = NULL, lease_until = NULL, endings = endings + 1,
        version = version + 1,
        first_failed_at = CASE WHEN $5::jsonb IS NULL THEN first_failed_at
            ELSE coalesce(first_failed_at, now()) END
    FROM mine WHERE jobs.id = mine.id
    RETURNING jobs.*
), unlocked AS (
    DELETE FROM job_locks USING mine WHERE job_locks.job_id = mine.id
), told AS (
    INSERT INTO outbox (owner, address, job_id, volume_id, volume_gone)
    SELECT $7, done.address, done.id,
        coalesce((SELECT id FROM gone), (SELECT (volume).id FROM changed)),
        (SELECT event FROM gone)
    FROM done
    RETURNING id
)
SELECT
    done.*,
    (SELECT id FROM told) AS outbox_id,
    coalesce((SELECT event FROM gone), (SELECT volume_event(volume) FROM changed)) AS event
FROM done;

-- name: requeue_job
-- Puts a running job back, to run again after $3 seconds. $1 job, $2 fencing token, $4 the error of
-- this attempt or null, $5 whether the attempt counts (one cut short by a drain does not).
WITH back AS (
    UPDATE jobs SET
        state = 'queued', owner = NULL, lease_until = NULL,
        run_at = now() + make_interval(secs => $3),
        error = coalesce($4, error), attempt = attempt - (NOT $5::boolean)::integer,
        first_failed_at = CASE WHEN $4::jsonb IS NULL THEN first_failed_at
            ELSE coalesce(first_failed_at, now()) END,
        version = version + 1
    WHERE id = $1 AND lease_token = $2 AND state = 'running'
    RETURNING jobs.*
), unheld AS (
    UPDATE job_locks SET held = false FROM back WHERE job_locks.job_id = back.id
)
SELECT * FROM back;

-- name: set_progress
-- Keeps how far a job has come; returns its row. $1 job, $2 fencing token, $3 progress.
UPDATE jobs SET progress = $3, version = version + 1
WHERE id = $1 AND lease_token = $2 AND state = 'running'
RETURNING *;

-- name: get_job
-- One job. $1 id.
SELECT * FROM jobs WHERE id = $1;

-- name: prune_jobs
-- Forgets jobs that ended long ago and of which nothing is left to tell. $1 seconds, $2 how many.
DELETE FROM jobs WHERE id IN (
    SELECT id FROM jobs
    WHERE finished_at < now() - make_interval(secs => $1)
        AND NOT EXISTS (SELECT FROM outbox WHERE outbox.job_id = jobs.id)
    ORDER BY finished_at
    LIMIT $2)
RETURNING id;

-- name: list_jobs
-- Jobs in the order of acceptance. $1 address or null for all, $2 state or null, $3 volume or null,
-- $4 the last id seen or null, $5 how many.
SELECT jobs.* FROM jobs
WHERE ($1::text IS NULL OR address = $1)
    AND ($2::text IS NULL OR state = $2)
    AND ($3::uuid IS NULL OR volume_ids @> ARRAY[$3])
    AND ($4::uuid IS NULL OR seq > (SELECT seq FROM jobs last WHERE last.id = $4))
ORDER BY seq
LIMIT $5;
