//! Snapshots of the hub's state on the gateway's disk: the route table and the gateway's rows of the plan, each in its own file
//! with a checksum, so that a gateway that starts while the hub is down serves from the last valid ones.
//!
//! During a handover two processes write the same snapshot, because both still receive updates from the hub. So a writer holds
//! a lock file, reads the existing file, and writes only a newer generation: the generation on disk never decreases, like the
//! generation in memory (invariant 5, Monotone plans), whichever process is slower.

use regions::route::{Generation, RouteTable};
use scheduler_api::WireError;
use scheduler_api::plan::{GatewayWeights, WeightsV1};
use scheduler_api::route::RouteTableV1;
use scheduler_core::bound::{self, AcceptedGeneration};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Message of the hub that is written to disk in its wire format.
pub(super) trait PersistedMessage: Serialize + DeserializeOwned {
    /// Decoded content.
    type Content: TryFrom<Self, Error = WireError>;

    /// Returns the generation of the content.
    fn generation(content: &Self::Content) -> Generation;
}

impl PersistedMessage for RouteTableV1 {
    type Content = RouteTable;

    fn generation(table: &RouteTable) -> Generation {
        table.generation
    }
}

impl PersistedMessage for WeightsV1 {
    type Content = GatewayWeights;

    fn generation(weights: &GatewayWeights) -> Generation {
        weights.generation
    }
}

/// Returns `path` with `suffix` appended to the file name.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// Writes a temporary file and renames it, so that a crash leaves either the old file or the new one. Does nothing if the file
/// already has the same or a newer generation.
pub(super) fn save<W: PersistedMessage>(path: &Path, wire: &W, generation: Generation) -> io::Result<()> {
    // The lock is released when the file is closed, also if the process crashes.
    let lock = fs::File::create(with_suffix(path, ".lock"))?;
    lock.lock()?;
    if load::<W>(path).is_ok_and(|existing| W::generation(&existing) >= generation) {
        return Ok(());
    }
    let body = serde_json::to_vec(wire)?;
    let new = with_suffix(path, ".new");
    let mut file = fs::File::create(&new)?;
    writeln!(file, "{}", checksum(&body))?;
    file.write_all(&body)?;
    file.sync_all()?;
    fs::rename(new, path)
}

/// Reads the file and checks its checksum, its format, and that a hub can have published its generation. An invalid file is
/// replaced by the next accepted message.
pub(super) fn load<W: PersistedMessage>(path: &Path) -> io::Result<W::Content> {
    let bytes = fs::read(path)?;
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let end = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .ok_or_else(|| invalid("the file has no checksum line"))?;
    let (sum, body) = (&bytes[..end], &bytes[end + 1..]);
    if sum != checksum(body).as_bytes() {
        return Err(invalid("the checksum does not match the content"));
    }
    let wire: W = serde_json::from_slice(body)?;
    let content = W::Content::try_from(wire).map_err(|error| invalid(&error.to_string()))?;
    let plausible = bound::plausible(W::generation(&content), unix_time());
    plausible.map_err(|error| invalid(&error.to_string()))?;
    Ok(content)
}

/// Time at which the current generation was accepted. A generation restored from disk was accepted before this process started,
/// when its file was written.
#[derive(Clone, Copy)]
pub(super) struct AcceptanceTime {
    at: Instant,
    /// Age that it already had at `at`.
    initial_age: Duration,
}

impl AcceptanceTime {
    pub(super) fn now() -> AcceptanceTime {
        AcceptanceTime { at: Instant::now(), initial_age: Duration::ZERO }
    }

    /// Returns the modification time of the file, or the current time if it is unknown.
    pub(super) fn of_file(path: &Path) -> AcceptanceTime {
        let written = fs::metadata(path).and_then(|file| file.modified());
        let age = written.ok().and_then(|written| SystemTime::now().duration_since(written).ok());
        AcceptanceTime { initial_age: age.unwrap_or_default(), ..AcceptanceTime::now() }
    }

    /// Returns the generation with its age, for [`bound::accept`].
    pub(super) fn accepted(self, generation: Option<Generation>) -> Option<AcceptedGeneration> {
        generation
            .map(|generation| AcceptedGeneration { generation, age: self.at.elapsed() + self.initial_age })
    }
}

/// Returns the wall-clock time since 1970.
pub(super) fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn checksum(body: &[u8]) -> String {
    Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, number: u64) -> io::Result<()> {
        let wire = serde_json::json!({
            "version": 1, "epoch": 1, "generation": number, "deployments": [],
            // Long enough for a torn write to be visible.
            "regions": (0..200).map(|at| serde_json::json!({
                "id": format!("aws/region-{at}"), "endpoint": "127.0.0.1:1", "deployments": [],
            })).collect::<Vec<_>>(),
        });
        let wire: RouteTableV1 = serde_json::from_value(wire).expect("a table in wire format");
        let table = RouteTable::try_from(wire.clone()).expect("a valid table");
        save(path, &wire, table.generation)
    }

    fn stored(path: &Path) -> u64 {
        load::<RouteTableV1>(path).expect("a valid table on disk").generation.number
    }

    /// Invariant 5, Monotone plans.
    #[test]
    fn the_generation_on_disk_never_decreases() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("routes");
        for (written, expected) in [(3, 3), (2, 3), (3, 3), (4, 4), (1, 4)] {
            write(&path, written).expect("written or skipped");
            assert_eq!(stored(&path), expected, "after {written}");
        }
        // An invalid file is replaced.
        fs::write(&path, "torn").expect("written");
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
}
