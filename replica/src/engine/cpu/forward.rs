//! One batch through a BERT.
//!
//! Two ways through a layer, the same arithmetic, chosen by the number of tokens:
//!
//! * A *tall* batch has rows for all threads. Rows are cut into blocks, and a thread carries its block through
//!   everything between two attentions: gather, normalise, expand, contract, normalise, and the next layer's
//!   projections. The wide rows in the middle of the feed-forward block exist for one block at a time and never leave
//!   the thread's own cache. Threads meet twice per layer.
//! * A *flat* batch, in the extreme one short text, has too few rows. Then columns are cut, so that each thread reads its
//!   own part of the weights instead of all threads reading all of them, and threads meet after every step.
//!
//! Attention, which alone looks beyond its row, is cut by sequence and head in both.
//!
//! Which way is taken, how blocks are cut and who computes them changes no sum: see [`Product`].

use super::kernel::{Attention, AttentionScratch, Finish, Isa, Norm, Normalize, PoolRows, Product};
use super::matrix::{Cut, Matrix, Parts, Tiles, View, Window};
use super::panels::PANEL;
use super::threads::Threads;
use super::weights::{BertWeights, Linear};
use crate::engine::RaggedBatch;
use crate::model::{BertConfig, SentenceConfig};

/// Rows of a block of a tall batch: eleven full tiles. Weights, which come from far away, are used as many times for each
/// time that they are fetched; and the expanded rows of a block of MiniLM, 792 KiB, fit the thread's second-level cache.
const BLOCK_ROWS: usize = 132;

/// With fewer rows than this for each thread a batch is flat: below it reading weights takes longer than computing.
const TALL_ROWS: usize = 24;

/// Parts of a flat product per thread, so that a thread that was interrupted holds up little.
const FLAT_PARTS: usize = 3;

/// A BERT, ready to compute.
pub(super) struct Bert {
    pub(super) isa: Isa,
    pub(super) config: BertConfig,
    pub(super) sentence: SentenceConfig,
    pub(super) weights: BertWeights,
}

/// Memory for one batch. It grows to the largest one and is then not allocated again.
#[derive(Default)]
pub(super) struct Arena {
    tokens: Vec<Token>,
    activations: Activations,
    rooms: Vec<Room>,
}

/// One token in the tables of embeddings.
struct Token {
    id: u32,
    kind: u32,
    position: usize,
}

/// What is computed, a row per token.
#[derive(Default)]
struct Activations {
    /// What layers hand to each other.
    states: Matrix,
    /// Queries, keys and values.
    projections: Matrix,
    /// What attention came to.
    attended: Matrix,
    /// The wide rows of a flat batch.
    expanded: Matrix,
}

/// One thread's own memory.
#[derive(Default)]
struct Room {
    attention: AttentionScratch,
    /// The wide rows of a block of a tall batch.
    expanded: Matrix,
}

/// The threads, and the room of each.
struct Crew<'a> {
    threads: &'a mut Threads,
    rooms: &'a mut [Room],
}

impl Crew<'_> {
    fn each<P: Parts>(&mut self, parts: P, work: impl Fn(&mut Room, P::Part) + Sync) {
        self.threads.for_each(self.rooms, parts, work);
    }
}

impl Bert {
    /// Computes a batch that was checked; `out` has a row per sequence.
    pub(super) fn run(
        &self,
        threads: &mut Threads,
        arena: &mut Arena,
        batch: &RaggedBatch<'_>,
        out: &mut [f32],
    ) {
        let Arena { tokens, activations, rooms } = arena;
        tokens.clear();
        tokens.extend(tokens_of(batch));
        rooms.resize_with(threads.count(), Room::default);
        let mut crew = Crew { threads, rooms };
        if tokens.len() >= TALL_ROWS * crew.threads.count() {
            self.tall(&mut crew, activations, tokens, batch.offsets());
        } else {
            self.flat(&mut crew, activations, tokens, batch.offsets());
        }
        self.pool(&mut crew, &activations.states, batch.offsets(), out);
    }

    fn tall(&self, crew: &mut Crew<'_>, activations: &mut Activations, tokens: &[Token], offsets: &[u32]) {
        let Activations { states, projections, attended, .. } = activations;
        let (rows, hidden) = (tokens.len(), self.config.hidden);
        states.resize(rows, hidden);
        projections.resize(rows, 3 * hidden);
        // The same number of blocks for each thread: none waits for the last one.
        let blocks = rows.div_ceil(BLOCK_ROWS).next_multiple_of(crew.threads.count());
        let layers = &self.weights.layers;
        crew.each(blocks_of(blocks, states, projections), |_, (mut states, mut projections)| {
            self.embed(tokens, &mut states);
            self.linear(states.view(), &layers[0].project, Finish::Store, &mut projections);
        });
        for (index, layer) in layers.iter().enumerate() {
            self.attend(crew, projections, offsets, attended);
            crew.each(blocks_of(blocks, states, projections), |room, (mut states, mut projections)| {
                let attended = attended.view(states.rows());
                self.linear(attended, &layer.gather, Finish::Add, &mut states);
                self.normalize(&layer.norm, &mut states);
                room.expanded.resize(attended.rows(), self.config.intermediate);
                let mut expanded = room.expanded.window();
                self.linear(states.view(), &layer.expand, self.activate(), &mut expanded);
                self.linear(expanded.view(), &layer.contract, Finish::Add, &mut states);
                self.normalize(&layer.final_norm, &mut states);
                if let Some(next) = layers.get(index + 1) {
                    self.linear(states.view(), &next.project, Finish::Store, &mut projections);
                }
            });
        }
    }

    fn flat(&self, crew: &mut Crew<'_>, activations: &mut Activations, tokens: &[Token], offsets: &[u32]) {
        let Activations { states, projections, attended, expanded } = activations;
        let (rows, hidden) = (tokens.len(), self.config.hidden);
        states.resize(rows, hidden);
        projections.resize(rows, 3 * hidden);
        expanded.resize(rows, self.config.intermediate);
        let each_row = Cut::even(rows, rows, 1);
        crew.each(states.tiles(each_row, Cut::whole(hidden)), |_, mut states| {
            self.embed(tokens, &mut states);
        });
        for layer in &self.weights.layers {
            self.product(crew, states, &layer.project, Finish::Store, projections);
            self.attend(crew, projections, offsets, attended);
            self.product(crew, attended, &layer.gather, Finish::Add, states);
            crew.each(states.tiles(each_row, Cut::whole(hidden)), |_, mut states| {
                self.normalize(&layer.norm, &mut states);
            });
            self.product(crew, states, &layer.expand, self.activate(), expanded);
            self.product(crew, expanded, &layer.contract, Finish::Add, states);
            crew.each(states.tiles(each_row, Cut::whole(hidden)), |_, mut states| {
                self.normalize(&layer.final_norm, &mut states);
            });
        }
    }

    /// A linear layer over a whole matrix, by all threads.
    fn product(
        &self,
        crew: &mut Crew<'_>,
        input: &Matrix,
        linear: &Linear,
        finish: Finish,
        out: &mut Matrix,
    ) {
        let (rows, width) = (out.rows(), out.width());
        let blocks = Cut::even(rows, rows.div_ceil(BLOCK_ROWS), 1);
        let columns = Cut::even(width, FLAT_PARTS * crew.threads.count(), PANEL);
        crew.each(out.tiles(blocks, columns), |_, mut out| {
            self.linear(input.view(out.rows()), linear, finish, &mut out);
        });
    }

    /// Attention of every head over every sequence, by all threads.
    fn attend(&self, crew: &mut Crew<'_>, projections: &Matrix, offsets: &[u32], attended: &mut Matrix) {
        let hidden = self.config.hidden;
        attended.resize(projections.rows(), hidden);
        let heads = Cut::even(hidden, self.config.heads, self.config.head_width());
        crew.each(attended.tiles(Cut::At(offsets), heads), |room, mut out| {
            self.isa.run(Attention {
                projections: projections.view(out.rows()),
                out: &mut out,
                scratch: &mut room.attention,
            });
        });
    }

    /// One vector per sequence, by all threads.
    fn pool(&self, crew: &mut Crew<'_>, states: &Matrix, offsets: &[u32], out: &mut [f32]) {
        let hidden = self.config.hidden;
        let sequences = offsets.len() - 1;
        let each = Cut::even(sequences, sequences, 1);
        crew.each(Tiles::new(out, hidden, each, Cut::whole(hidden)), |_, mut out| {
            for (index, sequence) in out.rows().enumerate() {
                let rows = offsets[sequence] as usize..offsets[sequence + 1] as usize;
                self.isa.run(PoolRows {
                    pooling: self.sentence.pooling,
                    normalize: self.sentence.normalize,
                    rows: states.view(rows),
                    out: out.row_mut(index),
                });
            }
        });
    }

    fn embed(&self, tokens: &[Token], out: &mut Window<'_>) {
        let BertWeights { words, kinds, positions, norm, .. } = &self.weights;
        for (index, token) in tokens[out.rows()].iter().enumerate() {
            let word = words.row(token.id as usize);
            let kind = kinds.row(token.kind as usize);
            let position = positions.row(token.position);
            let parts = word.iter().zip(kind).zip(position);
            for (out, ((word, kind), position)) in out.row_mut(index).iter_mut().zip(parts) {
                let meaning = f32::from_le_bytes(*word) + f32::from_le_bytes(*kind);
                *out = meaning + f32::from_le_bytes(*position);
            }
        }
        self.normalize(norm, out);
    }

    fn linear(&self, input: View<'_>, linear: &Linear, finish: Finish, out: &mut Window<'_>) {
        self.isa.run(Product {
            input,
            weights: self.weights.matrix(linear),
            bias: &linear.bias,
            finish,
            out,
        });
    }

    fn normalize(&self, norm: &Norm, rows: &mut Window<'_>) {
        self.isa.run(Normalize { norm, rows });
    }

    fn activate(&self) -> Finish {
        Finish::Activate(self.config.activation)
    }
}

/// The same blocks of rows of both.
fn blocks_of<'a>(
    blocks: usize,
    states: &'a mut Matrix,
    projections: &'a mut Matrix,
) -> (Tiles<'a>, Tiles<'a>) {
    let rows = Cut::even(states.rows(), blocks, 1);
    let (hidden, wide) = (Cut::whole(states.width()), Cut::whole(projections.width()));
    (states.tiles(rows, hidden), projections.tiles(rows, wide))
}

fn tokens_of<'a>(batch: &RaggedBatch<'a>) -> impl Iterator<Item = Token> + 'a {
    let (ids, types) = (batch.token_ids(), batch.type_ids());
    batch.sequences().flat_map(move |sequence| {
        let start = sequence.start;
        sequence.map(move |index| Token {
            id: ids[index],
            kind: types.map_or(0, |types| types[index]),
            position: index - start,
        })
    })
}
