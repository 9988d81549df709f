//! Where a model is put together before it gets its name.
//!
//! Each model has one folder under `pulls/`: a lock, the partials of its downloads, and `new/`, in which the files are
//! laid out. The lock is the file's own (`flock`), so it ends with the process that holds it, however that ends.
//! `new/` is renamed to its place only when every file and the manifest are on the disk; so a reader sees all of a
//! model or nothing. Whatever a killed pull left in `new/` is removed by the next; its partials are what it goes on
//! with.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::error::PullError;
use super::manifest::{MANIFEST, ManifestV1};
use super::progress::{Phase, Progress};
use super::trust;

/// The right to pull one model, and the folder to do it in.
pub(super) struct Staging {
    folder: PathBuf,
    _lock: File,
}

impl Staging {
    /// Takes the lock of the model `key`, waiting for whoever holds it.
    pub(super) fn enter(root: &Path, key: &str, progress: &mut dyn Progress) -> Result<Staging, PullError> {
        let folder = root.join("pulls").join(key);
        let failed = |error| PullError::disk(&folder, 0, error);
        fs::create_dir_all(&folder).map_err(failed)?;
        let lock = File::create(folder.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.phase(Phase::Waiting);
                lock.lock().map_err(failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let staging = Staging { folder, _lock: lock };
        staging.clear().map_err(|error| PullError::disk(&staging.folder, 0, error))?;
        Ok(staging)
    }

    /// Where downloads grow.
    pub(super) fn partials(&self) -> &Path {
        &self.folder
    }

    /// A new file of the model, which needs so many bytes in all.
    pub(super) fn create(&self, path: &str, needed: u64) -> Result<NewFile, PullError> {
        let path = self.prepare(path)?;
        let file = File::create(&path).map_err(|error| PullError::disk(&path, needed, error))?;
        Ok(NewFile { path, file, needed })
    }

    /// A downloaded file becomes a file of the model.
    pub(super) fn adopt(&self, downloaded: &Path, path: &str) -> Result<(), PullError> {
        let path = self.prepare(path)?;
        fs::rename(downloaded, &path).map_err(|error| PullError::disk(&path, 0, error))
    }

    /// All files are there: gives them their manifest and their name, and forgets the partials.
    pub(super) fn install(self, manifest: &ManifestV1, place: &Path) -> Result<(), PullError> {
        let text = serde_json::to_vec_pretty(manifest).expect("strings and numbers serialise to JSON");
        let mut file = self.create(MANIFEST, text.len() as u64)?;
        file.write(&text)?;
        file.finish()?;
        self.swap_in(place).map_err(|error| PullError::disk(place, 0, error))
    }

    fn new_folder(&self) -> PathBuf {
        self.folder.join("new")
    }

    fn old_folder(&self) -> PathBuf {
        self.folder.join("old")
    }

    fn prepare(&self, path: &str) -> Result<PathBuf, PullError> {
        let path = self.new_folder().join(path);
        let parent = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(parent).map_err(|error| PullError::disk(parent, 0, error))?;
        Ok(path)
    }

    /// Removes what a killed pull left half-made.
    fn clear(&self) -> io::Result<()> {
        for folder in [self.new_folder(), self.old_folder()] {
            match fs::remove_dir_all(folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn swap_in(&self, place: &Path) -> io::Result<()> {
        seal_and_sync(&self.new_folder())?;
        let parent = place.parent().unwrap_or(place);
        fs::create_dir_all(parent)?;
        if place.exists() {
            // Only a damaged model is ever replaced; a good one is not pulled again.
            fs::rename(place, self.old_folder())?;
            fs::rename(self.new_folder(), place)?;
            fs::remove_dir_all(self.old_folder())?;
        } else {
            fs::rename(self.new_folder(), place)?;
        }
        File::open(parent)?.sync_all()?;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "part") {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    /// What did not become a model takes no room. Its partials stay: they are what the next pull goes on with.
    fn drop(&mut self) {
        // The next pull would clear it as well.
        let _ = self.clear();
    }
}

/// A file that is being written.
pub(super) struct NewFile {
    path: PathBuf,
    file: File,
    needed: u64,
}

impl NewFile {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        self.file.write_all(bytes).map_err(|error| PullError::disk(&self.path, self.needed, error))
    }

    /// Its bytes are on the disk when this returns.
    pub(super) fn finish(self) -> Result<(), PullError> {
        self.file.sync_all().map_err(|error| PullError::disk(&self.path, self.needed, error))
    }
}

/// Files can only be read from here on, and all names in the folder are on the disk when this returns.
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
    fn a_full_disk_is_told_with_the_bytes_that_are_needed() {
        let path = PathBuf::from("/dev/full");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("a disk that is always full");
        let error = NewFile { path, file, needed: 5_000 }.write(&[0; 100]).expect_err("full");
        assert!(matches!(error, PullError::DiskFull { needed: 5_000, .. }), "{error}");
        for part in ["the disk is full", "5000 bytes are needed", "/dev/full"] {
            assert!(error.to_string().contains(part), "{part:?} in {error}");
        }
    }

    #[test]
    fn a_place_that_may_not_be_written_is_named() {
        let reason = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = PullError::disk(Path::new("/cache"), 1, reason).to_string();
        assert!(error.starts_with("no permission to write at /cache"), "{error}");
    }
}
