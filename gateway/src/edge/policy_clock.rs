//! Time since a hub last confirmed the route table: the clocks and the file on disk.
//!
//! `scheduler_core::policy_age` computes the age. This module reads the clocks and keeps a file next to the snapshot with the
//! wall-clock time of the last confirmation. The file is written at most once a minute, so after a restart the table appears up
//! to a minute older than it is, never younger.

use gateway_core::residency::Residency;
use scheduler_client::snapshot::{replace, with_suffix};
use scheduler_core::policy_age::ClockReading;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Minimum time between two writes of the confirmation file.
const WRITE_PERIOD_MS: u64 = 60_000;
/// Value of the monotonic clock at process start: 139 years, so that a confirmation before the start is a positive number.
const STARTED_MS: u64 = 1 << 42;

/// Time of the last confirmation of the route table by a hub.
pub(crate) struct PolicyClock {
    max: Duration,
    path: PathBuf,
    started: Instant,
    monotonic_ms: AtomicU64,
    unix_ms: AtomicU64,
    /// Wall-clock time in the file on disk, in milliseconds since 1970.
    written_ms: AtomicU64,
}

/// The route table is older than `policy_max_age`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StalePolicy {
    pub(crate) age: Duration,
    pub(crate) max: Duration,
}

impl PolicyClock {
    /// Creates the clock of the table in `snapshot`, with the age recorded on disk.
    pub(crate) fn of(snapshot: &Path, max: Duration) -> PolicyClock {
        let path = with_suffix(snapshot, ".confirmed");
        let clock = PolicyClock {
            max,
            path,
            started: Instant::now(),
            monotonic_ms: AtomicU64::new(0),
            unix_ms: AtomicU64::new(0),
            written_ms: AtomicU64::new(0),
        };
        let now = clock.now();
        // A table written by a version without a confirmation file is as old as its own file.
        let confirmed = read(&clock.path).or_else(|| modified(snapshot));
        clock.set(confirmed.map_or(now, |unix_ms| ClockReading::restored(unix_ms, now)));
        clock
    }

    /// Records that a hub has confirmed the table or sent a newer one.
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
            // After a restart while no hub is reachable, requests of deployments with a residency policy are rejected sooner
            // (`policy_max_age`). Check the disk.
            tracing::warn!(path = %self.path.display(), %error, "failed to write the policy confirmation time");
        }
    }

    /// Checks that a request under this policy may be sent: fails if the policy is locked and the table too old.
    pub(crate) fn check(&self, residency: &Residency) -> Result<(), StalePolicy> {
        if !residency.is_locked() {
            return Ok(());
        }
        let (age, max) = (self.age(), self.max);
        if age > max { Err(StalePolicy { age, max }) } else { Ok(()) }
    }

    /// Returns the time since a hub confirmed the table.
    pub(crate) fn age(&self) -> Duration {
        let monotonic_ms = self.monotonic_ms.load(Ordering::Relaxed);
        let unix_ms = self.unix_ms.load(Ordering::Relaxed);
        ClockReading { monotonic_ms, unix_ms }.age(self.now())
    }

    /// Returns the age above which requests of locked deployments are rejected.
    pub(crate) fn max(&self) -> Duration {
        self.max
    }

    fn set(&self, ClockReading { monotonic_ms, unix_ms }: ClockReading) {
        self.monotonic_ms.store(monotonic_ms, Ordering::Relaxed);
        self.unix_ms.store(unix_ms, Ordering::Relaxed);
    }

    fn now(&self) -> ClockReading {
        let monotonic_ms = STARTED_MS + self.started.elapsed().as_millis() as u64;
        ClockReading { monotonic_ms, unix_ms: to_unix_ms(SystemTime::now()) }
    }
}

fn to_unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn modified(path: &Path) -> Option<u64> {
    fs::metadata(path).and_then(|file| file.modified()).ok().map(to_unix_ms)
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn write(path: &Path, unix_ms: u64) -> io::Result<()> {
    replace(path, &[format!("{unix_ms}\n").as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn locked() -> Residency {
        Residency::of(&"eu".parse().unwrap())
    }

    #[tokio::test]
    async fn the_age_is_restored_from_disk_and_reset_by_the_next_confirmation() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("routes");
        let now = to_unix_ms(SystemTime::now());
        write(&with_suffix(&snapshot, ".confirmed"), now - 7_200_000).unwrap();
        let clock = Arc::new(PolicyClock::of(&snapshot, HOUR));
        assert!(clock.check(&locked()).is_err_and(|stale| stale.age >= 2 * HOUR && stale.max == HOUR));
        assert_eq!(clock.check(&Residency::of(&"anywhere".parse().unwrap())), Ok(()));
        clock.confirm().await;
        assert_eq!(clock.check(&locked()), Ok(()));
        let restarted = PolicyClock::of(&snapshot, HOUR);
        assert!(restarted.age() < Duration::from_secs(60), "{:?}", restarted.age());
    }

    #[test]
    fn a_table_without_an_age_is_as_old_as_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("routes");
        assert!(PolicyClock::of(&snapshot, HOUR).age() < Duration::from_secs(60), "no table yet");
        let file = fs::File::create(&snapshot).unwrap();
        file.set_modified(SystemTime::now() - 3 * HOUR).unwrap();
        assert!(PolicyClock::of(&snapshot, HOUR).age() >= 3 * HOUR);
        fs::write(with_suffix(&snapshot, ".confirmed"), "torn").unwrap();
        assert!(PolicyClock::of(&snapshot, HOUR).check(&locked()).is_err());
    }
}
