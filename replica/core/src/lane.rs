//! Two kinds of traffic in one replica: lookups that somebody waits for, and backfills that want throughput.
//!
//! The caller says which it is (`x-meridian-lane`). Where he says nothing, the size of the request does: a person types
//! one query, a reranker sends some dozen passages, and whoever sends more at once is filling an index.

use std::fmt;

use crate::refusal::Refusal;
use crate::wire::headers;

/// A request of more inputs than this is bulk, unless it says otherwise. The largest batches of lookups that stock
/// clients send by themselves are those of rerankers, some 25 to 100 documents; those of backfills begin at 128 (the
/// stock sizes of the batch clients are 128, 512 and 2048).
pub const INTERACTIVE_INPUTS: usize = 100;

/// Who goes first. The order of the variants is the preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Somebody waits for it.
    Interactive,
    /// It wants throughput.
    Bulk,
}

impl Lane {
    /// Both, in the order of preference.
    pub const ALL: [Lane; 2] = [Lane::Interactive, Lane::Bulk];

    /// The lane of a request of so many inputs, by its header if it has one.
    pub fn of(header: Option<&str>, inputs: usize) -> Result<Lane, Refusal> {
        match header {
            None if inputs > INTERACTIVE_INPUTS => Ok(Lane::Bulk),
            None => Ok(Lane::Interactive),
            Some(given) => Lane::ALL
                .into_iter()
                .find(|lane| lane.as_str() == given.trim())
                .ok_or_else(|| Refusal::invalid_header(headers::LANE, given, "`interactive` or `bulk`")),
        }
    }

    /// As it is written in headers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Lane::Interactive => "interactive",
            Lane::Bulk => "bulk",
        }
    }

    /// The other one.
    pub fn other(self) -> Lane {
        match self {
            Lane::Interactive => Lane::Bulk,
            Lane::Bulk => Lane::Interactive,
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One value for each lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerLane<T> {
    /// [`Lane::Interactive`]
    pub interactive: T,
    /// [`Lane::Bulk`]
    pub bulk: T,
}

impl<T> PerLane<T> {
    /// That of one lane.
    pub fn of(&self, lane: Lane) -> &T {
        match lane {
            Lane::Interactive => &self.interactive,
            Lane::Bulk => &self.bulk,
        }
    }

    /// That of one lane, to change it.
    pub fn of_mut(&mut self, lane: Lane) -> &mut T {
        match lane {
            Lane::Interactive => &mut self.interactive,
            Lane::Bulk => &mut self.bulk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    #[test]
    fn the_header_decides_and_without_it_the_number_of_inputs() {
        assert_eq!(Lane::of(Some("bulk"), 1), Ok(Lane::Bulk));
        assert_eq!(Lane::of(Some(" interactive "), 2048), Ok(Lane::Interactive));
        assert_eq!(Lane::of(None, INTERACTIVE_INPUTS), Ok(Lane::Interactive), "at the limit");
        assert_eq!(Lane::of(None, INTERACTIVE_INPUTS + 1), Ok(Lane::Bulk), "one past it");
    }

    #[test]
    fn a_lane_that_does_not_exist_is_refused_with_those_that_do() {
        for given in ["", "Bulk", "batch"] {
            let refusal = Lane::of(Some(given), 1).expect_err(given);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidHeader, Some(headers::LANE)));
            assert!(refusal.message.contains("`interactive` or `bulk`"), "{}", refusal.message);
        }
    }
}
