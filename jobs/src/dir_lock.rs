//! Lock of the directory of a queue.
//!
//! A process with a log in a file deletes the objects that its log does not know, so a second queue in the same directory would
//! lose its inputs and results. The lock is a file lock (`flock`), which ends with the process that holds it: exclusive for a log
//! in a file, and shared by the processes of a log in NATS, which know the same objects.
//!
//! redb locks the file of the log as well. That lock does not exclude a process whose log is in NATS.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file.
const LOCK: &str = "lock";

/// Use of the directory of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirUse {
    /// One process has the queue for itself.
    Exclusive,
    /// The processes of a region share the queue.
    Shared,
}

/// Error for a directory that cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum DirLockError {
    /// Another process uses it.
    #[error("the directory {} of [jobs] belongs to the queue of another process; stop it, or set another jobs.dir", dir.display())]
    InUse {
        /// Directory.
        dir: PathBuf,
    },
    /// The file cannot be created or locked.
    #[error("cannot lock {}: {source}; the folder must be writable and its file system support flock", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// Lock of a directory, until it is dropped.
#[derive(Debug)]
pub struct DirLock {
    _file: File,
}

impl DirLock {
    /// Creates the directory if it does not exist, and locks it.
    ///
    /// # Errors
    ///
    /// When a process uses it whose queue is another one, or it cannot be written.
    pub fn acquire(dir: &Path, own: DirUse) -> Result<DirLock, DirLockError> {
        let path = dir.join(LOCK);
        let failed = |source| DirLockError::Io { path: path.clone(), source };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(failed)?;
        let locked = match own {
            DirUse::Exclusive => file.try_lock(),
            DirUse::Shared => file.try_lock_shared(),
        };
        match locked {
            Ok(()) => Ok(DirLock { _file: file }),
            Err(TryLockError::WouldBlock) => Err(DirLockError::InUse { dir: dir.to_owned() }),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_queue() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("jobs");
        let acquire = |own| DirLock::acquire(&dir, own).map_err(|error| error.to_string());
        let alone = acquire(DirUse::Exclusive).unwrap();
        for own in [DirUse::Exclusive, DirUse::Shared] {
            let error = acquire(own).unwrap_err();
            assert!(error.contains("belongs to the queue of another process"), "{error}");
        }
        drop(alone);
        let shared = [(); 2].map(|()| acquire(DirUse::Shared).unwrap());
        assert!(acquire(DirUse::Exclusive).is_err());
        drop(shared);
        assert!(acquire(DirUse::Exclusive).is_ok(), "a lock ends with its holder");
        std::fs::remove_dir_all(&dir).unwrap();
        std::fs::write(&dir, "").unwrap();
        assert!(acquire(DirUse::Exclusive).unwrap_err().starts_with("cannot lock"));
    }
}
