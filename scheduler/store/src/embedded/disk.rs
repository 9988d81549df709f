//! The state on disk: one redb file.
//!
//! ```text
//! entries   key    → (create revision, mod revision, lease or 0, value)
//! leases    number → time to live in milliseconds
//! meta      "format" | "revision" | "last lease" → number
//! ```
//!
//! Every write is one redb transaction that is synced to the disk before it counts as done (`Durability::Immediate`),
//! so acknowledged writes survive kill -9 and the loss of power, and an interrupted write leaves the previous state.
//! The expiry of leases is not stored: that would need a write for every keep-alive.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use crate::model::{Event, KeyValue, Lease, whole_millis};
use crate::state::{Changes, State};

const ENTRIES: TableDefinition<'_, &str, (u64, u64, u64, &[u8])> = TableDefinition::new("entries");
const LEASES: TableDefinition<'_, u64, u64> = TableDefinition::new("leases");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// Version of the tables above, which are not those of the log of jobs.
const FORMAT: u64 = 1;
/// Cache size of redb. The state is in memory anyway; the default of 1 GiB would hold it a second time.
const CACHE_BYTES: usize = 1 << 20;

/// Open file of the store.
#[derive(Debug)]
pub(crate) struct StoreFile {
    database: Database,
}

/// Error of redb, or a file of another format.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiskError {
    #[error("{0}")]
    Redb(#[from] redb::Error),
    /// Another hub has the file of the store open.
    #[error("it is already open in another hub; stop that one, or name another folder")]
    Locked,
    /// Another version of the hub wrote the store. Use that version or a newer one.
    #[error("the file has format {0}; this version reads format {FORMAT}")]
    Format(u64),
}

/// Conversions of redb's error types, of which each call has another, for `?`.
macro_rules! from_redb {
    ($($error:ident),+) => {$(
        impl From<redb::$error> for DiskError {
            fn from(error: redb::$error) -> DiskError {
                DiskError::Redb(error.into())
            }
        }
    )+};
}

from_redb!(TransactionError, TableError, StorageError, CommitError);

impl From<redb::DatabaseError> for DiskError {
    fn from(error: redb::DatabaseError) -> DiskError {
        match error {
            redb::DatabaseError::DatabaseAlreadyOpen => DiskError::Locked,
            other => DiskError::Redb(other.into()),
        }
    }
}

impl StoreFile {
    /// Opens or creates the file, and reads the state. Fails if it is open in another process.
    pub(crate) fn open(path: &Path, now: Instant) -> Result<(StoreFile, State), DiskError> {
        let is_new = !path.exists();
        let opened = StoreFile::from_database(builder().create(path)?, now)?;
        if is_new {
            sync_name(path).map_err(redb::StorageError::from)?;
        }
        Ok(opened)
    }

    /// Opens a backend other than a file, for tests.
    #[cfg(test)]
    pub(crate) fn on(
        backend: impl redb::StorageBackend,
        now: Instant,
    ) -> Result<(StoreFile, State), DiskError> {
        StoreFile::from_database(builder().create_with_backend(backend)?, now)
    }

    fn from_database(database: Database, now: Instant) -> Result<(StoreFile, State), DiskError> {
        let disk = StoreFile { database };
        disk.initialise()?;
        let state = disk.read(now)?;
        Ok((disk, state))
    }

    /// Writes the changes, and returns when they are on the disk.
    pub(crate) fn write(&self, changes: &Changes, state: &State) -> Result<(), DiskError> {
        let txn = self.database.begin_write()?;
        {
            let mut entries = txn.open_table(ENTRIES)?;
            for event in changes.events.iter().flatten() {
                match event {
                    Event::Put(entry) => {
                        let KeyValue { key, value, create_revision, mod_revision, lease } = entry;
                        let lease = lease.map_or(0, |lease| lease.0);
                        entries.insert(key.as_str(), (*create_revision, *mod_revision, lease, &**value))?;
                    }
                    Event::Delete { key, .. } => drop(entries.remove(key.as_str())?),
                }
            }
            let mut leases = txn.open_table(LEASES)?;
            for (lease, granted) in &changes.leases {
                match granted {
                    Some(ttl) => drop(leases.insert(lease.0, whole_millis(*ttl))?),
                    None => drop(leases.remove(lease.0)?),
                }
            }
            let mut meta = txn.open_table(META)?;
            meta.insert("revision", state.revision)?;
            meta.insert("last lease", state.last_lease)?;
        }
        txn.commit()?;
        Ok(())
    }

    fn initialise(&self) -> Result<(), DiskError> {
        let txn = self.database.begin_write()?;
        let format = {
            let mut meta = txn.open_table(META)?;
            let format = meta.get("format")?.map(|format| format.value());
            if format.is_none() {
                meta.insert("format", FORMAT)?;
                txn.open_table(ENTRIES)?;
                txn.open_table(LEASES)?;
            }
            format.unwrap_or(FORMAT)
        };
        if format != FORMAT {
            return Err(DiskError::Format(format));
        }
        txn.commit()?;
        Ok(())
    }

    fn read(&self, now: Instant) -> Result<State, DiskError> {
        let txn = self.database.begin_read()?;
        let mut entries = Vec::new();
        for item in txn.open_table(ENTRIES)?.iter()? {
            let (key, entry) = item?;
            let (create_revision, mod_revision, lease, value) = entry.value();
            let lease = (lease != 0).then_some(Lease(lease));
            let (key, value) = (key.value().to_owned(), value.into());
            entries.push(KeyValue { key, value, create_revision, mod_revision, lease });
        }
        let mut leases = Vec::new();
        for item in txn.open_table(LEASES)?.iter()? {
            let (lease, ttl) = item?;
            leases.push((Lease(lease.value()), Duration::from_millis(ttl.value())));
        }
        let meta = txn.open_table(META)?;
        let number = |key| meta.get(key).map(|number| number.map_or(0, |number| number.value()));
        Ok(State::restored(number("revision")?, number("last lease")?, entries, leases, now))
    }
}

fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    // With the check, a file that another program has modified is an error and not a panic.
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

/// Syncs the folder: a new file is durable only when its directory entry is.
fn sync_name(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(folder) if folder != Path::new("") => File::open(folder)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Op, Txn};

    fn put(key: &str, value: &str, lease: Option<Lease>) -> Txn {
        Txn { when: vec![], then: vec![Op::Put { key: key.to_owned(), value: value.into(), lease }] }
    }

    #[test]
    fn written_state_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let now = Instant::now();
        let written = {
            let (disk, mut state) = StoreFile::open(&path, now).unwrap();
            let (kept, ended) = (Duration::from_secs(5), Duration::from_secs(6));
            let (kept, ended) = (state.grant(kept, now).unwrap(), state.grant(ended, now).unwrap());
            for txn in [put("a", "1", Some(kept)), put("b", "2", Some(ended)), put("a", "3", Some(kept))] {
                state.txn(txn).unwrap();
            }
            let changes = state.take_changes();
            disk.write(&changes, &state).unwrap();
            state.revoke(ended).unwrap();
            let changes = state.take_changes();
            disk.write(&changes, &state).unwrap();
            state
        };
        let (_, mut read) = StoreFile::open(&path, now).unwrap();
        assert_eq!(read.range(&"".into()), written.range(&"".into()));
        assert_eq!((read.revision, read.last_lease), (4, 2));
        assert_eq!(read.expire(now + Duration::from_secs(5)), [Lease(1)]);
        assert!(read.get("a").is_none());
    }

    #[test]
    fn a_file_of_another_format_is_rejected_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        {
            let (disk, _) = StoreFile::open(&path, Instant::now()).unwrap();
            let txn = disk.database.begin_write().unwrap();
            txn.open_table(META).unwrap().insert("format", 2).unwrap();
            txn.commit().unwrap();
        }
        let error = StoreFile::open(&path, Instant::now()).unwrap_err();
        assert_eq!(error.to_string(), "the file has format 2; this version reads format 1");
    }

    #[test]
    fn a_file_that_is_not_a_store_is_rejected_and_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        std::fs::write(&path, "something else").unwrap();
        assert!(StoreFile::open(&path, Instant::now()).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"something else");
    }
}
