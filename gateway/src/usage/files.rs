//! Files of ledgers beside the snapshot of a gateway, or in the directory of the jobs of a spoke: `SNAPSHOT.usage-LEDGER-DAY`, or
//! `DIR/jobs.usage-LEDGER-DAY`, has the newest version of a day, and the same name with `.lock` instead of the day is locked by the
//! process that owns the ledger.
//!
//! Each day has a file of its own, so a write does not grow with the days that wait for a hub. The lock is another file, because
//! each write replaces the file of the day. A ledger is locked before its first file is written, and the lock file is deleted with the
//! last one.

use gateway_core::usage::Ledger;
use regions::id::RegionId;
use scheduler_api::usage::{UsageDay, UsageV1};
use scheduler_client::snapshot;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum number of ledgers beside the one in which this process counts. More are left for the next start.
const FORMER_LEDGERS_MAX: usize = 8;
/// Suffix of the files, before the number of the ledger.
const SUFFIX: &str = ".usage-";
/// Suffix of the lock of a ledger.
const LOCK_SUFFIX: &str = ".lock";
/// Hexadecimal digits of the number of a ledger.
const LEDGER_DIGITS: usize = 16;

/// Ledger, and its files.
pub(super) struct LedgerOnDisk {
    pub(super) ledger: Ledger,
    /// Path of all files, up to the number of the ledger.
    base: PathBuf,
    /// Held while this process owns the ledger; absent before the first file is written.
    lock: Option<File>,
}

/// Takes over the ledgers that ended processes left beside the snapshot. Returns the one in which this process counts, which is new if
/// there is no other, and the others.
pub(super) fn open(snapshot: &Path, region: &RegionId) -> (LedgerOnDisk, Vec<LedgerOnDisk>) {
    let (mut counting, mut former) = (None, Vec::new());
    for (id, days) in ledgers(snapshot) {
        if former.len() == FORMER_LEDGERS_MAX {
            break;
        }
        match LedgerOnDisk::adopt(snapshot, region, id, &days) {
            Ok(Some((adopted, true))) if counting.is_none() => counting = Some(adopted),
            Ok(Some((adopted, _))) if !adopted.ledger.is_empty() => former.push(adopted),
            // Another process uses it, or it has no valid file.
            Ok(_) => {}
            Err(error) => {
                // The usage of an earlier process is not reported before the next start. Check the disk of `snapshot`, or of
                // `jobs.dir` at a spoke.
                tracing::warn!(ledger = format!("{id:016x}"), %error, "cannot lock the usage on disk");
            }
        }
    }
    (counting.unwrap_or_else(|| LedgerOnDisk::new(snapshot, region, rand::random())), former)
}

impl LedgerOnDisk {
    fn new(snapshot: &Path, region: &RegionId, id: u64) -> LedgerOnDisk {
        let base = snapshot::with_suffix(snapshot, &format!("{SUFFIX}{id:016x}"));
        LedgerOnDisk { ledger: Ledger::new(region.clone(), id), base, lock: None }
    }

    /// Takes over a ledger; `None` if another process holds it. Returns also whether all files are valid: in a ledger with an
    /// invalid one no process counts, because the sequence numbers of that day are unknown.
    fn adopt(
        snapshot: &Path,
        region: &RegionId,
        id: u64,
        days: &[UsageDay],
    ) -> io::Result<Option<(LedgerOnDisk, bool)>> {
        let mut adopted = LedgerOnDisk::new(snapshot, region, id);
        adopted.lock = lock(&adopted.lock_path())?;
        if adopted.lock.is_none() {
            return Ok(None);
        }
        let mut is_valid = true;
        for day in days {
            let path = adopted.path(*day);
            match parse(&path, *day).and_then(|usage| adopted.ledger.adopt(usage).map_err(io::Error::other)) {
                Ok(()) => {}
                // Its owner has deleted it since the directory was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    // The usage in this file is missing in reports. Move the file away and report the defect.
                    tracing::warn!(file = %path.display(), %error, "usage on disk rejected");
                    is_valid = false;
                }
            }
        }
        if is_valid && adopted.ledger.is_empty() {
            adopted.unlock();
            return Ok(None);
        }
        Ok(Some((adopted, is_valid)))
    }

    fn path(&self, day: UsageDay) -> PathBuf {
        snapshot::with_suffix(&self.base, &format!("-{day}"))
    }

    fn lock_path(&self) -> PathBuf {
        snapshot::with_suffix(&self.base, LOCK_SUFFIX)
    }

    /// Writes the days that have changed; returns the number of failures.
    pub(super) fn write(&mut self) -> u64 {
        let mut failures = 0;
        for usage in self.ledger.flush() {
            match self.save(&UsageV1::from(&usage), usage.day) {
                Ok(()) => self.ledger.written(usage.day, usage.sequence),
                Err(error) => {
                    failures += 1;
                    self.ledger.unwritten(usage.day);
                    // Usage is counted in memory, and not reported before it is on disk. Check the disk of `snapshot`, or of
                    // `jobs.dir` at a spoke.
                    tracing::warn!(file = %self.path(usage.day).display(), %error, "cannot write the usage to disk");
                }
            }
        }
        failures
    }

    fn save(&mut self, usage: &UsageV1, day: UsageDay) -> io::Result<()> {
        if self.lock.is_none() {
            self.lock = lock(&self.lock_path())?;
        }
        if self.lock.is_none() {
            return Err(io::Error::other("another process holds the lock of this ledger"));
        }
        snapshot::replace(&self.path(day), &[&serde_json::to_vec(usage)?])
    }

    /// Returns the version of a day that is on disk. One that cannot be read is written again.
    pub(super) fn read(&mut self, day: UsageDay) -> Option<UsageV1> {
        let path = self.path(day);
        let read = parse(&path, day);
        read.inspect_err(|error| {
            self.ledger.unwritten(day);
            // It is written and reported again. Check the disk of `snapshot`, or of `jobs.dir` at a spoke.
            tracing::warn!(file = %path.display(), %error, "cannot read the usage on disk");
        })
        .ok()
    }

    /// Deletes the files of these days, and with the last one the lock. A file that stays is reported again after the next start, which
    /// changes nothing.
    pub(super) fn delete(&mut self, days: &[UsageDay]) {
        days.iter().for_each(|day| drop(std::fs::remove_file(self.path(*day))));
        if !days.is_empty() && self.ledger.is_empty() {
            self.unlock();
        }
    }

    /// Deletes the lock file, and releases the lock afterwards.
    fn unlock(&mut self) {
        if let Some(lock) = self.lock.take() {
            let _ = std::fs::remove_file(self.lock_path());
            drop(lock);
        }
    }
}

/// Reads the file of a day.
pub(super) fn parse(path: &Path, day: UsageDay) -> io::Result<UsageV1> {
    let usage: UsageV1 = serde_json::from_slice(&std::fs::read(path)?)?;
    let is_same = usage.day == day.to_string();
    if is_same { Ok(usage) } else { Err(io::Error::other(format!("it has the usage of {}", usage.day))) }
}

/// Returns the ledgers with files beside the snapshot, in the order of their numbers, with their days. One without days has a lock
/// only.
fn ledgers(snapshot: &Path) -> BTreeMap<u64, Vec<UsageDay>> {
    let mut found: BTreeMap<u64, Vec<UsageDay>> = BTreeMap::new();
    let prefix = snapshot::with_suffix(snapshot, SUFFIX);
    let (Some(dir), Some(prefix)) = (prefix.parent(), prefix.file_name()) else { return found };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(prefix.to_str()?));
        let parts = rest.and_then(|rest| rest.split_at_checked(LEDGER_DIGITS));
        let Some((digits, rest)) = parts else { continue };
        let Ok(ledger) = u64::from_str_radix(digits, 16) else { continue };
        if rest == LOCK_SUFFIX {
            found.entry(ledger).or_default();
        } else if let Some(Ok(day)) = rest.strip_prefix('-').map(str::parse) {
            found.entry(ledger).or_default().push(day);
        }
    }
    found
}

/// Locks a file until the returned one is dropped or the process ends; `None` if another process holds it or has just deleted it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = File::create(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => return Ok(None),
        Err(std::fs::TryLockError::Error(error)) => return Err(error),
    }
    // A lock on a file that was deleted meanwhile does not exclude a process that creates it again.
    let (held, named) = (file.metadata()?, std::fs::metadata(path));
    let is_same = named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino()));
    Ok(is_same.then_some(file))
}
