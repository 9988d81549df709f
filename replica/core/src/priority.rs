//! Two kinds of traffic in one replica: interactive requests, which need low latency, and bulk requests, which need
//! throughput.
//!
//! The caller selects one with `x-meridian-priority`. Without the header the size of the request decides: a user types
//! one query, a reranker sends some dozen passages, and a request with more inputs fills an index.

use std::fmt;

use crate::refusal::Refusal;
use crate::wire::headers;

/// A request of more inputs than this is bulk, unless its header selects a priority. The largest interactive batches
/// that stock clients send by default are those of rerankers, some 25 to 100 documents; those of backfills begin at 128
/// (the default sizes of the batch clients are 128, 512 and 2048).
pub const INTERACTIVE_INPUTS: usize = 100;

/// Priority of a request. The order of the variants is the preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Needs low latency.
    Interactive,
    /// Needs throughput.
    Bulk,
}

impl Priority {
    /// Both priorities, in the order of preference.
    pub const ALL: [Priority; 2] = [Priority::Interactive, Priority::Bulk];

    /// Returns the priority of a request with this number of inputs, by its header if it has one.
    pub fn of(header: Option<&str>, inputs: usize) -> Result<Priority, Refusal> {
        match header {
            None if inputs > INTERACTIVE_INPUTS => Ok(Priority::Bulk),
            None => Ok(Priority::Interactive),
            Some(given) => Priority::ALL
                .into_iter()
                .find(|priority| priority.as_str() == given.trim())
                .ok_or_else(|| Refusal::invalid_header(headers::PRIORITY, given, "`interactive` or `bulk`")),
        }
    }

    /// Returns the name in headers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Interactive => "interactive",
            Priority::Bulk => "bulk",
        }
    }

    /// Returns the other priority.
    pub fn other(self) -> Priority {
        match self {
            Priority::Interactive => Priority::Bulk,
            Priority::Bulk => Priority::Interactive,
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One value for each priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerPriority<T> {
    /// [`Priority::Interactive`]
    pub interactive: T,
    /// [`Priority::Bulk`]
    pub bulk: T,
}

impl<T> PerPriority<T> {
    /// Returns the value of `priority`.
    pub fn of(&self, priority: Priority) -> &T {
        match priority {
            Priority::Interactive => &self.interactive,
            Priority::Bulk => &self.bulk,
        }
    }

    /// Returns the value of `priority`, mutably.
    pub fn of_mut(&mut self, priority: Priority) -> &mut T {
        match priority {
            Priority::Interactive => &mut self.interactive,
            Priority::Bulk => &mut self.bulk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    #[test]
    fn the_header_decides_and_without_it_the_number_of_inputs() {
        assert_eq!(Priority::of(Some("bulk"), 1), Ok(Priority::Bulk));
        assert_eq!(Priority::of(Some(" interactive "), 2048), Ok(Priority::Interactive));
        assert_eq!(Priority::of(None, INTERACTIVE_INPUTS), Ok(Priority::Interactive), "at the limit");
        assert_eq!(Priority::of(None, INTERACTIVE_INPUTS + 1), Ok(Priority::Bulk), "one past it");
    }

    #[test]
    fn an_unknown_priority_is_rejected_with_the_known_ones() {
        for given in ["", "Bulk", "batch"] {
            let refusal = Priority::of(Some(given), 1).expect_err(given);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidHeader, Some(headers::PRIORITY)));
            assert!(refusal.message.contains("`interactive` or `bulk`"), "{}", refusal.message);
        }
    }
}
