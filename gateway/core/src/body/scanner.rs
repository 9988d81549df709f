//! Scanner of the bytes of a body, with its counters.

use super::swar::{ByteMask, SwarWord, WORD_BYTES, escaped};
use super::{BodyProblem, NESTING_MAX};

/// Consecutive words without an escape after which the rest of a string is searched with `memchr`: its start-up cost is
/// recovered after some twenty bytes.
const UNESCAPED_WORDS: u32 = 3;

/// Bytes of a number, `true`, `false` or `null`.
const IN_A_BARE_VALUE: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = (byte as u8).is_ascii_alphanumeric() || matches!(byte as u8, b'+' | b'-' | b'.');
        byte += 1;
    }
    table
};

/// Position in a body, with the counters up to it.
pub(super) struct BodyScanner<'a> {
    body: &'a [u8],
    at: usize,
    /// Bytes of string values.
    pub(super) text_bytes: u64,
    /// Numbers in lists.
    pub(super) numbers: u64,
    /// Elements of the longest list at a level of inputs; a list of numbers is one input.
    pub(super) longest_list: u64,
}

impl<'a> BodyScanner<'a> {
    pub(super) fn new(body: &'a [u8]) -> BodyScanner<'a> {
        BodyScanner { body, at: 0, text_bytes: 0, numbers: 0, longest_list: 0 }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    pub(super) fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    pub(super) fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    pub(super) fn unexpected(&self, expected: &'static str) -> BodyProblem {
        BodyProblem::NotJson { at: self.at, expected }
    }

    /// As [`BodyScanner::unexpected`], for the last byte that was taken.
    pub(super) fn unexpected_before(&self, expected: &'static str) -> BodyProblem {
        BodyProblem::NotJson { at: self.at.saturating_sub(1), expected }
    }

    pub(super) fn take(&mut self, byte: u8, expected: &'static str) -> Result<(), BodyProblem> {
        if self.peek() != Some(byte) {
            return Err(self.unexpected(expected));
        }
        self.at += 1;
        Ok(())
    }

    /// Scans a string and returns its content between the quotes.
    #[inline]
    pub(super) fn string(&mut self, expected: &'static str) -> Result<&'a [u8], BodyProblem> {
        self.take(b'"', expected)?;
        let rest = &self.body[self.at..];
        // A short text without any escape, the most frequent case.
        if let Some(bytes) = rest.first_chunk()
            && let word = SwarWord::of(bytes)
            && let Some(length) = word.equal(b'"').first_before(word.equal(b'\\'))
        {
            self.at += length + 1;
            return Ok(&rest[..length]);
        }
        self.long_string()
    }

    /// As [`BodyScanner::string`], from after the first quote.
    fn long_string(&mut self) -> Result<&'a [u8], BodyProblem> {
        let start = self.at;
        // Whether the next byte follows a backslash.
        let mut behind = false;
        let mut unescaped = 0;
        while let Some(bytes) = self.body[self.at..].first_chunk() {
            let word = SwarWord::of(bytes);
            let backslashes = word.equal(b'\\').bits();
            let (escaped, next) = escaped(backslashes, behind);
            let closing = word.equal(b'"').bits() & !escaped;
            if closing != 0 {
                self.at += closing.trailing_zeros() as usize + 1;
                return Ok(&self.body[start..self.at - 1]);
            }
            self.at += WORD_BYTES;
            behind = next;
            unescaped = if backslashes == 0 { unescaped + 1 } else { 0 };
            if unescaped == UNESCAPED_WORDS {
                unescaped = 0;
                let rest = &self.body[self.at..];
                self.at += memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
            }
        }
        while let Some(byte) = self.next() {
            match byte {
                _ if behind => behind = false,
                b'"' => return Ok(&self.body[start..self.at - 1]),
                byte => behind = byte == b'\\',
            }
        }
        Err(self.unexpected(if behind { "an escaped character" } else { "'\"'" }))
    }

    /// Scans any value.
    pub(super) fn value(&mut self) -> Result<(), BodyProblem> {
        match self.peek() {
            Some(b'"') => self.text(),
            Some(b'{' | b'[') => self.nested(),
            _ => self.bare(),
        }
    }

    /// Skips a comma and an optional space if a text follows.
    fn skip_to_next_text(&mut self) -> bool {
        let gap = match self.body[self.at..] {
            [b',', b'"', ..] => 1,
            [b',', b' ', b'"', ..] => 2,
            _ => 0,
        };
        self.at += gap;
        gap > 0
    }

    /// Scans a string value.
    fn text(&mut self) -> Result<(), BodyProblem> {
        let text = self.string("a string")?;
        self.text_bytes += text.len() as u64;
        Ok(())
    }

    /// Scans a number, `true`, `false` or `null`.
    fn bare(&mut self) -> Result<(), BodyProblem> {
        let length = self.bare_bytes();
        self.at += length;
        if length == 0 { Err(self.unexpected("a value")) } else { Ok(()) }
    }

    /// Returns the number of bytes from here on that can belong to a number or a word.
    fn bare_bytes(&self) -> usize {
        let rest = &self.body[self.at..];
        rest.iter().position(|byte| !IN_A_BARE_VALUE[usize::from(*byte)]).unwrap_or(rest.len())
    }

    /// Scans a number in a list and those that follow it: token ids come by the thousand, separated by a comma and an
    /// optional space.
    fn numbers(&mut self) {
        let mut before = ByteMask::NONE;
        while let Some(bytes) = self.body[self.at..].first_chunk() {
            let word = SwarWord::of(bytes);
            let digits = word.digits();
            let run_starts = digits.run_starts(before);
            let fit = digits.or(word.equal(b',')).or(word.equal(b' ')).leading();
            if fit < WORD_BYTES {
                self.numbers += run_starts.within(fit).count();
                self.at += fit;
                // This was only the beginning of a fraction or an exponent.
                if fit > 0 && bytes[fit - 1].is_ascii_digit() || fit == 0 && before.ends() {
                    self.at += self.bare_bytes();
                }
                return;
            }
            self.numbers += run_starts.count();
            self.at += WORD_BYTES;
            before = digits;
        }
        // The last few bytes of the body.
        self.numbers += u64::from(!before.ends() && self.bare_bytes() > 0);
        self.at += self.bare_bytes();
    }

    /// Scans an object or an array with its content.
    fn nested(&mut self) -> Result<(), BodyProblem> {
        let mut open: u64 = 0; // one bit a level: 1 = object
        let mut depth: u32 = 1; // the top-level object is open around us
        let mut before = 0; // the last byte that is no space
        let mut elements = 0; // of the current list, if it is at the level of inputs
        loop {
            let Some(byte) = self.peek() else {
                return Err(self.unexpected("']' or '}'"));
            };
            match byte {
                b'{' | b'[' => {
                    if depth == NESTING_MAX {
                        return Err(BodyProblem::TooDeep);
                    }
                    elements += u64::from(is_input_level(depth, open));
                    open = open << 1 | u64::from(byte == b'{');
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    if open & 1 != u64::from(byte == b'}') {
                        return Err(self.unexpected("the bracket that closes the open one"));
                    }
                    if is_input_level(depth, open) {
                        self.longest_list = self.longest_list.max(elements);
                        elements = 0;
                    }
                    open >>= 1;
                    depth -= 1;
                    self.at += 1;
                    if depth == 1 {
                        return Ok(());
                    }
                }
                b'"' if open & 1 == 1 && matches!(before, b'{' | b',') => {
                    self.string("a key in double quotes")?;
                }
                b'"' => {
                    let counted = u64::from(is_input_level(depth, open));
                    elements += counted;
                    self.text()?;
                    // Texts come by the thousand, separated only by a comma and an optional space.
                    while open & 1 == 0 && self.skip_to_next_text() {
                        elements += counted;
                        self.text()?;
                    }
                }
                b',' | b':' => self.at += 1,
                b' ' | b'\t' | b'\n' | b'\r' => {
                    self.at += 1;
                    continue;
                }
                b'0'..=b'9' if open & 1 == 0 => self.numbers(),
                _ => {
                    self.numbers += u64::from(open & 1 == 0);
                    self.bare()?;
                }
            }
            before = byte;
        }
    }
}

/// Returns whether this is a list in the top-level object, or in an object there.
fn is_input_level(depth: u32, open: u64) -> bool {
    depth == 2 && open & 1 == 0 || depth == 3 && open & 3 == 2
}
