//! Removal of partial downloads that no pull continues.
//!
//! A partial is continued by the next pull of the same file, so pulls keep them. A model that is not pulled again, and a
//! version that was replaced at its origin, would leave theirs on the disk. Each pull removes those that have not
//! grown for [`STALE_AGE`], and those of any age if the disk has no space for its own files. The lock of a model protects
//! the partials of a pull in progress; the lock files stay, since a removed one would not exclude a process that has it open.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Age of a partial download that no pull will continue: more than the longest outage of an origin.
pub(super) const STALE_AGE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Names of the lock and of the folders of staged files in the folder of a pull.
pub(super) const LOCK: &str = "lock";
pub(super) const NEW: &str = "new";
pub(super) const OLD: &str = "old";

/// Removes partials of all models that are at least this old, and returns their bytes. `own` is the folder of a pull whose
/// lock the caller has, and `kept` its partials in use. A file that cannot be removed is left.
pub(super) fn remove(own: &Path, kept: &BTreeSet<PathBuf>, now: SystemTime, age: Duration) -> u64 {
    visit(own, kept, &|folder, kept| {
        if folder != own {
            for staged in [NEW, OLD] {
                // Files that a killed pull left. They are usually absent.
                let _ = fs::remove_dir_all(folder.join(staged));
            }
        }
        let mut found = find(folder, kept, now, age);
        found.retain(|partial| partial.paths.iter().all(|path| fs::remove_file(path).is_ok()));
        found
    })
}

/// Returns the bytes that [`remove`] frees if partials of every age are removed.
pub(super) fn removable(own: &Path, kept: &BTreeSet<PathBuf>, now: SystemTime) -> u64 {
    visit(own, kept, &|folder, kept| find(folder, kept, now, Duration::ZERO))
}

/// Calls `partials` with the folder of each model that no other process pulls, and returns the bytes of the partials.
fn visit(
    own: &Path,
    kept: &BTreeSet<PathBuf>,
    partials: &dyn Fn(&Path, &BTreeSet<PathBuf>) -> Vec<FoundPartial>,
) -> u64 {
    let bytes = |partials: Vec<FoundPartial>| partials.iter().map(|partial| partial.bytes).sum::<u64>();
    let mut total = bytes(partials(own, kept));
    let pulls = own.parent().and_then(|pulls| fs::read_dir(pulls).ok());
    let folders = pulls.into_iter().flatten().flatten();
    let folders = folders.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    for folder in folders.map(|entry| entry.path()).filter(|folder| folder != own) {
        let lock = OpenOptions::new().write(true).open(folder.join(LOCK));
        // Another process pulls this model if the lock is held.
        let Some(_lock) = lock.ok().filter(|lock| lock.try_lock().is_ok()) else { continue };
        total += bytes(partials(&folder, &BTreeSet::new()));
    }
    total
}

/// Partial download on disk.
#[derive(Default)]
struct FoundPartial {
    paths: Vec<PathBuf>,
    bytes: u64,
    modified: Option<SystemTime>,
}

/// Returns the partials in a folder that are at least this old, except `kept`.
fn find(folder: &Path, kept: &BTreeSet<PathBuf>, now: SystemTime, age: Duration) -> Vec<FoundPartial> {
    let mut found: BTreeMap<PathBuf, FoundPartial> = BTreeMap::new();
    for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if path.extension().is_some_and(|extension| extension == "part" || extension == "ranges") {
            let partial = found.entry(path.with_extension("part")).or_default();
            // A partial has holes: its length is not its size on disk.
            partial.bytes += metadata.blocks() * 512;
            partial.modified = partial.modified.max(metadata.modified().ok());
            partial.paths.push(path);
        }
    }
    let is_old = |partial: &FoundPartial| {
        let grown = partial.modified.and_then(|modified| now.duration_since(modified).ok());
        grown.unwrap_or_default() >= age
    };
    found
        .into_iter()
        .filter(|(path, partial)| !kept.contains(path) && is_old(partial))
        .map(|(_, partial)| partial)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn partials_of_other_versions_and_models_are_removed_once_they_are_old_and_not_in_use() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = root.path().join(name);
            fs::create_dir_all(folder.join(NEW)).unwrap();
            let lock = File::create(folder.join(LOCK)).unwrap();
            for file in ["a.part", "a.ranges", "b.part"] {
                fs::write(folder.join(file), [1; 5_000]).unwrap();
            }
            (folder, lock)
        };
        let ((own, _own_lock), (held, held_lock), (left, _)) =
            (folder("own"), folder("held"), folder("left"));
        held_lock.try_lock().unwrap();
        let kept = BTreeSet::from([own.join("a.part")]);
        let is_there = |path: PathBuf| path.exists();
        let now = SystemTime::now();
        assert_eq!(remove(&own, &kept, now, STALE_AGE), 0, "they are new");
        assert!(is_there(own.join("b.part")) && is_there(left.join("b.part")));
        assert!(!is_there(left.join(NEW)), "no process stages files there");
        let removed = remove(&own, &kept, now + STALE_AGE + Duration::from_secs(60), STALE_AGE);
        assert!(removed > 0);
        assert!(is_there(own.join("a.part")) && is_there(own.join("a.ranges")), "in use by this pull");
        assert!(!is_there(own.join("b.part")), "of another version");
        assert!(is_there(held.join("a.part")) && is_there(held.join(NEW)), "in use by another process");
        assert!(!is_there(left.join("a.part")) && !is_there(left.join("a.ranges")));
        assert!(is_there(left.join(LOCK)), "it excludes processes that have it open");
        drop(held_lock);
        remove(&own, &BTreeSet::new(), now, Duration::ZERO);
        assert!(!is_there(own.join("a.part")) && !is_there(held.join("a.part")), "space is lacking");
    }
}
