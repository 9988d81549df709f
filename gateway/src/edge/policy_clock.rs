//! Time since a hub last confirmed the route table, by the clocks and on disk.
//!
//! `scheduler_core::policy_age` decides; here are the clocks and the file beside the snapshot, which holds the wall clock at
//! the last confirmation. It is written once a minute at most: a process that starts again finds the table up to a minute
//! older than it is, never younger.

use super::snapshot::beside;
use gateway_core::residency::Residency;
use scheduler_core::policy_age::Moment;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval at which a confirmation is written to disk.
const WRITE_PERIOD_MS: u64 = 60_000;
/// Value of the monotonic clock when a process starts, so that what was confirmed before is a positive number: 139 years.
const STARTED_MS: u64 = 1 << 42;

/// When a hub last confirmed the table.
pub(crate) struct PolicyClock {
    max: Duration,
    path: PathBuf,
    started: Instant,
    monotonic_ms: AtomicU64,
    unix_ms: AtomicU64,
    /// The wall clock of the confirmation on disk.
    written_ms: AtomicU64,
}

/// The table is older than it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooOld {
    pub(crate) age: Duration,
    pub(crate) max: Duration,
}

impl PolicyClock {
    /// The clock of the table in `snapshot`, with the age that it had there.
    pub(crate) fn of(snapshot: &Path, max: Duration) -> PolicyClock {
        let path = beside(snapshot, ".confirmed");
        let clock = PolicyClock {
            max,
            path,
            started: Instant::now(),
            monotonic_ms: AtomicU64::new(0),
            unix_ms: AtomicU64::new(0),
            written_ms: AtomicU64::new(0),
        };
        let now = clock.now();
        // A table of a version that kept no age is as old as its file.
        let confirmed = read(&clock.path).or_else(|| modified(snapshot));
        clock.set(confirmed.map_or(now, |unix_ms| Moment::restored(unix_ms, now)));
        clock
    }

    /// A hub has confirmed the table, or given a newer one.
    pub(crate) async fn confirm(self: &Arc<Self>) {
        let now = self.now();
        self.set(now);
        let written = self.written_ms.load(Ordering::Relaxed);
        if now.unix_ms.abs_diff(written) < WRITE_PERIOD_MS {
            return;
        }
        self.written_ms.store(now.unix_ms, Ordering::Relaxed);
        let clock = self.clone();
        let write = tokio::task::spawn_blocking(move || write(&clock.path, now.unix_ms)).await;
        if let Err(error) = write.map_err(io::Error::other).flatten() {
            tracing::warn!(path = %self.path.display(), %error, "the age of the policy cannot be kept on disk");
        }
    }

    /// Whether a request under this policy may be sent.
    pub(crate) fn check(&self, residency: &Residency) -> Result<(), TooOld> {
        if !residency.is_locked() {
            return Ok(());
        }
        let (age, max) = (self.age(), self.max);
        if age > max { Err(TooOld { age, max }) } else { Ok(()) }
    }

    /// The time since a hub confirmed the table.
    pub(crate) fn age(&self) -> Duration {
        let monotonic_ms = self.monotonic_ms.load(Ordering::Relaxed);
        let unix_ms = self.unix_ms.load(Ordering::Relaxed);
        Moment { monotonic_ms, unix_ms }.age(self.now())
    }

    /// The age past which requests of locked deployments are rejected.
    pub(crate) fn max(&self) -> Duration {
        self.max
    }

    fn set(&self, Moment { monotonic_ms, unix_ms }: Moment) {
        self.monotonic_ms.store(monotonic_ms, Ordering::Relaxed);
        self.unix_ms.store(unix_ms, Ordering::Relaxed);
    }

    fn now(&self) -> Moment {
        let monotonic_ms = STARTED_MS + self.started.elapsed().as_millis() as u64;
        Moment { monotonic_ms, unix_ms: since_1970(SystemTime::now()) }
    }
}

fn since_1970(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn modified(path: &Path) -> Option<u64> {
    fs::metadata(path).and_then(|file| file.modified()).ok().map(since_1970)
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Written beside its place and moved there, so that a crash leaves the old one or the new one.
fn write(path: &Path, unix_ms: u64) -> io::Result<()> {
    let new = beside(path, ".new");
    let mut file = fs::File::create(&new)?;
    writeln!(file, "{unix_ms}")?;
    file.sync_all()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn locked() -> Residency {
        Residency::of(&"eu".parse().unwrap())
    }

    #[tokio::test]
    async fn the_age_is_found_again_on_disk_and_ends_with_the_next_confirmation() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("routes");
        let now = since_1970(SystemTime::now());
        write(&beside(&snapshot, ".confirmed"), now - 7_200_000).unwrap();
        let clock = Arc::new(PolicyClock::of(&snapshot, HOUR));
        assert!(clock.check(&locked()).is_err_and(|old| old.age >= 2 * HOUR && old.max == HOUR));
        assert_eq!(clock.check(&Residency::of(&"anywhere".parse().unwrap())), Ok(()));
        clock.confirm().await;
        assert_eq!(clock.check(&locked()), Ok(()));
        let again = PolicyClock::of(&snapshot, HOUR);
        assert!(again.age() < Duration::from_secs(60), "{:?}", again.age());
    }

    #[test]
    fn a_table_without_an_age_is_as_old_as_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("routes");
        assert!(PolicyClock::of(&snapshot, HOUR).age() < Duration::from_secs(60), "there is no table yet");
        let file = fs::File::create(&snapshot).unwrap();
        file.set_modified(SystemTime::now() - 3 * HOUR).unwrap();
        assert!(PolicyClock::of(&snapshot, HOUR).age() >= 3 * HOUR);
        fs::write(beside(&snapshot, ".confirmed"), "torn").unwrap();
        assert!(PolicyClock::of(&snapshot, HOUR).check(&locked()).is_err());
    }
}
