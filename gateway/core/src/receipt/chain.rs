//! Hash chain of receipts: `hash = SHA-256(hash before ‖ the entry's bytes)`. A line has the hash in hexadecimal, a
//! space, and the entry as JSON.
//!
//! The canonical bytes of an entry are those of its line. A verifier does not need to serialise JSON in the same way.

use super::entry::Entry;
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

/// Maximum bytes of a line: a policy that names every region that fits into a set, twice over.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// Head of a chain: the hash of an entry and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ChainHash([u8; 32]);

/// Error for a text that is not the head of a receipt chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the head of a chain has 64 hexadecimal digits")]
pub struct InvalidChainHash;

/// Problem of a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineProblem {
    /// A line of a receipt file is malformed: the file was damaged or changed.
    #[error("it is not a hash, a space and an entry")]
    Form,
    /// A line of a receipt file was changed, or lines before it were removed or inserted.
    #[error("its hash does not follow from the line before")]
    Hash,
    /// The entry of a line in a receipt file is invalid: a newer version wrote it, or it was changed.
    #[error("its entry cannot be read: {0}")]
    Entry(String),
}

impl ChainHash {
    /// Returns the head after `entry`.
    pub(super) fn after(&self, entry: &[u8]) -> ChainHash {
        ChainHash(Sha256::new().chain_update(self.0).chain_update(entry).finalize().into())
    }

    /// Appends the line of `entry` to `file` and advances the head.
    pub fn append(&mut self, entry: &Entry<'_>, file: &mut Vec<u8>) {
        let start = file.len();
        file.extend_from_slice(&[b' '; 65]);
        serde_json::to_writer(&mut *file, entry).expect("an entry serialises to JSON");
        *self = self.after(&file[start + 65..]);
        file[start..start + 64].copy_from_slice(hex(&self.0).as_bytes());
        file.push(b'\n');
    }

    /// Reads `line`, without its newline, and advances to the head that it states, correct or not, so that one wrong
    /// line is one problem. The entry is returned even if its hash is wrong.
    pub fn read<'a>(&mut self, line: &'a [u8]) -> (Option<Entry<'a>>, Option<LineProblem>) {
        let Some((stated, entry)) = split(line) else { return (None, Some(LineProblem::Form)) };
        let right = self.after(entry) == stated;
        *self = stated;
        match serde_json::from_slice(entry) {
            Ok(entry) => (Some(entry), (!right).then_some(LineProblem::Hash)),
            Err(_) if !right => (None, Some(LineProblem::Hash)),
            Err(error) => (None, Some(LineProblem::Entry(error.to_string()))),
        }
    }
}

/// Returns the entry of a line without a check of its hash.
pub fn entry_of(line: &[u8]) -> Option<Entry<'_>> {
    serde_json::from_slice(split(line)?.1).ok()
}

fn split(line: &[u8]) -> Option<(ChainHash, &[u8])> {
    let (stated, entry) = line.split_at_checked(65)?;
    let stated = std::str::from_utf8(stated).ok()?.strip_suffix(' ')?.parse().ok()?;
    Some((stated, entry))
}

impl fmt::Display for ChainHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for ChainHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ChainHash {
    type Err = InvalidChainHash;

    fn from_str(text: &str) -> Result<ChainHash, InvalidChainHash> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(InvalidChainHash);
        }
        let digit = |byte: u8| (byte as char).to_digit(16).ok_or(InvalidChainHash);
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(ChainHash(bytes))
    }
}

/// Returns the bytes in lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn closed(at_ms: u64) -> Entry<'static> {
        Entry::Closed { at_ms }
    }

    /// Returns the problem of each line of a file.
    fn problems(file: &[u8]) -> Vec<Option<LineProblem>> {
        let mut head = ChainHash::default();
        file.split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| head.read(line).1)
            .collect()
    }

    fn file_of(entries: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let (mut head, mut file) = (ChainHash::default(), Vec::new());
        entries.into_iter().for_each(|at_ms| head.append(&closed(at_ms), &mut file));
        file
    }

    #[test]
    fn written_lines_are_read_back() {
        let file = file_of([1, 2]);
        let mut head = ChainHash::default();
        let lines: Vec<_> = file.split(|byte| *byte == b'\n').collect();
        assert_eq!(head.read(lines[0]), (Some(closed(1)), None));
        assert_eq!(head.read(lines[1]), (Some(closed(2)), None));
        assert_eq!(head.to_string().parse(), Ok(head));
        // SHA-256 of 32 zero bytes and this text, as computed by `sha256sum`.
        let first = std::str::from_utf8(lines[0]).expect("text");
        assert!(first.ends_with(r#" {"kind":"closed","at_ms":1}"#), "{first}");
        assert_eq!(first.len(), 65 + 27);
    }

    #[test]
    fn a_line_that_is_changed_removed_or_moved_breaks_the_chain_there() {
        let file = String::from_utf8(file_of([1, 2, 3])).expect("text");
        let lines: Vec<_> = file.lines().collect();
        let check = |lines: &[&str], expected: &[Option<LineProblem>]| {
            assert_eq!(problems(lines.join("\n").as_bytes()), expected, "{lines:#?}");
        };
        let wrong = || Some(LineProblem::Hash);
        check(&lines, &[None, None, None]);
        let changed = lines[1].replace("\"at_ms\":2", "\"at_ms\":9");
        check(&[lines[0], &changed, lines[2]], &[None, wrong(), None]);
        check(&[lines[0], lines[2]], &[None, wrong()]);
        check(&[lines[0], lines[2], lines[1]], &[None, wrong(), wrong()]);
        check(&[lines[0], lines[0], lines[1]], &[None, wrong(), None]);
        check(&[lines[0], "", "short", lines[1]], &[None, Some(LineProblem::Form), None]);
    }

    #[test]
    fn an_entry_of_unknown_kind_or_with_an_unknown_field_cannot_be_read() {
        for entry in [r#"{"kind":"whim","at_ms":1}"#, r#"{"kind":"closed","at_ms":1,"b":2}"#, "{}", ""] {
            let hash = ChainHash::default().after(entry.as_bytes());
            let line = format!("{hash} {entry}");
            let (read, problem) = ChainHash::default().read(line.as_bytes());
            assert!(read.is_none() && matches!(problem, Some(LineProblem::Entry(_))), "{entry}: {problem:?}");
        }
    }

    proptest! {
        #[test]
        fn no_byte_of_a_line_can_be_changed(at in 0usize..184, by in 1u8..=255) {
            let mut file = file_of([10, 20]);
            let at = at % file.len();
            prop_assume!(file[at] != b'\n' && file[at] ^ by != b'\n');
            // The case of a hexadecimal digit may change.
            prop_assume!(!file[at].eq_ignore_ascii_case(&(file[at] ^ by)));
            file[at] ^= by;
            prop_assert!(problems(&file).iter().any(Option::is_some));
        }
    }
}
