//! Division of a batch into parts within the limits of an engine.

use std::ops::Range;

use trtllm::ExecutorError as Failure;
use trtllm::packed::{PackedBatch, Positions};

use crate::engine::RaggedBatch;

/// Limits of one part.
#[derive(Clone, Copy)]
pub(super) struct PartLimits {
    pub(super) sequences: usize,
    pub(super) tokens: usize,
}

/// Some sequences of a batch.
pub(super) struct Part<'a> {
    pub(super) whole: &'a RaggedBatch<'a>,
    pub(super) sequences: Range<usize>,
    /// Start of each sequence among the part's own tokens.
    offsets: Vec<u32>,
}

impl<'a> Part<'a> {
    pub(super) fn new(whole: &'a RaggedBatch<'a>, sequences: Range<usize>) -> Part<'a> {
        let offsets = &whole.offsets()[sequences.start..=sequences.end];
        let offsets = offsets.iter().map(|offset| offset - offsets[0]).collect();
        Part { whole, sequences, offsets }
    }

    pub(super) fn batch(&self) -> RaggedBatch<'_> {
        let tokens = self.range(self.sequences.start).start..self.range(self.sequences.end - 1).end;
        let types = self.whole.type_ids().map(|types| &types[tokens.clone()]);
        RaggedBatch::new(&self.whole.token_ids()[tokens], types, &self.offsets)
            .expect("a part of a valid batch")
    }

    /// Returns the range of a sequence among the tokens of the whole batch.
    pub(super) fn range(&self, sequence: usize) -> Range<usize> {
        let offsets = self.whole.offsets();
        offsets[sequence] as usize..offsets[sequence + 1] as usize
    }

    pub(super) fn packed(&self, positions: Positions, typed: bool) -> Result<PackedBatch, Failure> {
        let mut packed = PackedBatch::default();
        for sequence in self.sequences.clone() {
            let range = self.range(sequence);
            let types = self.whole.type_ids().filter(|_| typed).map(|types| &types[range.clone()]);
            packed.push(&self.whole.token_ids()[range], types, positions)?;
        }
        Ok(packed)
    }
}

/// Divides a batch, in order, into the least number of parts within `most`.
pub(super) fn parts(batch: &RaggedBatch<'_>, most: PartLimits) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut tokens = 0;
    for (sequence, range) in batch.sequences().enumerate() {
        tokens += range.len();
        match parts.last_mut() {
            Some(last) if tokens <= most.tokens && last.len() < most.sequences => last.end += 1,
            _ => {
                parts.push(sequence..sequence + 1);
                tokens = range.len();
            }
        }
    }
    parts
}
