//! Batch for an encoder, without padding: the tokens of all sequences, concatenated.
//!
//! A packed engine computes no positions, so they are computed here; a cross-encoder distinguishes query and document
//! by token types, so they are passed along. Neither may be left to a default: an engine accepts zeros for both without
//! an error, and its results are then slightly wrong.

use crate::ExecutorError;

/// Numbering of positions of an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// From 0: BERT.
    FromZero,
    /// From the padding token's id + 1: RoBERTa and XLM-RoBERTa, whose padding id is 1, so that positions begin at 2.
    AfterPadding(u32),
}

impl Positions {
    fn first(self) -> u32 {
        match self {
            Positions::FromZero => 0,
            Positions::AfterPadding(id) => id + 1,
        }
    }
}

/// Packed sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedBatch {
    pub(crate) tokens: Vec<i32>,
    pub(crate) types: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    pub(crate) lengths: Vec<i32>,
}

impl PackedBatch {
    /// Appends a sequence; without `types` all of its types are 0.
    pub fn push(
        &mut self,
        tokens: &[u32],
        types: Option<&[u32]>,
        positions: Positions,
    ) -> Result<(), ExecutorError> {
        let rejected = |reason: String| Err(ExecutorError::Rejected(reason));
        if tokens.is_empty() {
            return rejected("the sequence has no tokens; at least one is required".to_owned());
        }
        if types.is_some_and(|types| types.len() != tokens.len()) {
            return rejected("the sequence does not have one type for each token".to_owned());
        }
        let number = |n: u32| i32::try_from(n).ok();
        let numbers = |ns: &[u32]| ns.iter().map(|n| number(*n)).collect::<Option<Vec<i32>>>();
        let length = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let first = positions.first();
        let (tokens, types) = (numbers(tokens), types.map(numbers));
        let last = first.checked_add(length).and_then(number);
        let (Some(tokens), Some(types), Some(last)) = (tokens, types.unwrap_or(Some(Vec::new())), last)
        else {
            return rejected("a token, a type or a position exceeds 2³¹".to_owned());
        };
        self.tokens.extend_from_slice(&tokens);
        self.types.extend_from_slice(&types);
        self.types.resize(self.tokens.len(), 0);
        self.positions.extend(last - tokens.len() as i32..last);
        self.lengths.push(tokens.len() as i32);
        Ok(())
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Returns whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Returns the number of tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.lengths().max().unwrap_or(0)
    }

    /// Returns the number of tokens of each sequence.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.lengths.iter().map(|length| *length as usize)
    }

    /// Returns the sequences that `keep` selects, packed again.
    pub(crate) fn select(&self, keep: impl Fn(usize) -> bool) -> PackedBatch {
        let mut packed = PackedBatch::default();
        let mut begin = 0;
        for (index, length) in self.lengths().enumerate() {
            let range = begin..begin + length;
            begin = range.end;
            if keep(index) {
                packed.tokens.extend_from_slice(&self.tokens[range.clone()]);
                packed.types.extend_from_slice(&self.types[range.clone()]);
                packed.positions.extend_from_slice(&self.positions[range]);
                packed.lengths.push(length as i32);
            }
        }
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed() -> PackedBatch {
        let mut packed = PackedBatch::default();
        packed.push(&[5, 6, 7], None, Positions::FromZero).unwrap();
        packed.push(&[8, 9], Some(&[0, 1]), Positions::AfterPadding(1)).unwrap();
        packed.push(&[4], None, Positions::FromZero).unwrap();
        packed
    }

    #[test]
    fn sequences_are_concatenated_with_their_own_positions_and_types() {
        let packed = packed();
        assert_eq!(packed.tokens, [5, 6, 7, 8, 9, 4]);
        assert_eq!(packed.positions, [0, 1, 2, 2, 3, 0], "RoBERTa's begin after the padding token's id");
        assert_eq!(packed.types, [0, 0, 0, 0, 1, 0]);
        assert_eq!(packed.lengths, [3, 2, 1]);
        assert_eq!((packed.len(), packed.tokens(), packed.longest()), (3, 6, 3));
    }

    #[test]
    fn a_subset_of_a_batch_is_unchanged() {
        let part = packed().select(|index| index == 1);
        assert_eq!((part.tokens, part.types), (vec![8, 9], vec![0, 1]));
        assert_eq!((part.positions, part.lengths), (vec![2, 3], vec![2]));
    }

    #[test]
    fn invalid_sequences_are_rejected_and_leave_the_batch_unchanged() {
        let mut packed = packed();
        let before = packed.clone();
        for (tokens, types) in [(&[][..], None), (&[1, 2], Some(&[0][..])), (&[u32::MAX], None)] {
            let refused = packed.push(tokens, types, Positions::FromZero);
            assert!(matches!(refused, Err(ExecutorError::Rejected(_))), "{tokens:?}");
        }
        assert_eq!(packed, before);
    }
}
