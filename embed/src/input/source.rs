//! Parts that all readers share: the reader's interface, its errors, and a count of the bytes that it has read.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use crate::row::ParsedRow;

/// Largest row in bytes. A row is held in memory, and the longest inputs of embedding models (32768 tokens) have about
/// 200 KB.
pub const ROW_BYTES_MAX: usize = 16 << 20;

/// Byte order mark that some programs put before UTF-8 text.
const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// Reader of the rows of an input, in order. Its memory does not grow with the number of rows.
pub trait TextReader {
    /// Returns the next row, or `None` after the last.
    fn next_row(&mut self) -> Result<Option<ParsedRow>, InputError>;

    /// Returns the share of the input that has been read, from 0 to 1, if the size of the input is known.
    fn fraction(&self) -> Option<f64>;
}

/// Error after which the rest of an input cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The input file cannot be read.
    #[error("{name}: cannot be read: {reason}")]
    Read {
        /// Input.
        name: String,
        /// Error of the operating system.
        reason: io::Error,
    },
    /// The input as a whole is invalid.
    #[error("{name}: {reason}")]
    Invalid {
        /// Input, with the line where it is known.
        name: String,
        /// Statement of what is wrong and what is expected.
        reason: String,
    },
}

/// Columns or fields that are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldNames {
    /// Field of the text.
    pub text: String,
    /// Field of the id, if ids are read.
    pub id: Option<String>,
}

/// Count of the bytes read from an input, shared with the reader that buffers them.
#[derive(Clone, Debug)]
pub(super) struct ByteCount {
    read: Rc<Cell<u64>>,
    /// Size of the input, if it is known.
    total: Option<u64>,
}

impl ByteCount {
    /// Returns the share of the input that has been read.
    pub(super) fn fraction(&self) -> Option<f64> {
        let total = self.total?;
        (total > 0).then(|| (self.read.get() as f64 / total as f64).min(1.0))
    }
}

/// Input that counts its bytes and omits a byte order mark at its beginning.
pub(super) struct CountedInput<R> {
    inner: R,
    count: ByteCount,
    /// Bytes read ahead to recognize a byte order mark, and the number of them that were returned.
    ahead: Option<(Vec<u8>, usize)>,
}

impl<R: Read> CountedInput<R> {
    /// Wraps an input of `total` bytes.
    pub(super) fn new(inner: R, total: Option<u64>) -> (CountedInput<R>, ByteCount) {
        let count = ByteCount { read: Rc::default(), total };
        (CountedInput { inner, count: count.clone(), ahead: None }, count)
    }

    fn fill_ahead(&mut self) -> io::Result<(Vec<u8>, usize)> {
        let mut start = Vec::with_capacity(BYTE_ORDER_MARK.len());
        (&mut self.inner).take(BYTE_ORDER_MARK.len() as u64).read_to_end(&mut start)?;
        self.count.read.set(start.len() as u64);
        let used = if start == BYTE_ORDER_MARK { start.len() } else { 0 };
        Ok((start, used))
    }
}

impl<R: Read> Read for CountedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.ahead.is_none() {
            self.ahead = Some(self.fill_ahead()?);
        }
        if let Some((start, used)) = &mut self.ahead
            && *used < start.len()
        {
            let count = buffer.len().min(start.len() - *used);
            buffer[..count].copy_from_slice(&start[*used..*used + count]);
            *used += count;
            return Ok(count);
        }
        let count = self.inner.read(buffer)?;
        self.count.read.set(self.count.read.get() + count as u64);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_omitted_only_at_the_beginning() {
        let all = |bytes: &[u8]| {
            let (mut input, count) = CountedInput::new(bytes, Some(bytes.len() as u64));
            let mut read = Vec::new();
            input.read_to_end(&mut read).expect("a slice");
            assert!(bytes.is_empty() || count.fraction() == Some(1.0));
            read
        };
        assert_eq!(all(b"\xef\xbb\xbfab"), b"ab");
        assert_eq!(all(b"\xef\xbb\xbf\xef\xbb\xbfa"), b"\xef\xbb\xbfa");
        assert_eq!(all(b"\xef\xbb"), b"\xef\xbb");
        assert_eq!(all(b""), b"");
        assert_eq!(all(b"a\xef\xbb\xbf"), b"a\xef\xbb\xbf");
    }
}
