//! Lines of an input, each of at most a given number of bytes.

use std::io::{self, BufRead, Read};

/// Line of an input.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BoundedLine<'a> {
    /// Bytes without the end of the line (LF or CR LF).
    Complete(&'a [u8]),
    /// The line is longer than the limit; its bytes were skipped.
    TooLong,
}

/// Reader of lines. A longer line than the limit is skipped without being held in memory.
pub(super) struct BoundedLines<R> {
    input: R,
    limit: usize,
    buffer: Vec<u8>,
    /// Number of lines so far.
    pub(super) number: u64,
}

impl<R: BufRead> BoundedLines<R> {
    /// Reads lines of at most `limit` bytes.
    pub(super) fn new(input: R, limit: usize) -> BoundedLines<R> {
        BoundedLines { input, limit, buffer: Vec::new(), number: 0 }
    }

    /// Returns the next line, or `None` at the end. The end of the last line is optional.
    pub(super) fn next_line(&mut self) -> io::Result<Option<BoundedLine<'_>>> {
        self.buffer.clear();
        // Room for CR LF after the longest line.
        let most = self.limit as u64 + 2;
        let read = (&mut self.input).take(most).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let is_ended = self.buffer.ends_with(b"\n");
        if is_ended {
            self.buffer.pop();
            if self.buffer.ends_with(b"\r") {
                self.buffer.pop();
            }
        }
        if !is_ended && read as u64 == most {
            self.skip_to_end()?;
        }
        if self.buffer.len() > self.limit {
            return Ok(Some(BoundedLine::TooLong));
        }
        Ok(Some(BoundedLine::Complete(&self.buffer)))
    }

    fn skip_to_end(&mut self) -> io::Result<()> {
        loop {
            let available = self.input.fill_buf()?;
            let (count, is_ended) = match available.iter().position(|byte| *byte == b'\n') {
                Some(at) => (at + 1, true),
                None => (available.len(), available.is_empty()),
            };
            self.input.consume(count);
            if is_ended {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8], limit: usize) -> Vec<Option<Vec<u8>>> {
        // A buffer of three bytes, so that lines cross its ends.
        let mut lines = BoundedLines::new(io::BufReader::with_capacity(3, bytes), limit);
        let mut found = Vec::new();
        while let Some(line) = lines.next_line().expect("a slice") {
            found.push(match line {
                BoundedLine::Complete(bytes) => Some(bytes.to_vec()),
                BoundedLine::TooLong => None,
            });
        }
        assert_eq!(lines.number, found.len() as u64);
        found
    }

    #[test]
    fn a_line_ends_with_lf_with_cr_lf_or_with_the_input() {
        let expected = |lines: &[&str]| lines.iter().map(|line| Some(line.as_bytes().to_vec())).collect();
        let check = |bytes: &str, of: &[&str]| {
            let expected: Vec<Option<Vec<u8>>> = expected(of);
            assert_eq!(lines(bytes.as_bytes(), 10), expected, "{bytes:?}");
        };
        check("", &[]);
        check("a", &["a"]);
        check("a\n", &["a"]);
        check("a\r\nb", &["a", "b"]);
        check("\n\r\n\n", &["", "", ""]);
        check("a\rb\n", &["a\rb"]);
    }

    #[test]
    fn a_line_at_the_limit_is_read_and_one_past_it_skipped() {
        for end in ["\n", "\r\n", ""] {
            assert_eq!(lines(format!("abcd{end}").as_bytes(), 4), [Some(b"abcd".to_vec())], "{end:?}");
            assert_eq!(lines(format!("abcde{end}").as_bytes(), 4), [None], "{end:?}");
            assert_eq!(lines(format!("abcdefghijkl{end}").as_bytes(), 4), [None], "{end:?}");
        }
        assert_eq!(lines(b"abcdefgh\nx\n", 4), [None, Some(b"x".to_vec())]);
        assert_eq!(lines(b"abcdef\nx\n", 4), [None, Some(b"x".to_vec())]);
        assert_eq!(lines(b"abcde\nx\n", 4), [None, Some(b"x".to_vec())]);
    }
}
