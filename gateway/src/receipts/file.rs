//! Files of a chain, and recovery of its position when a process starts.
//!
//! A file is named `receipts-CHAIN-NUMBER.log`; a lock file beside it is held by the process that writes the chain. A
//! process continues the newest chain of its directory that no other process holds; during a handover each process has
//! its own.

use gateway_core::receipt::chain::{ChainHash, entry_of};
use gateway_core::receipt::entry::{Entry, Role};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

const PREFIX: &str = "receipts-";
const SUFFIX: &str = ".log";

/// Name of a file of receipts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) chain: String,
    pub(super) number: u32,
}

impl Name {
    pub(super) fn parse(name: &str) -> Option<Name> {
        let (chain, number) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.rsplit_once('-')?;
        Some(Name { chain: chain.to_owned(), number: number.parse().ok()? })
    }

    pub(super) fn in_dir(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{PREFIX}{}-{:08}{SUFFIX}", self.chain, self.number))
    }
}

/// Returns the receipts files of a directory, in order of chain and number.
pub(super) fn list(dir: &Path) -> io::Result<Vec<Name>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.extend(entry?.file_name().to_str().and_then(Name::parse));
    }
    names.sort();
    Ok(names)
}

/// Locks a chain for this process until the returned file is dropped; `None` if another process holds it.
pub(super) fn lock(dir: &Path, chain: &str) -> io::Result<Option<File>> {
    let path = dir.join(format!("{PREFIX}{chain}.lock"));
    try_lock(OpenOptions::new().create(true).truncate(false).write(true).open(path)?)
}

/// Locks an open file for this process until the returned one is dropped; `None` if another process holds it.
pub(crate) fn try_lock(file: File) -> io::Result<Option<File>> {
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// End of a chain, where it is continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChainPosition {
    /// Number of its last file.
    pub(super) number: u32,
    pub(super) head: ChainHash,
    /// Valid bytes of that file.
    pub(super) len: u64,
    /// Bytes after the valid ones.
    pub(super) torn_bytes: u64,
    /// Whether its last entry is the entry that closes the chain.
    pub(super) clean: bool,
    /// Role and region of the process that wrote it; absent while no line is readable.
    pub(super) writer: Option<(Role, String)>,
}

impl ChainPosition {
    /// Returns the position of a chain that has not begun.
    pub(super) fn start() -> ChainPosition {
        ChainPosition {
            number: 0,
            head: ChainHash::default(),
            len: 0,
            torn_bytes: 0,
            clean: true,
            writer: None,
        }
    }
}

/// Reads the position of a chain from its last file; `None` if the chain cannot be continued because a line before the
/// end is invalid.
pub(super) fn position(dir: &Path, files: &[Name]) -> io::Result<Option<ChainPosition>> {
    let Some((last, before)) = files.split_last() else { return Ok(None) };
    let content = fs::read(last.in_dir(dir))?;
    let whole = content.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let torn_bytes = (content.len() - whole) as u64;
    if whole == 0 {
        // The file was just being created: the position is that of the file before it, and this one is created again.
        let before = match before {
            [] => Some(ChainPosition::start()),
            before => position(dir, before)?,
        };
        return Ok(before.map(|position| ChainPosition {
            number: last.number,
            len: 0,
            torn_bytes,
            ..position
        }));
    }
    let mut lines = content[..whole].split_inclusive(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
    let first = lines.next().unwrap_or_default();
    let Some(Entry::File { before, role, region: place, .. }) = entry_of(first) else { return Ok(None) };
    let writer = Some((role, place.into_owned()));
    let Ok(mut head) = before.parse::<ChainHash>() else { return Ok(None) };
    let mut clean = false;
    for line in std::iter::once(first).chain(lines) {
        let (entry, problem) = head.read(line);
        if problem.is_some() {
            return Ok(None);
        }
        clean = matches!(entry, Some(Entry::Closed { .. }));
    }
    Ok(Some(ChainPosition { number: last.number, head, len: whole as u64, torn_bytes, clean, writer }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_name_parses_to_its_chain_and_number() {
        let name = Name { chain: "0192ab".to_owned(), number: 12 };
        let path = name.in_dir(Path::new("/d"));
        assert_eq!(path, Path::new("/d/receipts-0192ab-00000012.log"));
        assert_eq!(path.file_name().and_then(|name| Name::parse(name.to_str()?)), Some(name));
        for other in ["receipts-0192ab.lock", "receipts-a-b.log", "routes", "receipts-.log"] {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }
}
