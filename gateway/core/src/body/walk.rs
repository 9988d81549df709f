//! The walk over the bytes of a body, and what it counts on the way.

use super::{BodyProblem, NESTING_MAX};

/// How far the end of a string is looked for byte by byte once it has had an escape, before the search that begins slowly
/// and then takes many bytes at a time.
const NEAR_BYTES: usize = 16;

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
    pub(super) fn string(&mut self, expected: &'static str) -> Result<&'a [u8], BodyProblem> {
        self.take(b'"', expected)?;
        let start = self.at;
        loop {
            let rest = &self.body[self.at..];
            // Where there was one escape the next is near.
            let near = if self.at == start { 0 } else { NEAR_BYTES };
            let found = rest.iter().take(near).position(|byte| matches!(byte, b'"' | b'\\'));
            let far = || Some(near + memchr::memchr2(b'"', b'\\', rest.get(near..)?)?);
            let Some(stop) = found.or_else(far) else {
                return Err(BodyProblem::NotJson { at: self.body.len(), expected: "'\"'" });
            };
            self.at += stop + 1;
            if rest[stop] == b'"' {
                return Ok(&self.body[start..self.at - 1]);
            }
            if self.next().is_none() {
                return Err(self.wanted("an escaped character"));
            }
        }
    }

    /// Walks over any value.
    pub(super) fn value(&mut self) -> Result<(), BodyProblem> {
        match self.peek() {
            Some(b'"') => self.text(),
            Some(b'{' | b'[') => self.nested(),
            _ => self.bare(),
        }
    }

    /// Walks over a string that is a value.
    fn text(&mut self) -> Result<(), BodyProblem> {
        let text = self.string("a string")?;
        self.text_bytes += text.len() as u64;
        Ok(())
    }

    /// Walks over a number, `true`, `false` or `null`.
    fn bare(&mut self) -> Result<(), BodyProblem> {
        let rest = &self.body[self.at..];
        let length = rest.iter().position(|byte| !IN_A_BARE_VALUE[usize::from(*byte)]).unwrap_or(rest.len());
        self.at += length;
        if length == 0 { Err(self.wanted("a value")) } else { Ok(()) }
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
                    elements += u64::from(of_inputs(depth, open));
                    self.text()?;
                }
                b',' | b':' => self.at += 1,
                b' ' | b'\t' | b'\n' | b'\r' => {
                    self.at += 1;
                    continue;
                }
                _ => {
                    self.numbers += u64::from(open & 1 == 0);
                    self.bare()?;
                    // Token ids come by the thousand, each with a comma behind it.
                    if self.peek() == Some(b',') {
                        self.at += 1;
                        before = b',';
                        continue;
                    }
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
