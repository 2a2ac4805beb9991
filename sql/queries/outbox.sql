-- The outbox: what has still to be told.

-- name: add_letters
-- Keeps messages that never became jobs, to be dead-lettered. $1 addresses, $2 bodies, $3 properties.
INSERT INTO outbox (address, letter, letter_properties)
SELECT * FROM unnest($1::text[], $2::bytea[], $3::jsonb[])
RETURNING id;

-- name: adopt_outbox
-- Takes over rows that nobody has touched for a while, the oldest first. $1 addresses, $2 age in
-- seconds, $3 how many.
WITH mine AS (
    SELECT id FROM outbox
    WHERE address = ANY ($1::text[]) AND touched_at < now() - make_interval(secs => $2)
    ORDER BY id LIMIT $3 FOR UPDATE SKIP LOCKED
), adopted AS (
    UPDATE outbox SET touched_at = now() FROM mine WHERE outbox.id = mine.id
    RETURNING outbox.*
)
SELECT
    adopted.*, to_jsonb(jobs) - 'body' AS job, jobs.body AS job_body,
    coalesce(adopted.volume_gone, volume_event(volumes)) AS event
FROM adopted
    LEFT JOIN jobs ON jobs.id = adopted.job_id
    LEFT JOIN volumes ON volumes.id = adopted.volume_id
ORDER BY adopted.id;

-- name: touch_outbox
-- Keeps rows from being adopted for a while. $1 ids.
UPDATE outbox SET touched_at = now() WHERE id = ANY ($1::bigint[]);

-- name: delete_outbox
-- Forgets what the broker has confirmed. $1 ids.
DELETE FROM outbox WHERE id = ANY ($1::bigint[]);
