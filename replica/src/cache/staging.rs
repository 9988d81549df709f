//! Staging of a pull: a model is assembled here before it is renamed to its final path.
//!
//! Each model has one folder under `pulls/`: a lock, the partial downloads, and `new/`, which holds the staged files.
//! The lock is a file lock (`flock`), so it ends with the process that holds it. `new/` is renamed to its final path
//! only when all files and the manifest are on disk; so readers see either the whole model or none of it. Files that a
//! killed pull left in `new/` are removed by the next pull; its partial downloads are resumed, or removed when they are
//! stale ([`super::stale`]).

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use super::error::PullError;
use super::manifest::{MANIFEST, ManifestV1};
use super::partial;
use super::progress::{Phase, PullObserver};
use super::stale::{self, LOCK, NEW, OLD, STALE_AGE};
use super::{space, trust};

/// Interval at which a waiting pull tries to acquire the lock.
const LOCK_PERIOD: Duration = Duration::from_millis(100);

/// Exclusive lock for pulling one model, and its staging folder.
pub(super) struct Staging {
    folder: PathBuf,
    _lock: File,
}

impl Staging {
    /// Acquires the lock of the model `key`, waiting for its current holder.
    pub(super) fn enter(
        root: &Path,
        key: &str,
        progress: &mut dyn PullObserver,
    ) -> Result<Staging, PullError> {
        let folder = root.join("pulls").join(key);
        let failed = |error| PullError::disk(&folder, 0, error);
        fs::create_dir_all(&folder).map_err(failed)?;
        let lock = File::create(folder.join(LOCK)).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.phase(Phase::Waiting);
                wait_for(&lock, &folder, progress)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let staging = Staging { folder, _lock: lock };
        staging.clear().map_err(|error| PullError::disk(&staging.folder, 0, error))?;
        Ok(staging)
    }

    /// Returns the folder of partial downloads.
    pub(super) fn partials(&self) -> &Path {
        &self.folder
    }

    /// Checks that the disk has space for `bytes` more. Removes stale partial downloads, and those of every age that are not
    /// in use if space is lacking; `kept` are those of this pull.
    pub(super) fn reserve(&self, bytes: u64, kept: &BTreeSet<PathBuf>) -> Result<(), PullError> {
        self.remove_partials(kept, STALE_AGE);
        if space::check(&self.folder, bytes).is_err() {
            // Partials that other pulls would continue are not removed for a model that does not fit anyway.
            let removable = stale::removable(&self.folder, kept, SystemTime::now());
            space::check(&self.folder, bytes.saturating_sub(removable))?;
            self.free_space(kept);
        }
        space::check(&self.folder, bytes)
    }

    /// Removes all partial downloads that are not in use, except `kept`.
    pub(super) fn free_space(&self, kept: &BTreeSet<PathBuf>) {
        self.remove_partials(kept, Duration::ZERO);
    }

    fn remove_partials(&self, kept: &BTreeSet<PathBuf>, age: Duration) {
        let bytes = stale::remove(&self.folder, kept, SystemTime::now(), age);
        if bytes > 0 {
            // Partial downloads that no process continues were removed from the model cache, because they are a week old or
            // the disk has no space for the model. No action.
            tracing::info!(bytes, "partial downloads removed");
        }
    }

    /// Creates a file of the model; `needed` is the total size of the model, for the error message.
    pub(super) fn create(&self, path: &str, needed: u64) -> Result<NewFile, PullError> {
        let path = self.prepare(path)?;
        let file = File::create(&path).map_err(|error| PullError::disk(&path, needed, error))?;
        Ok(NewFile { path, file, needed })
    }

    /// Moves a downloaded file into the model.
    pub(super) fn adopt(&self, downloaded: &Path, path: &str) -> Result<(), PullError> {
        let path = self.prepare(path)?;
        fs::rename(downloaded, &path).map_err(|error| PullError::disk(&path, 0, error))
    }

    /// Writes the manifest, moves the model to its final path, and deletes the partial downloads.
    pub(super) fn install(self, manifest: &ManifestV1, target: &Path) -> Result<(), PullError> {
        let text = serde_json::to_vec_pretty(manifest).expect("strings and numbers serialise to JSON");
        let mut file = self.create(MANIFEST, text.len() as u64)?;
        file.write(&text)?;
        file.finish()?;
        self.swap_in(target).map_err(|error| PullError::disk(target, 0, error))
    }

    fn new_folder(&self) -> PathBuf {
        self.folder.join(NEW)
    }

    fn old_folder(&self) -> PathBuf {
        self.folder.join(OLD)
    }

    fn prepare(&self, path: &str) -> Result<PathBuf, PullError> {
        let path = self.new_folder().join(path);
        let parent = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(parent).map_err(|error| PullError::disk(parent, 0, error))?;
        Ok(path)
    }

    /// Removes the staged files of a killed pull.
    fn clear(&self) -> io::Result<()> {
        for folder in [self.new_folder(), self.old_folder()] {
            match fs::remove_dir_all(folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn swap_in(&self, target: &Path) -> io::Result<()> {
        seal_and_sync(&self.new_folder())?;
        let parent = target.parent().unwrap_or(target);
        fs::create_dir_all(parent)?;
        if target.exists() {
            // Only a damaged model is replaced; an intact one is not pulled again.
            fs::rename(target, self.old_folder())?;
            fs::rename(self.new_folder(), target)?;
            fs::remove_dir_all(self.old_folder())?;
        } else {
            fs::rename(self.new_folder(), target)?;
        }
        File::open(parent)?.sync_all()?;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "part" || extension == "ranges") {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    /// Removes staged files. Partial downloads are kept for the next pull.
    fn drop(&mut self) {
        // On an error the next pull clears the folder as well.
        let _ = self.clear();
    }
}

/// Acquires the lock once its holder has ended, and reports the progress of the holder. A file lock has no wait with a timeout, and the wait can be cancelled.
fn wait_for(lock: &File, folder: &Path, progress: &mut dyn PullObserver) -> Result<(), PullError> {
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if progress.is_cancelled() => return Err(PullError::Cancelled),
            Err(TryLockError::WouldBlock) => {
                if let Some((done, total)) = partial::progress_in(folder) {
                    progress.bytes(done, Some(total));
                }
                thread::sleep(LOCK_PERIOD);
            }
            Err(TryLockError::Error(error)) => return Err(PullError::disk(folder, 0, error)),
        }
    }
}

/// File that is being written.
pub(super) struct NewFile {
    path: PathBuf,
    file: File,
    needed: u64,
}

impl NewFile {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        self.file.write_all(bytes).map_err(|error| PullError::disk(&self.path, self.needed, error))
    }

    /// Flushes the file to disk.
    pub(super) fn finish(self) -> Result<(), PullError> {
        self.file.sync_all().map_err(|error| PullError::disk(&self.path, self.needed, error))
    }
}

/// Removes write permissions, and flushes all names in the folder to disk.
fn seal_and_sync(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            seal_and_sync(&entry.path())?;
        } else {
            trust::seal(&entry.path(), false)?;
        }
    }
    trust::seal(folder, true)?;
    File::open(folder)?.sync_all()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn partials_of_other_models_are_removed_if_the_disk_has_no_space_and_has_it_then() {
        let root = tempfile::tempdir().unwrap();
        let part = |staging: &Staging| {
            let path = staging.partials().join("x.part");
            fs::write(&path, [1; 5_000]).unwrap();
            path
        };
        let left = part(&Staging::enter(root.path(), "left", &mut ()).unwrap());
        let held = Staging::enter(root.path(), "held", &mut ()).unwrap();
        let own = Staging::enter(root.path(), "own", &mut ()).unwrap();
        let (held_part, own_part) = (part(&held), part(&own));
        own.reserve(1, &BTreeSet::new()).unwrap();
        assert!(left.exists() && own_part.exists(), "the disk has space, and the partials are new");
        let error = own.reserve(u64::MAX, &BTreeSet::from([own_part.clone()])).unwrap_err();
        assert!(matches!(error, PullError::NoSpace { .. }), "{error}");
        assert!(left.exists(), "the model does not fit without them either");
        own.free_space(&BTreeSet::from([own_part.clone()]));
        assert!(!left.exists() && own_part.exists() && held_part.exists());
    }

    #[test]
    fn a_full_disk_is_reported_with_the_needed_bytes() {
        let path = PathBuf::from("/dev/full");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("a disk that is always full");
        let error = NewFile { path, file, needed: 5_000 }.write(&[0; 100]).expect_err("full");
        assert!(matches!(error, PullError::DiskFull { needed: 5_000, .. }), "{error}");
        for part in ["the disk is full", "5000 bytes are needed", "/dev/full"] {
            assert!(error.to_string().contains(part), "{part:?} in {error}");
        }
    }

    #[test]
    fn a_path_without_write_permission_is_reported() {
        let reason = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = PullError::disk(Path::new("/cache"), 1, reason).to_string();
        assert!(error.starts_with("no permission to write at /cache"), "{error}");
    }
}
