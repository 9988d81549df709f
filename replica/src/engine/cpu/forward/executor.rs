//! Two ways to execute a step: over a block of rows on one thread, or over all rows on all threads.

use super::{Transformer, WorkerSet};
use crate::engine::cpu::kernel::Finish;
use crate::engine::cpu::linear::{LinearId, LinearScratch};
use crate::engine::cpu::matrix::{Matrix, MatrixView, Partition, Tiles, Window};
use crate::engine::cpu::profile::ComputeStage;
use crate::model::Architecture;

/// Matrix of activations, with a row per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActivationBuffer {
    /// States between layers.
    States,
    /// Queries, keys and values.
    Projections,
    /// Output of attention.
    Attended,
    /// Normalized states, or the normalized output of a block.
    Normed,
    /// Wide rows in the middle of the feed-forward block.
    Expanded,
}

const BUFFERS: usize = 5;

/// Numbers that one thread normalizes in the time that synchronizing threads takes, about 2 µs: sixteen rows of 384.
const SINGLE_THREAD_NUMBERS: usize = 16 * 384;

/// Executor of steps.
pub(super) trait StepExecutor {
    /// Computes a linear layer.
    fn product(&mut self, from: ActivationBuffer, linear: LinearId, finish: Finish, to: ActivationBuffer);

    /// Applies `work` to rows independently; it gets the same rows of both buffers.
    fn rows(
        &mut self,
        stage: ComputeStage,
        from: Option<ActivationBuffer>,
        to: ActivationBuffer,
        work: impl Fn(Option<MatrixView<'_>>, &mut Window<'_>) + Sync,
    );
}

/// Activations of all rows of a batch.
#[derive(Default)]
pub(super) struct Activations([Matrix; BUFFERS]);

/// Windows on the three buffers that outlive a block: states, projections, attended.
type BlockParts<'a> = ((Window<'a>, Window<'a>), Window<'a>);

impl Activations {
    pub(super) fn states(&self) -> &Matrix {
        &self.0[ActivationBuffer::States as usize]
    }

    /// Returns the input and the output of attention.
    pub(super) fn around_attention(&mut self) -> (&Matrix, &mut Matrix) {
        let [_, projections, attended, ..] = &mut self.0;
        (projections, attended)
    }

    /// Returns the states, and the output of the last attention, for this number of rows.
    pub(super) fn around_last(&mut self, rows: usize, architecture: &Architecture) -> [&mut Matrix; 2] {
        let [states, _, attended, ..] = &mut self.0;
        states.resize(rows, architecture.hidden);
        attended.resize(rows, architecture.query_width());
        [states, attended]
    }

    pub(super) fn rows(&self) -> usize {
        self.states().rows()
    }

    /// Resizes the matrices to this number of rows.
    pub(super) fn resize(&mut self, rows: usize, architecture: &Architecture) {
        let [states, projections, attended, ..] = &mut self.0;
        states.resize(rows, architecture.hidden);
        projections.resize(rows, architecture.query_width() + 2 * architecture.key_value_width());
        attended.resize(rows, architecture.query_width());
    }

    /// Copies some rows of another batch, after an attention.
    pub(super) fn select(&mut self, from: &Activations, rows: &[usize], architecture: &Architecture) {
        self.resize(rows.len(), architecture);
        for buffer in [ActivationBuffer::States, ActivationBuffer::Attended] {
            let from = &from.0[buffer as usize];
            let out = self.0[buffer as usize].data_mut().chunks_exact_mut(from.width());
            for (out, row) in out.zip(rows) {
                out.copy_from_slice(from.view(*row..row + 1).row(0));
            }
        }
    }

    /// Returns a partition into this number of blocks of rows.
    pub(super) fn blocks(&mut self, blocks: usize) -> ((Tiles<'_>, Tiles<'_>), Tiles<'_>) {
        let [states, projections, attended, ..] = &mut self.0;
        ((whole_rows(states, blocks), whole_rows(projections, blocks)), whole_rows(attended, blocks))
    }

    /// Returns an executor over all rows, on all threads.
    pub(super) fn all_rows<'a, 'c>(
        &'a mut self,
        transformer: &'a Transformer,
        workers: &'a mut WorkerSet<'c>,
    ) -> AllRows<'a, 'c> {
        let rows = self.rows();
        let [.., normed, expanded] = &mut self.0;
        normed.resize(rows, transformer.architecture.hidden);
        expanded.resize(rows, transformer.architecture.feed_forward.width);
        AllRows { activations: self, transformer, workers }
    }
}

/// Executor over all rows, on all threads.
pub(super) struct AllRows<'a, 'c> {
    activations: &'a mut Activations,
    transformer: &'a Transformer,
    workers: &'a mut WorkerSet<'c>,
}

impl StepExecutor for AllRows<'_, '_> {
    fn product(&mut self, from: ActivationBuffer, linear: LinearId, finish: Finish, to: ActivationBuffer) {
        let [input, out] = two(&mut self.activations.0, from, to);
        let Transformer { isa, weights, .. } = self.transformer;
        let WorkerSet { threads, scratch } = &mut *self.workers;
        weights.linears.apply_by_all(*isa, threads, scratch, linear, input, finish, out);
    }

    fn rows(
        &mut self,
        stage: ComputeStage,
        from: Option<ActivationBuffer>,
        to: ActivationBuffer,
        work: impl Fn(Option<MatrixView<'_>>, &mut Window<'_>) + Sync,
    ) {
        let (input, out) = match from {
            Some(from) => {
                let [input, out] = two(&mut self.activations.0, from, to);
                (Some(&*input), out)
            }
            None => (None, &mut self.activations.0[to as usize]),
        };
        if out.data().len() <= SINGLE_THREAD_NUMBERS {
            let input = input.map(|input| input.view(0..out.rows()));
            let stage_ticks = &mut self.workers.scratch[0].linear.stage_ticks;
            let begin = stage_ticks.begin();
            work(input, &mut out.window());
            stage_ticks.end(stage, begin);
            return;
        }
        let rows = out.rows();
        self.workers.each(whole_rows(out, rows), |scratch, mut out| {
            let begin = scratch.linear.stage_ticks.begin();
            work(input.map(|input| input.view(out.rows())), &mut out);
            scratch.linear.stage_ticks.end(stage, begin);
        });
    }
}

/// Executor over a block of rows, on one thread.
pub(super) struct RowBlock<'a> {
    windows: [Window<'a>; BUFFERS],
    transformer: &'a Transformer,
    scratch: &'a mut LinearScratch,
}

impl<'a> RowBlock<'a> {
    /// Creates the executor from its windows; `between` is memory for the other buffers.
    pub(super) fn new(
        transformer: &'a Transformer,
        scratch: &'a mut LinearScratch,
        between: &'a mut [Matrix; 2],
        parts: BlockParts<'a>,
    ) -> RowBlock<'a> {
        let ((states, projections), attended) = parts;
        let Architecture { hidden, feed_forward, .. } = &transformer.architecture;
        let [normed, expanded] = between;
        let rows = states.rows().len();
        normed.resize(rows, *hidden);
        expanded.resize(rows, feed_forward.width);
        let windows = [states, projections, attended, normed.window(), expanded.window()];
        RowBlock { windows, transformer, scratch }
    }
}

impl StepExecutor for RowBlock<'_> {
    fn product(&mut self, from: ActivationBuffer, linear: LinearId, finish: Finish, to: ActivationBuffer) {
        let [input, out] = two(&mut self.windows, from, to);
        let Transformer { isa, weights, .. } = self.transformer;
        weights.linears.apply(*isa, linear, input.view(), finish, out, self.scratch);
    }

    fn rows(
        &mut self,
        stage: ComputeStage,
        from: Option<ActivationBuffer>,
        to: ActivationBuffer,
        work: impl Fn(Option<MatrixView<'_>>, &mut Window<'_>) + Sync,
    ) {
        let begin = self.scratch.stage_ticks.begin();
        match from {
            Some(from) => {
                let [input, out] = two(&mut self.windows, from, to);
                work(Some(input.view()), out);
            }
            None => work(None, &mut self.windows[to as usize]),
        }
        self.scratch.stage_ticks.end(stage, begin);
    }
}

/// Partitions the matrix into this number of parts of whole rows.
fn whole_rows(matrix: &mut Matrix, parts: usize) -> Tiles<'_> {
    let (rows, columns) = (Partition::even(matrix.rows(), parts, 1), Partition::whole(matrix.width()));
    matrix.tiles(rows, columns)
}

/// Returns two different buffers, mutably.
fn two<T>(buffers: &mut [T; BUFFERS], from: ActivationBuffer, to: ActivationBuffer) -> [&mut T; 2] {
    buffers.get_disjoint_mut([from as usize, to as usize]).expect("a step reads and writes different buffers")
}
