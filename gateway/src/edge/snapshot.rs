//! What a gateway keeps on its disk of what the hub has told it: the route table and its rows of the plan, each in a file of
//! its own, with its checksum, so that a gateway which starts while the hub is dead serves from the last good ones.
//!
//! Two processes keep the same snapshot for as long as the one hands over to the other, and both go on hearing the hub.
//! So whoever writes holds a lock beside it, looks what is there, and writes only what is newer: a file goes back no more
//! than what is in hand does (invariant 5, Monotone plans), whoever of the two was slower.

use regions::route::{Generation, RouteTable};
use scheduler_core::bound::{self, AcceptedGeneration};
use scheduler_core::wire::WireError;
use scheduler_core::wire::plan::{GatewayWeights, WeightsV1};
use scheduler_core::wire::route::RouteTableV1;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Something that is kept as it was told.
pub(super) trait Kept: Serialize + DeserializeOwned {
    /// What it means.
    type Meaning: TryFrom<Self, Error = WireError>;

    /// How new that is.
    fn generation(meaning: &Self::Meaning) -> Generation;
}

impl Kept for RouteTableV1 {
    type Meaning = RouteTable;

    fn generation(table: &RouteTable) -> Generation {
        table.generation
    }
}

impl Kept for WeightsV1 {
    type Meaning = GatewayWeights;

    fn generation(weights: &GatewayWeights) -> Generation {
        weights.generation
    }
}

/// `path` with something after it.
pub(super) fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(what);
    name.into()
}

/// Writes it beside its place and moves it there, so that a crash leaves the old one or the new one; unless one as new is
/// there already.
pub(super) fn save<W: Kept>(path: &Path, wire: &W, generation: Generation) -> io::Result<()> {
    // Held until the file is closed, also by a process that crashes.
    let lock = fs::File::create(beside(path, ".lock"))?;
    lock.lock()?;
    if load::<W>(path).is_ok_and(|there| W::generation(&there) >= generation) {
        return Ok(());
    }
    let body = serde_json::to_vec(wire)?;
    let new = beside(path, ".new");
    let mut file = fs::File::create(&new)?;
    writeln!(file, "{}", checksum(&body))?;
    file.write_all(&body)?;
    file.sync_all()?;
    fs::rename(new, path)
}

/// What is kept there, if it is whole, can be read, and is something that a hub can have published. Anything else is of no
/// use, and the next that is accepted takes its place.
pub(super) fn load<W: Kept>(path: &Path) -> io::Result<W::Meaning> {
    let bytes = fs::read(path)?;
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| invalid("it has no checksum"))?;
    let (sum, body) = (&bytes[..end], &bytes[end + 1..]);
    if sum != checksum(body).as_bytes() {
        return Err(invalid("its checksum does not fit"));
    }
    let wire: W = serde_json::from_slice(body)?;
    let meaning = W::Meaning::try_from(wire).map_err(|error| invalid(&error.to_string()))?;
    let plausible = bound::plausible(W::generation(&meaning), since_1970());
    plausible.map_err(|error| invalid(&error.to_string()))?;
    Ok(meaning)
}

/// When what was accepted last was accepted. What comes from disk was accepted before this process began, when its file was
/// written.
#[derive(Clone, Copy)]
pub(super) struct Since {
    at: Instant,
    before: Duration,
}

impl Since {
    pub(super) fn now() -> Since {
        Since { at: Instant::now(), before: Duration::ZERO }
    }

    /// When the file was written; now, where nobody can tell.
    pub(super) fn written(path: &Path) -> Since {
        let written = fs::metadata(path).and_then(|file| file.modified());
        let age = written.ok().and_then(|written| SystemTime::now().duration_since(written).ok());
        Since { before: age.unwrap_or_default(), ..Since::now() }
    }

    /// What is held since then, for [`bound::accept`].
    pub(super) fn held(self, generation: Option<Generation>) -> Option<AcceptedGeneration> {
        generation.map(|generation| AcceptedGeneration { generation, age: self.at.elapsed() + self.before })
    }
}

/// The time by this machine's clock.
pub(super) fn since_1970() -> Duration {
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
            // As long as it takes for a torn write to show.
            "regions": (0..200).map(|at| serde_json::json!({
                "id": format!("aws/region-{at}"), "endpoint": "127.0.0.1:1", "deployments": [],
            })).collect::<Vec<_>>(),
        });
        let wire: RouteTableV1 = serde_json::from_value(wire).expect("a table as a hub sends it");
        let table = RouteTable::try_from(wire.clone()).expect("a good table");
        save(path, &wire, table.generation)
    }

    fn there(path: &Path) -> u64 {
        load::<RouteTableV1>(path).expect("a good table is there").generation.number
    }

    /// Invariant 5, Monotone plans.
    #[test]
    fn the_snapshot_never_goes_back_whoever_writes_last() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("routes");
        for (written, expected) in [(3, 3), (2, 3), (3, 3), (4, 4), (1, 4)] {
            write(&path, written).expect("it is written or left");
            assert_eq!(there(&path), expected, "after {written}");
        }
        // One that is of no use is in nobody's way.
        fs::write(&path, "torn").expect("it is written");
        write(&path, 1).expect("it is written");
        assert_eq!(there(&path), 1);
        write(&path, u64::MAX).expect("it is written");
        assert!(load::<RouteTableV1>(&path).is_err(), "no hub has published that");
        write(&path, 2).expect("it is written");
        assert_eq!(there(&path), 2, "and it is in nobody's way");
    }

    #[test]
    fn two_who_write_at_once_leave_a_whole_table_and_the_newest() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("routes");
        write(&path, 1).expect("it is written");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    let mut before = 1;
                    for round in 0..25 {
                        write(path, 2 + 4 * round + writer).expect("it is written or left");
                        let now = there(path);
                        assert!(now >= before && now >= 2 + 4 * round + writer, "{before} {now}");
                        before = now;
                    }
                });
            }
        });
        assert_eq!(there(&path), 2 + 4 * 24 + 3);
    }
}
