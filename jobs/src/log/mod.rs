//! Log of a queue: an append and a read in order, and a snapshot that replaces what is before it.

mod embedded;
mod nats;

pub use embedded::{EmbeddedJobLog, JobLogOpenError};
pub use nats::{NatsJobLog, NatsLogConfig};

use async_trait::async_trait;
use jobs_core::batch::state::BatchRow;
use jobs_core::job::{DurableJob, DurableJobId};
use jobs_core::record::JobRecord;
use std::io;
use std::sync::Arc;
use tokio::sync::watch;

/// All jobs of a queue at a position of its log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueSnapshot {
    /// Sequence number of the last entry that it contains.
    pub applied: u64,
    /// Jobs, which the queue shares.
    pub jobs: Vec<(DurableJobId, Arc<DurableJob>)>,
    /// Files and batches.
    pub batches: Vec<BatchRow>,
}

/// Error of a log. The entry of a failed append may still have been written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobLogError {
    /// No job is accepted until the disk has space. Stored jobs are kept.
    #[error("the disk of the job log is full; free space")]
    Full,
    /// The log cannot be read or written now; the text has the cause. Stored jobs are kept.
    #[error("the job log is unavailable: {0}")]
    Unavailable(String),
}

/// Records in their encoding, to be appended together. Their sizes decide which ones are, so they are encoded before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncodedEntry {
    /// The records after the bracket of a list.
    json: Vec<u8>,
}

impl EncodedEntry {
    /// Encodes records.
    pub fn of(records: &[JobRecord]) -> EncodedEntry {
        let mut entry = EncodedEntry::default();
        for record in records {
            entry.push(&serde_json::to_vec(record).expect("a record serialises to JSON"));
        }
        entry
    }

    /// Adds an encoded record.
    pub(crate) fn push(&mut self, record: &[u8]) {
        self.json.push(if self.json.is_empty() { b'[' } else { b',' });
        self.json.extend_from_slice(record);
    }

    /// Returns the number of bytes before the end of the list.
    pub(crate) fn len(&self) -> usize {
        self.json.len()
    }

    /// Returns the entry as it is stored.
    pub fn into_bytes(mut self) -> Vec<u8> {
        if self.json.is_empty() {
            self.json.push(b'[');
        }
        self.json.push(b']');
        self.json
    }
}

/// Log of a queue. An entry has the records that were appended together, and a sequence number. Sequence numbers begin at
/// 1 and have no gaps.
#[async_trait]
pub trait JobLog: Send + Sync + 'static {
    /// Appends an entry, and returns its sequence number when it is durable.
    async fn append(&self, entry: EncodedEntry) -> Result<u64, JobLogError>;

    /// Returns the entries after a sequence number in order, up to this number of them. If they have been replaced by a
    /// snapshot, the first one has a higher number than the next, or there is none.
    async fn read(&self, after: u64, count: usize) -> Result<Vec<(u64, Vec<JobRecord>)>, JobLogError>;

    /// Returns the sequence number of the last entry, which may be from another process.
    fn last(&self) -> watch::Receiver<u64>;

    /// Whether other processes append to it as well.
    fn is_shared(&self) -> bool {
        false
    }

    /// Returns the sequence number of the last entry at the time of the call, also if [`Self::last`] does not know of it yet.
    async fn latest(&self) -> Result<u64, JobLogError> {
        Ok(*self.last().borrow())
    }

    /// Stores a snapshot, and deletes the entries that it contains. An older one than the stored one is ignored.
    async fn save(&self, snapshot: QueueSnapshot) -> Result<(), JobLogError>;

    /// Returns the last snapshot; an empty one before the first.
    async fn saved(&self) -> Result<QueueSnapshot, JobLogError>;
}

/// Reads the records of an entry.
fn decode(sequence: u64, entry: &[u8]) -> Result<Vec<JobRecord>, JobLogError> {
    let unreadable = |error| JobLogError::Unavailable(format!("entry {sequence} cannot be read: {error}"));
    serde_json::from_slice(entry).map_err(unreadable)
}

/// Whether an error means that a disk is full, or a quota is used up.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
