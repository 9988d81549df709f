//! Cache files of the hub's messages (the route table, and a gateway's rows of the plan), each with a checksum, so that a
//! process that starts while no hub responds uses the last valid ones.
//!
//! During a handover two gateways write the same file, because both still receive updates from the hub. So a writer holds
//! a lock file, reads the existing file, and writes only a newer generation: the generation on disk never decreases, like
//! the generation in memory (invariant 5, Monotone plans), whichever process is slower. A directory that only one process
//! may use has a lock for as long as that process runs ([`DirectoryLock`]).

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use regions::Generation;
use scheduler_core::bound::{self, AcceptedGeneration, PublishedMessage};
use sha2::{Digest, Sha256};

use crate::hub::HubFailure;

/// Last accepted message of one kind: its generation, and its file.
#[derive(Debug)]
pub struct Cache {
    file: Option<PathBuf>,
    held: Option<Held>,
}

/// Accepted generation. One that was restored from disk was accepted before this process started, when its file was
/// written.
#[derive(Clone, Copy, Debug)]
struct Held {
    generation: Generation,
    at: Instant,
    /// Age that it already had at `at`.
    initial_age: Duration,
}

impl Cache {
    /// Creates the cache of the process's current message, of generation `held`. Without a file, messages are kept in
    /// memory only.
    pub fn new(file: Option<PathBuf>, held: Option<Generation>) -> Cache {
        let initial_age = file.as_deref().and_then(age).unwrap_or_default();
        let held = held.map(|generation| Held { generation, at: Instant::now(), initial_age });
        Cache { file, held }
    }

    /// Returns the generation of the current message.
    pub fn generation(&self) -> Option<Generation> {
        self.held.map(|held| held.generation)
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
        M: PublishedMessage,
        for<'a> M: From<&'a M::Content>,
    {
        let held = self.held.map(|Held { generation, at, initial_age }| AcceptedGeneration {
            generation,
            age: at.elapsed() + initial_age,
        });
        let accepted = bound::accept_message(offered, held, unix_time());
        let mut content = accepted.map_err(|error| HubFailure::Invalid(error.to_string()))?;
        check(&mut content).map_err(HubFailure::Invalid)?;
        let generation = M::generation(&content);
        if let Some(file) = self.file.clone() {
            let (message, path) = (M::from(&content), file.clone());
            let saved = tokio::task::spawn_blocking(move || save(&path, &message, generation)).await;
            if let Err(error) = saved.map_err(io::Error::other).flatten() {
                tracing::warn!(file = %file.display(), %error, "cannot write a message of the hub to disk");
            }
        }
        self.held = Some(Held { generation, at: Instant::now(), initial_age: Duration::ZERO });
        Ok(content)
    }
}

/// Reads a cache file and checks its checksum, its format, and that a hub can have published its generation. Returns
/// `None` if there is no file. An invalid file is replaced by the next accepted message.
///
/// # Errors
///
/// When the file cannot be read, or is invalid.
pub fn load<M: PublishedMessage>(path: &Path) -> io::Result<Option<M::Content>> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let end = end.ok_or_else(|| invalid("the file has no checksum line"))?;
    let (sum, body) = (&bytes[..end], &bytes[end + 1..]);
    if sum != checksum(body).as_bytes() {
        return Err(invalid("the checksum does not match the content"));
    }
    let message: M = serde_json::from_slice(body)?;
    let content = M::Content::try_from(message).map_err(|error| invalid(&error.to_string()))?;
    let plausible = bound::plausible(M::generation(&content), unix_time());
    plausible.map_err(|error| invalid(&error.to_string()))?;
    Ok(Some(content))
}

/// Writes a message, unless the file has the same or a newer generation.
fn save<M: PublishedMessage>(path: &Path, message: &M, generation: Generation) -> io::Result<()> {
    // The lock is released when the file is closed, also if the process crashes.
    let lock = File::create(with_suffix(path, ".lock"))?;
    lock.lock()?;
    if load::<M>(path).is_ok_and(|existing| existing.is_some_and(|it| M::generation(&it) >= generation)) {
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

/// Returns the wall-clock time since 1970.
fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Exclusive use of a directory by one process, until it is dropped or the process ends.
#[derive(Debug)]
pub struct DirectoryLock(#[expect(dead_code, reason = "the lock is held while the file is open")] File);

impl DirectoryLock {
    /// Locks the directory.
    ///
    /// # Errors
    ///
    /// When another process uses the directory, or the lock file cannot be created.
    pub fn acquire(dir: &Path) -> io::Result<DirectoryLock> {
        let file = File::create(dir.join("lock"))?;
        match file.try_lock() {
            Ok(()) => Ok(DirectoryLock(file)),
            Err(TryLockError::Error(error)) => Err(error),
            Err(TryLockError::WouldBlock) => Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "another process uses this directory; stop it, or name another directory",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::RouteTable;
    use scheduler_api::route::RouteTableV1;

    fn write(path: &Path, number: u64) -> io::Result<()> {
        let message = serde_json::json!({
            "version": 1, "epoch": 1, "generation": number, "deployments": [],
            // Long enough for a torn write to be visible.
            "regions": (0..200).map(|at| serde_json::json!({
                "id": format!("aws/region-{at}"), "endpoint": "127.0.0.1:1", "deployments": [],
            })).collect::<Vec<_>>(),
        });
        let message: RouteTableV1 = serde_json::from_value(message).expect("a table in wire format");
        let table = RouteTable::try_from(message.clone()).expect("a valid table");
        save(path, &message, table.generation)
    }

    fn stored(path: &Path) -> u64 {
        let table = load::<RouteTableV1>(path).expect("a valid table on disk");
        table.expect("a table on disk").generation.number
    }

    /// Invariant 5, Monotone plans.
    #[test]
    fn the_generation_on_disk_never_decreases() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("routes");
        assert!(load::<RouteTableV1>(&path).expect("no file is no error").is_none());
        for (written, expected) in [(3, 3), (2, 3), (3, 3), (4, 4), (1, 4)] {
            write(&path, written).expect("written or skipped");
            assert_eq!(stored(&path), expected, "after {written}");
        }
        // An invalid file is replaced.
        fs::write(&path, "torn").expect("written");
        assert!(load::<RouteTableV1>(&path).is_err());
        write(&path, 1).expect("written");
        assert_eq!(stored(&path), 1);
        write(&path, u64::MAX).expect("written");
        assert!(load::<RouteTableV1>(&path).is_err(), "no hub can have published this generation");
        write(&path, 2).expect("written");
        assert_eq!(stored(&path), 2, "an implausible generation is replaced");
    }

    #[test]
    fn concurrent_writers_leave_the_newest_table_intact() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("routes");
        write(&path, 1).expect("written");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    let mut previous = 1;
                    for round in 0..25 {
                        write(path, 2 + 4 * round + writer).expect("written or skipped");
                        let now = stored(path);
                        assert!(now >= previous && now >= 2 + 4 * round + writer, "{previous} {now}");
                        previous = now;
                    }
                });
            }
        });
        assert_eq!(stored(&path), 2 + 4 * 24 + 3);
    }

    #[test]
    fn a_directory_has_one_user_at_a_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = DirectoryLock::acquire(dir.path()).expect("no other user");
        let second = DirectoryLock::acquire(dir.path()).expect_err("the directory is in use").to_string();
        assert!(second.contains("another process uses this directory"), "{second}");
        drop(first);
        DirectoryLock::acquire(dir.path()).expect("the first user has ended");
    }
}
