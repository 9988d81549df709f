//! Priorities of requests: interactive requests, which need low latency, and bulk requests, which need throughput.
//!
//! The client selects one with `x-meridian-priority`. Without the header the size of the request decides: a user types
//! one query, a reranker sends some dozen passages, and a request with more inputs fills an index.

pub use regions::Priority;

use crate::headers;
use crate::refusal::Refusal;

/// A request of more inputs than this is bulk, unless its header selects a priority. The largest interactive batches
/// that stock clients send by default are those of rerankers, some 25 to 100 documents; those of backfills begin at 128
/// (the default sizes of the batch clients are 128, 512 and 2048).
pub const INTERACTIVE_INPUTS: u64 = 100;

/// Returns the priority of a request without the header.
pub fn of_size(inputs: u64) -> Priority {
    if inputs > INTERACTIVE_INPUTS { Priority::Bulk } else { Priority::Interactive }
}

/// Parses the value of the header; spaces around it are ignored.
pub fn parse(header: &[u8]) -> Option<Priority> {
    str::from_utf8(header.trim_ascii()).ok()?.parse().ok()
}

/// Returns the priority of a request with this number of inputs, by its header if it has one.
pub fn of_request(header: Option<&[u8]>, inputs: usize) -> Result<Priority, Refusal> {
    match header {
        None => Ok(of_size(inputs as u64)),
        Some(given) => parse(given).ok_or_else(|| {
            Refusal::invalid_header(
                headers::PRIORITY,
                str::from_utf8(given).unwrap_or("not text"),
                "`interactive` or `bulk`",
            )
        }),
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
    use crate::error::ErrorCode;

    #[test]
    fn the_header_decides_and_without_it_the_number_of_inputs() {
        assert_eq!(of_request(Some(b"bulk"), 1), Ok(Priority::Bulk));
        assert_eq!(of_request(Some(b" interactive "), 2048), Ok(Priority::Interactive));
        assert_eq!(of_request(None, INTERACTIVE_INPUTS as usize), Ok(Priority::Interactive), "at the limit");
        assert_eq!(of_request(None, INTERACTIVE_INPUTS as usize + 1), Ok(Priority::Bulk), "one past it");
    }

    #[test]
    fn an_unknown_priority_is_rejected_with_the_known_ones() {
        for given in ["", "Bulk", "batch"] {
            let refusal = of_request(Some(given.as_bytes()), 1).expect_err(given);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidHeader, Some(headers::PRIORITY)));
            assert!(refusal.message.contains("`interactive` or `bulk`"), "{}", refusal.message);
        }
    }

    #[test]
    fn a_priority_has_one_name() {
        for priority in Priority::ALL {
            assert_eq!(parse(priority.as_str().as_bytes()), Some(priority));
        }
        assert_eq!(parse(b" bulk "), Some(Priority::Bulk));
        assert_eq!([&b"Bulk"[..], b"", b"\xff"].map(parse), [None; 3]);
    }
}
