//! The walk over the bytes of a body, and what it counts on the way.

use super::word::{Lanes, WORD_BYTES, Word, escaped};
use super::{BodyProblem, NESTING_MAX};

/// Words in a row without an escape after which the rest of a string is searched with `memchr`: what it costs to begin is
/// paid back after some twenty bytes.
const CALM_WORDS: u32 = 3;

/// The bytes that a number, `true`, `false` or `null` is made of.
const IN_A_BARE_VALUE: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = (byte as u8).is_ascii_alphanumeric() || matches!(byte as u8, b'+' | b'-' | b'.');
        byte += 1;
    }
    table
};

/// A place in a body, and what was counted on the way to it.
pub(super) struct Walk<'a> {
    body: &'a [u8],
    at: usize,
    /// Bytes of the strings that are values.
    pub(super) text_bytes: u64,
    /// Numbers in lists.
    pub(super) numbers: u64,
    /// Elements of the longest list at a place where inputs can stand; a list of numbers is one.
    pub(super) longest_list: u64,
}

impl<'a> Walk<'a> {
    pub(super) fn new(body: &'a [u8]) -> Walk<'a> {
        Walk { body, at: 0, text_bytes: 0, numbers: 0, longest_list: 0 }
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

    pub(super) fn wanted(&self, expected: &'static str) -> BodyProblem {
        BodyProblem::NotJson { at: self.at, expected }
    }

    /// As [`Walk::wanted`], about the byte that was taken last.
    pub(super) fn wanted_before(&self, expected: &'static str) -> BodyProblem {
        BodyProblem::NotJson { at: self.at.saturating_sub(1), expected }
    }

    pub(super) fn take(&mut self, byte: u8, expected: &'static str) -> Result<(), BodyProblem> {
        if self.peek() != Some(byte) {
            return Err(self.wanted(expected));
        }
        self.at += 1;
        Ok(())
    }

    /// Walks over a string and returns what stands between its quotes.
    #[inline]
    pub(super) fn string(&mut self, expected: &'static str) -> Result<&'a [u8], BodyProblem> {
        self.take(b'"', expected)?;
        let rest = &self.body[self.at..];
        // A short text without any escape, which is most of them where there are many.
        if let Some(bytes) = rest.first_chunk()
            && let word = Word::of(bytes)
            && let Some(length) = word.equal(b'"').first_before(word.equal(b'\\'))
        {
            self.at += length + 1;
            return Ok(&rest[..length]);
        }
        self.long_string()
    }

    /// As [`Walk::string`], from behind the first quote.
    fn long_string(&mut self) -> Result<&'a [u8], BodyProblem> {
        let start = self.at;
        // Whether the next byte stands behind a backslash.
        let mut behind = false;
        let mut calm = 0;
        while let Some(bytes) = self.body[self.at..].first_chunk() {
            let word = Word::of(bytes);
            let backslashes = word.equal(b'\\').bits();
            let (escaped, next) = escaped(backslashes, behind);
            let closing = word.equal(b'"').bits() & !escaped;
            if closing != 0 {
                self.at += closing.trailing_zeros() as usize + 1;
                return Ok(&self.body[start..self.at - 1]);
            }
            self.at += WORD_BYTES;
            behind = next;
            calm = if backslashes == 0 { calm + 1 } else { 0 };
            if calm == CALM_WORDS {
                calm = 0;
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
        Err(self.wanted(if behind { "an escaped character" } else { "'\"'" }))
    }

    /// Walks over any value.
    pub(super) fn value(&mut self) -> Result<(), BodyProblem> {
        match self.peek() {
            Some(b'"') => self.text(),
            Some(b'{' | b'[') => self.nested(),
            _ => self.bare(),
        }
    }

    /// Walks over a comma, and perhaps a space, if a text follows.
    fn pass_to_next_text(&mut self) -> bool {
        let gap = match self.body[self.at..] {
            [b',', b'"', ..] => 1,
            [b',', b' ', b'"', ..] => 2,
            _ => 0,
        };
        self.at += gap;
        gap > 0
    }

    /// Walks over a string that is a value.
    fn text(&mut self) -> Result<(), BodyProblem> {
        let text = self.string("a string")?;
        self.text_bytes += text.len() as u64;
        Ok(())
    }

    /// Walks over a number, `true`, `false` or `null`.
    fn bare(&mut self) -> Result<(), BodyProblem> {
        let length = self.bare_bytes();
        self.at += length;
        if length == 0 { Err(self.wanted("a value")) } else { Ok(()) }
    }

    /// How many bytes from here on can be of a number or a word.
    fn bare_bytes(&self) -> usize {
        let rest = &self.body[self.at..];
        rest.iter().position(|byte| !IN_A_BARE_VALUE[usize::from(*byte)]).unwrap_or(rest.len())
    }

    /// Walks over a number in a list, and over those that follow it: token ids come by the thousand, with a comma and
    /// perhaps a space between them.
    fn numbers(&mut self) {
        let mut before = Lanes::NONE;
        while let Some(bytes) = self.body[self.at..].first_chunk() {
            let word = Word::of(bytes);
            let digits = word.digits();
            let begun = digits.begun(before);
            let fit = digits.or(word.equal(b',')).or(word.equal(b' ')).leading();
            if fit < WORD_BYTES {
                self.numbers += begun.within(fit).count();
                self.at += fit;
                // Of a fraction or an exponent this was only the beginning.
                if fit > 0 && bytes[fit - 1].is_ascii_digit() || fit == 0 && before.ends() {
                    self.at += self.bare_bytes();
                }
                return;
            }
            self.numbers += begun.count();
            self.at += WORD_BYTES;
            before = digits;
        }
        // The last few bytes of the body.
        self.numbers += u64::from(!before.ends() && self.bare_bytes() > 0);
        self.at += self.bare_bytes();
    }

    /// Walks over an object or an array, its contents included.
    fn nested(&mut self) -> Result<(), BodyProblem> {
        let mut open: u64 = 0; // one bit a level: 1 = object
        let mut depth: u32 = 1; // the top-level object is open around us
        let mut before = 0; // the last byte that is no space
        let mut elements = 0; // of the list at hand, if inputs can stand there
        loop {
            let Some(byte) = self.peek() else {
                return Err(self.wanted("']' or '}'"));
            };
            match byte {
                b'{' | b'[' => {
                    if depth == NESTING_MAX {
                        return Err(BodyProblem::TooDeep);
                    }
                    elements += u64::from(of_inputs(depth, open));
                    open = open << 1 | u64::from(byte == b'{');
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    if open & 1 != u64::from(byte == b'}') {
                        return Err(self.wanted("the bracket that closes the open one"));
                    }
                    if of_inputs(depth, open) {
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
                    let counted = u64::from(of_inputs(depth, open));
                    elements += counted;
                    self.text()?;
                    // Texts come by the thousand, with nothing but a comma between them, or a space as well.
                    while open & 1 == 0 && self.pass_to_next_text() {
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

/// Whether this is a list in the top-level object, or in an object there.
fn of_inputs(depth: u32, open: u64) -> bool {
    depth == 2 && open & 1 == 0 || depth == 3 && open & 3 == 2
}
