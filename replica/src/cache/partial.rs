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
    bytes: u64,
    part_bytes: u64,
    /// Bytes of each part that have arrived.
    done: Vec<AtomicU64>,
}

/// Open files of a partial, for one request: so the number of open files is that of the connections, and not that of the
/// files of a model.
pub(super) struct PartialFiles {
    data: File,
    ranges: File,
}

/// Scope of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartialScope {
    /// The missing range of one part.
    Part(usize),
    /// The whole file, because its origin sends no ranges; the bytes that have arrived before are skipped.
    Whole,
}

/// Returns the path of the partial of a file in `folder`.
pub(super) fn path_of(folder: &Path, file: &RemoteFile, part_bytes: u64) -> PathBuf {
    let mut name = Sha256::new();
    let digest = file.sha256.as_deref().unwrap_or_default();
    name.update(format!("{}\n{digest}\n{}\n{}", file.location, file.bytes, part_bytes.max(1)));
    folder.join(format!("{}.part", &hex(name)[..32]))
}

/// Returns the bytes of a file that an earlier pull has downloaded into `folder`. Creates no file.
pub(super) fn arrived(folder: &Path, file: &RemoteFile, part_bytes: u64) -> u64 {
    let (path, part_bytes) = (path_of(folder, file, part_bytes), part_bytes.max(1));
    let length = |path: &Path| fs::metadata(path).map(|metadata| metadata.len()).ok();
    let (ranges, bytes) = (path.with_extension("ranges"), Some(file.bytes));
    let is_same = length(&path) == bytes && length(&ranges) == Some(file.bytes.div_ceil(part_bytes) * 8);
    if file.sha256.is_none() || !is_same {
        return 0;
    }
    let numbers = fs::read(&ranges).unwrap_or_default();
    let part = |number| le_bytes(number).min(part_bytes);
    numbers.chunks_exact(8).map(part).fold(0, u64::saturating_add).min(file.bytes)
}

impl RangedPartial {
    /// Opens the partial of a file in `folder`, with parts of `part_bytes`; continues an existing one if the file has a
    /// digest, by which the existing bytes are verified.
    pub(super) fn open(folder: &Path, file: &RemoteFile, part_bytes: u64) -> io::Result<RangedPartial> {
        let (path, part_bytes) = (path_of(folder, file, part_bytes), part_bytes.max(1));
        let parts = file.bytes.div_ceil(part_bytes);
        let open =
            |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let (data, ranges) = (open(&path)?, open(&path.with_extension("ranges"))?);
        let length = |file: &File| file.metadata().map(|metadata| metadata.len());
        let is_same = length(&data)? == file.bytes && length(&ranges)? == parts * 8;
        if file.sha256.is_none() || !is_same {
            ranges.set_len(0)?;
            data.set_len(0)?;
            data.set_len(file.bytes)?;
            ranges.set_len(parts * 8)?;
        }
        let mut partial = RangedPartial { path, bytes: file.bytes, part_bytes, done: Vec::new() };
        for part in 0..parts {
            let mut number = [0; 8];
            ranges.read_exact_at(&mut number, part * 8)?;
            let range = partial.range(part as usize);
            let done = u64::from_le_bytes(number).min(range.end - range.start);
            partial.done.push(AtomicU64::new(done));
        }
        Ok(partial)
    }

    /// Opens the files for writing.
    pub(super) fn files(&self) -> Result<PartialFiles, PullError> {
        let open = |path: &Path| {
            let opened = OpenOptions::new().read(true).write(true).open(path);
            opened.map_err(|error| PullError::disk(path, self.bytes, error))
        };
        Ok(PartialFiles { data: open(&self.path)?, ranges: open(&self.path.with_extension("ranges"))? })
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

    /// Returns the range that a request is to download; it is empty if nothing of it is missing.
    pub(super) fn wanted(&self, scope: PartialScope) -> Range<u64> {
        match scope {
            PartialScope::Part(part) => self.missing(part),
            PartialScope::Whole if self.done() == self.bytes => self.bytes..self.bytes,
            PartialScope::Whole => 0..self.bytes,
        }
    }

    /// Returns the bytes within a scope that have arrived.
    pub(super) fn done_in(&self, scope: PartialScope) -> u64 {
        match scope {
            PartialScope::Part(part) => self.done[part].load(Ordering::Relaxed),
            PartialScope::Whole => self.done(),
        }
    }

    /// Writes bytes of the file that begin at `position`, except those that have arrived before; returns the number of new
    /// ones. A part is written by one thread at a time, in order.
    pub(super) fn write(
        &self,
        files: &PartialFiles,
        mut position: u64,
        mut bytes: &[u8],
    ) -> Result<u64, PullError> {
        let mut new = 0;
        while !bytes.is_empty() {
            let part = usize::try_from(position / self.part_bytes).unwrap_or(usize::MAX);
            assert!(part < self.done.len(), "bytes are within the file");
            let (range, missing) = (self.range(part), self.missing(part));
            assert!(position <= missing.start || missing.is_empty(), "a part is written in order");
            let here =
                usize::try_from(range.end - position).map_or(bytes.len(), |left| left.min(bytes.len()));
            let (piece, rest) = bytes.split_at(here);
            let skipped = usize::try_from(missing.start - position).map_or(here, |known| known.min(here));
            new += self.append(files, part, &piece[skipped..])?;
            position += here as u64;
            bytes = rest;
        }
        Ok(new)
    }

    fn append(&self, files: &PartialFiles, part: usize, bytes: &[u8]) -> Result<u64, PullError> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let (start, count) = (self.missing(part).start, bytes.len() as u64);
        let done = self.done[part].load(Ordering::Relaxed) + count;
        let written = files.data.write_all_at(bytes, start);
        let written = written.and_then(|()| files.ranges.write_all_at(&done.to_le_bytes(), part as u64 * 8));
        written.map_err(|error| PullError::disk(&self.path, self.bytes, error))?;
        self.done[part].store(done, Ordering::Relaxed);
        Ok(count)
    }

    /// Forgets all bytes.
    pub(super) fn restart(&self) -> Result<(), PullError> {
        let (parts, ranges) = (self.done.len() as u64, self.files()?.ranges);
        let cleared = ranges.set_len(0).and_then(|()| ranges.set_len(parts * 8));
        cleared.map_err(|error| PullError::disk(&self.path, self.bytes, error))?;
        self.done.iter().for_each(|done| done.store(0, Ordering::Relaxed));
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
        let read = File::open(&self.path).and_then(|mut file| {
            copy_hashing(&mut file, &mut hasher, |_| Ok(()))?;
            file.sync_all()
        });
        read.map_err(|error| PullError::disk(&self.path, self.bytes, error))?;
        Ok(hex(hasher))
    }

    /// Returns the path of the complete file.
    pub(super) fn path(&self) -> &Path {
        &self.path
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

    /// Writes bytes at the first missing position of a part.
    fn add(partial: &RangedPartial, part: usize, bytes: &[u8]) {
        let written = partial.write(&partial.files().unwrap(), partial.missing(part).start, bytes);
        assert_eq!(written.unwrap(), bytes.len() as u64);
    }

    #[test]
    fn each_part_continues_at_its_last_byte() {
        let folder = tempfile::tempdir().unwrap();
        let open = |sha256| RangedPartial::open(folder.path(), &remote(10, sha256), 4).unwrap();
        let partial = open(Some("a"));
        assert_eq!((partial.parts(), partial.done()), (3, 0));
        add(&partial, 2, b"89");
        add(&partial, 1, b"4");
        add(&partial, 1, b"56");
        drop(partial);
        assert_eq!(progress_in(folder.path()), Some((5, 10)), "as another process sees it");
        let arrived = |sha256| arrived(folder.path(), &remote(10, sha256), 4);
        assert_eq!([arrived(Some("a")), arrived(Some("b")), arrived(None)], [5, 0, 0]);
        let partial = open(Some("a"));
        assert_eq!([0, 1, 2].map(|part| partial.missing(part)), [0..4, 7..8, 10..10]);
        assert_eq!(partial.done(), 5);
        add(&partial, 1, b"7");
        add(&partial, 0, b"0123");
        let expected: String =
            Sha256::digest(b"0123456789").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(partial.digest().unwrap(), expected);
        assert_eq!(open(Some("b")).done(), 0, "another file has a partial of its own");
        partial.restart().unwrap();
        assert_eq!(open(Some("a")).done(), 0);
    }

    #[test]
    fn a_whole_file_fills_the_gaps_of_its_parts() {
        let folder = tempfile::tempdir().unwrap();
        let partial = RangedPartial::open(folder.path(), &remote(10, Some("a")), 4).unwrap();
        add(&partial, 0, b"01");
        add(&partial, 1, b"4567");
        assert_eq!(partial.wanted(PartialScope::Whole), 0..10);
        let files = partial.files().unwrap();
        assert_eq!(partial.write(&files, 0, b"x").unwrap(), 0, "it has arrived before");
        assert_eq!(partial.write(&files, 1, b"x23xxxx8").unwrap(), 3);
        assert_eq!((partial.done_in(PartialScope::Whole), partial.done_in(PartialScope::Part(2))), (9, 1));
        assert_eq!(partial.write(&files, 9, b"9").unwrap(), 1);
        assert!(partial.wanted(PartialScope::Whole).is_empty());
        assert_eq!(fs::read(partial.path()).unwrap(), b"0123456789");
    }

    #[test]
    fn a_partial_that_cannot_be_verified_or_has_another_length_begins_again() {
        let folder = tempfile::tempdir().unwrap();
        let open = |sha256| RangedPartial::open(folder.path(), &remote(10, sha256), 4).unwrap();
        add(&open(None), 0, b"01");
        assert_eq!(open(None).done(), 0, "no digest");
        let partial = open(Some("a"));
        add(&partial, 0, b"01");
        let files = partial.files().unwrap();
        files.data.set_len(3).unwrap();
        assert_eq!(arrived(folder.path(), &remote(10, Some("a")), 4), 0);
        assert_eq!(open(Some("a")).done(), 0, "another length");
        files.ranges.write_all_at(&u64::MAX.to_le_bytes(), 0).unwrap();
        assert_eq!(open(Some("a")).done(), 4, "a number beyond the part is that of the part");
        assert_eq!(arrived(folder.path(), &remote(10, Some("a")), 4), 4);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_disk_that_fills_up_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let partial = RangedPartial::open(folder.path(), &remote(83_000, Some("a")), 4_000).unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").expect("a disk that is always full");
        let files = PartialFiles { data: full, ..partial.files().unwrap() };
        let error = partial.write(&files, 0, &[0; 100]).expect_err("full");
        assert!(matches!(error, PullError::DiskFull { needed: 83_000, .. }), "{error}");
        assert_eq!(partial.done(), 0);
        partial.delete();
        assert!(!partial.path.exists());
    }
}
