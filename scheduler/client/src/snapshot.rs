//! Snapshots of the hub's messages on disk (the route table, and a gateway's rows of the plan and shares), each with a checksum, so
//! that a process that starts while no hub responds uses the last valid ones.
//!
//! During a handover two gateways write the same file, because both still receive updates from the hub. So a writer holds
//! a lock file, reads the existing file, and writes only a newer generation: the generation on disk never decreases, like
//! the generation in memory (invariant 5, Monotonic plans), whichever process is slower. A directory that only one process
//! may use is locked for as long as that process runs ([`lock_directory`]).

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use regions::{Generation, RouteTable};
use scheduler_api::WireError;
use scheduler_api::plan::{GatewayWeights, TenantShares, TenantSharesV1, WeightsV1};
use scheduler_api::route::RouteTableV1;
use scheduler_core::bound::{self, AcceptedGeneration};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::hub::HubFailure;
use crate::unix_time;

/// Message of the hub that has a generation.
pub trait PublishedMessage: Serialize + DeserializeOwned + Send + 'static {
    /// Decoded content.
    type Content: TryFrom<Self, Error = WireError>;

    /// Returns the generation of the content.
    fn generation(content: &Self::Content) -> Generation;
}

impl PublishedMessage for RouteTableV1 {
    type Content = RouteTable;

    fn generation(table: &RouteTable) -> Generation {
        table.generation
    }
}

impl PublishedMessage for WeightsV1 {
    type Content = GatewayWeights;

    fn generation(weights: &GatewayWeights) -> Generation {
        weights.generation
    }
}

impl PublishedMessage for TenantSharesV1 {
    type Content = TenantShares;

    fn generation(shares: &TenantShares) -> Generation {
        shares.generation
    }
}

/// Current message of one kind: its generation, and its file.
#[derive(Debug)]
pub struct Snapshot {
    file: Option<PathBuf>,
    current: Option<AcceptedGeneration>,
    accepted_at: Instant,
}

impl Snapshot {
    /// Creates the snapshot of the process's current message, of this generation. One that was restored from disk was
    /// accepted before this process started, when its file was written. Without a file, messages are kept in memory
    /// only.
    pub fn new(file: Option<PathBuf>, generation: Option<Generation>) -> Snapshot {
        let age = file.as_deref().and_then(age).unwrap_or_default();
        let current = generation.map(|generation| AcceptedGeneration { generation, age });
        Snapshot { file, current, accepted_at: Instant::now() }
    }

    /// Returns the generation of the current message.
    pub fn generation(&self) -> Option<Generation> {
        self.current.map(|current| current.generation)
    }

    /// Accepts a message if its generation is higher than the current one, a hub can have published it, and `check` has
    /// no objection. `check` may complete the content. The accepted message is on disk when this returns; if the disk
    /// fails, the message is used nevertheless.
    ///
    /// # Errors
    ///
    /// The reason for the rejection; the current message stays.
    pub async fn accept<M>(
        &mut self,
        offered: M,
        check: impl FnOnce(&mut M::Content) -> Result<(), String>,
    ) -> Result<M::Content, HubFailure>
    where
        M: PublishedMessage + for<'a> From<&'a M::Content>,
    {
        let invalid = |error: &dyn std::fmt::Display| HubFailure::Invalid(error.to_string());
        let mut content = M::Content::try_from(offered).map_err(|error| invalid(&error))?;
        let generation = M::generation(&content);
        let elapsed = self.accepted_at.elapsed();
        let current = self.current.map(|it| AcceptedGeneration { age: it.age + elapsed, ..it });
        bound::accept(generation, current, unix_time()).map_err(|error| invalid(&error))?;
        check(&mut content).map_err(HubFailure::Invalid)?;
        if let Some(file) = self.file.clone() {
            let (message, path) = (M::from(&content), file.clone());
            let saved = tokio::task::spawn_blocking(move || save(&path, &message, generation)).await;
            if let Err(error) = saved.map_err(io::Error::other).flatten() {
                // A restart while no hub is reachable would use an older snapshot. Check the disk.
                tracing::warn!(file = %file.display(), %error, "cannot write the snapshot to disk");
            }
        }
        self.current = Some(AcceptedGeneration { generation, age: Duration::ZERO });
        self.accepted_at = Instant::now();
        Ok(content)
    }
}

/// Loads the message of a file, if there is a valid one; calls `rejected` if it is invalid. An invalid file is replaced
/// by the next accepted message.
pub fn restore<M: PublishedMessage>(path: &Path, rejected: impl FnOnce()) -> Option<M::Content> {
    let file = path.display();
    match load::<M>(path) {
        Ok(content) => {
            // The process starts with the route table or traffic plan of its last run, until a hub sends a newer one.
            tracing::info!(%file, generation = %M::generation(&content), "snapshot restored from disk");
            Some(content)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            rejected();
            // The process waits for a hub. Check the disk; a snapshot of another version is rejected too.
            tracing::warn!(%file, %error, "snapshot on disk rejected");
            None
        }
    }
}

/// Reads a file and checks its checksum, its format, and that a hub can have published its generation.
fn load<M: PublishedMessage>(path: &Path) -> io::Result<M::Content> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let bytes = fs::read(path)?;
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let (sum, body) = bytes.split_at(end.ok_or_else(|| invalid("the file has no checksum line"))?);
    let body = &body[1..];
    if sum != checksum(body).as_bytes() {
        return Err(invalid("the checksum does not match the content"));
    }
    let content = M::Content::try_from(serde_json::from_slice::<M>(body)?).map_err(io::Error::other)?;
    bound::plausible(M::generation(&content), unix_time()).map_err(io::Error::other)?;
    Ok(content)
}

/// Writes a message, unless the file has the same or a newer generation.
fn save<M: PublishedMessage>(path: &Path, message: &M, generation: Generation) -> io::Result<()> {
    // The lock is released when the file is closed, also if the process crashes.
    let lock = File::create(with_suffix(path, ".lock"))?;
    lock.lock()?;
    if load::<M>(path).is_ok_and(|existing| M::generation(&existing) >= generation) {
        return Ok(());
    }
    let body = serde_json::to_vec(message)?;
    replace(path, &[checksum(&body).as_bytes(), b"\n", &body])
}

/// Writes a temporary file and renames it, so that a crash leaves either the old file or the new one.
///
/// # Errors
///
/// When the file cannot be written.
pub fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let new = with_suffix(path, ".new");
    let mut file = File::create(&new)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_all()?;
    fs::rename(new, path)
}

/// Returns `path` with `suffix` appended to the file name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

fn checksum(body: &[u8]) -> String {
    Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the age of a file, if it is known.
fn age(path: &Path) -> Option<Duration> {
    let written = fs::metadata(path).and_then(|file| file.modified()).ok()?;
    SystemTime::now().duration_since(written).ok()
}

/// Locks a directory for this process until the returned file is dropped or the process ends.
///
/// # Errors
///
/// When another process uses the directory, or the lock file cannot be created.
pub fn lock_directory(dir: &Path) -> io::Result<File> {
    let file = File::create(dir.join("lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(error),
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::other("another process uses this directory; stop it, or name another directory"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem<M: PublishedMessage>(path: &Path) -> String {
        load::<M>(path).err().expect("it is rejected").to_string()
    }

    #[test]
    fn a_message_of_a_later_version_is_rejected_with_both_versions() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("message");
        let body = br#"{"version":2,"later":true}"#;
        replace(&path, &[checksum(body).as_bytes(), b"\n", body]).expect("written");
        let problems =
            [problem::<RouteTableV1>(&path), problem::<WeightsV1>(&path), problem::<TenantSharesV1>(&path)];
        for problem in problems {
            let expected = "version 2 is not supported; this process supports version 1";
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
