//! Named invariants, as functions. The deciding code asserts them, property tests check them after each step, and one
//! test for each breaks it on purpose.

use regions::{Generation, RegionSet};

/// Violated invariant: a route table has no higher generation than its predecessor. A defect: report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("generation {next} does not supersede its predecessor {previous}")]
pub struct NotMonotone {
    /// Generation of the current table.
    pub previous: Generation,
    /// Generation of the next table.
    pub next: Generation,
}

/// **Monotonic plans**: (epoch, number) only rises at each reader.
pub fn monotone(previous: Generation, next: Generation) -> Result<(), NotMonotone> {
    if next > previous { Ok(()) } else { Err(NotMonotone { previous, next }) }
}

/// Violated invariant: a region grants more credit than its spare capacity. A defect: report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given} tokens are granted on top of {held} outstanding ones, but only {spare} tokens are spare")]
pub struct SpareCapacityExceeded {
    /// Capacity of the region in one period beyond its own traffic, in tokens.
    pub spare: u64,
    /// Tokens that other gateways may already send.
    pub held: u64,
    /// Tokens of the new grant.
    pub given: u64,
}

/// **Rationed spillover**: a grant is taken from spare capacity that no other grant covers.
pub fn rationed(spare: u64, held: u64, given: u64) -> Result<(), SpareCapacityExceeded> {
    if given <= spare.saturating_sub(held) {
        Ok(())
    } else {
        Err(SpareCapacityExceeded { spare, held, given })
    }
}

/// Violated invariant: a residency policy was widened before all gateways and spokes had acknowledged it. A defect:
/// report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("requests may be sent to {} regions that not every reader has acknowledged as allowed", unacknowledged.len())]
pub struct NotAcknowledged {
    /// The regions.
    pub unacknowledged: RegionSet,
}

/// **Acknowledged before widened**: a reader of the previous table accepts requests wherever the new table sends them.
pub fn acknowledged_before_widened(sent: RegionSet, accepted: RegionSet) -> Result<(), NotAcknowledged> {
    if sent.is_subset(&accepted) {
        Ok(())
    } else {
        Err(NotAcknowledged { unacknowledged: sent.minus(accepted) })
    }
}

/// Violated invariant: an ingress holds more requests than its limits permit. A defect: report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{requests} requests of {bytes} bytes are held; the limits are {requests_max} requests and {bytes_max} bytes"
)]
pub struct NotBounded {
    /// Number of held requests.
    pub requests: usize,
    /// Maximum number of held requests.
    pub requests_max: usize,
    /// Bytes of the held requests.
    pub bytes: u64,
    /// Maximum bytes of the held requests.
    pub bytes_max: u64,
}

/// **Bounded**: requests held for replicas that are not ready stay within their limits.
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
    fn a_region_that_a_reader_has_not_acknowledged_breaks_acknowledged_before_widened() {
        let set = |ordinals: &[usize]| ordinals.iter().filter_map(|at| RegionIndex::new(*at)).collect();
        assert_eq!(acknowledged_before_widened(set(&[1]), set(&[1, 2])), Ok(()));
        assert_eq!(acknowledged_before_widened(set(&[]), set(&[])), Ok(()));
        assert_eq!(
            acknowledged_before_widened(set(&[1, 3]), set(&[1, 2])),
            Err(NotAcknowledged { unacknowledged: set(&[3]) })
        );
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
        assert_eq!(rationed(10, 4, 7), Err(SpareCapacityExceeded { spare: 10, held: 4, given: 7 }));
        // Less is spare than at the time of the other grants: no further grant until those are renewed.
        assert_eq!(rationed(3, 4, 0), Ok(()));
        assert_eq!(rationed(3, 4, 1), Err(SpareCapacityExceeded { spare: 3, held: 4, given: 1 }));
    }

    #[test]
    fn one_request_or_one_byte_too_many_breaks_bounded() {
        assert_eq!(held_within(3, 9, 3, 9), Ok(()));
        let broken = |requests, bytes| Err(NotBounded { requests, requests_max: 3, bytes, bytes_max: 9 });
        assert_eq!(held_within(4, 9, 3, 9), broken(4, 9));
        assert_eq!(held_within(3, 10, 3, 9), broken(3, 10));
    }
}
