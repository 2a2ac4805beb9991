-- The installation: its namespace, its schema, its backends.

-- name: create_migration_table
CREATE TABLE IF NOT EXISTS schema_migrations (
    version integer PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- name: lock_migrations
-- One migration at a time, for this transaction.
SELECT pg_advisory_xact_lock(7046029254386353131);

-- name: has_migrations
SELECT to_regclass('schema_migrations') IS NOT NULL AS present;

-- name: applied_migrations
SELECT version, name, checksum FROM schema_migrations ORDER BY version;

-- name: record_migration
INSERT INTO schema_migrations (version, name, checksum) VALUES ($1, $2, $3);

-- name: record_namespace
-- Names the installation, unless it has a name; returns the name that it has.
WITH new AS (
    INSERT INTO installation (namespace) VALUES ($1) ON CONFLICT DO NOTHING RETURNING namespace
)
SELECT namespace FROM new UNION ALL SELECT namespace FROM installation LIMIT 1;

-- name: get_namespace
SELECT namespace FROM installation;

-- name: set_backend
-- Keeps a backend's state; returns its seq. $1 address, $2 state, $3 stats or null to keep them,
-- $4 error or null.
INSERT INTO backends (address, state, stats, error) VALUES ($1, $2, $3, $4)
ON CONFLICT (address) DO UPDATE SET
    state = $2, stats = coalesce($3, backends.stats), error = $4,
    seq = backends.seq + 1, updated_at = now()
RETURNING seq;

-- name: is_writable
-- Answers while the database is there and takes writes.
SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off' AS writable;

-- name: create_database
-- {name} is put in as an identifier: a statement of this kind takes no parameters.
CREATE DATABASE {name};

-- name: drop_database
-- Forced: a worker that was killed a moment ago may still count as connected.
DROP DATABASE IF EXISTS {name} WITH (FORCE);
