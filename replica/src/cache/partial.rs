//! File that is downloaded in parts, by several connections at once.
//!
//! ```text
//! <name>.part      the file in its whole length, with holes where nothing has arrived
//! <name>.ranges    for each part the number of bytes that have arrived, 8 bytes each (little endian)
//! ```
//!
//! The name is derived from the location, the digest and the size of the file, so only more of the same file can be added.
//! Bytes are written before their number. So when the process is killed, the number is at most that of the bytes in the
//! file, and the next pull continues each part at its last byte. When the machine loses power, the numbers may be on disk
//! without the bytes: the digest of the complete file does not match then, and the file is downloaded again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::error::PullError;
use super::manifest::{copy_hashing, hex};
use super::origin::RemoteFile;

/// File that is downloaded in parts.
pub(super) struct RangedPartial {
    path: PathBuf,
    data: File,
    ranges: File,
    bytes: u64,
    part_bytes: u64,
    /// Bytes of each part that have arrived.
    done: Vec<AtomicU64>,
}

impl RangedPartial {
    /// Opens the partial of a file in `folder`, with parts of `part_bytes`; continues an existing one if the file has a
    /// digest, by which the existing bytes are verified.
    pub(super) fn open(folder: &Path, file: &RemoteFile, part_bytes: u64) -> io::Result<RangedPartial> {
        let part_bytes = if file.has_ranges { part_bytes.max(1) } else { file.bytes.max(1) };
        let mut name = Sha256::new();
        let digest = file.sha256.as_deref().unwrap_or_default();
        name.update(format!("{}\n{digest}\n{}\n{part_bytes}", file.location, file.bytes));
        let path = folder.join(format!("{}.part", &hex(name)[..32]));
        let parts = file.bytes.div_ceil(part_bytes);
        let open =
            |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let (data, ranges) = (open(&path)?, open(&path.with_extension("ranges"))?);
        let length = |file: &File| file.metadata().map(|metadata| metadata.len());
        let is_resumable = file.sha256.is_some() && file.has_ranges;
        let is_same = length(&data)? == file.bytes && length(&ranges)? == parts * 8;
        if !is_resumable || !is_same {
            ranges.set_len(0)?;
            data.set_len(0)?;
            data.set_len(file.bytes)?;
            ranges.set_len(parts * 8)?;
        }
        let mut partial =
            RangedPartial { path, data, ranges, bytes: file.bytes, part_bytes, done: Vec::new() };
        for part in 0..parts {
            let mut number = [0; 8];
            partial.ranges.read_exact_at(&mut number, part * 8)?;
            let range = partial.range(part as usize);
            let done = u64::from_le_bytes(number).min(range.end - range.start);
            partial.done.push(AtomicU64::new(done));
        }
        Ok(partial)
    }

    /// Returns the number of parts.
    pub(super) fn parts(&self) -> usize {
        self.done.len()
    }

    /// Returns the bytes of the file that have arrived.
    pub(super) fn done(&self) -> u64 {
        self.done.iter().map(|done| done.load(Ordering::Relaxed)).sum()
    }

    /// Returns the range of a part.
    fn range(&self, part: usize) -> Range<u64> {
        let start = part as u64 * self.part_bytes;
        start..(start + self.part_bytes).min(self.bytes)
    }

    /// Returns the range of a part that is missing; it is empty if the part is complete.
    pub(super) fn missing(&self, part: usize) -> Range<u64> {
        let range = self.range(part);
        range.start + self.done[part].load(Ordering::Relaxed)..range.end
    }

    /// Appends bytes to a part. A part is written by one thread at a time.
    pub(super) fn write(&self, part: usize, bytes: &[u8]) -> Result<(), PullError> {
        let missing = self.missing(part);
        let count = bytes.len() as u64;
        assert!(count <= missing.end - missing.start, "a part gets no bytes of the next one");
        let done = self.done[part].load(Ordering::Relaxed) + count;
        let written = self.data.write_all_at(bytes, missing.start);
        let written = written.and_then(|()| self.ranges.write_all_at(&done.to_le_bytes(), part as u64 * 8));
        written.map_err(|error| self.failed(error))?;
        self.done[part].store(done, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets all bytes.
    pub(super) fn restart(&self) -> Result<(), PullError> {
        let parts = self.done.len() as u64;
        let cleared = self.ranges.set_len(0).and_then(|()| self.ranges.set_len(parts * 8));
        cleared.map_err(|error| self.failed(error))?;
        self.done.iter().for_each(|done| done.store(0, Ordering::Relaxed));
        Ok(())
    }

    /// Forgets the bytes of one part, which the origin can only send again from the begin.
    pub(super) fn restart_part(&self, part: usize) -> Result<(), PullError> {
        let cleared = self.ranges.write_all_at(&[0; 8], part as u64 * 8);
        cleared.map_err(|error| self.failed(error))?;
        self.done[part].store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Deletes the file.
    pub(super) fn delete(&self) {
        // One that cannot be deleted is continued or replaced by the next pull.
        let _ = fs::remove_file(self.path.with_extension("ranges"));
        let _ = fs::remove_file(&self.path);
    }

    /// Returns the SHA-256 of the complete file, which is flushed to disk.
    pub(super) fn digest(&self) -> Result<String, PullError> {
        let mut hasher = Sha256::new();
        let read = File::open(&self.path)
            .and_then(|mut file| copy_hashing(&mut file, &mut hasher, |_| Ok(())))
            .and_then(|_| self.data.sync_all());
        read.map_err(|error| PullError::disk(&self.path, self.bytes, error))?;
        Ok(hex(hasher))
    }

    /// Returns the path of the complete file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&self, error: io::Error) -> PullError {
        let error = PullError::disk(&self.path, self.bytes, error);
        if matches!(error, PullError::DiskFull { .. }) {
            // An incomplete file is deleted to free space.
            self.delete();
        }
        error
    }
}

/// Returns the bytes that have arrived of the files in `folder`, and their total, while another process downloads them.
pub(super) fn progress_in(folder: &Path) -> Option<(u64, u64)> {
    let (mut done, mut total) = (0, 0);
    for entry in fs::read_dir(folder).ok()? {
        let path = entry.ok()?.path();
        if path.extension().is_none_or(|extension| extension != "ranges") {
            continue;
        }
        let numbers = fs::read(&path).ok()?;
        done += numbers.chunks_exact(8).map(le_bytes).sum::<u64>();
        total += fs::metadata(path.with_extension("part")).ok()?.len();
    }
    (total > 0).then_some((done.min(total), total))
}

fn le_bytes(number: &[u8]) -> u64 {
    number.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(bytes: u64, sha256: Option<&str>) -> RemoteFile {
        RemoteFile {
            path: "x".to_owned(),
            location: "https://host/x".to_owned(),
            bytes,
            sha256: sha256.map(str::to_owned),
            etag: None,
            has_ranges: true,
        }
    }

    #[test]
    fn each_part_continues_at_its_last_byte() {
        let folder = tempfile::tempdir().unwrap();
        let open = |sha256| RangedPartial::open(folder.path(), &remote(10, sha256), 4).unwrap();
        let partial = open(Some("a"));
        assert_eq!((partial.parts(), partial.done()), (3, 0));
        partial.write(2, b"89").unwrap();
        partial.write(1, b"4").unwrap();
        partial.write(1, b"56").unwrap();
        drop(partial);
        assert_eq!(progress_in(folder.path()), Some((5, 10)), "as another process sees it");
        let partial = open(Some("a"));
        assert_eq!([0, 1, 2].map(|part| partial.missing(part)), [0..4, 7..8, 10..10]);
        assert_eq!(partial.done(), 5);
        partial.write(1, b"7").unwrap();
        partial.write(0, b"0123").unwrap();
        let expected: String =
            Sha256::digest(b"0123456789").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(partial.digest().unwrap(), expected);
        assert_eq!(open(Some("b")).done(), 0, "another file has a partial of its own");
        partial.restart_part(1).unwrap();
        assert_eq!(open(Some("a")).done(), 6);
        partial.restart().unwrap();
        assert_eq!(open(Some("a")).done(), 0);
    }

    #[test]
    fn a_partial_that_cannot_be_verified_or_has_another_length_begins_again() {
        let folder = tempfile::tempdir().unwrap();
        let open = |sha256| RangedPartial::open(folder.path(), &remote(10, sha256), 4).unwrap();
        open(None).write(0, b"01").unwrap();
        assert_eq!(open(None).done(), 0, "no digest");
        let partial = open(Some("a"));
        partial.write(0, b"01").unwrap();
        partial.data.set_len(3).unwrap();
        assert_eq!(open(Some("a")).done(), 0, "another length");
        partial.ranges.write_all_at(&u64::MAX.to_le_bytes(), 0).unwrap();
        assert_eq!(open(Some("a")).done(), 4, "a number beyond the part is that of the part");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_disk_that_fills_up_is_reported_and_the_partial_is_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let partial = RangedPartial::open(folder.path(), &remote(83_000, Some("a")), 4_000).unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").expect("a disk that is always full");
        let partial = RangedPartial { data: full, ..partial };
        let error = partial.write(0, &[0; 100]).expect_err("full");
        assert!(matches!(error, PullError::DiskFull { needed: 83_000, .. }), "{error}");
        assert!(!partial.path.exists(), "the partial is deleted");
    }
}
