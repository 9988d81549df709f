//! Forward pass of one batch through a transformer.
//!
//! Three strategies with the same arithmetic, chosen by the number of tokens:
//!
//! * A batch of many sequences is partitioned between sequences, and a thread takes groups of them from their tokens to
//!   the end. All activations stay in the thread's own cache, and threads do not synchronize at all. See
//!   `sequence_groups`.
//! * A *tall* batch has rows for all threads. Rows are partitioned into blocks, and a thread takes its block through
//!   all steps between two attentions: from the attention output, through the feed-forward block, to the next layer's
//!   queries, keys and values. The wide rows in the middle of the feed-forward block exist for one block at a time and
//!   never leave the thread's own cache. Threads synchronize twice per layer.
//! * A *flat* batch, in the extreme one short text, has too few rows. Then columns are partitioned, so that each thread
//!   reads its own part of the weights instead of all threads reading all of them, and threads synchronize after every
//!   step.
//!
//! The steps themselves are in `layer`, once, for all strategies and all architectures. Attention, the only step that
//! reads other rows, is partitioned by sequence and head.
//!
//! Where one row of a sequence is the output (that of the first token, as for rerankers, or of the last), the last
//! layer computes only that row after its attention. In a model of six layers this saves an eighth.
//!
//! The strategy, the partition and the assignment to threads change no sum: see [`super::linear`].
//!
//! A long batch can be preempted: between any two steps another batch may be computed, in its own arena
//! ([`Preemption`]). So an interactive request that arrives in the middle of it waits for one step, of some
//! milliseconds.

mod executor;
mod layer;
#[cfg(feature = "tensorrt")]
mod output_head;
mod pool;
mod sequence_groups;

use std::sync::atomic::AtomicBool;

use replica_core::Precision;

use super::kernel::{Attention, AttentionScratch, ByteAttention, ByteAttentionScratch, Isa, MAX_KEYS};
use super::linear::LinearScratch;
use super::matrix::{Matrix, Partition, Parts, Tiles, Window};
use super::profile::{Profile, ProfileTimer, StageTicks};
use super::rotary_table::RotaryTable;
use super::threads::ThreadPool;
use super::weights::TransformerWeights;
use crate::engine::{EngineStep, Output, RaggedBatch};
use crate::model::{Architecture, LearntPositions};
use executor::{Activations, RowBlock};
use layer::LayerContext;
#[cfg(feature = "tensorrt")]
pub(crate) use output_head::OutputHead;
pub(super) use pool::PoolingHead;
use sequence_groups::GroupScratch;

/// Rows of a block of a tall batch: ten full tiles. Weights, which come from distant memory, are reused that many times
/// each time that they are fetched; and the expanded rows of a block of MiniLM, 840 KiB, fit the thread's second-level
/// cache.
const BLOCK_ROWS: usize = 140;

/// With fewer rows than this for each thread a batch is flat: below it reading weights takes longer than computing.
const TALL_ROWS: usize = 24;

/// Minimum parts of attention for each thread. With fewer parts, heads that share their keys are computed separately,
/// although each then packs the keys again.
const ATTENTION_PARTS: usize = 4;

/// Transformer with loaded weights.
pub(super) struct Transformer {
    pub(super) isa: Isa,
    pub(super) precision: Precision,
    pub(super) architecture: Architecture,
    pub(super) weights: TransformerWeights,
    pub(super) pool: PoolingHead,
}

/// Memory for one batch. It grows to the largest batch and is then not allocated again.
pub(super) struct Arena {
    tokens: Vec<Token>,
    /// Index of each token in its sequence.
    positions: Vec<u32>,
    rotary_tables: Vec<RotaryTable>,
    /// Start of each group of sequences, and the end of the last one.
    groups: Vec<u32>,
    /// Flags of the groups that are finished.
    finished_groups: Vec<AtomicBool>,
    activations: Activations,
    /// Rows that the last layer ends with; `selected_rows` are their indices in the batch.
    selected: Activations,
    selected_rows: Vec<usize>,
    pooled: [Matrix; 2],
    scratch: Vec<ThreadScratch>,
}

impl Arena {
    /// Creates an arena for batches of this model.
    pub(super) fn new(architecture: &Architecture) -> Arena {
        Arena {
            tokens: Vec::new(),
            positions: Vec::new(),
            rotary_tables: architecture.ropes.iter().cloned().map(RotaryTable::new).collect(),
            groups: Vec::new(),
            finished_groups: Vec::new(),
            activations: Activations::default(),
            selected: Activations::default(),
            selected_rows: Vec::new(),
            pooled: Default::default(),
            scratch: Vec::new(),
        }
    }
}

/// Ids of one token in the embedding tables.
struct Token {
    id: u32,
    kind: u32,
    position: usize,
}

/// Local memory of one thread.
#[derive(Default)]
struct ThreadScratch {
    attention: AttentionBuffers,
    linear: LinearScratch,
    /// Rows of a block of a tall batch between two attentions.
    block: [Matrix; 2],
    /// Activations of a group of sequences.
    group: GroupScratch,
}

/// Local memory of one thread for attention, in f32 and in bytes.
#[derive(Default)]
struct AttentionBuffers {
    numbers: AttentionScratch,
    bytes: ByteAttentionScratch,
}

impl ThreadScratch {
    /// Returns the profile counters of the thread.
    fn stage_ticks(&mut self) -> [&mut StageTicks; 3] {
        let AttentionBuffers { numbers, bytes } = &mut self.attention;
        [&mut self.linear.stage_ticks, &mut numbers.stage_ticks, &mut bytes.stage_ticks]
    }
}

impl AsMut<LinearScratch> for ThreadScratch {
    fn as_mut(&mut self) -> &mut LinearScratch {
        &mut self.linear
    }
}

/// Work that runs between the steps of a batch.
pub(super) trait Preemption: Sync {
    /// Returns whether there is such work. Any thread may call it.
    fn is_pending(&self) -> bool;
    /// Runs it on these threads, which are idle meanwhile.
    fn run(&mut self, threads: &mut ThreadPool);
    /// Records that a step of the batch begins.
    fn began(&mut self, step: EngineStep) {
        let _ = step;
    }
}

/// Implementation for a batch that cannot be preempted.
pub(super) struct NoPreemption;

impl Preemption for NoPreemption {
    fn is_pending(&self) -> bool {
        false
    }

    fn run(&mut self, _threads: &mut ThreadPool) {}
}

/// Threads, with the local memory of each.
struct WorkerSet<'a> {
    threads: &'a mut ThreadPool,
    scratch: &'a mut [ThreadScratch],
}

impl WorkerSet<'_> {
    /// Returns the number of blocks for this number of rows, if the batch is tall.
    fn blocks(&self, rows: usize) -> Option<usize> {
        let threads = self.threads.count();
        // The same number of blocks for each thread, so that none waits for a last one.
        (rows >= TALL_ROWS * threads).then(|| rows.div_ceil(BLOCK_ROWS).next_multiple_of(threads))
    }

    /// Runs more urgent work first, if there is any.
    fn run_preemption(&mut self, preemption: &mut dyn Preemption) {
        if preemption.is_pending() {
            preemption.run(self.threads);
        }
    }

    fn each<P: Parts>(&mut self, parts: P, work: impl Fn(&mut ThreadScratch, P::Part) + Sync) {
        self.threads.for_each(self.scratch, parts, work);
    }
}

impl Transformer {
    /// Computes a validated batch without preemption, and returns its profile.
    pub(super) fn profile(
        &self,
        threads: &mut ThreadPool,
        arena: &mut Arena,
        batch: &RaggedBatch<'_>,
        output: Output,
        out: &mut [f32],
    ) -> Profile {
        arena.scratch.resize_with(threads.count(), ThreadScratch::default);
        let stage_ticks = |scratch: &mut [ThreadScratch], counting| {
            scratch
                .iter_mut()
                .flat_map(ThreadScratch::stage_ticks)
                .for_each(|stage_ticks| stage_ticks.reset(counting));
        };
        stage_ticks(&mut arena.scratch, true);
        let watch = ProfileTimer::start();
        self.run(threads, arena, batch, output, &mut NoPreemption, out);
        let profile = watch.stop(
            arena.scratch.iter_mut().flat_map(ThreadScratch::stage_ticks).map(|stage_ticks| &*stage_ticks),
        );
        stage_ticks(&mut arena.scratch, false);
        profile
    }

    /// Computes a validated batch; `out` has the size of the requested output.
    pub(super) fn run(
        &self,
        threads: &mut ThreadPool,
        arena: &mut Arena,
        batch: &RaggedBatch<'_>,
        output: Output,
        preemption: &mut dyn Preemption,
        out: &mut [f32],
    ) {
        let Arena {
            tokens,
            positions,
            rotary_tables,
            groups,
            finished_groups,
            activations,
            selected,
            selected_rows,
            pooled,
            scratch,
        } = arena;
        let longest = batch.sequences().map(|sequence| sequence.len()).max().unwrap_or(0);
        rotary_tables.iter_mut().for_each(|rotation| rotation.reach(longest));
        tokens.clear();
        tokens.extend(tokens_of(batch, self.architecture.embedding.positions));
        positions.clear();
        positions.extend(batch.sequences().flat_map(|sequence| 0..sequence.len() as u32));
        scratch.resize_with(threads.count(), ThreadScratch::default);
        let mut workers = WorkerSet { threads, scratch };
        let context = LayerContext { transformer: self, tokens, positions, rotary_tables };
        selected_rows.clear();
        if output == Output::Pooled {
            self.pool.select(batch, selected_rows);
        }
        let last = self.architecture.layers.len() - 1;
        preemption.began(EngineStep::Forward);
        if sequence_groups::cut(batch.offsets(), workers.threads.count(), groups) {
            self.run_groups(
                &context,
                &mut workers,
                activations,
                batch.offsets(),
                (groups, finished_groups, selected_rows),
                preemption,
            );
        } else {
            self.begin(&context, &mut workers, activations);
            for index in 0..last {
                workers.run_preemption(preemption);
                self.attend(&mut workers, index, batch.offsets(), activations);
                workers.run_preemption(preemption);
                self.follow(&context, &mut workers, activations, index);
            }
            workers.run_preemption(preemption);
            self.attend(&mut workers, last, batch.offsets(), activations);
            if selected_rows.is_empty() {
                workers.run_preemption(preemption);
                self.follow(&context, &mut workers, activations, last);
            }
        }
        if !selected_rows.is_empty() {
            selected.select(activations, selected_rows, &self.architecture);
            self.follow(&context, &mut workers, selected, last);
        }
        preemption.began(EngineStep::Pool);
        match output {
            Output::Pooled if selected_rows.is_empty() => {
                self.pool.run(self.isa, &mut workers, activations.states(), batch, pooled, out);
            }
            Output::Pooled => self.pool.finish(self.isa, &mut workers, selected.states(), pooled, out),
            Output::Tokens => out.copy_from_slice(activations.states().data()),
        }
    }

    /// Computes the steps from tokens to the first attention.
    fn begin(&self, context: &LayerContext<'_>, workers: &mut WorkerSet<'_>, activations: &mut Activations) {
        activations.resize(context.tokens.len(), &self.architecture);
        match workers.blocks(activations.rows()) {
            Some(blocks) => workers.each(activations.blocks(blocks), |scratch, parts| {
                context.begin(&mut RowBlock::new(self, &mut scratch.linear, &mut scratch.block, parts));
            }),
            None => context.begin(&mut activations.all_rows(self, workers)),
        }
    }

    /// Computes the steps from the attention of this layer to that of the next one, or to the end.
    fn follow(
        &self,
        context: &LayerContext<'_>,
        workers: &mut WorkerSet<'_>,
        activations: &mut Activations,
        index: usize,
    ) {
        match workers.blocks(activations.rows()) {
            Some(blocks) => workers.each(activations.blocks(blocks), |scratch, parts| {
                context
                    .follow(&mut RowBlock::new(self, &mut scratch.linear, &mut scratch.block, parts), index);
            }),
            None => context.follow(&mut activations.all_rows(self, workers), index),
        }
    }

    /// Computes attention of every head over every sequence, on all threads.
    fn attend(
        &self,
        workers: &mut WorkerSet<'_>,
        index: usize,
        offsets: &[u32],
        activations: &mut Activations,
    ) {
        let attention = &self.architecture.attention;
        let (width, sharing) = (attention.head_width, attention.heads / attention.key_value_heads);
        let queries = self.architecture.query_width();
        let sequences = offsets.len() - 1;
        let together = sequences * attention.key_value_heads >= ATTENTION_PARTS * workers.threads.count();
        let heads = if together { sharing } else { 1 };
        let (projections, attended) = activations.around_attention();
        let cut = Partition::even(queries, queries / (heads * width), heads * width);
        let tiles: Tiles<'_> = attended.tiles(Partition::At(offsets), cut);
        workers.each(tiles, |scratch, mut out| {
            self.attend_part(index, projections, &mut out, &mut scratch.attention);
        });
    }

    /// Computes attention of the heads of `out` over one sequence.
    fn attend_part(
        &self,
        index: usize,
        projections: &Matrix,
        out: &mut Window<'_>,
        scratch: &mut AttentionBuffers,
    ) {
        let attention = &self.architecture.attention;
        let (width, sharing) = (attention.head_width, attention.heads / attention.key_value_heads);
        let (all_queries, all_keys) = (self.architecture.query_width(), self.architecture.key_value_width());
        let rows = projections.view(out.rows());
        let first = out.columns().start / width;
        let key = all_queries + first / sharing * width;
        let queries = rows.columns(out.columns());
        let keys = rows.columns(key..key + width);
        let values = rows.columns(key + all_keys..key + all_keys + width);
        let (isa, reach) = (self.isa, self.architecture.layers[index].reach);
        let softcap = attention.softcap.map(|cap| cap * std::f32::consts::LOG2_E);
        let biases = self.weights.distance_biases.as_ref().map(|biases| (biases, first));
        let plain = softcap.is_none() && biases.is_none();
        if self.precision == Precision::Int8 && plain && rows.rows() <= MAX_KEYS {
            let scratch = &mut scratch.bytes;
            isa.run(ByteAttention { isa, queries, keys, values, reach, out, scratch });
        } else {
            let scratch = &mut scratch.numbers;
            isa.run(Attention { queries, keys, values, reach, softcap, biases, out, scratch });
        }
    }
}

fn tokens_of<'a>(
    batch: &RaggedBatch<'a>,
    positions: Option<LearntPositions>,
) -> impl Iterator<Item = Token> + 'a {
    let (ids, types) = (batch.token_ids(), batch.type_ids());
    let padding = positions.and_then(|positions| positions.padding);
    batch.sequences().flat_map(move |sequence| {
        let mut next = padding.map_or(0, |padding| padding as usize + 1);
        sequence.map(move |index| {
            let id = ids[index];
            let position = match padding {
                Some(padding) if padding == id => padding as usize,
                Some(_) | None => {
                    next += 1;
                    next - 1
                }
            };
            Token { id, kind: types.map_or(0, |types| types[index]), position }
        })
    })
}
