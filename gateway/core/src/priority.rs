//! Two kinds of traffic: lookups that somebody waits for, and backfills that want throughput.
//!
//! A client says which it sends (`x-meridian-priority`). Where it says nothing, size does: whoever sends more than some dozen
//! inputs at once is filling an index. What a tenant may is the operator's word, and the two meet so:
//!
//! | asked for | the tenant may do both | interactive only | bulk only |
//! |---|---|---|---|
//! | `interactive` | interactive | interactive | **bulk** |
//! | `bulk` | bulk | **refused** | bulk |
//! | nothing | by its size | interactive | bulk |
//!
//! To travel as bulk is the same service with less urgency, so who asks for more than it has gets what it has, and is told
//! so on the answer: a client library that labels everything interactive needs no change to run under a tenant of
//! backfills. The other way round would give urgency to who said that it needs none, and a tenant without bulk was given
//! no place for backfills on purpose: there a refusal is the answer.

/// Who goes first. The order of the variants is the preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for it.
    Interactive,
    /// It wants throughput.
    Bulk,
}

/// A request of more inputs than this is bulk, unless it says otherwise: the replica's own border. The largest batches of
/// lookups that stock clients send by themselves are those of rerankers, some 25 to 100 documents; backfills begin at 128.
pub const INTERACTIVE_INPUTS_MAX: u64 = 100;

impl Priority {
    /// As headers and configuration have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Interactive => "interactive",
            Priority::Bulk => "bulk",
        }
    }

    /// The priority of this name.
    pub fn parse(name: &[u8]) -> Option<Priority> {
        match name.trim_ascii() {
            b"interactive" => Some(Priority::Interactive),
            b"bulk" => Some(Priority::Bulk),
            _ => None,
        }
    }

    fn of_size(inputs: u64) -> Priority {
        if inputs > INTERACTIVE_INPUTS_MAX { Priority::Bulk } else { Priority::Interactive }
    }
}

/// The priorities that a tenant may use: at least one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priorities {
    /// Both.
    #[default]
    Both,
    /// This one.
    Only(Priority),
}

/// A tenant without the bulk priority asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoBulk;

impl Priorities {
    /// The priority of a request that asks for `asked` and has so many `inputs`.
    pub fn priority(self, asked: Option<Priority>, inputs: u64) -> Result<Priority, NoBulk> {
        match (self, asked) {
            (Priorities::Both, Some(asked)) => Ok(asked),
            (Priorities::Both, None) => Ok(Priority::of_size(inputs)),
            (Priorities::Only(Priority::Interactive), Some(Priority::Bulk)) => Err(NoBulk),
            (Priorities::Only(only), Some(_) | None) => Ok(only),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Priority::{Bulk, Interactive};

    #[test]
    fn a_tenant_travels_in_a_priority_that_it_has() {
        let check = |asked: Option<Priority>, inputs: u64, expected: [Result<Priority, NoBulk>; 3]| {
            let priorities = [Priorities::Both, Priorities::Only(Interactive), Priorities::Only(Bulk)];
            assert_eq!(
                priorities.map(|priorities| priorities.priority(asked, inputs)),
                expected,
                "{asked:?}, {inputs}"
            );
        };
        let many = INTERACTIVE_INPUTS_MAX + 1;
        check(Some(Interactive), many, [Ok(Interactive), Ok(Interactive), Ok(Bulk)]);
        check(Some(Bulk), 1, [Ok(Bulk), Err(NoBulk), Ok(Bulk)]);
        check(None, INTERACTIVE_INPUTS_MAX, [Ok(Interactive), Ok(Interactive), Ok(Bulk)]);
        check(None, many, [Ok(Bulk), Ok(Interactive), Ok(Bulk)]);
    }

    #[test]
    fn a_priority_has_one_name() {
        for priority in [Interactive, Bulk] {
            assert_eq!(Priority::parse(priority.as_str().as_bytes()), Some(priority));
        }
        assert_eq!(Priority::parse(b" bulk "), Some(Bulk));
        assert_eq!(Priority::parse(b"Bulk"), None);
        assert_eq!(Priority::parse(b""), None);
    }
}
