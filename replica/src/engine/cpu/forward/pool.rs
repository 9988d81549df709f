//! Pooling to one row per sequence, and the dense layers or label head after it.

use std::ops::Range;

use super::WorkerSet;
use crate::engine::RaggedBatch;
use crate::engine::cpu::kernel::{Isa, Normalize, PoolRows};
use crate::engine::cpu::matrix::{Matrix, Partition};
use crate::engine::cpu::weights::HeadWeights;
use crate::model::{HeadPooling, ModelDir, ModelError, Pooling};

/// Pooling and head of a model.
pub(in super::super) struct PoolingHead {
    pub(in super::super) pooling: Pooling,
    /// Tokens with this id at the end are ignored.
    pub(in super::super) padding: Option<u32>,
    /// Steps after pooling.
    pub(in super::super) head: HeadWeights,
    /// Numbers of a pooled row.
    pub(in super::super) hidden: usize,
}

impl PoolingHead {
    /// Loads the label head if the model has one, and otherwise the stages of sentence-transformers after the
    /// transformer.
    pub(in super::super) fn load(model: &ModelDir) -> Result<PoolingHead, ModelError> {
        let architecture = &model.architecture;
        let hidden = architecture.hidden;
        if !model.sentence.include_prompt && !model.prompts.by_name.is_empty() {
            let problem =
                "`include_prompt` = false is not supported: pooling does not know which tokens are \
                           those of the prompt"
                    .to_owned();
            return Err(ModelError::Content { path: model.folder.join("1_Pooling/config.json"), problem });
        }
        let Some(steps) = architecture.head.as_ref().filter(|_| model.head.is_some()) else {
            let head = HeadWeights::of_dense(&model.sentence.dense)?;
            return Ok(PoolingHead { pooling: model.sentence.pooling, padding: None, head, hidden });
        };
        let (pooling, padding) = match architecture.head_pooling {
            HeadPooling::First => (Pooling::Cls, None),
            HeadPooling::Mean => (Pooling::Mean, None),
            HeadPooling::Last { padding } => (Pooling::LastToken, padding),
        };
        let head = HeadWeights::of_labels(&model.checkpoint, architecture, steps)?;
        Ok(PoolingHead { pooling, padding, head, hidden })
    }

    /// Returns the numbers of an output row.
    pub(in super::super) fn width(&self) -> usize {
        self.head.steps.last().map_or(self.hidden, |step| self.head.linears.width(step.linear))
    }

    /// Returns the row in the batch to which each sequence is pooled, if it is the row of one of its tokens.
    pub(super) fn select(&self, batch: &RaggedBatch<'_>, selected_rows: &mut Vec<usize>) {
        let rows = (0..batch.len()).map(|sequence| self.rows(batch, sequence));
        match self.pooling {
            Pooling::Cls => selected_rows.extend(rows.map(|rows| rows.start)),
            Pooling::LastToken => selected_rows.extend(rows.map(|rows| rows.end - 1)),
            Pooling::Mean | Pooling::WeightedMean | Pooling::Max | Pooling::MeanSqrtLength => {}
        }
    }

    /// Writes a row per sequence, on all threads.
    pub(super) fn run(
        &self,
        isa: Isa,
        workers: &mut WorkerSet<'_>,
        states: &Matrix,
        batch: &RaggedBatch<'_>,
        scratch: &mut [Matrix; 2],
        out: &mut [f32],
    ) {
        let [pooled, _] = &mut *scratch;
        pooled.resize(batch.len(), self.hidden);
        let each = Partition::even(batch.len(), batch.len(), 1);
        workers.each(pooled.tiles(each, Partition::whole(self.hidden)), |_, mut out| {
            for (index, sequence) in out.rows().enumerate() {
                let rows = states.view(self.rows(batch, sequence));
                isa.run(PoolRows { pooling: self.pooling, rows, out: out.row_mut(index) });
            }
        });
        self.end(isa, workers, scratch, out);
    }

    /// Applies the steps after pooling to rows that are already pooled.
    pub(super) fn finish(
        &self,
        isa: Isa,
        workers: &mut WorkerSet<'_>,
        pooled: &Matrix,
        scratch: &mut [Matrix; 2],
        out: &mut [f32],
    ) {
        scratch[0].resize(pooled.rows(), self.hidden);
        scratch[0].data_mut().copy_from_slice(pooled.data());
        self.end(isa, workers, scratch, out);
    }

    /// Returns the rows of a sequence that are pooled.
    fn rows(&self, batch: &RaggedBatch<'_>, sequence: usize) -> Range<usize> {
        let offsets = &batch.offsets()[sequence..];
        let mut rows = offsets[0] as usize..offsets[1] as usize;
        if let Some(padding) = self.padding {
            let last = batch.token_ids()[rows.clone()].iter().rposition(|id| *id != padding);
            rows.end = rows.start + last.unwrap_or(0) + 1;
        }
        rows
    }

    /// Applies the steps after pooling, from the first buffer to `out`.
    fn end(&self, isa: Isa, workers: &mut WorkerSet<'_>, scratch: &mut [Matrix; 2], out: &mut [f32]) {
        let [from, to] = scratch;
        let (mut from, mut to) = (from, to);
        let sequences = from.rows();
        for step in &self.head.steps {
            to.resize(sequences, self.head.linears.width(step.linear));
            let WorkerSet { threads, scratch } = &mut *workers;
            self.head.linears.apply_by_all(isa, threads, scratch, step.linear, from, step.finish, to);
            if let Some(norm) = &step.norm {
                isa.run(Normalize { norm, rows: &mut to.window() });
            }
            (from, to) = (to, from);
        }
        out.copy_from_slice(from.data());
    }
}
