//! Splitting of a request with very many inputs into sub-requests that are computed in several places at once.
//!
//! A request is sent to one replica, so a backfill of twenty thousand texts waits for one machine while others in its
//! allowed regions are idle. This module makes all decisions for a split, and performs none:
//!
//! ```text
//!  body ──▶ split ──▶ sub-request 0 ──▶ region A ──▶ response 0 ─┐
//!             ▲       sub-request 1 ──▶ region B ──▶ response 1 ─┼─▶ join ──▶ response
//!             │       sub-request 2 ──▶ region A ──▶ response 2 ─┘
//!         dispatch (how large, where, how many at once)
//! ```
//!
//! - [`split`] finds the list of inputs in the body's bytes and makes of every run of elements a body that differs from
//!   the original in nothing else.
//! - [`dispatch`] decides how large a sub-request has to be to be worth a round trip, and which region takes the next
//!   one.
//! - [`join`] makes one response of those to the sub-requests: lists in order with their indices shifted, ranks merged
//!   by score, `usage` summed. It moves bytes and parses no vector.
//!
//! The split is done at the edge, because a client would have to know the number of machines, and a region knows only
//! its own. It does not use a tree of JSON values, because that costs ten times the bytes, and a number may change when
//! it is parsed and written again.
//!
//! A sub-request is a request like any other: the same allowed regions, the same deadline, a plan of its own. So all
//! guarantees of requests hold for sub-requests, residency first.

pub mod dispatch;
pub mod join;
mod json;
pub mod split;

/// Maximum inputs of one request at the edge. Fifty times what a replica accepts (`replica_api::limits`), and as many
/// short texts as a body of 32 MiB holds at 330 bytes each: beyond it a file is the better format.
pub const INPUTS_MAX: usize = 100_000;
