-- The first schema: volumes with what hangs on them, jobs with their locks, and the outbox.

-- The one installation that this database belongs to.
CREATE TABLE installation (
    namespace text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one)
);

-- Addresses that a worker has served.
CREATE TABLE backends (
    address text PRIMARY KEY,
    state text NOT NULL CHECK (state IN ('up', 'down')),
    stats jsonb,
    error jsonb,
    seq bigint NOT NULL DEFAULT 1,
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE volumes (
    id uuid PRIMARY KEY,
    name text NOT NULL,
    address text NOT NULL,
    size_bytes bigint NOT NULL CHECK (size_bytes > 0),
    status text NOT NULL,
    migration_status text,
    attach_status text NOT NULL DEFAULT 'detached',
    metadata jsonb NOT NULL DEFAULT '{}',
    provider_location text,
    source jsonb,
    user_id text,
    project_id text,
    -- Who asked for the export: nobody, a connection (it goes with the last one), or create_export.
    export text NOT NULL DEFAULT 'none' CHECK (export IN ('none', 'implicit', 'explicit')),
    -- The job that made it from none.
    export_job uuid,
    error jsonb,
    -- The job that made the record: its next attempt goes on with it, anybody else's create is refused.
    created_by uuid NOT NULL,
    -- While a job holds a passing status: that job, and the status to go back to.
    status_job uuid,
    previous_status text,
    -- Rises with every change; the seq of events.
    seq bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX volumes_by_address ON volumes (address, id);
CREATE INDEX volumes_exported_implicitly ON volumes (address) WHERE export = 'implicit';

CREATE TABLE attachments (
    id uuid PRIMARY KEY,
    volume_id uuid NOT NULL REFERENCES volumes ON DELETE CASCADE,
    instance_uuid uuid,
    host_name text,
    mountpoint text NOT NULL,
    mode text NOT NULL,
    status text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX attachments_by_volume ON attachments (volume_id);

-- A connection is recorded before its target is told, and kept as ended, without its secrets, until
-- its volume goes: so what was made can always be found, and ending it twice is told from never.
CREATE TABLE connections (
    id uuid PRIMARY KEY,
    volume_id uuid NOT NULL REFERENCES volumes ON DELETE CASCADE,
    connector_host text,
    identity text NOT NULL,
    connection_key text NOT NULL,
    connector jsonb NOT NULL,
    access_mode text NOT NULL CHECK (access_mode IN ('rw', 'ro')),
    state text NOT NULL CHECK (state IN ('making', 'live', 'ending', 'ended')),
    is_local boolean NOT NULL,
    -- The job that began it: that one takes it back where it is cancelled.
    made_by uuid NOT NULL,
    driver_volume_type text,
    data jsonb,
    -- The only place where a secret is kept.
    credentials jsonb,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX connections_by_volume ON connections (volume_id);
CREATE INDEX connections_not_ended ON connections (volume_id) WHERE state <> 'ended';
-- A text of any length as an index can hold it.
CREATE FUNCTION hashed(t text) RETURNS bytea
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN sha256(convert_to(t, 'UTF8'));
CREATE UNIQUE INDEX connections_told_apart
    ON connections (
        volume_id, hashed(coalesce(connector_host, '')), hashed(identity), hashed(connection_key))
    WHERE state <> 'ended';

CREATE SEQUENCE lease_tokens;

CREATE TABLE jobs (
    id uuid PRIMARY KEY,
    -- The order of acceptance.
    seq bigint GENERATED ALWAYS AS IDENTITY,
    method text NOT NULL,
    address text NOT NULL,
    body bytea NOT NULL,
    properties jsonb NOT NULL,
    fingerprint bytea NOT NULL,
    -- The volumes that it is about, a copy's destination last.
    volume_ids uuid[] NOT NULL,
    slot text NOT NULL CHECK (slot IN ('control', 'data', 'waiting')),
    state text NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    run_at timestamptz NOT NULL DEFAULT now(),
    owner uuid,
    -- The fencing token: a write with an older one comes from a worker that has lost the job.
    lease_token bigint,
    lease_until timestamptz,
    deadline timestamptz,
    reply_to text,
    correlation_id text NOT NULL,
    status_updates boolean NOT NULL DEFAULT false,
    parent_job uuid,
    -- Whether its deadline had passed when its attempt began, by this database's clock.
    overdue boolean NOT NULL DEFAULT false,
    -- Whether an earlier attempt had begun, and may have left something.
    resumed boolean NOT NULL DEFAULT false,
    -- Why it is refused although it was stored: found when it was accepted, or cancelled before it began.
    refusal jsonb,
    -- Its owner, or whoever takes it up next, is to take back what it did and end it.
    cancel_requested boolean NOT NULL DEFAULT false,
    -- How fast it may go, {"bytes_per_second": …}, where somebody has said so after it was sent.
    throttle jsonb,
    -- How far a copy has safely come, and of which source: where its next attempt goes on.
    checkpoint jsonb,
    -- The processes that work for it: pid and start time, so that whoever takes it over can end them.
    children jsonb NOT NULL DEFAULT '[]',
    result jsonb,
    error jsonb,
    progress jsonb,
    -- The connection whose secrets belong into the result.
    connection_id uuid,
    edited boolean NOT NULL DEFAULT false,
    endings integer NOT NULL DEFAULT 0,
    -- Its lives before the last replay: how many, attempts in all, and how the newest of them ended.
    history jsonb,
    first_failed_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    finished_at timestamptz,
    -- Rises with every change; the seq of events. Not to be taken for the order of acceptance.
    version bigint NOT NULL DEFAULT 1
);
CREATE INDEX jobs_waiting ON jobs (address, slot, seq) WHERE state = 'queued';
CREATE INDEX jobs_running ON jobs (lease_until) WHERE state = 'running';
CREATE INDEX jobs_unfinished ON jobs (address) WHERE finished_at IS NULL;
CREATE INDEX jobs_to_cancel ON jobs (owner) WHERE cancel_requested AND state = 'running';
CREATE INDEX jobs_throttled ON jobs (owner) WHERE throttle IS NOT NULL AND state = 'running';
CREATE INDEX jobs_by_parent ON jobs (parent_job) WHERE parent_job IS NOT NULL AND finished_at IS NULL;
CREATE INDEX jobs_by_volume ON jobs USING gin (volume_ids);
CREATE INDEX jobs_by_acceptance ON jobs (seq);
CREATE INDEX jobs_by_address ON jobs (address, seq);
CREATE INDEX jobs_ended_badly ON jobs (state, seq) WHERE state IN ('failed', 'dead', 'cancelled');
CREATE INDEX jobs_finished ON jobs (finished_at) WHERE finished_at IS NOT NULL;

-- What unfinished jobs need of volumes: x alone, c (connect, attach, …) one at a time beside readers,
-- r (a copy's source) beside all but x. A row means a claim; held, that the job runs.
CREATE TABLE job_locks (
    volume_id uuid NOT NULL,
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    seq bigint NOT NULL,
    mode "char" NOT NULL CHECK (mode IN ('x', 'c', 'r')),
    parent_job uuid,
    held boolean NOT NULL,
    PRIMARY KEY (volume_id, job_id)
);
CREATE INDEX job_locks_by_job ON job_locks (job_id);

-- What has still to be told: the end of a job (its reply, events and dead letter), the last word
-- about a volume, or a message that never became a job. A row goes once the broker has confirmed it.
CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- By whoever is about to tell it: what nobody touches is another worker's to tell.
    touched_at timestamptz NOT NULL DEFAULT now(),
    address text NOT NULL,
    job_id uuid REFERENCES jobs ON DELETE CASCADE,
    reply_only boolean NOT NULL DEFAULT false,
    volume_id uuid,
    -- The last event of a volume whose record is gone.
    volume_gone jsonb,
    letter bytea,
    letter_properties jsonb,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX outbox_by_job ON outbox (job_id);
CREATE INDEX outbox_by_address ON outbox (address, id);

-- Times as the contract has them: RFC 3339 in UTC.
CREATE FUNCTION rfc3339(t timestamptz) RETURNS text
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN to_char(t AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');

CREATE FUNCTION attachment_record(a attachments) RETURNS jsonb
    LANGUAGE sql STABLE
    RETURN jsonb_build_object(
        'id', a.id, 'volume_id', a.volume_id, 'instance_uuid', a.instance_uuid,
        'host_name', a.host_name, 'mountpoint', a.mountpoint, 'mode', a.mode,
        'status', a.status, 'created_at', rfc3339(a.created_at));

-- The Volume record of the contract, as it is sent. An attachment that is being made belongs to it
-- only while the volume is being attached: it goes with the statement that settles the volume, which
-- makes the record too and still sees it.
CREATE FUNCTION volume_record(v volumes) RETURNS jsonb
    LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN jsonb_build_object(
        'id', v.id, 'name', v.name, 'address', v.address, 'size_bytes', v.size_bytes,
        'status', v.status, 'migration_status', v.migration_status,
        'attach_status', v.attach_status, 'metadata', v.metadata,
        'provider_location', v.provider_location, 'source', v.source,
        'user_id', v.user_id, 'project_id', v.project_id, 'exported', v.export <> 'none',
        'created_at', rfc3339(v.created_at), 'updated_at', rfc3339(v.updated_at),
        'attachments', coalesce((
            SELECT jsonb_agg(attachment_record(a) ORDER BY a.created_at, a.id)
            FROM attachments a
            WHERE a.volume_id = v.id
                AND (a.status <> 'attaching' OR v.status = 'attaching')), '[]'),
        'connections', coalesce((
            SELECT jsonb_agg(
                jsonb_build_object(
                    'id', c.id, 'volume_id', c.volume_id, 'connector_host', c.connector_host,
                    'access_mode', c.access_mode, 'created_at', rfc3339(c.created_at))
                ORDER BY c.created_at, c.id)
            FROM connections c WHERE c.volume_id = v.id AND c.state <> 'ended'), '[]'))
        || CASE WHEN v.error IS NULL THEN '{}' ELSE jsonb_build_object('error', v.error) END;
END $$;

-- The body of a volume's event.
CREATE FUNCTION volume_event(v volumes) RETURNS jsonb
    LANGUAGE sql STABLE
    RETURN jsonb_build_object(
        'at', rfc3339(v.updated_at), 'seq', v.seq, 'volume', volume_record(v));

-- What a worker needs to know of a volume's row: the record with what only workers use.
CREATE FUNCTION begun_volume(v volumes) RETURNS jsonb
    LANGUAGE sql STABLE
    RETURN jsonb_build_object(
        'record', volume_record(v), 'seq', v.seq, 'export', v.export, 'export_job', v.export_job,
        'created_by', v.created_by, 'status_job', v.status_job,
        'previous_status', v.previous_status);

-- Volumes by id, from p_after on. Planned for the filters that there are: sessions keep one plan for
-- all arguments, which could use no index but that of the ids.
CREATE FUNCTION list_volumes(p_address text, p_status text, p_after uuid, p_limit integer)
    RETURNS SETOF volumes
    LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    RETURN QUERY
        SELECT * FROM volumes
        WHERE (p_address IS NULL OR address = p_address)
            AND (p_status IS NULL OR status = p_status)
            AND (p_after IS NULL OR id > p_after)
        ORDER BY id
        LIMIT p_limit;
END $$;

-- Where a volume belongs that a job left in a passing status when it ended: by what is there.
CREATE FUNCTION settled_status(v volumes) RETURNS text
    LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN CASE v.status
        WHEN 'creating' THEN 'error'
        WHEN 'deleting' THEN 'error_deleting'
        WHEN 'extending' THEN 'error_extending'
        WHEN 'attaching' THEN CASE
            WHEN EXISTS (
                SELECT FROM attachments a WHERE a.volume_id = v.id AND a.status = 'attached')
            THEN 'in-use' ELSE 'available' END
        WHEN 'detaching' THEN CASE
            WHEN EXISTS (SELECT FROM attachments a WHERE a.volume_id = v.id) THEN 'in-use'
            ELSE 'available' END
        ELSE v.previous_status END;
END $$;

CREATE FUNCTION settled_attach_status(v volumes) RETURNS text
    LANGUAGE sql STABLE
    RETURN CASE settled_status(v)
        WHEN 'in-use' THEN 'attached'
        WHEN 'available' THEN 'detached'
        ELSE v.attach_status END;

CREATE FUNCTION conflicts(a "char", b "char") RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN a = 'x' OR b = 'x' OR (a = 'c' AND b = 'c');

-- A job, if it has not ended; NULL for NULL, without a look.
CREATE FUNCTION unfinished(p_job uuid) RETURNS uuid
    LANGUAGE plpgsql STABLE STRICT AS $$
DECLARE
    ended timestamptz;
BEGIN
    -- By its id alone: to ask for those that have not ended may find it among all of them.
    SELECT finished_at INTO ended FROM jobs WHERE id = p_job;
    RETURN CASE WHEN FOUND AND ended IS NULL THEN p_job END;
END $$;

-- Whether a job must wait for another one that needs one of its volumes. In the order of acceptance;
-- a child, while its parent has not ended, passes what its parent holds and what waits behind that,
-- but neither what runs nor an older child of the same parent.
CREATE FUNCTION must_wait(p_job uuid, p_seq bigint, p_parent uuid) RETURNS boolean
    LANGUAGE plpgsql STABLE AS $$
DECLARE
    parent uuid := unfinished(p_parent);
BEGIN
    RETURN EXISTS (
        SELECT FROM job_locks mine
            JOIN job_locks other USING (volume_id)
        WHERE mine.job_id = p_job
            AND other.job_id <> p_job
            AND other.job_id IS DISTINCT FROM parent
            AND conflicts(mine.mode, other.mode)
            AND (other.held
                OR (other.seq < p_seq AND (parent IS NULL OR other.parent_job = parent))));
END $$;

-- Whether a job that is being accepted, the newest of all, must wait; p_checks are its volumes.
CREATE FUNCTION finds_locks(p_parent uuid, p_checks jsonb) RETURNS boolean
    LANGUAGE plpgsql STABLE AS $$
DECLARE
    parent uuid := unfinished(p_parent);
BEGIN
    RETURN EXISTS (
        SELECT FROM jsonb_array_elements(p_checks) mine
            JOIN job_locks other ON other.volume_id = (mine ->> 'volume_id')::uuid
        WHERE other.job_id IS DISTINCT FROM parent
            AND conflicts((mine ->> 'mode')::"char", other.mode)
            AND (other.held OR parent IS NULL OR other.parent_job = parent));
END $$;

-- Takes the volumes for the rest of the transaction, so that two workers cannot both find one free.
CREATE FUNCTION lock_volumes(p_volumes uuid[]) RETURNS void
    LANGUAGE plpgsql AS $$
DECLARE
    key bigint;
BEGIN
    FOR key IN SELECT DISTINCT hashtextextended(v::text, 0) FROM unnest(p_volumes) v ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(key);
    END LOOP;
END $$;

-- Why a job is refused at once, or NULL: what is plain to see from the records already.
-- p_check: volume_id, mode, known (must exist, else must not), at (must live at the job's address),
-- idle (no connection, no attachment), statuses (allowed; null: any).
CREATE FUNCTION refusal(p_job uuid, p_address text, p_parent uuid, p_check jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_id uuid := p_check ->> 'volume_id';
    v volumes;
BEGIN
    IF p_parent IS NOT NULL AND NOT EXISTS (
        SELECT FROM jobs JOIN job_locks ON job_locks.job_id = jobs.id
        WHERE jobs.id = p_parent AND jobs.state = 'running' AND job_locks.volume_id = v_id
    ) THEN
        RETURN jsonb_build_object('code', 'InvalidRequest', 'member', 'parent-job');
    END IF;
    SELECT * INTO v FROM volumes WHERE id = v_id;
    IF NOT (p_check ->> 'known')::boolean THEN
        RETURN CASE WHEN FOUND THEN
            jsonb_build_object('code', 'VolumeExists', 'volume_id', v_id) END;
    END IF;
    IF NOT FOUND THEN
        -- A create that was accepted before and has not run yet: wait for it.
        IF EXISTS (SELECT FROM job_locks WHERE volume_id = v_id AND mode = 'x' AND job_id <> p_job)
        THEN
            RETURN NULL;
        END IF;
        RETURN jsonb_build_object('code', 'VolumeNotFound', 'volume_id', v_id);
    END IF;
    IF (p_check ->> 'at')::boolean AND v.address <> p_address THEN
        RETURN jsonb_build_object(
            'code', 'WrongAddress', 'volume_id', v_id, 'address', v.address);
    END IF;
    IF (p_check ->> 'idle')::boolean
        AND NOT EXISTS (
            SELECT FROM job_locks
            WHERE volume_id = v_id AND mode IN ('x', 'c') AND job_id <> p_job)
        AND (EXISTS (SELECT FROM connections WHERE volume_id = v_id AND state <> 'ended')
            OR EXISTS (SELECT FROM attachments WHERE volume_id = v_id))
    THEN
        RETURN jsonb_build_object('code', 'VolumeIsBusy', 'volume_id', v_id);
    END IF;
    -- The short passing statuses settle by themselves: a job sent right behind waits for them.
    IF p_parent IS NULL
        AND p_check -> 'statuses' <> 'null'
        AND NOT p_check -> 'statuses' ? v.status
        AND v.status NOT IN ('creating', 'attaching', 'detaching', 'extending')
    THEN
        RETURN jsonb_build_object(
            'code', 'InvalidVolumeStatus', 'volume_id', v_id, 'status', v.status);
    END IF;
    RETURN NULL;
END $$;

-- Whether there is room for a job; those that only wait for others need none, but a worker that
-- takes jobs at all (not less than 0 slots).
CREATE FUNCTION has_slot(slot text, p_control integer, p_data integer) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE slot WHEN 'data' THEN p_data > 0 WHEN 'control' THEN p_control > 0
        ELSE p_control >= 0 END;

CREATE TYPE verdict AS ENUM ('running', 'queued', 'repeated', 'finished', 'reused');

-- Stores requests as jobs, in their order. A job whose volumes are free is stored as running, with a
-- lease, while slots last, and with the record of the volume that it is to create (p_creates, null
-- for none), which is returned; the same id again changes only who gets the answer.
CREATE FUNCTION accept_jobs(
    p_owner uuid, p_lease interval, p_control integer, p_data integer,
    p_ids uuid[], p_methods text[], p_addresses text[], p_slots text[],
    p_bodies bytea[], p_properties jsonb[], p_fingerprints bytea[],
    p_deadlines timestamptz[], p_reply_to text[], p_correlation_ids text[],
    p_status_updates boolean[], p_parents uuid[], p_checks jsonb, p_creates jsonb
) RETURNS TABLE (verdict verdict, job jobs, outbox_id bigint, begun jsonb)
    LANGUAGE plpgsql AS $$
DECLARE
    new_volume jsonb;
    checks jsonb;
    item jsonb;
    why jsonb;
    starts boolean;
BEGIN
    PERFORM lock_volumes(array(
        SELECT (c ->> 'volume_id')::uuid FROM jsonb_array_elements(p_checks) one,
            jsonb_array_elements(one) c));
    FOR i IN 1 .. cardinality(p_ids) LOOP
        outbox_id := NULL;
        begun := NULL;
        checks := p_checks -> (i - 1);
        why := NULL;
        FOR item IN SELECT jsonb_array_elements(checks) LOOP
            why := coalesce(why, refusal(p_ids[i], p_addresses[i], p_parents[i], item));
        END LOOP;
        starts := why IS NOT NULL
            OR (has_slot(p_slots[i], p_control, p_data) AND NOT finds_locks(p_parents[i], checks));
        INSERT INTO jobs (
            id, method, address, slot, body, properties, fingerprint, volume_ids, deadline,
            reply_to, correlation_id, status_updates, parent_job, refusal,
            state, attempt, owner, lease_token, lease_until, started_at, overdue
        ) VALUES (
            p_ids[i], p_methods[i], p_addresses[i], p_slots[i], p_bodies[i],
            p_properties[i], p_fingerprints[i],
            array(SELECT (c ->> 'volume_id')::uuid FROM jsonb_array_elements(checks) c),
            p_deadlines[i], p_reply_to[i], p_correlation_ids[i], p_status_updates[i], p_parents[i],
            why, CASE WHEN starts THEN 'running' ELSE 'queued' END, starts::integer,
            CASE WHEN starts THEN p_owner END,
            CASE WHEN starts THEN nextval('lease_tokens') END,
            CASE WHEN starts THEN now() + p_lease END, CASE WHEN starts THEN now() END,
            starts AND coalesce(p_deadlines[i] < now(), false)
        ) ON CONFLICT (id) DO NOTHING RETURNING jobs.* INTO job;
        IF NOT FOUND THEN
            SELECT * INTO job FROM jobs WHERE id = p_ids[i];
            IF job.fingerprint <> p_fingerprints[i] THEN
                verdict := 'reused';
                RETURN NEXT;
                CONTINUE;
            END IF;
            UPDATE jobs SET
                deadline = p_deadlines[i], reply_to = p_reply_to[i],
                correlation_id = p_correlation_ids[i], status_updates = p_status_updates[i]
            WHERE id = p_ids[i] RETURNING * INTO job;
            IF job.finished_at IS NULL THEN
                verdict := 'repeated';
            ELSE
                verdict := 'finished';
                INSERT INTO outbox (address, job_id, reply_only)
                VALUES (job.address, job.id, true) RETURNING id INTO outbox_id;
            END IF;
            RETURN NEXT;
            CONTINUE;
        END IF;
        verdict := job.state::verdict;
        IF why IS NULL THEN
            INSERT INTO job_locks (volume_id, job_id, seq, mode, parent_job, held)
            SELECT (c ->> 'volume_id')::uuid, job.id, job.seq, (c ->> 'mode')::"char",
                job.parent_job, starts
            FROM jsonb_array_elements(checks) c;
            new_volume := nullif(p_creates -> (i - 1), 'null');
            IF starts AND NOT job.overdue AND new_volume IS NOT NULL THEN
                INSERT INTO volumes (
                    id, name, address, size_bytes, status, metadata, created_by, status_job)
                VALUES (
                    (new_volume ->> 'id')::uuid, new_volume ->> 'name', job.address,
                    (new_volume ->> 'size_bytes')::bigint, 'creating', new_volume -> 'metadata',
                    job.id, job.id)
                ON CONFLICT (id) DO NOTHING
                RETURNING begun_volume(volumes) INTO begun;
            END IF;
            p_control := p_control - (starts AND job.slot = 'control')::integer;
            p_data := p_data - (starts AND job.slot = 'data')::integer;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- Takes jobs to run: the oldest first whose turn it is, within the free slots; also those whose
-- worker let its lease run out.
CREATE FUNCTION claim_jobs(
    p_owner uuid, p_lease interval, p_control integer, p_data integer, p_addresses text[]
) RETURNS SETOF jobs
    LANGUAGE plpgsql AS $$
DECLARE
    c_waiting CONSTANT integer := 100;
    candidates uuid[];
    candidate uuid;
    job jobs;
BEGIN
    -- First what a worker was lost with: it is the oldest, and others wait for what it holds.
    candidates := array(
        (SELECT id FROM jobs
        WHERE address = ANY (p_addresses) AND state = 'running' AND lease_until < now()
            AND has_slot(slot, p_control, p_data)
        ORDER BY seq LIMIT p_control + p_data + c_waiting)
        UNION ALL
        (SELECT id FROM jobs
        WHERE slot = 'control' AND address = ANY (p_addresses) AND state = 'queued'
            AND run_at <= now() AND NOT must_wait(id, seq, parent_job)
        ORDER BY seq LIMIT p_control)
        UNION ALL
        (SELECT id FROM jobs
        WHERE slot = 'data' AND address = ANY (p_addresses) AND state = 'queued'
            AND run_at <= now() AND NOT must_wait(id, seq, parent_job)
        ORDER BY seq LIMIT p_data)
        UNION ALL
        (SELECT id FROM jobs
        WHERE slot = 'waiting' AND address = ANY (p_addresses) AND state = 'queued'
            AND run_at <= now() AND NOT must_wait(id, seq, parent_job)
        ORDER BY seq LIMIT c_waiting));
    PERFORM lock_volumes(array(
        SELECT volume_id FROM job_locks WHERE job_id = ANY (candidates)));
    -- In the order in which others lock jobs, so that neither waits for the other.
    PERFORM FROM jobs WHERE id = ANY (candidates) ORDER BY id FOR UPDATE;
    FOREACH candidate IN ARRAY candidates LOOP
        UPDATE jobs SET
            state = 'running', attempt = attempt + 1, owner = p_owner,
            lease_token = nextval('lease_tokens'), lease_until = now() + p_lease,
            resumed = started_at IS NOT NULL, started_at = coalesce(started_at, now()),
            overdue = coalesce(deadline < now(), false), progress = NULL, version = version + 1
        WHERE id = candidate
            AND ((state = 'queued' AND NOT must_wait(id, seq, parent_job))
                OR (state = 'running' AND lease_until < now()))
            AND has_slot(slot, p_control, p_data)
        RETURNING * INTO job;
        IF FOUND THEN
            UPDATE job_locks SET held = true WHERE job_id = job.id;
            p_control := p_control - (job.slot = 'control')::integer;
            p_data := p_data - (job.slot = 'data')::integer;
            RETURN NEXT job;
        END IF;
    END LOOP;
END $$;

-- Asks for a job to be cancelled, and for what it has called for, but for what gives something back
-- (p_cleanups). Returns those that have never begun: they are the caller's now, to be ended.
CREATE FUNCTION cancel_job(p_job uuid, p_owner uuid, p_lease interval, p_cleanups text[])
    RETURNS SETOF jobs
    LANGUAGE plpgsql AS $$
DECLARE
    target jobs;
BEGIN
    FOR target IN
        SELECT * FROM jobs
        WHERE finished_at IS NULL
            AND (id = p_job OR (parent_job = p_job AND method <> ALL (p_cleanups)))
        ORDER BY id FOR UPDATE
    LOOP
        IF target.state = 'queued' AND target.started_at IS NULL THEN
            DELETE FROM job_locks WHERE job_id = target.id;
            UPDATE jobs SET
                state = 'running', slot = 'waiting', cancel_requested = true,
                refusal = '{"code": "Cancelled"}', owner = p_owner,
                lease_token = nextval('lease_tokens'), lease_until = now() + p_lease,
                version = version + 1
            WHERE id = target.id RETURNING * INTO target;
            RETURN NEXT target;
        ELSE
            UPDATE jobs SET
                cancel_requested = true, run_at = least(run_at, now()), slot = 'waiting'
            WHERE id = target.id;
        END IF;
    END LOOP;
END $$;

-- Jobs in the order of acceptance, behind the job p_after. Planned for the filters that there are, as
-- list_volumes is: few jobs are found in one index, many in another.
CREATE FUNCTION list_jobs(
    p_address text, p_state text, p_volume uuid, p_after uuid, p_limit integer
) RETURNS SETOF jobs
    LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    last bigint := (SELECT seq FROM jobs WHERE id = p_after);
BEGIN
    IF p_volume IS NOT NULL THEN
        -- Apart: a volume has few jobs, but PostgreSQL expects so many that it would look for the
        -- first of them among all.
        RETURN QUERY
            WITH found AS MATERIALIZED (SELECT * FROM jobs WHERE volume_ids @> ARRAY[p_volume])
            SELECT * FROM found
            WHERE (p_address IS NULL OR address = p_address)
                AND (p_state IS NULL OR state = p_state)
                AND (p_after IS NULL OR seq > last)
            ORDER BY seq
            LIMIT p_limit;
        RETURN;
    END IF;
    RETURN QUERY
        SELECT * FROM jobs
        WHERE (p_address IS NULL OR address = p_address)
            AND (p_state IS NULL OR state = p_state)
            AND (p_after IS NULL OR seq > last)
        ORDER BY seq
        LIMIT p_limit;
END $$;

-- Who works on the dead letters: one operator at a time, under a lease.
CREATE TABLE operator_locks (
    name text PRIMARY KEY,
    holder uuid NOT NULL,
    who text NOT NULL,
    until timestamptz NOT NULL
);

-- The newest job that has changed a volume, or let somebody in who could, since another job was
-- accepted, or NULL. What that one had done for itself does not count.
CREATE FUNCTION changed_since(p_job jobs, p_volume uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    BEGIN ATOMIC
        SELECT jsonb_build_object('volume_id', p_volume, 'job_id', id, 'method', method)
        FROM jobs
        WHERE volume_ids @> ARRAY[p_volume]
            AND state = 'succeeded'
            AND seq > p_job.seq
            AND parent_job IS DISTINCT FROM p_job.id
            AND CASE
                -- Not by its body: not all that is JSON to a worker is jsonb.
                WHEN method = 'copy_volume_data'
                    THEN p_volume = volume_ids[cardinality(volume_ids)]
                ELSE method IN (
                    'create_volume', 'delete_volume', 'extend_volume', 'initialize_connection',
                    'attach_volume') END
        ORDER BY seq DESC
        LIMIT 1;
    END;

CREATE TYPE revival AS ENUM ('revived', 'stale', 'refused', 'overtaken', 'orphaned');

-- Takes a job that has ended dead, or failed and left a dead letter, back to be run again: behind
-- all that was accepted since. p_ending: which of its endings the letter tells of; p_body: the
-- request as edited, or null; p_checks: see the function refusal; p_dry: only finds out.
-- An outcome other than revived changes nothing, and `why` has what there is to say of it.
CREATE FUNCTION revive_job(
    p_job uuid, p_ending integer, p_body bytea, p_slot text, p_checks jsonb, p_dry boolean
) RETURNS TABLE (outcome revival, why jsonb)
    LANGUAGE plpgsql AS $$
DECLARE
    c_lives CONSTANT integer := 10;
    job jobs;
    parent uuid;
    item jsonb;
    own uuid;
BEGIN
    PERFORM lock_volumes(array(
        SELECT (c ->> 'volume_id')::uuid FROM jsonb_array_elements(p_checks) c));
    SELECT * INTO job FROM jobs WHERE id = p_job FOR UPDATE;
    IF job.endings <> p_ending OR job.finished_at IS NULL OR job.state NOT IN ('dead', 'failed')
    THEN
        RETURN QUERY SELECT 'stale'::revival, jsonb_build_object('state', job.state);
        RETURN;
    END IF;
    parent := (SELECT id FROM jobs WHERE id = job.parent_job AND finished_at IS NULL);
    -- Nobody would end a connection that is made for a job that has ended.
    IF job.parent_job IS NOT NULL AND parent IS NULL AND job.method <> 'terminate_connection' THEN
        RETURN QUERY SELECT 'orphaned'::revival, jsonb_build_object('job_id', job.parent_job);
        RETURN;
    END IF;

    FOR item IN SELECT jsonb_array_elements(p_checks) LOOP
        -- A volume that the job itself has left in an error is its to go on with.
        own := coalesce(own, (
            SELECT v.id FROM volumes v
            WHERE v.id = (item ->> 'volume_id')::uuid
                AND CASE job.method
                    WHEN 'create_volume' THEN v.status = 'error' AND v.created_by = job.id
                    WHEN 'extend_volume' THEN
                        v.status = 'error_extending' AND v.error = job.error END));
        IF own IS NOT NULL THEN
            item := item || '{"known": true, "statuses": null}';
        END IF;
        why := refusal(job.id, job.address, parent, item);
        IF why IS NOT NULL THEN
            RETURN QUERY SELECT 'refused'::revival, why;
            RETURN;
        END IF;
        IF item ->> 'mode' = 'x' THEN
            why := changed_since(job, (item ->> 'volume_id')::uuid);
        END IF;
        IF why IS NOT NULL THEN
            RETURN QUERY SELECT 'overtaken'::revival, why;
            RETURN;
        END IF;
    END LOOP;

    IF NOT p_dry THEN
        UPDATE volumes v SET
            status = CASE job.method WHEN 'create_volume' THEN 'creating' ELSE 'extending' END,
            previous_status = CASE
                WHEN job.method = 'create_volume' THEN NULL
                WHEN EXISTS (SELECT FROM attachments a WHERE a.volume_id = v.id) THEN 'in-use'
                ELSE 'available' END,
            status_job = job.id, error = NULL, seq = seq + 1, updated_at = now()
        WHERE v.id = own;
        UPDATE jobs SET
            state = 'queued', seq = DEFAULT, slot = p_slot, attempt = 0, run_at = now(),
            deadline = NULL, overdue = false, refusal = NULL, cancel_requested = false,
            throttle = NULL,
            result = NULL, progress = NULL, connection_id = NULL, finished_at = NULL,
            -- It has left something only where it goes on with a volume of its own.
            started_at = CASE WHEN own IS NULL THEN NULL ELSE started_at END,
            body = coalesce(p_body, body), edited = edited OR p_body IS NOT NULL,
            volume_ids = array(
                SELECT (c ->> 'volume_id')::uuid FROM jsonb_array_elements(p_checks) c),
            history = jsonb_build_object(
                'replays', endings,
                'attempts', coalesce((history ->> 'attempts')::integer, 0) + attempt,
                'lives', jsonb_path_query_array(
                    coalesce(history -> 'lives', '[]') || jsonb_build_object(
                        'code', error ->> 'code', 'message', left(error ->> 'message', 1000),
                        'attempts', attempt, 'finished_at', rfc3339(finished_at)),
                    '$[last - $before to last]', jsonb_build_object('before', c_lives - 1))),
            version = version + 1
        WHERE id = job.id RETURNING * INTO job;
        INSERT INTO job_locks (volume_id, job_id, seq, mode, parent_job, held)
        SELECT (c ->> 'volume_id')::uuid, job.id, job.seq, (c ->> 'mode')::"char",
            job.parent_job, false
        FROM jsonb_array_elements(p_checks) c;
    END IF;
    RETURN QUERY SELECT 'revived'::revival, NULL::jsonb;
END $$;
