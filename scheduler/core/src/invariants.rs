//! Named invariants, as functions. What makes a decision asserts them, properties check them after each step, and a test
//! breaks them on purpose.

use regions::{Generation, RegionSet};

/// A route table does not supersede the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("generation {next} does not supersede {previous}, which came before it")]
pub struct NotMonotone {
    /// The one in hand.
    pub previous: Generation,
    /// The one that came after it.
    pub next: Generation,
}

/// **Monotone plans**: (epoch, number) only rises at each reader.
pub fn monotone(previous: Generation, next: Generation) -> Result<(), NotMonotone> {
    if next > previous { Ok(()) } else { Err(NotMonotone { previous, next }) }
}

/// More of a region's room is given out than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given} tokens are granted where {held} are held already and {spare} were spare")]
pub struct NotRationed {
    /// What the region can take for a period beyond what comes by itself, in tokens.
    pub spare: u64,
    /// What others may send already.
    pub held: u64,
    /// What is given out now.
    pub given: u64,
}

/// **Rationed spill**: whatever is given out is taken from the spare room that nobody else holds.
pub fn rationed(spare: u64, held: u64, given: u64) -> Result<(), NotRationed> {
    if given <= spare.saturating_sub(held) { Ok(()) } else { Err(NotRationed { spare, held, given }) }
}

/// Requests may be sent to where not every reader knows that they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("requests may be sent to {} regions of which a reader has not heard that they may", unheard.len())]
pub struct NotHeard {
    /// Where.
    pub unheard: RegionSet,
}

/// **Heard before widened**: where the table lets a request be sent, a reader of an older one takes it.
pub fn heard(sent: RegionSet, taken: RegionSet) -> Result<(), NotHeard> {
    if sent.is_subset(&taken) { Ok(()) } else { Err(NotHeard { unheard: sent.minus(taken) }) }
}

/// More is held than may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{requests} requests of {bytes} bytes are held where {requests_max} of {bytes_max} may be")]
pub struct NotBounded {
    /// What is held.
    pub requests: usize,
    /// What may be.
    pub requests_max: usize,
    /// What is held.
    pub bytes: u64,
    /// What may be.
    pub bytes_max: u64,
}

/// **Bounded**: what is held for replicas that are not ready stays within its limits.
pub fn held_within(
    requests: usize,
    bytes: u64,
    requests_max: usize,
    bytes_max: u64,
) -> Result<(), NotBounded> {
    let within = requests <= requests_max && bytes <= bytes_max;
    if within { Ok(()) } else { Err(NotBounded { requests, requests_max, bytes, bytes_max }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::RegionIndex;

    #[test]
    fn a_region_that_a_reader_has_not_heard_of_breaks_heard_before_widened() {
        let set = |ordinals: &[usize]| ordinals.iter().filter_map(|at| RegionIndex::new(*at)).collect();
        assert_eq!(heard(set(&[1]), set(&[1, 2])), Ok(()));
        assert_eq!(heard(set(&[]), set(&[])), Ok(()));
        assert_eq!(heard(set(&[1, 3]), set(&[1, 2])), Err(NotHeard { unheard: set(&[3]) }));
    }

    #[test]
    fn a_table_that_does_not_rise_breaks_monotone_plans() {
        for (previous, next, rises) in [
            ("1.4", "1.5", true),
            ("1.4", "2.0", true),
            ("1.4", "1.4", false),
            ("1.4", "1.3", false),
            ("2.0", "1.9", false),
        ] {
            let (previous, next) = (previous.parse().unwrap(), next.parse().unwrap());
            let expected = if rises { Ok(()) } else { Err(NotMonotone { previous, next }) };
            assert_eq!(monotone(previous, next), expected);
        }
    }

    #[test]
    fn a_grant_of_what_another_holds_breaks_rationed_spill() {
        assert_eq!(rationed(10, 4, 6), Ok(()));
        assert_eq!(rationed(10, 4, 7), Err(NotRationed { spare: 10, held: 4, given: 7 }));
        // Less is spare than was when the others were given theirs: nothing more until they have asked again.
        assert_eq!(rationed(3, 4, 0), Ok(()));
        assert_eq!(rationed(3, 4, 1), Err(NotRationed { spare: 3, held: 4, given: 1 }));
    }

    #[test]
    fn one_request_or_one_byte_too_many_breaks_bounded() {
        assert_eq!(held_within(3, 9, 3, 9), Ok(()));
        let broken = |requests, bytes| Err(NotBounded { requests, requests_max: 3, bytes, bytes_max: 9 });
        assert_eq!(held_within(4, 9, 3, 9), broken(4, 9));
        assert_eq!(held_within(3, 10, 3, 9), broken(3, 10));
    }
}
