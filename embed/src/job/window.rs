//! Windows: consecutive rows that are computed and stored together. A checkpoint follows each of them.

use crate::input::{InputError, TextReader};
use crate::row::{ParsedRow, RowDigest};

/// Limits of a window. A row above the limit of bytes is a window by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLimits {
    /// Maximum number of rows, above 0.
    pub rows: usize,
    /// Maximum bytes of the texts.
    pub bytes: usize,
}

/// Reader of windows. The windows after a row are the same whether the rows before it were computed or skipped.
pub(super) struct WindowReader<'a> {
    reader: &'a mut dyn TextReader,
    limits: WindowLimits,
    /// Row that did not fit into the last window.
    held: Option<ParsedRow>,
    pub(super) digest: RowDigest,
}

impl<'a> WindowReader<'a> {
    pub(super) fn new(reader: &'a mut dyn TextReader, limits: WindowLimits) -> WindowReader<'a> {
        WindowReader { reader, limits, held: None, digest: RowDigest::default() }
    }

    /// Reads rows without keeping them; returns how many there were, at most `rows`.
    pub(super) fn skip(
        &mut self,
        rows: u64,
        mut is_cancelled: impl FnMut() -> bool,
    ) -> Result<u64, InputError> {
        let mut skipped = 0;
        while skipped < rows && !is_cancelled() {
            let Some(row) = self.reader.next_row()? else { break };
            self.digest.add(&row);
            skipped += 1;
        }
        Ok(skipped)
    }

    /// Returns the next window; it is empty at the end of the input. The digest includes its rows.
    pub(super) fn next_window(&mut self) -> Result<Vec<ParsedRow>, InputError> {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while rows.len() < self.limits.rows {
            let next = match self.held.take() {
                Some(row) => Some(row),
                None => self.reader.next_row()?,
            };
            let Some(row) = next else { break };
            if !rows.is_empty() && bytes + row.bytes() > self.limits.bytes {
                self.held = Some(row);
                break;
            }
            bytes += row.bytes();
            self.digest.add(&row);
            rows.push(row);
        }
        Ok(rows)
    }

    /// Returns the share of the input that has been read.
    pub(super) fn fraction(&self) -> Option<f64> {
        self.reader.fraction()
    }
}
