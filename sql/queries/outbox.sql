-- The outbox: what has still to be told.

-- name: add_letter
-- Keeps messages that never became jobs, to be dead-lettered. $1 owner, $2 addresses, $3 bodies,
-- $4 properties.
INSERT INTO outbox (owner, address, letter, letter_properties)
SELECT $1, * FROM unnest($2::text[], $3::bytea[], $4::jsonb[])
RETURNING id;

-- name: pending_outbox
-- Rows that nobody has published for a while, the oldest first. $1 addresses, $2 age in seconds,
-- $3 ids to leave out, $4 how many.
SELECT
    outbox.*, to_jsonb(jobs) - 'body' AS job, jobs.body AS job_body,
    coalesce(outbox.volume_gone, volume_event(volumes)) AS event
FROM outbox
    LEFT JOIN jobs ON jobs.id = outbox.job_id
    LEFT JOIN volumes ON volumes.id = outbox.volume_id
WHERE outbox.address = ANY ($1::text[])
    AND outbox.created_at < now() - make_interval(secs => $2)
    AND outbox.id <> ALL ($3::bigint[])
ORDER BY outbox.id
LIMIT $4;

-- name: delete_outbox
-- Forgets what the broker has confirmed. $1 ids.
DELETE FROM outbox WHERE id = ANY ($1::bigint[]);
