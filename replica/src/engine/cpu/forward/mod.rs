//! One batch through a transformer.
//!
//! Three ways, the same arithmetic, chosen by the number of tokens:
//!
//! * A batch of many sequences is cut between sequences, and a thread carries some of them from their tokens to the end.
//!   Whatever is computed stays in the thread's own cache, and threads do not meet at all. See `carry`.
//! * A *tall* batch has rows for all threads. Rows are cut into blocks, and a thread carries its block through
//!   everything between two attentions: from what attention came to, through the feed-forward block, to the next layer's
//!   queries, keys and values. The wide rows in the middle of the feed-forward block exist for one block at a time and
//!   never leave the thread's own cache. Threads meet twice per layer.
//! * A *flat* batch, in the extreme one short text, has too few rows. Then columns are cut, so that each thread reads its
//!   own part of the weights instead of all threads reading all of them, and threads meet after every step.
//!
//! The steps themselves stand in `layer`, once, for all ways and for every family. Attention, which alone looks beyond
//! its row, is cut by sequence and head.
//!
//! Where one row of a sequence is all that is wanted (of the first token, as rerankers have it, or of the last), the
//! last layer ends with that row: behind its attention the others are left behind. Of a model of six layers this saves an
//! eighth.
//!
//! Which way is taken, how blocks are cut and who computes them changes no sum: see [`super::linear`].
//!
//! A long batch need not be waited for: between any two steps something else may be computed, in an arena of its own
//! ([`Between`]). So whoever comes in the middle of it waits for one step, of some milliseconds.

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

/// Rows of a block of a tall batch: ten full tiles. Weights, which come from far away, are used as many times for each
/// time that they are fetched; and the expanded rows of a block of MiniLM, 840 KiB, fit the thread's second-level cache.
const BLOCK_ROWS: usize = 140;

/// With fewer rows than this for each thread a batch is flat: below it reading weights takes longer than computing.
const TALL_ROWS: usize = 24;

/// Parts of attention for each thread, below which heads that share their keys are computed apart, though each then
/// packs the keys for itself.
const ATTENTION_PARTS: usize = 4;

/// A transformer, ready to compute.
pub(super) struct Transformer {
    pub(super) isa: Isa,
    pub(super) precision: Precision,
    pub(super) architecture: Architecture,
    pub(super) weights: Weights,
    pub(super) pool: Pool,
}

/// Memory for one batch. It grows to the largest one and is then not allocated again.
pub(super) struct Arena {
    tokens: Vec<Token>,
    /// The place of each token in its sequence.
    positions: Vec<u32>,
    rotations: Vec<Rotation>,
    /// Where the groups of carried sequences begin, and where the last one ends.
    groups: Vec<u32>,
    /// Which of them have been carried to the end.
    carried: Vec<AtomicBool>,
    whole: Whole,
    /// The rows that the last layer ends with, and where they are in the batch.
    picked: Whole,
    picks: Vec<usize>,
    pooled: [Matrix; 2],
    rooms: Vec<Room>,
}

impl Arena {
    /// For batches of this model.
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

/// One token in the tables of embeddings.
struct Token {
    id: u32,
    kind: u32,
    position: usize,
}

/// One thread's own memory.
#[derive(Default)]
struct Room {
    attention: AttentionRoom,
    linear: LinearScratch,
    /// What a block of a tall batch needs between two attentions.
    block: [Matrix; 2],
    /// What carried sequences need beside it.
    carried: Carried,
}

/// One thread's memory for attention, in numbers and in bytes.
#[derive(Default)]
struct AttentionRoom {
    numbers: AttentionScratch,
    bytes: ByteAttentionScratch,
}

impl Room {
    /// The counts of what its thread does.
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

/// What goes between the steps of a batch.
pub(super) trait Between: Sync {
    /// Whether there is something. Any thread may ask.
    fn is_due(&self) -> bool;
    /// Does it, by these threads, which have nothing to do meanwhile.
    fn run(&mut self, threads: &mut Threads);
}

/// A batch that nothing interrupts.
pub(super) struct Nothing;

impl Between for Nothing {
    fn is_due(&self) -> bool {
        false
    }

    fn run(&mut self, _threads: &mut Threads) {}
}

/// The threads, and the room of each.
struct Crew<'a> {
    threads: &'a mut Threads,
    rooms: &'a mut [Room],
}

impl Crew<'_> {
    /// Into how many blocks so many rows are cut, if they are tall.
    fn blocks(&self, rows: usize) -> Option<usize> {
        let threads = self.threads.count();
        // The same number of blocks for each thread: none waits for the last one.
        (rows >= TALL_ROWS * threads).then(|| rows.div_ceil(BLOCK_ROWS).next_multiple_of(threads))
    }

    /// Lets something else go first, if there is anything.
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
    /// Computes a batch that was checked, as ever, and tells what it took.
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

    /// Computes a batch that was checked; `out` has the size of what is wanted.
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

    /// From tokens to the first attention.
    fn begin(&self, step: &Step<'_>, crew: &mut Crew<'_>, whole: &mut Whole) {
        whole.resize(step.tokens.len(), &self.architecture);
        match crew.blocks(whole.rows()) {
            Some(blocks) => crew.each(whole.blocks(blocks), |room, parts| {
                step.begin(&mut Block::new(self, &mut room.linear, &mut room.block, parts));
            }),
            None => step.begin(&mut whole.by_all(self, crew)),
        }
    }

    /// From the attention of this layer to the next one's, or to the end.
    fn follow(&self, step: &Step<'_>, crew: &mut Crew<'_>, whole: &mut Whole, index: usize) {
        match crew.blocks(whole.rows()) {
            Some(blocks) => crew.each(whole.blocks(blocks), |room, parts| {
                step.follow(&mut Block::new(self, &mut room.linear, &mut room.block, parts), index);
            }),
            None => step.follow(&mut whole.by_all(self, crew), index),
        }
    }

    /// Attention of every head over every sequence, by all threads.
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

    /// Attention of some heads over one sequence: those of `out`.
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
