//! The chain: `hash = SHA-256(hash before ‖ the entry's bytes)`, a line each: the hash in hexadecimal, a space, the entry as
//! JSON.
//!
//! The canonical bytes of an entry are those of its line. Nobody has to write JSON the same way twice to check one.

use super::entry::Entry;
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

/// The longest line that is read: a policy that names every region that fits into a set, twice over.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// The hash of an entry and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Head([u8; 32]);

/// A text that is no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a head is written with 64 hexadecimal digits")]
pub struct NotAHead;

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineProblem {
    /// It is not of the form.
    #[error("it is no hash, a space and an entry")]
    Form,
    /// It does not follow from the one before it.
    #[error("its hash does not follow from the line before")]
    Hash,
    /// Its entry cannot be read.
    #[error("its entry cannot be read: {0}")]
    Entry(String),
}

impl Head {
    /// The head after `entry`.
    fn after(&self, entry: &[u8]) -> Head {
        Head(Sha256::new().chain_update(self.0).chain_update(entry).finalize().into())
    }

    /// Appends the line of `entry` to `file` and moves on.
    pub fn append(&mut self, entry: &Entry<'_>, file: &mut Vec<u8>) {
        let start = file.len();
        file.extend_from_slice(&[b' '; 65]);
        serde_json::to_writer(&mut *file, entry).expect("an entry serialises to JSON");
        *self = self.after(&file[start + 65..]);
        file[start..start + 64].copy_from_slice(hex(&self.0).as_bytes());
        file.push(b'\n');
    }

    /// Reads `line`, which has no newline any more, and moves on to the head that it states, right or wrong, so that one
    /// wrong line is one problem. The entry is given whatever its hash is.
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

/// The entry of a line, whether or not it follows from anything.
pub fn entry_of(line: &[u8]) -> Option<Entry<'_>> {
    serde_json::from_slice(split(line)?.1).ok()
}

fn split(line: &[u8]) -> Option<(Head, &[u8])> {
    let (stated, entry) = line.split_at_checked(65)?;
    let stated = std::str::from_utf8(stated).ok()?.strip_suffix(' ')?.parse().ok()?;
    Some((stated, entry))
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Head {
    type Err = NotAHead;

    fn from_str(text: &str) -> Result<Head, NotAHead> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(NotAHead);
        }
        let digit = |byte: u8| (byte as char).to_digit(16).ok_or(NotAHead);
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Head(bytes))
    }
}

/// In lower-case hexadecimal.
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

    /// The problem of each line of a file.
    fn problems(file: &[u8]) -> Vec<Option<LineProblem>> {
        let mut head = Head::default();
        file.split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| head.read(line).1)
            .collect()
    }

    fn file_of(entries: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let (mut head, mut file) = (Head::default(), Vec::new());
        entries.into_iter().for_each(|at_ms| head.append(&closed(at_ms), &mut file));
        file
    }

    #[test]
    fn what_was_written_is_read() {
        let file = file_of([1, 2]);
        let mut head = Head::default();
        let lines: Vec<_> = file.split(|byte| *byte == b'\n').collect();
        assert_eq!(head.read(lines[0]), (Some(closed(1)), None));
        assert_eq!(head.read(lines[1]), (Some(closed(2)), None));
        assert_eq!(head.to_string().parse(), Ok(head));
        // SHA-256 of 32 zero bytes and this text, as `sha256sum` says.
        let first = std::str::from_utf8(lines[0]).expect("text");
        assert!(first.ends_with(r#" {"kind":"closed","at_ms":1}"#), "{first}");
        assert_eq!(first.len(), 65 + 27);
    }

    #[test]
    fn a_line_that_is_changed_left_out_or_moved_breaks_the_chain_there() {
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
    fn an_entry_of_another_kind_or_with_a_field_too_many_cannot_be_read() {
        for entry in [r#"{"kind":"whim","at_ms":1}"#, r#"{"kind":"closed","at_ms":1,"b":2}"#, "{}", ""] {
            let hash = Head::default().after(entry.as_bytes());
            let line = format!("{hash} {entry}");
            let (read, problem) = Head::default().read(line.as_bytes());
            assert!(read.is_none() && matches!(problem, Some(LineProblem::Entry(_))), "{entry}: {problem:?}");
        }
    }

    proptest! {
        #[test]
        fn no_byte_of_a_line_can_be_changed(at in 0usize..184, by in 1u8..=255) {
            let mut file = file_of([10, 20]);
            let at = at % file.len();
            prop_assume!(file[at] != b'\n' && file[at] ^ by != b'\n');
            // A hexadecimal digit may change its case.
            prop_assume!(!file[at].eq_ignore_ascii_case(&(file[at] ^ by)));
            file[at] ^= by;
            prop_assert!(problems(&file).iter().any(Option::is_some));
        }
    }
}
