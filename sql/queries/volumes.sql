-- Volumes and attachments.

-- name: get_volume
-- One volume. $1 id.
SELECT volume_record(volumes) AS record, volumes.* FROM volumes WHERE id = $1;

-- name: list_volumes
-- Volumes by id. $1 address or null for all, $2 status or null, $3 the last id seen or null, $4 how many.
SELECT volume_record(found) AS record, found.* FROM list_volumes($1, $2, $3, $4) AS found
ORDER BY id;

-- name: begin_volumes
-- Makes the records of volumes that jobs are about to create, each by one of its own; the record of an
-- earlier attempt of the same job will do, whose request may have been edited since. Without a row:
-- the id is taken, or the job lost its lease.
-- $1 jobs, $2 fencing tokens, $3 ids, $4 names, $5 sizes in bytes, $6 metadata, $7 addresses.
WITH mine AS (
    SELECT jobs.id AS job_id, input.* FROM unnest(
            $1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::bigint[], $6::jsonb[], $7::text[]
        ) AS input (job, token, id, name, size_bytes, metadata, address)
        JOIN jobs ON jobs.id = input.job AND jobs.lease_token = input.token
    WHERE jobs.state = 'running'
    ORDER BY jobs.id FOR SHARE OF jobs
)
INSERT INTO volumes (
    id, name, address, size_bytes, status, metadata, created_by, status_job)
SELECT id, name, address, size_bytes, 'creating', metadata, job_id, job_id FROM mine
ON CONFLICT (id) DO UPDATE SET
    name = excluded.name, size_bytes = excluded.size_bytes, metadata = excluded.metadata,
    seq = volumes.seq + 1, updated_at = now()
    WHERE volumes.created_by = excluded.created_by AND volumes.status = 'creating'
RETURNING volume_record(volumes) AS record, volumes.*;

-- name: take_volume
-- Moves a volume into a passing status that a job holds, remembering the one to go back to. No row:
-- the status is none of $4, or the job lost its lease.
-- $1 job, $2 fencing token, $3 volume, $4 allowed statuses, $5 status, $6 attach status or null.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
UPDATE volumes SET
    status = $5, attach_status = coalesce($6, attach_status), status_job = $1,
    previous_status = CASE WHEN status_job = $1 THEN previous_status ELSE status END,
    seq = seq + 1, updated_at = now()
FROM mine
WHERE id = $3 AND (status = ANY ($4::text[]) OR status_job = $1)
RETURNING volume_record(volumes) AS record, volumes.*;

-- name: set_export
-- Records who asked for a volume's export, before it is made. $1 job, $2 fencing token, $3 volume,
-- $4 export, $5 provider location or null to leave it.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
UPDATE volumes SET
    export = $4,
    export_job = CASE WHEN $4 = 'none' THEN NULL WHEN export = 'none' THEN $1 ELSE export_job END,
    provider_location = CASE WHEN $4 = 'none' THEN NULL
        ELSE coalesce($5, provider_location) END,
    seq = seq + 1, updated_at = now()
FROM mine
WHERE id = $3
RETURNING volume_record(volumes) AS record, volumes.*;

-- name: begin_attachment
-- Records an attachment; the one that is there already will do. $1 job, $2 fencing token, $3 id,
-- $4 volume, $5 instance, $6 host name, $7 mountpoint, $8 mode.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
INSERT INTO attachments (id, volume_id, instance_uuid, host_name, mountpoint, mode, status)
SELECT $3, $4, $5, $6, $7, $8, 'attaching' FROM mine
ON CONFLICT (id) DO UPDATE SET status = attachments.status
RETURNING attachment_record(attachments) AS attachment;

-- name: set_attachment
-- Changes an attachment's status. $1 job, $2 fencing token, $3 attachment, $4 status.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
UPDATE attachments SET status = $4 FROM mine WHERE attachments.id = $3
RETURNING attachment_record(attachments) AS attachment;

-- name: end_attachments
-- Removes a volume's attachment, or all of them. $1 job, $2 fencing token, $3 volume,
-- $4 attachment or null.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
DELETE FROM attachments USING mine
WHERE attachments.volume_id = $3 AND ($4::uuid IS NULL OR attachments.id = $4);
