//! Priorities of requests: interactive requests, for which a person waits, and bulk, which needs throughput.
//!
//! A client states the priority (`x-meridian-priority`). Without the header the size decides: a request with more than
//! some dozen inputs is filling an index. The operator configures what a tenant may use, which leads to:
//!
//! | requested | the tenant may use both | interactive only | bulk only |
//! |---|---|---|---|
//! | `interactive` | interactive | interactive | **bulk** |
//! | `bulk` | bulk | **rejected** | bulk |
//! | none | by its size | interactive | bulk |
//!
//! Bulk is the same service with less urgency, so a tenant without interactive priority gets bulk, and the response
//! says so: a client library that labels everything interactive needs no change to run under a bulk tenant. The other
//! direction would give urgency to a request that declares to need none, and a tenant without bulk has no capacity for
//! backfills on purpose: such a request is rejected.

use replica_api::priority::{Priority, of_size};

/// Priorities that a tenant may use: at least one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priorities {
    /// Both.
    #[default]
    Both,
    /// This one.
    Only(Priority),
}

/// A tenant without the bulk priority requested it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoBulk;

impl Priorities {
    /// Returns the priority of a request with this header and number of inputs.
    pub fn priority(self, requested: Option<Priority>, inputs: u64) -> Result<Priority, NoBulk> {
        match (self, requested) {
            (Priorities::Both, Some(requested)) => Ok(requested),
            (Priorities::Both, None) => Ok(of_size(inputs)),
            (Priorities::Only(Priority::Interactive), Some(Priority::Bulk)) => Err(NoBulk),
            (Priorities::Only(only), Some(_) | None) => Ok(only),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Priority::{Bulk, Interactive};
    use replica_api::priority::INTERACTIVE_INPUTS;

    #[test]
    fn a_request_gets_a_priority_of_its_tenant() {
        let check = |requested: Option<Priority>, inputs: u64, expected: [Result<Priority, NoBulk>; 3]| {
            let priorities = [Priorities::Both, Priorities::Only(Interactive), Priorities::Only(Bulk)];
            assert_eq!(
                priorities.map(|priorities| priorities.priority(requested, inputs)),
                expected,
                "{requested:?}, {inputs}"
            );
        };
        let many = INTERACTIVE_INPUTS + 1;
        check(Some(Interactive), many, [Ok(Interactive), Ok(Interactive), Ok(Bulk)]);
        check(Some(Bulk), 1, [Ok(Bulk), Err(NoBulk), Ok(Bulk)]);
        check(None, INTERACTIVE_INPUTS, [Ok(Interactive), Ok(Interactive), Ok(Bulk)]);
        check(None, many, [Ok(Bulk), Ok(Interactive), Ok(Bulk)]);
    }
}
