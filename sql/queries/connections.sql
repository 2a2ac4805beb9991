-- Connections: recorded before they are made, kept as ended until their volume goes.

-- name: count_writers
-- How many connections there have ever been that could write to a volume. $1 volume.
SELECT count(*) FROM connections WHERE volume_id = $1 AND access_mode = 'rw';

-- name: begin_connection
-- Records a connection that is about to be made, or finds the one that is there; one that is being
-- ended is made again, unless another kind is asked for.
-- $1 job, $2 fencing token, $3 id, $4 volume, $5 connector host, $6 identity, $7 connection key,
-- $8 connector, $9 access mode, $10 whether it is local, $11 credentials.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
INSERT INTO connections (
    id, volume_id, connector_host, identity, connection_key, connector, access_mode, state,
    is_local, credentials, made_by)
SELECT $3, $4, $5, $6, $7, $8, $9, 'making', $10, $11, $1 FROM mine
ON CONFLICT (
        volume_id, hashed(coalesce(connector_host, '')), hashed(identity), hashed(connection_key))
    WHERE state <> 'ended'
    DO UPDATE SET state = CASE connections.state
        WHEN 'ending' THEN CASE
            WHEN (connections.access_mode, connections.is_local)
                = (excluded.access_mode, excluded.is_local)
            THEN 'making' ELSE 'ending' END
        ELSE connections.state END,
        made_by = CASE connections.state
            WHEN 'ending' THEN excluded.made_by ELSE connections.made_by END
RETURNING *;

-- name: live_connection
-- Keeps what the target gave. $1 job, $2 fencing token, $3 id, $4 driver volume type, $5 data without
-- secrets, $6 secrets and credentials.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
UPDATE connections SET
    state = 'live', driver_volume_type = $4, data = $5, credentials = $6
FROM mine
WHERE connections.id = $3 AND connections.state IN ('making', 'live')
RETURNING connections.*;

-- name: ending_connections
-- Marks a volume's connections as ending, before they are undone, and returns them.
-- $1 job, $2 fencing token, $3 volume, $4 connection ids or null for all.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
UPDATE connections SET state = 'ending'
FROM mine
WHERE connections.volume_id = $3 AND connections.state <> 'ended'
    AND ($4::uuid[] IS NULL OR connections.id = ANY ($4))
RETURNING connections.*;

-- name: ended_connection
-- Marks a connection as ended, and forgets its secrets. $1 job, $2 fencing token, $3 id.
WITH mine AS (
    SELECT FROM jobs WHERE id = $1 AND lease_token = $2 AND state = 'running' FOR SHARE
)
UPDATE connections SET state = 'ended', credentials = NULL, data = NULL
FROM mine WHERE connections.id = $3;

-- name: get_connection
-- One connection, ended or not. $1 id.
SELECT * FROM connections WHERE id = $1;

-- name: find_connection
-- The connection of a connector that has not ended. $1 volume, $2 host, $3 identity, $4 key.
SELECT * FROM connections
WHERE volume_id = $1 AND coalesce(connector_host, '') = $2 AND identity = $3
    AND connection_key = $4 AND state <> 'ended';

-- name: volume_connections
-- A volume's connections that have not ended, the oldest first. $1 volume.
SELECT * FROM connections WHERE volume_id = $1 AND state <> 'ended' ORDER BY created_at, id;

-- name: left_connections
-- What jobs that have ended left of connections and of exports made for them: a volume and its
-- connection; for an export that no connection needs an ended one, null where there never was one.
-- Not while a job is at work on it.
-- $1 address.
SELECT volumes.id AS volume_id, connections.id AS connection_id
FROM connections JOIN volumes ON volumes.id = connections.volume_id
WHERE volumes.address = $1
    AND (connections.state IN ('making', 'ending')
        OR (connections.state = 'live' AND EXISTS (
            SELECT FROM jobs
            WHERE jobs.id = CASE WHEN connections.connection_key ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                    THEN connections.connection_key::uuid END
                AND jobs.method = 'copy_volume_data' AND jobs.finished_at IS NOT NULL)))
    AND NOT EXISTS (
        SELECT FROM job_locks WHERE job_locks.volume_id = volumes.id AND mode IN ('c', 'x'))
UNION ALL
SELECT volumes.id, last.id FROM volumes
    LEFT JOIN LATERAL (
        SELECT connections.id FROM connections
        WHERE connections.volume_id = volumes.id AND NOT is_local
        ORDER BY created_at DESC LIMIT 1) last ON true
WHERE volumes.address = $1 AND volumes.export = 'implicit'
    AND NOT EXISTS (
        SELECT FROM connections
        WHERE connections.volume_id = volumes.id AND state <> 'ended' AND NOT is_local)
    AND NOT EXISTS (
        SELECT FROM job_locks WHERE job_locks.volume_id = volumes.id AND mode IN ('c', 'x'));

-- name: exported_volumes
-- What a backend has to serve. $1 address.
SELECT volume_record(volumes) AS record, volumes.* FROM volumes
WHERE address = $1 AND export <> 'none'
ORDER BY id;

-- name: served_connections
-- The connections of a backend that its target serves. $1 address.
SELECT connections.* FROM connections JOIN volumes ON volumes.id = connections.volume_id
WHERE volumes.address = $1 AND volumes.export <> 'none' AND NOT is_local AND state = 'live'
ORDER BY connections.created_at, connections.id;
