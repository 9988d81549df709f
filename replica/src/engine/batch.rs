//! A batch without padding: all tokens one after another, and where each sequence begins.
//!
//! A padded rectangle costs the longest sequence for every one of them, three to five times the work on texts of mixed
//! length. Here the cost of a batch is the sum of its tokens, and no mask has to be right.

use std::ops::Range;

/// Sequences of tokens, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct RaggedBatch<'a> {
    token_ids: &'a [u32],
    type_ids: Option<&'a [u32]>,
    /// `n + 1` of them: sequence `i` is `offsets[i]..offsets[i + 1]`.
    offsets: &'a [u32],
}

/// Parts of a batch that do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedBatch {
    /// The offsets must begin at 0, never fall, and end at the number of tokens.
    #[error("the offsets do not go from 0 up to the {tokens} tokens")]
    Offsets {
        /// Tokens of the batch.
        tokens: usize,
    },
    /// Every token has a type, or none has.
    #[error("there are {tokens} tokens and {types} token types")]
    Types {
        /// Tokens of the batch.
        tokens: usize,
        /// Types of the batch.
        types: usize,
    },
}

impl<'a> RaggedBatch<'a> {
    /// Puts the parts together; `offsets` has one entry more than there are sequences. Without `type_ids` all are 0.
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

    /// Sequences.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is no sequence.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens of all sequences.
    pub fn token_ids(&self) -> &'a [u32] {
        self.token_ids
    }

    /// Their types; absent if all are 0.
    pub fn type_ids(&self) -> Option<&'a [u32]> {
        self.type_ids
    }

    /// Where the sequences begin, and where the last one ends.
    pub fn offsets(&self) -> &'a [u32] {
        self.offsets
    }

    /// Where each sequence lies among the tokens, in order.
    pub fn sequences(&self) -> impl ExactSizeIterator<Item = Range<usize>> + 'a {
        self.offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize)
    }
}

/// A batch in the making; its memory is kept from one batch to the next.
#[derive(Clone, Debug)]
pub struct BatchBuffer {
    token_ids: Vec<u32>,
    /// Empty as long as every type is 0, which is the usual case.
    type_ids: Vec<u32>,
    offsets: Vec<u32>,
}

impl Default for BatchBuffer {
    fn default() -> BatchBuffer {
        BatchBuffer { token_ids: Vec::new(), type_ids: Vec::new(), offsets: vec![0] }
    }
}

impl BatchBuffer {
    /// Appends one sequence; without `type_ids` all of them are 0.
    ///
    /// # Panics
    /// If there is not a type for every token.
    pub fn push(&mut self, token_ids: &[u32], type_ids: Option<&[u32]>) {
        let before = self.token_ids.len();
        self.token_ids.extend_from_slice(token_ids);
        if let Some(type_ids) = type_ids {
            assert_eq!(type_ids.len(), token_ids.len(), "a type for each token");
            self.type_ids.resize(before, 0);
            self.type_ids.extend_from_slice(type_ids);
        } else if !self.type_ids.is_empty() {
            self.type_ids.resize(self.token_ids.len(), 0);
        }
        let end =
            u32::try_from(self.token_ids.len()).expect("a batch has a budget far below four billion tokens");
        self.offsets.push(end);
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.type_ids.clear();
        self.offsets.truncate(1);
    }

    /// What was pushed.
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
    fn what_is_pushed_is_what_is_in_the_batch() {
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
    fn types_are_those_of_their_tokens_and_absent_where_nobody_gave_any() {
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
    fn parts_that_do_not_fit_together_are_refused() {
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
