//! Lock of the directory of explanations, so that no two gateways use the same one.
//!
//! With a common directory, searches would find each request twice, and each gateway would delete files of the other. A gateway holds
//! the lock until it drains:
//!
//! ```text
//!  previous process:  accepts ──drains──▶ releases the lock ── finishes its requests, whose explanations it writes ──▶ exits
//!  next process:            starts ─────────▶ gets the lock
//! ```
//!
//! So the next process need not wait for the last request of the previous one, and only one that takes over starts before it has the
//! lock. The kernel releases the lock of a process that is killed. A directory that cannot be locked costs no explanations: the
//! attempts continue, and a warning has the reason.

use crate::receipts::try_lock;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name of the lock file.
const NAME: &str = "explanations.lock";
/// Interval of the attempts to get the lock.
const RETRY: Duration = Duration::from_secs(1);
/// Time after which a missing lock is reported. The process that is taken over releases it within [`RETRY`].
const REPORT_AFTER: Duration = Duration::from_secs(30);

/// Lock of a directory.
pub(super) struct DirectoryLock {
    dir: PathBuf,
    state: LockState,
}

enum LockState {
    /// This process holds it, while the file is open.
    Held {
        file: File,
        /// Time at which the directory was last found to have this file.
        checked_at: Option<Instant>,
    },
    /// This process does not hold it yet.
    Missing {
        /// Time of the first attempt.
        since: Option<Instant>,
        attempted_at: Option<Instant>,
        is_reported: bool,
    },
    /// This process drains, and another one may hold it.
    Released,
}

impl LockState {
    const INITIAL: LockState = LockState::Missing { since: None, attempted_at: None, is_reported: false };
}

impl DirectoryLock {
    /// Creates the lock of a directory, which is not held yet.
    pub(super) fn new(dir: &Path) -> DirectoryLock {
        DirectoryLock { dir: dir.to_owned(), state: LockState::INITIAL }
    }

    /// Attempts to get the lock. Returns whether this process holds it; otherwise another one does.
    pub(super) fn acquire(&mut self) -> io::Result<bool> {
        let locked = lock(&self.dir)?;
        let is_held = locked.is_some();
        if let Some(file) = locked {
            self.state = LockState::Held { file, checked_at: None };
        }
        Ok(is_held)
    }

    /// Attempts each second to get the lock, until it is released. While it is held, checks at the same interval that the
    /// directory still has the locked file: another process would lock a new one. Reports once that the lock is missing.
    pub(super) fn keep(&mut self, now: Instant) {
        if let LockState::Held { file, checked_at } = &mut self.state {
            if checked_at.is_some_and(|at| now < at + RETRY) {
                return;
            }
            *checked_at = Some(now);
            if is_in(&self.dir, file) {
                return;
            }
            self.forget();
        }
        let LockState::Missing { since, attempted_at, is_reported } = &mut self.state else { return };
        if attempted_at.is_some_and(|at| now < at + RETRY) {
            return;
        }
        *attempted_at = Some(now);
        let is_due = !*is_reported && now >= *since.get_or_insert(now) + REPORT_AFTER;
        let error = match self.acquire() {
            Ok(true) => return,
            Ok(false) => io::Error::other(format!("another process holds {NAME}")),
            Err(error) => error,
        };
        if is_due && let LockState::Missing { is_reported, .. } = &mut self.state {
            *is_reported = true;
            // If another gateway uses the directory, requests are found twice and each gateway deletes files of the other: set `dir`
            // of [explanations] of one of them to another directory. Otherwise check the disk and the permissions of the directory.
            tracing::warn!(dir = %self.dir.display(), %error, "directory of explanations cannot be locked; trying again");
        }
    }

    /// Returns whether this process holds the lock.
    #[cfg(test)]
    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, LockState::Held { .. })
    }

    /// Forgets the lock of a directory that was deleted or moved away, so that the next attempt locks the one that is created.
    pub(super) fn forget(&mut self) {
        if matches!(self.state, LockState::Held { .. }) {
            self.state = LockState::INITIAL;
        }
    }

    /// Releases the lock for the next process, for ever.
    pub(super) fn release(&mut self) {
        self.state = LockState::Released;
    }
}

/// Returns whether the directory has this lock file. An error other than that it has none is not a difference.
fn is_in(dir: &Path, file: &File) -> bool {
    let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let Ok(locked) = file.metadata().map(identity) else { return true };
    match fs::symlink_metadata(dir.join(NAME)).map(identity) {
        Ok(found) => found == locked,
        Err(error) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
    }
}

/// Locks a directory, which is created with its lock file, until the returned file is dropped; `None` if another process holds it.
fn lock(dir: &Path) -> io::Result<Option<File>> {
    fs::create_dir_all(dir)?;
    // Another user who may open the file could hold the lock. A FIFO with this name is not waited for.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    try_lock(rustix::fs::open(dir.join(NAME), flags, Mode::RUSR | Mode::WUSR)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_holds_the_lock_and_the_next_one_gets_it_when_the_first_drains() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("below");
        let (mut first, mut next, now) = (DirectoryLock::new(&dir), DirectoryLock::new(&dir), Instant::now());
        assert!(first.acquire().unwrap());
        assert!(!next.acquire().unwrap());
        next.keep(now);
        assert!(!next.is_held());
        first.release();
        next.keep(now + RETRY / 2);
        assert!(!next.is_held(), "it is not the time of an attempt");
        next.keep(now + RETRY);
        first.keep(now + RETRY);
        assert!(next.is_held() && !first.is_held());
        drop(next);
        first.keep(now + 2 * RETRY);
        assert!(!first.is_held(), "it drains");
        assert!(DirectoryLock::new(&dir).acquire().unwrap(), "a process that ends releases it");
    }

    #[test]
    fn a_missing_lock_is_reported_after_some_time() {
        let dir = tempfile::tempdir().unwrap();
        let (mut first, mut next, now) =
            (DirectoryLock::new(dir.path()), DirectoryLock::new(dir.path()), Instant::now());
        assert!(first.acquire().unwrap());
        let is_reported = |lock: &mut DirectoryLock, at| {
            lock.keep(at);
            matches!(lock.state, LockState::Missing { is_reported: true, .. })
        };
        assert!(!is_reported(&mut next, now));
        assert!(!is_reported(&mut next, now + REPORT_AFTER - RETRY));
        assert!(is_reported(&mut next, now + REPORT_AFTER));
    }

    #[test]
    fn a_lock_file_that_was_deleted_or_replaced_is_locked_again() {
        let dir = tempfile::tempdir().unwrap();
        let (path, mut first, mut now) =
            (dir.path().join(NAME), DirectoryLock::new(dir.path()), Instant::now());
        first.keep(now);
        first.keep(now);
        fs::remove_file(&path).unwrap();
        first.keep(now + RETRY / 2);
        assert!(!path.exists(), "it is not the time of a check");
        now += RETRY;
        first.keep(now);
        assert!(first.is_held() && !DirectoryLock::new(dir.path()).acquire().unwrap());
        fs::remove_file(&path).unwrap();
        let mut next = DirectoryLock::new(dir.path());
        assert!(next.acquire().unwrap());
        first.keep(now + RETRY);
        assert!(!first.is_held(), "another process holds the new file");
        drop(next);
        first.keep(now + 2 * RETRY);
        assert!(first.is_held());
    }

    #[test]
    fn a_directory_that_was_deleted_is_locked_again() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("below");
        let (mut first, now) = (DirectoryLock::new(&dir), Instant::now());
        first.keep(now);
        fs::remove_dir_all(&dir).unwrap();
        first.forget();
        first.keep(now);
        assert!(first.is_held());
        assert!(!DirectoryLock::new(&dir).acquire().unwrap());
    }
}
