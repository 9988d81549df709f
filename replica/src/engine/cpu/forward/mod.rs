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

#[cfg(feature = "tensorrt")]
mod behind;
mod carry;
mod layer;
mod pool;
mod ways;

use std::sync::atomic::AtomicBool;

use replica_core::Precision;

use super::kernel::{Attention, AttentionScratch, ByteAttention, ByteAttentionScratch, Isa, MAX_KEYS};
use super::laps::{Laps, Profile, Watch};
use super::linear::LinearScratch;
use super::matrix::{Cut, Matrix, Parts, Tiles, Window};
use super::rotation::Rotation;
use super::threads::Threads;
use super::weights::Weights;
use crate::engine::{Output, RaggedBatch};
use crate::model::{Architecture, LearntPositions};
#[cfg(feature = "tensorrt")]
pub(crate) use behind::Behind;
use carry::Carried;
use layer::Step;
pub(super) use pool::Pool;
use ways::{Block, Whole};

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
    pub(super) weights: Weights,
    pub(super) pool: Pool,
}

/// Memory for one batch. It grows to the largest batch and is then not allocated again.
pub(super) struct Arena {
    tokens: Vec<Token>,
    /// Index of each token in its sequence.
    positions: Vec<u32>,
    rotations: Vec<Rotation>,
    /// Start of each group of sequences, and the end of the last one.
    groups: Vec<u32>,
    /// Flags of the groups that are finished.
    carried: Vec<AtomicBool>,
    whole: Whole,
    /// Rows that the last layer ends with; `picks` are their indices in the batch.
    picked: Whole,
    picks: Vec<usize>,
    pooled: [Matrix; 2],
    rooms: Vec<Room>,
}

impl Arena {
    /// Creates an arena for batches of this model.
    pub(super) fn new(architecture: &Architecture) -> Arena {
        Arena {
            tokens: Vec::new(),
            positions: Vec::new(),
            rotations: architecture.ropes.iter().cloned().map(Rotation::new).collect(),
            groups: Vec::new(),
            carried: Vec::new(),
            whole: Whole::default(),
            picked: Whole::default(),
            picks: Vec::new(),
            pooled: Default::default(),
            rooms: Vec::new(),
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
struct Room {
    attention: AttentionRoom,
    linear: LinearScratch,
    /// Rows of a block of a tall batch between two attentions.
    block: [Matrix; 2],
    /// Activations of a group of sequences.
    carried: Carried,
}

/// Local memory of one thread for attention, in f32 and in bytes.
#[derive(Default)]
struct AttentionRoom {
    numbers: AttentionScratch,
    bytes: ByteAttentionScratch,
}

impl Room {
    /// Returns the profile counters of the thread.
    fn laps(&mut self) -> [&mut Laps; 3] {
        let AttentionRoom { numbers, bytes } = &mut self.attention;
        [&mut self.linear.laps, &mut numbers.laps, &mut bytes.laps]
    }
}

impl AsMut<LinearScratch> for Room {
    fn as_mut(&mut self) -> &mut LinearScratch {
        &mut self.linear
    }
}

/// Work that runs between the steps of a batch.
pub(super) trait Between: Sync {
    /// Returns whether there is such work. Any thread may call it.
    fn is_due(&self) -> bool;
    /// Runs it on these threads, which are idle meanwhile.
    fn run(&mut self, threads: &mut Threads);
}

/// Implementation for a batch that cannot be preempted.
pub(super) struct Nothing;

impl Between for Nothing {
    fn is_due(&self) -> bool {
        false
    }

    fn run(&mut self, _threads: &mut Threads) {}
}

/// Threads, with the local memory of each.
struct Crew<'a> {
    threads: &'a mut Threads,
    rooms: &'a mut [Room],
}

impl Crew<'_> {
    /// Returns the number of blocks for this number of rows, if the batch is tall.
    fn blocks(&self, rows: usize) -> Option<usize> {
        let threads = self.threads.count();
        // The same number of blocks for each thread, so that none waits for a last one.
        (rows >= TALL_ROWS * threads).then(|| rows.div_ceil(BLOCK_ROWS).next_multiple_of(threads))
    }

    /// Runs more urgent work first, if there is any.
    fn let_in(&mut self, between: &mut dyn Between) {
        if between.is_due() {
            between.run(self.threads);
        }
    }

    fn each<P: Parts>(&mut self, parts: P, work: impl Fn(&mut Room, P::Part) + Sync) {
        self.threads.for_each(self.rooms, parts, work);
    }
}

impl Transformer {
    /// Computes a validated batch without preemption, and returns its profile.
    pub(super) fn profile(
        &self,
        threads: &mut Threads,
        arena: &mut Arena,
        batch: &RaggedBatch<'_>,
        output: Output,
        out: &mut [f32],
    ) -> Profile {
        arena.rooms.resize_with(threads.count(), Room::default);
        let laps = |rooms: &mut [Room], counting| {
            rooms.iter_mut().flat_map(Room::laps).for_each(|laps| laps.reset(counting));
        };
        laps(&mut arena.rooms, true);
        let watch = Watch::start();
        self.run(threads, arena, batch, output, &mut Nothing, out);
        let profile = watch.stop(arena.rooms.iter_mut().flat_map(Room::laps).map(|laps| &*laps));
        laps(&mut arena.rooms, false);
        profile
    }

    /// Computes a validated batch; `out` has the size of the requested output.
    pub(super) fn run(
        &self,
        threads: &mut Threads,
        arena: &mut Arena,
        batch: &RaggedBatch<'_>,
        output: Output,
        between: &mut dyn Between,
        out: &mut [f32],
    ) {
        let Arena { tokens, positions, rotations, groups, carried, whole, picked, picks, pooled, rooms } =
            arena;
        let longest = batch.sequences().map(|sequence| sequence.len()).max().unwrap_or(0);
        rotations.iter_mut().for_each(|rotation| rotation.reach(longest));
        tokens.clear();
        tokens.extend(tokens_of(batch, self.architecture.embedding.positions));
        positions.clear();
        positions.extend(batch.sequences().flat_map(|sequence| 0..sequence.len() as u32));
        rooms.resize_with(threads.count(), Room::default);
        let mut crew = Crew { threads, rooms };
        let step = Step { transformer: self, tokens, positions, rotations };
        picks.clear();
        if output == Output::Pooled {
            self.pool.pick(batch, picks);
        }
        let last = self.architecture.layers.len() - 1;
        if carry::cut(batch.offsets(), crew.threads.count(), groups) {
            self.carry(&step, &mut crew, whole, batch.offsets(), (groups, carried, picks), between);
        } else {
            self.begin(&step, &mut crew, whole);
            for index in 0..last {
                crew.let_in(between);
                self.attend(&mut crew, index, batch.offsets(), whole);
                crew.let_in(between);
                self.follow(&step, &mut crew, whole, index);
            }
            crew.let_in(between);
            self.attend(&mut crew, last, batch.offsets(), whole);
            if picks.is_empty() {
                crew.let_in(between);
                self.follow(&step, &mut crew, whole, last);
            }
        }
        if !picks.is_empty() {
            picked.pick(whole, picks, &self.architecture);
            self.follow(&step, &mut crew, picked, last);
        }
        match output {
            Output::Pooled if picks.is_empty() => {
                self.pool.run(self.isa, &mut crew, whole.states(), batch, pooled, out);
            }
            Output::Pooled => self.pool.finish(self.isa, &mut crew, picked.states(), pooled, out),
            Output::Tokens => out.copy_from_slice(whole.states().data()),
        }
    }

    /// Computes the steps from tokens to the first attention.
    fn begin(&self, step: &Step<'_>, crew: &mut Crew<'_>, whole: &mut Whole) {
        whole.resize(step.tokens.len(), &self.architecture);
        match crew.blocks(whole.rows()) {
            Some(blocks) => crew.each(whole.blocks(blocks), |room, parts| {
                step.begin(&mut Block::new(self, &mut room.linear, &mut room.block, parts));
            }),
            None => step.begin(&mut whole.by_all(self, crew)),
        }
    }

    /// Computes the steps from the attention of this layer to that of the next one, or to the end.
    fn follow(&self, step: &Step<'_>, crew: &mut Crew<'_>, whole: &mut Whole, index: usize) {
        match crew.blocks(whole.rows()) {
            Some(blocks) => crew.each(whole.blocks(blocks), |room, parts| {
                step.follow(&mut Block::new(self, &mut room.linear, &mut room.block, parts), index);
            }),
            None => step.follow(&mut whole.by_all(self, crew), index),
        }
    }

    /// Computes attention of every head over every sequence, on all threads.
    fn attend(&self, crew: &mut Crew<'_>, index: usize, offsets: &[u32], whole: &mut Whole) {
        let attention = &self.architecture.attention;
        let (width, sharing) = (attention.head_width, attention.heads / attention.key_value_heads);
        let queries = self.architecture.query_width();
        let sequences = offsets.len() - 1;
        let together = sequences * attention.key_value_heads >= ATTENTION_PARTS * crew.threads.count();
        let heads = if together { sharing } else { 1 };
        let (projections, attended) = whole.around_attention();
        let cut = Cut::even(queries, queries / (heads * width), heads * width);
        let tiles: Tiles<'_> = attended.tiles(Cut::At(offsets), cut);
        crew.each(tiles, |room, mut out| {
            self.attend_part(index, projections, &mut out, &mut room.attention);
        });
    }

    /// Computes attention of the heads of `out` over one sequence.
    fn attend_part(
        &self,
        index: usize,
        projections: &Matrix,
        out: &mut Window<'_>,
        room: &mut AttentionRoom,
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
            let scratch = &mut room.bytes;
            isa.run(ByteAttention { isa, queries, keys, values, reach, out, scratch });
        } else {
            let scratch = &mut room.numbers;
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
