-- The ledger, schema version 1. WAL mode; one writer. Times are Unix seconds.
--
-- A group:  RUNNING -> FINISHED -> RECEIVED -> COMMITTED
--           RUNNING | FINISHED | RECEIVED -> WITHDRAWN -> COMMITTED
--           RECEIVED -> FINISHED (delivered again)
-- COMMITTED rows keep no tries and no arrays; they are kept so that a late assignment is refused.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE consumers (
    consumer_id   TEXT PRIMARY KEY,
    purpose       TEXT NOT NULL,
    incarnation   INTEGER NOT NULL,
    newest_cursor INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE groups (
    group_row     INTEGER PRIMARY KEY AUTOINCREMENT, -- rises in order of acceptance
    consumer_id   TEXT NOT NULL,
    group_id      TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    state         TEXT NOT NULL,
    task_id       TEXT NOT NULL,
    attempts      INTEGER NOT NULL,
    assignment    BLOB NOT NULL,
    cursor        INTEGER,
    accepted_at_s REAL NOT NULL,
    fault_stage   TEXT, -- set when quarantined
    fault_cause   TEXT,
    fault_message TEXT,
    decision      TEXT,
    step          INTEGER,
    UNIQUE (consumer_id, group_id, epoch)
);

CREATE INDEX groups_by_state ON groups (consumer_id, state);
CREATE INDEX groups_by_cursor ON groups (consumer_id, cursor) WHERE cursor IS NOT NULL;

CREATE TABLE tries (
    group_row     INTEGER NOT NULL REFERENCES groups (group_row),
    attempt       INTEGER NOT NULL,
    try           INTEGER NOT NULL,
    leased_at_s   REAL NOT NULL,
    turns         INTEGER NOT NULL DEFAULT 0,
    tokens        INTEGER NOT NULL DEFAULT 0,
    outcome       TEXT, -- NULL while it runs
    final         INTEGER NOT NULL DEFAULT 0, -- the one that is delivered for its attempt
    counted       INTEGER NOT NULL DEFAULT 0, -- a fault that counts against the cap of refills
    fault_stage   TEXT,
    fault_cause   TEXT,
    fault_message TEXT,
    ended_at_s    REAL,
    file          INTEGER, -- where its arrays are; the bytes are synced before this row
    offset        INTEGER,
    length        INTEGER,
    checksum      BLOB,
    PRIMARY KEY (group_row, attempt, try)
) WITHOUT ROWID;

CREATE INDEX tries_by_file ON tries (file) WHERE file IS NOT NULL;
