-- Jobs: their life from acceptance to the end. Every write by a worker names its fencing token.

-- name: accept_jobs
-- Stores a batch of requests; the parameters are those of the function, see the migrations.
SELECT * FROM accept_jobs(
    $1, make_interval(secs => $2), $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13,
    $14, $15, $16, $17, $18);

-- name: claim_jobs
-- Takes jobs to run. $1 owner, $2 lease in seconds, $3 $4 free control and data slots, $5 addresses.
SELECT * FROM claim_jobs($1, make_interval(secs => $2), $3, $4, $5);

-- name: cancel_job
-- Asks for a job to be cancelled; returns those that the caller has to end. $1 job, $2 owner, $3 lease
-- in seconds, $4 methods that are never cancelled for their parent's sake.
SELECT * FROM cancel_job($1, $2, make_interval(secs => $3), $4);

-- name: jobs_to_cancel
-- Running jobs that somebody wants to be cancelled. $1 owner.
SELECT id FROM jobs WHERE owner = $1 AND cancel_requested AND state = 'running';

-- name: throttle_job
-- Says how fast a job may go, unless it has ended. $1 job, $2 what is said, $3 methods that heed it.
UPDATE jobs SET throttle = $2 WHERE id = $1 AND finished_at IS NULL AND method = ANY ($3::text[])
RETURNING *;

-- name: throttled_jobs
-- Running jobs of which somebody has said how fast they may go. $1 owner.
SELECT id, throttle FROM jobs WHERE owner = $1 AND throttle IS NOT NULL AND state = 'running';

-- name: ended_jobs
-- Which of some jobs have ended, or are gone. $1 ids.
SELECT id FROM unnest($1::uuid[]) AS asked (id)
WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.id = asked.id AND finished_at IS NULL);

-- name: queued_connects
-- Queued jobs that are to connect a volume, and stand before another job. $1 volume, $2
-- that job.
SELECT * FROM jobs
WHERE volume_ids @> ARRAY[$1::uuid] AND method = 'initialize_connection' AND state = 'queued'
    AND seq < (SELECT seq FROM jobs last WHERE last.id = $2)
ORDER BY seq;

-- name: set_children
-- Keeps which processes work for a job. $1 job, $2 fencing token, $3 children.
UPDATE jobs SET children = $3 WHERE id = $1 AND lease_token = $2 AND state = 'running'
RETURNING id;

-- name: renew_leases
-- Keeps the lease of running jobs; returns those still held. $1 lease in seconds, $2 ids, $3 their
-- fencing tokens.
WITH mine AS (
    -- In the order in which finish_jobs locks them, so that neither waits for the other.
    SELECT jobs.id FROM jobs
        JOIN unnest($2::uuid[], $3::bigint[]) AS held (id, lease_token) USING (id, lease_token)
    WHERE jobs.state = 'running'
    ORDER BY jobs.id FOR UPDATE OF jobs
)
UPDATE jobs SET lease_until = now() + make_interval(secs => $1)
FROM mine WHERE jobs.id = mine.id
RETURNING jobs.id;

-- name: finish_jobs
-- Ends jobs, each together with what becomes of its volume, and notes what has to be told. A volume
-- that a job holds in a passing status, and of which nothing is said, is settled. No two of them
-- change the same volume. A row for each that was still its worker's.
-- $1 jobs, $2 fencing tokens, $3 states, $4 results, $5 errors, $6 connections whose secrets belong
-- into the result, $7 volume changes (id, drop, and the columns to set), $8 whether the result is the
-- changed volume's record, $9 their addresses: whether more waits at any of them.
WITH input AS (
    SELECT * FROM unnest(
        $1::uuid[], $2::bigint[], $3::text[], $4::jsonb[], $5::jsonb[], $6::uuid[], $7::jsonb[],
        $8::boolean[]
    ) AS input (id, lease_token, state, result, error, connection_id, change, is_record)
), mine AS (
    SELECT input.*, coalesce(
        (change ->> 'id')::uuid,
        (SELECT volumes.id FROM volumes
        WHERE volumes.id = ANY (jobs.volume_ids) AND status_job = jobs.id LIMIT 1)) AS volume_id
    FROM jobs JOIN input ON input.id = jobs.id AND input.lease_token = jobs.lease_token
    WHERE jobs.state = 'running'
        -- One whose volume's record is gone has not made what it says: it runs again.
        AND (input.state <> 'succeeded' OR change IS NULL OR change ? 'drop'
            -- A scalar, since PostgreSQL may look for what EXISTS asks for in a hash of all volumes.
            OR (SELECT volumes.id FROM volumes WHERE volumes.id = (change ->> 'id')::uuid)
                IS NOT NULL)
    ORDER BY jobs.id FOR UPDATE OF jobs
), changed AS (
    UPDATE volumes SET
        status = coalesce(
            change ->> 'status',
            CASE WHEN status_job = mine.id THEN settled_status(volumes) ELSE status END),
        attach_status = coalesce(
            change ->> 'attach_status',
            CASE WHEN status_job = mine.id THEN settled_attach_status(volumes)
                ELSE attach_status END),
        provider_location = CASE WHEN change ? 'provider_location'
            THEN change ->> 'provider_location' ELSE provider_location END,
        size_bytes = coalesce((change ->> 'size_bytes')::bigint, size_bytes),
        export = coalesce(change ->> 'export', export),
        metadata = coalesce(change -> 'metadata', metadata),
        error = CASE WHEN coalesce(
            change ->> 'status',
            CASE WHEN status_job = mine.id THEN settled_status(volumes) ELSE status END)
            LIKE 'error%' THEN coalesce(mine.error, volumes.error) END,
        previous_status = CASE WHEN status_job = mine.id THEN NULL ELSE previous_status END,
        status_job = nullif(status_job, mine.id), seq = seq + 1, updated_at = now()
    FROM mine
    WHERE volumes.id = mine.volume_id AND (change IS NULL OR NOT change ? 'drop')
    RETURNING mine.id AS job_id, volumes.id, seq, updated_at, volume_record(volumes) AS record
), unattached AS (
    DELETE FROM attachments USING mine
    WHERE mine.state <> 'succeeded' AND attachments.volume_id = mine.volume_id
        AND attachments.status = 'attaching'
), dropped AS (
    DELETE FROM volumes USING mine
    WHERE volumes.id = mine.volume_id AND change ? 'drop'
    RETURNING mine.id AS job_id, volumes AS volume
), gone AS (
    SELECT job_id, (volume).id, jsonb_build_object(
        'at', rfc3339(now()), 'seq', (volume).seq + 1,
        'volume', volume_record(volume) || jsonb_build_object(
            'status', 'deleted', 'updated_at', rfc3339(now()), 'exported', false,
            'attachments', '[]'::jsonb, 'connections', '[]'::jsonb)) AS event
    FROM dropped
), done AS (
    UPDATE jobs SET
        state = mine.state, error = mine.error, connection_id = mine.connection_id,
        result = CASE WHEN mine.is_record THEN changed.record ELSE mine.result END,
        finished_at = now(), owner = NULL, lease_until = NULL, children = '[]', checkpoint = NULL,
        endings = endings + 1, version = version + 1,
        first_failed_at = CASE WHEN mine.error IS NULL THEN first_failed_at
            ELSE coalesce(first_failed_at, now()) END
    FROM mine LEFT JOIN changed ON changed.job_id = mine.id
    WHERE jobs.id = mine.id
    RETURNING jobs.*
), unlocked AS (
    DELETE FROM job_locks USING mine WHERE job_locks.job_id = mine.id
), told AS (
    INSERT INTO outbox (address, job_id, volume_id, volume_gone)
    SELECT done.address, done.id, coalesce(gone.id, changed.id), gone.event
    FROM done LEFT JOIN gone ON gone.job_id = done.id
        LEFT JOIN changed ON changed.job_id = done.id
    RETURNING id, job_id
)
SELECT
    done.id, done.state, done.result, done.error, done.progress, done.connection_id, done.endings,
    done.version, done.first_failed_at, done.finished_at, done.deadline, done.reply_to,
    done.correlation_id, done.status_updates, told.id AS outbox_id,
    -- The record that is the result is not sent twice.
    coalesce(gone.event, CASE WHEN changed.job_id IS NOT NULL THEN jsonb_build_object(
        'at', rfc3339(changed.updated_at), 'seq', changed.seq,
        'volume', CASE WHEN NOT mine.is_record THEN changed.record END) END
    ) AS event,
    EXISTS (
        SELECT FROM jobs WHERE address = ANY ($9::text[]) AND state = 'queued') AS is_more
FROM done JOIN mine USING (id) JOIN told ON told.job_id = done.id
    LEFT JOIN gone ON gone.job_id = done.id
    LEFT JOIN changed ON changed.job_id = done.id;

-- name: requeue_job
-- Puts a running job back, to run again after $3 seconds. $1 job, $2 fencing token, $4 the error of
-- this attempt or null, $5 whether the attempt counts (one cut short by a drain does not).
WITH back AS (
    UPDATE jobs SET
        state = 'queued', owner = NULL, lease_until = NULL, children = '[]', progress = NULL,
        run_at = now() + make_interval(secs => CASE WHEN cancel_requested THEN 0 ELSE $3 END),
        error = coalesce($4, error), attempt = greatest(attempt - (NOT $5::boolean)::integer, 0),
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

-- name: set_checkpoint
-- Keeps how far a copy has safely come. $1 job, $2 fencing token, $3 checkpoint.
UPDATE jobs SET checkpoint = $3 WHERE id = $1 AND lease_token = $2 AND state = 'running'
RETURNING id;

-- name: get_job
-- One job. $1 id.
SELECT * FROM jobs WHERE id = $1;

-- name: prune_jobs
-- Forgets jobs that ended long ago and of which nothing is left to tell. $1 seconds, $2 how many.
DELETE FROM jobs WHERE id = ANY (array(
    SELECT id FROM jobs
    WHERE finished_at < now() - make_interval(secs => $1)
        AND NOT EXISTS (SELECT FROM outbox WHERE outbox.job_id = jobs.id)
    ORDER BY finished_at
    LIMIT $2))
RETURNING id;

-- name: list_jobs
-- Jobs in the order of acceptance. $1 address or null for all, $2 state or null, $3 volume or null,
-- $4 the last id seen or null, $5 how many.
SELECT * FROM list_jobs($1, $2, $3, $4, $5) ORDER BY seq;
