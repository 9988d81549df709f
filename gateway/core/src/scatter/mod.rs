//! One request with very many inputs, computed in pieces at many places at once.
//!
//! A request goes to one replica, so a backfill of twenty thousand texts waits for one machine while others of its
//! regions are idle. Here is everything that has to be decided to do better, and none of the doing:
//!
//! ```text
//!  body ──▶ cut ──▶ piece 0 ──▶ region A ──▶ part 0 ─┐
//!            ▲      piece 1 ──▶ region B ──▶ part 1 ─┼─▶ join ──▶ one answer
//!            │      piece 2 ──▶ region A ──▶ part 2 ─┘
//!         spread (how large, where, how many at once)
//! ```
//!
//! - [`cut`] finds the list of inputs in the body's bytes and makes of every run of elements a body that differs from
//!   the original in nothing else.
//! - [`spread`] says how large a piece is worth a round trip and which region takes the next one.
//! - [`join`] makes one answer of the pieces' answers: lists in order with their indices counted on, ranks merged by
//!   score, `usage` summed. It moves bytes and parses no vector.
//!
//! Why at the edge, and not in the client or the region: a client would have to know how many machines there are, and a
//! region knows its own only. Why not a tree of JSON values: it costs ten times the bytes, and a number that is read and
//! written again may come out as another.
//!
//! A piece is a request like any other: the same allowed set, the same deadline, a plan of its own. So whatever holds for
//! requests holds for pieces, the residency policy first.

pub mod cut;
pub mod join;
mod json;
pub mod spread;

/// Inputs of one request at the edge; more is refused by name. Fifty times what a replica takes (`replica_core::limits`),
/// and as many short texts as a body of 32 MiB holds at 330 bytes each: beyond it a file is the better envelope.
pub const INPUTS_MAX: usize = 100_000;
/// Inputs of one request at a replica, `MAX_INPUTS` of `replica_core::limits`. A request of more must be cut.
pub const REPLICA_INPUTS_MAX: usize = 2048;

/// The answer of a path, as far as joining needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A list with one element per input, and nothing around it: TEI's vectors, predictions, tokens.
    Rows,
    /// An object with `data`, one element per input with its `index`, and `usage`: OpenAI, vLLM.
    Data,
    /// A list of `index` and `score`, the best first: TEI's ranks.
    Ranks,
    /// An object with `results` of `index` and `relevance_score`, the best first: Cohere, Jina.
    Results,
}
