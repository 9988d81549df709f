//! Batches without padding: all tokens one after another, and the offsets of the sequences.
//!
//! In a padded rectangle every sequence costs as much as the longest one, three to five times the work on texts of
//! mixed length. Here the cost of a batch is the sum of its tokens, and no attention mask is needed.

use std::ops::Range;

/// Borrowed batch of token sequences.
#[derive(Clone, Copy, Debug)]
pub struct RaggedBatch<'a> {
    token_ids: &'a [u32],
    type_ids: Option<&'a [u32]>,
    /// `n + 1` offsets: sequence `i` is `offsets[i]..offsets[i + 1]`.
    offsets: &'a [u32],
}

/// Inconsistent parts of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedBatch {
    /// A defect: the sequences of a batch do not cover its tokens. Report it.
    #[error("the offsets must increase from 0 to the number of tokens ({tokens})")]
    Offsets {
        /// Tokens of the batch.
        tokens: usize,
    },
    /// A defect: only some tokens of a batch have a token type. Report it.
    #[error("there are {tokens} tokens and {types} token types")]
    Types {
        /// Tokens of the batch.
        tokens: usize,
        /// Types of the batch.
        types: usize,
    },
}

impl<'a> RaggedBatch<'a> {
    /// Creates a batch; `offsets` has one entry more than there are sequences. Without `type_ids` all types are 0.
    pub fn new(
        token_ids: &'a [u32],
        type_ids: Option<&'a [u32]>,
        offsets: &'a [u32],
    ) -> Result<RaggedBatch<'a>, MalformedBatch> {
        let tokens = token_ids.len();
        let ends = (offsets.first().copied(), offsets.last().map(|last| *last as usize));
        if ends != (Some(0), Some(tokens)) || !offsets.is_sorted() {
            return Err(MalformedBatch::Offsets { tokens });
        }
        match type_ids {
            Some(types) if types.len() != tokens => Err(MalformedBatch::Types { tokens, types: types.len() }),
            _ => Ok(RaggedBatch { token_ids, type_ids, offsets }),
        }
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tokens of all sequences.
    pub fn token_ids(&self) -> &'a [u32] {
        self.token_ids
    }

    /// Returns the token types; `None` if all are 0.
    pub fn type_ids(&self) -> Option<&'a [u32]> {
        self.type_ids
    }

    /// Returns the start of each sequence, and the end of the last one.
    pub fn offsets(&self) -> &'a [u32] {
        self.offsets
    }

    /// Returns the range of tokens of each sequence, in order.
    pub fn sequences(&self) -> impl ExactSizeIterator<Item = Range<usize>> + 'a {
        self.offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize)
    }
}

/// Owned batch that is filled step by step; its memory is reused.
#[derive(Clone, Debug)]
pub struct BatchBuffer {
    token_ids: Vec<u32>,
    /// Empty while every type is 0, which is the usual case.
    type_ids: Vec<u32>,
    offsets: Vec<u32>,
}

impl Default for BatchBuffer {
    fn default() -> BatchBuffer {
        BatchBuffer { token_ids: Vec::new(), type_ids: Vec::new(), offsets: vec![0] }
    }
}

impl BatchBuffer {
    /// Appends a sequence; without `type_ids` all of its types are 0.
    ///
    /// # Panics
    /// If the number of types differs from the number of tokens.
    pub fn push(&mut self, token_ids: &[u32], type_ids: Option<&[u32]>) {
        let before = self.token_ids.len();
        self.token_ids.extend_from_slice(token_ids);
        if let Some(type_ids) = type_ids {
            assert_eq!(type_ids.len(), token_ids.len(), "one type for each token");
            self.type_ids.resize(before, 0);
            self.type_ids.extend_from_slice(type_ids);
        } else if !self.type_ids.is_empty() {
            self.type_ids.resize(self.token_ids.len(), 0);
        }
        let end = u32::try_from(self.token_ids.len())
            .expect("the token budget of a batch is far below four billion");
        self.offsets.push(end);
    }

    /// Removes all sequences.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.type_ids.clear();
        self.offsets.truncate(1);
    }

    /// Returns a view of the batch.
    pub fn batch(&self) -> RaggedBatch<'_> {
        let type_ids = (!self.type_ids.is_empty()).then_some(self.type_ids.as_slice());
        RaggedBatch { token_ids: &self.token_ids, type_ids, offsets: &self.offsets }
    }
}

impl<S: AsRef<[u32]>> FromIterator<S> for BatchBuffer {
    fn from_iter<I: IntoIterator<Item = S>>(sequences: I) -> BatchBuffer {
        let mut buffer = BatchBuffer::default();
        for sequence in sequences {
            buffer.push(sequence.as_ref(), None);
        }
        buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_contains_the_pushed_sequences() {
        let mut buffer: BatchBuffer = [&[7, 8][..], &[], &[9]].into_iter().collect();
        let batch = buffer.batch();
        assert_eq!((batch.token_ids(), batch.offsets()), (&[7, 8, 9][..], &[0, 2, 2, 3][..]));
        assert_eq!(batch.sequences().collect::<Vec<_>>(), [0..2, 2..2, 2..3]);
        buffer.clear();
        assert!(buffer.batch().is_empty());
        buffer.push(&[1], None);
        assert_eq!(buffer.batch().len(), 1);
    }

    #[test]
    fn types_match_their_tokens_and_are_absent_by_default() {
        let mut buffer = BatchBuffer::default();
        buffer.push(&[7, 8], None);
        assert_eq!(buffer.batch().type_ids(), None);
        buffer.push(&[9], Some(&[1]));
        assert_eq!(buffer.batch().type_ids(), Some(&[0, 0, 1][..]));
        buffer.push(&[4, 5], None);
        assert_eq!(buffer.batch().type_ids(), Some(&[0, 0, 1, 0, 0][..]));
        buffer.clear();
        buffer.push(&[6], None);
        assert_eq!(buffer.batch().type_ids(), None);
    }

    #[test]
    fn inconsistent_parts_are_rejected() {
        let offsets = |offsets: &[u32]| RaggedBatch::new(&[1, 2, 3], None, offsets).map(|batch| batch.len());
        assert_eq!(offsets(&[0, 3]), Ok(1));
        assert_eq!(offsets(&[0, 1, 3]), Ok(2));
        for wrong in [&[][..], &[0], &[1, 3], &[0, 2], &[0, 4], &[0, 3, 2, 3]] {
            assert_eq!(offsets(wrong), Err(MalformedBatch::Offsets { tokens: 3 }), "{wrong:?}");
        }
        let types = RaggedBatch::new(&[1, 2, 3], Some(&[0, 1]), &[0, 3]).map(|batch| batch.len());
        assert_eq!(types, Err(MalformedBatch::Types { tokens: 3, types: 2 }));
        assert!(RaggedBatch::new(&[], None, &[0]).unwrap().is_empty());
    }
}
