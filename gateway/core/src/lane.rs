//! Two kinds of traffic: lookups that somebody waits for, and backfills that want throughput.
//!
//! A client says which it sends (`x-meridian-lane`). Where it says nothing, size does: whoever sends more than some dozen
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
pub enum Lane {
    /// Somebody waits for it.
    Interactive,
    /// It wants throughput.
    Bulk,
}

/// A request of more inputs than this is bulk, unless it says otherwise: the replica's own border. The largest batches of
/// lookups that stock clients send by themselves are those of rerankers, some 25 to 100 documents; backfills begin at 128.
pub const INTERACTIVE_INPUTS_MAX: u64 = 100;

impl Lane {
    /// As headers and configuration have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Lane::Interactive => "interactive",
            Lane::Bulk => "bulk",
        }
    }

    /// The lane of this name.
    pub fn parse(name: &[u8]) -> Option<Lane> {
        match name.trim_ascii() {
            b"interactive" => Some(Lane::Interactive),
            b"bulk" => Some(Lane::Bulk),
            _ => None,
        }
    }

    fn of_size(inputs: u64) -> Lane {
        if inputs > INTERACTIVE_INPUTS_MAX { Lane::Bulk } else { Lane::Interactive }
    }
}

/// The lanes that a tenant may use: at least one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lanes {
    /// Both.
    #[default]
    Both,
    /// This one.
    Only(Lane),
}

/// A tenant without the bulk lane asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoBulk;

impl Lanes {
    /// The lane of a request that asks for `asked` and has so many `inputs`.
    pub fn lane(self, asked: Option<Lane>, inputs: u64) -> Result<Lane, NoBulk> {
        match (self, asked) {
            (Lanes::Both, Some(asked)) => Ok(asked),
            (Lanes::Both, None) => Ok(Lane::of_size(inputs)),
            (Lanes::Only(Lane::Interactive), Some(Lane::Bulk)) => Err(NoBulk),
            (Lanes::Only(only), Some(_) | None) => Ok(only),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Lane::{Bulk, Interactive};

    #[test]
    fn a_tenant_travels_in_a_lane_that_it_has() {
        let check = |asked: Option<Lane>, inputs: u64, expected: [Result<Lane, NoBulk>; 3]| {
            let lanes = [Lanes::Both, Lanes::Only(Interactive), Lanes::Only(Bulk)];
            assert_eq!(lanes.map(|lanes| lanes.lane(asked, inputs)), expected, "{asked:?}, {inputs}");
        };
        let many = INTERACTIVE_INPUTS_MAX + 1;
        check(Some(Interactive), many, [Ok(Interactive), Ok(Interactive), Ok(Bulk)]);
        check(Some(Bulk), 1, [Ok(Bulk), Err(NoBulk), Ok(Bulk)]);
        check(None, INTERACTIVE_INPUTS_MAX, [Ok(Interactive), Ok(Interactive), Ok(Bulk)]);
        check(None, many, [Ok(Bulk), Ok(Interactive), Ok(Bulk)]);
    }

    #[test]
    fn a_lane_has_one_name() {
        for lane in [Interactive, Bulk] {
            assert_eq!(Lane::parse(lane.as_str().as_bytes()), Some(lane));
        }
        assert_eq!(Lane::parse(b" bulk "), Some(Bulk));
        assert_eq!(Lane::parse(b"Bulk"), None);
        assert_eq!(Lane::parse(b""), None);
    }
}
