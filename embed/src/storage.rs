//! Files of an output: the operations that the job needs, and their implementation on disk.
//!
//! The job uses few operations, each of which is atomic, so that the tests can interrupt a run after any
//! of them (`crate::job`). Appends are the exception: a part of the bytes may be written.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// File of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OutputFile {
    /// Rows computed so far.
    Partial,
    /// Checkpoint.
    Checkpoint,
    /// Skipped rows, with reasons.
    Errors,
    /// Parquet file that is being converted from the partial one.
    Converted,
    /// Complete output.
    Final,
}

impl OutputFile {
    /// Returns the suffix after the name of the output.
    fn suffix(self) -> &'static str {
        match self {
            OutputFile::Partial => ".partial",
            OutputFile::Checkpoint => ".checkpoint",
            OutputFile::Errors => ".errors.jsonl",
            OutputFile::Converted => ".converted",
            OutputFile::Final => "",
        }
    }
}

/// Files of one output.
pub trait OutputStorage {
    /// Returns the name of a file, for messages.
    fn name(&self, file: OutputFile) -> String;

    /// Returns the length of a file, or `None` if it does not exist.
    fn length(&self, file: OutputFile) -> io::Result<Option<u64>>;

    /// Opens a file for reading from its beginning.
    fn reader(&self, file: OutputFile) -> io::Result<Box<dyn Read>>;

    /// Replaces a file by one with this content: afterwards it has the old or the new content, never a part.
    fn replace(&mut self, file: OutputFile, content: &[u8]) -> io::Result<()>;

    /// Creates a file if it does not exist, and truncates it to this length.
    fn truncate(&mut self, file: OutputFile, length: u64) -> io::Result<()>;

    /// Appends bytes to a file that was truncated before.
    fn append(&mut self, file: OutputFile, bytes: &[u8]) -> io::Result<()>;

    /// Overwrites bytes at an offset of a file that was truncated before.
    fn write_at(&mut self, file: OutputFile, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Waits until the content of a file that was truncated before is on the disk.
    fn sync(&mut self, file: OutputFile) -> io::Result<()>;

    /// Creates an empty file, and returns its writer.
    fn create(&mut self, file: OutputFile) -> io::Result<Box<dyn Write + Send>>;

    /// Waits until the content of a file is on the disk, and renames it.
    fn publish(&mut self, from: OutputFile, to: OutputFile) -> io::Result<()>;

    /// Removes a file; a missing one is no error.
    fn remove(&mut self, file: OutputFile) -> io::Result<()>;
}

/// Reason why the files of an output cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// Another process holds the lock of the output.
    #[error("{} is being written by another process; wait for it, or choose another --output", path.display())]
    Locked {
        /// Output.
        path: PathBuf,
    },
    /// The lock file of the output cannot be created.
    #[error("{} cannot be created: {reason}; create the directory, or choose another --output", path.display())]
    Unwritable {
        /// Lock file.
        path: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
}

/// Files next to each other in a directory, and their lock, which is held until the value is dropped.
#[derive(Debug)]
pub struct DiskStorage {
    output: PathBuf,
    open: BTreeMap<OutputFile, File>,
    _lock: OutputLock,
}

impl DiskStorage {
    /// Locks the files of an output.
    pub fn lock(output: &Path) -> Result<DiskStorage, StorageError> {
        let lock = OutputLock::acquire(output)?;
        Ok(DiskStorage { output: output.to_owned(), open: BTreeMap::new(), _lock: lock })
    }

    fn path(&self, file: OutputFile) -> PathBuf {
        with_suffix(&self.output, file.suffix())
    }

    fn opened(&mut self, file: OutputFile) -> io::Result<&mut File> {
        self.open.get_mut(&file).ok_or_else(|| io::Error::other("the file is not open"))
    }

    /// Makes creations, renames and removals durable.
    fn sync_directory(&self) -> io::Result<()> {
        let parent = self.output.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

fn with_suffix(output: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = output.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

impl OutputStorage for DiskStorage {
    fn name(&self, file: OutputFile) -> String {
        self.path(file).display().to_string()
    }

    fn length(&self, file: OutputFile) -> io::Result<Option<u64>> {
        match fs::metadata(self.path(file)) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn reader(&self, file: OutputFile) -> io::Result<Box<dyn Read>> {
        Ok(Box::new(File::open(self.path(file))?))
    }

    fn replace(&mut self, file: OutputFile, content: &[u8]) -> io::Result<()> {
        let path = self.path(file);
        let temporary = with_suffix(&path, ".new");
        let mut new = File::create(&temporary)?;
        new.write_all(content)?;
        new.sync_all()?;
        fs::rename(&temporary, &path)?;
        self.sync_directory()
    }

    fn truncate(&mut self, file: OutputFile, length: u64) -> io::Result<()> {
        let path = self.path(file);
        let mut opened = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        opened.set_len(length)?;
        opened.seek(SeekFrom::End(0))?;
        self.open.insert(file, opened);
        Ok(())
    }

    fn append(&mut self, file: OutputFile, bytes: &[u8]) -> io::Result<()> {
        self.opened(file)?.write_all(bytes)
    }

    fn write_at(&mut self, file: OutputFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let opened = self.opened(file)?;
        opened.seek(SeekFrom::Start(offset))?;
        opened.write_all(bytes)?;
        opened.seek(SeekFrom::End(0)).map(drop)
    }

    fn sync(&mut self, file: OutputFile) -> io::Result<()> {
        self.opened(file)?.sync_data()
    }

    fn create(&mut self, file: OutputFile) -> io::Result<Box<dyn Write + Send>> {
        Ok(Box::new(File::create(self.path(file))?))
    }

    fn publish(&mut self, from: OutputFile, to: OutputFile) -> io::Result<()> {
        self.open.remove(&from);
        File::open(self.path(from))?.sync_all()?;
        fs::rename(self.path(from), self.path(to))?;
        self.sync_directory()
    }

    fn remove(&mut self, file: OutputFile) -> io::Result<()> {
        self.open.remove(&file);
        match fs::remove_file(self.path(file)) {
            Ok(()) => self.sync_directory(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Lock of an output. The lock file is removed with the lock; the system releases the lock of a killed process.
#[derive(Debug)]
struct OutputLock {
    path: PathBuf,
    _file: File,
}

impl OutputLock {
    fn acquire(output: &Path) -> Result<OutputLock, StorageError> {
        let path = with_suffix(output, ".lock");
        let failed = |reason: io::Error| StorageError::Unwritable { path: path.clone(), reason };
        loop {
            let file =
                OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(StorageError::Locked { path: output.to_owned() });
                }
                Err(TryLockError::Error(reason)) => return Err(failed(reason)),
            }
            // The holder before this one may have removed the file between opening and locking.
            if is_at(&file, &path) {
                return Ok(OutputLock { path, _file: file });
            }
        }
    }
}

/// Returns whether `path` is still the path of an open file.
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(opened), Ok(named)) => identity(opened) == identity(named),
        _ => false,
    }
}

impl Drop for OutputLock {
    fn drop(&mut self) {
        // A file that remains has no effect: the lock is on the open file.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(storage: &DiskStorage, file: OutputFile) -> Vec<u8> {
        let mut content = Vec::new();
        storage.reader(file).expect("a file").read_to_end(&mut content).expect("a file");
        content
    }

    #[test]
    fn files_are_appended_truncated_overwritten_and_published() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut storage = DiskStorage::lock(&folder.path().join("a.npy")).expect("a lock");
        assert_eq!(storage.length(OutputFile::Partial).expect("a folder"), None);
        storage.truncate(OutputFile::Partial, 0).expect("a file");
        storage.append(OutputFile::Partial, b"abcdef").expect("a file");
        storage.truncate(OutputFile::Partial, 4).expect("a file");
        storage.append(OutputFile::Partial, b"xy").expect("a file");
        storage.write_at(OutputFile::Partial, 1, b"B").expect("a file");
        storage.append(OutputFile::Partial, b"z").expect("a file");
        storage.sync(OutputFile::Partial).expect("a file");
        assert_eq!(content(&storage, OutputFile::Partial), b"aBcdxyz");
        storage.replace(OutputFile::Checkpoint, b"1").expect("a file");
        storage.replace(OutputFile::Checkpoint, b"22").expect("a file");
        assert_eq!(content(&storage, OutputFile::Checkpoint), b"22");
        storage.publish(OutputFile::Partial, OutputFile::Final).expect("a file");
        assert_eq!(content(&storage, OutputFile::Final), b"aBcdxyz");
        assert_eq!(storage.length(OutputFile::Partial).expect("a folder"), None);
        storage.remove(OutputFile::Checkpoint).expect("a file");
        storage.remove(OutputFile::Checkpoint).expect("a missing file is no error");
        drop(storage);
        let names: Vec<_> = fs::read_dir(folder.path()).expect("a folder").flatten().collect();
        assert_eq!(names.len(), 1, "only the output remains: {names:?}");
    }

    #[test]
    fn an_output_is_locked_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, other) = (folder.path().join("a.npy"), folder.path().join("b.npy"));
        let first = DiskStorage::lock(&path).expect("a lock");
        let error = DiskStorage::lock(&path).expect_err("locked");
        assert!(matches!(error, StorageError::Locked { .. }), "{error}");
        DiskStorage::lock(&other).expect("another output");
        drop(first);
        DiskStorage::lock(&path).expect("released");
    }

    #[test]
    fn a_missing_directory_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = DiskStorage::lock(&folder.path().join("missing/a.npy")).expect_err("no directory");
        assert!(error.to_string().contains("missing/a.npy.lock cannot be created"), "{error}");
    }
}
