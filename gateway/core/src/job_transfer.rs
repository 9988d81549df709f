//! Selection of the region that computes a request of a job, if the region of its queue does not compute it in time.
//!
//! ```text
//!  filter (reason) ──▶ score (order of the deployment, distance) ──▶ pick
//! ```
//!
//! The request passes from the region of the queue through this gateway to the target, so the residency policy must allow all
//! three. Residency is a filter. Of the other regions those take part that have a ready replica, are healthy, and have granted
//! credit as for spillover ([`crate::spill`]): a region grants the speed of its replicas without its own arrivals, so
//! transferred requests use what interactive requests leave. A region whose speed is not measured grants nothing; it takes
//! part while it has no work, so that its speed is measured.
//!
//! Load is no score: of two regions with spare capacity the nearer one returns the result sooner, and credit moves the next
//! request to the other one.

use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use scheduler_api::report::DeploymentLoad;
use std::time::Duration;

/// Jobs whose region has too many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferQuery {
    /// Region of the queue.
    pub queue: RegionIndex,
    /// Region of this gateway.
    pub gateway: RegionIndex,
    /// Regions that the residency policy permits.
    pub permitted: RegionSet,
    /// Those of them that may compute the deployment.
    pub allowed: RegionSet,
    /// Whether the residency policy has a condition.
    pub is_locked: bool,
}

/// Region that may compute a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferCandidate {
    /// Index of the region.
    pub region: RegionIndex,
    /// Health for the deployment.
    pub health: Health,
    /// Whether it is being drained.
    pub is_draining: bool,
    /// Load of the deployment by its last report.
    pub load: DeploymentLoad,
    /// Tokens that it has granted and that are not spent.
    pub credit: u64,
    /// Index in the order of the deployment; equal for all without one.
    pub order_index: usize,
    /// Network round-trip time.
    pub rtt: Duration,
}

/// Reason for which a region does not compute a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferRejection {
    /// It has the queue.
    QueueRegion,
    /// The residency policy does not allow it.
    ForbiddenByResidency,
    /// It is suspect, down, or ejected.
    Unhealthy,
    /// It is being drained.
    Draining,
    /// It has no ready replica. Jobs of one region do not start replicas in another one.
    NoReadyReplica,
    /// It has granted no credit.
    NoCredit,
}

impl TransferQuery {
    /// Returns whether the content of the jobs may pass through this gateway.
    pub fn is_gateway_permitted(&self) -> bool {
        let is_permitted = |region| self.permitted.contains(region);
        is_permitted(self.queue) && (!self.is_locked || is_permitted(self.gateway))
    }

    /// Returns the reason for which a region does not compute the request; `None` if it may.
    pub fn rejection(&self, candidate: &TransferCandidate) -> Option<TransferRejection> {
        let TransferCandidate { region, health, is_draining, load, credit, order_index: _, rtt: _ } =
            candidate;
        let is_idle = load.tokens_per_second == 0.0 && load.pending_tokens == 0;
        let reasons = [
            (*region == self.queue, TransferRejection::QueueRegion),
            (
                !self.permitted.contains(*region) || !self.allowed.contains(*region),
                TransferRejection::ForbiddenByResidency,
            ),
            (*health != Health::Healthy, TransferRejection::Unhealthy),
            (*is_draining, TransferRejection::Draining),
            (load.ready == 0 || load.ready_in.is_some(), TransferRejection::NoReadyReplica),
            (*credit == 0 && !is_idle, TransferRejection::NoCredit),
        ];
        reasons.into_iter().find(|(applies, _)| *applies).map(|(_, reason)| reason)
    }

    /// Returns the first region in the order of the deployment, or else the nearest one, that may compute the request.
    pub fn target(
        &self,
        candidates: impl IntoIterator<Item = TransferCandidate>,
    ) -> Option<TransferCandidate> {
        if !self.is_gateway_permitted() {
            return None;
        }
        let candidates = candidates.into_iter().filter(|candidate| self.rejection(candidate).is_none());
        candidates.min_by_key(|candidate| (candidate.order_index, candidate.rtt, candidate.region))
    }
}

/// Share of a group of jobs in the transfers of a gateway. The order of the fields is the preference: the least first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransferShare {
    /// Transfers that are running.
    pub running: usize,
    /// Number of the last one in the order of their starts; 0 if none has started.
    pub last_started: u64,
}

/// Returns the position of the group that gets the next slot: of those with less than `max` transfers the one with the smallest
/// share, and the first of several with the same.
pub fn next_group(shares: impl IntoIterator<Item = TransferShare>, max: usize) -> Option<usize> {
    let shares = shares.into_iter().enumerate().filter(|(_, share)| share.running < max);
    shares.min_by_key(|(at, share)| (*share, *at)).map(|(at, _)| at)
}

/// Attempts to return a result to the region of the queue, and after these to return the ticket without it.
pub const RETURN_ATTEMPTS: u32 = 3;

/// Step of a gateway after it has sent a result to the region of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnStep {
    /// The ticket has ended.
    Ended,
    /// The gateway sends the result again.
    Repeat,
    /// The gateway returns the ticket without the result, so that the request is computed again and no attempt counts.
    WithoutResult,
    /// The ticket expires, which counts as a failed attempt.
    GiveUp,
}

/// Decides what follows attempt number `attempt`, from 1, to return a result. `status` is that of the response, if there was one.
///
/// A region that is overloaded, for example because the memory for bodies is in use, does not reject this result, so the job
/// is not at fault. Any other error may have the result as its cause: without counting, such a job would be computed for ever.
pub fn after_return(status: Option<u16>, attempt: u32) -> ReturnStep {
    match status {
        // 404: it had ended before.
        Some(200 | 404) => ReturnStep::Ended,
        _ if attempt < RETURN_ATTEMPTS => ReturnStep::Repeat,
        Some(429 | 503) => ReturnStep::WithoutResult,
        Some(_) | None => ReturnStep::GiveUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(index: usize) -> RegionIndex {
        regions::catalogue::Catalogue::builtin().all().iter().nth(index).unwrap()
    }

    fn set(indexes: &[usize]) -> RegionSet {
        indexes.iter().map(|index| region(*index)).collect()
    }

    /// Queue in region 0, gateway in region 1.
    fn query(permitted: &[usize], is_locked: bool) -> TransferQuery {
        let permitted = set(permitted);
        TransferQuery { queue: region(0), gateway: region(1), permitted, allowed: permitted, is_locked }
    }

    fn candidate(index: usize) -> TransferCandidate {
        let load = DeploymentLoad { ready: 1, tokens_per_second: 1000.0, ..DeploymentLoad::default() };
        TransferCandidate {
            region: region(index),
            health: Health::Healthy,
            is_draining: false,
            load,
            credit: 1,
            order_index: 0,
            rtt: Duration::from_millis(10 * index as u64),
        }
    }

    #[test]
    fn the_nearest_region_with_spare_capacity_computes_the_request() {
        let query = query(&[0, 1, 2, 3], false);
        let target = |candidates: &[TransferCandidate]| {
            query.target(candidates.iter().copied()).map(|target| target.region)
        };
        assert_eq!(target(&[candidate(3), candidate(2), candidate(0)]), Some(region(2)));
        let without_credit = TransferCandidate { credit: 0, ..candidate(2) };
        assert_eq!(target(&[candidate(3), without_credit]), Some(region(3)));
        assert_eq!(target(&[]), None);
        let in_order = |index, order_index| TransferCandidate { order_index, ..candidate(index) };
        assert_eq!(
            target(&[in_order(2, 1), in_order(3, 0)]),
            Some(region(3)),
            "the order comes before distance"
        );
    }

    #[test]
    fn every_other_region_is_rejected_with_the_reason() {
        let query = query(&[0, 1, 2], false);
        let load = candidate(2).load;
        for (rejected, reason) in [
            (candidate(0), TransferRejection::QueueRegion),
            (candidate(3), TransferRejection::ForbiddenByResidency),
            (TransferCandidate { health: Health::Suspect, ..candidate(2) }, TransferRejection::Unhealthy),
            (TransferCandidate { is_draining: true, ..candidate(2) }, TransferRejection::Draining),
            (
                TransferCandidate { load: DeploymentLoad { ready: 0, ..load }, ..candidate(2) },
                TransferRejection::NoReadyReplica,
            ),
            (
                TransferCandidate {
                    load: DeploymentLoad { ready_in: Some(Duration::ZERO), ..load },
                    ..candidate(2)
                },
                TransferRejection::NoReadyReplica,
            ),
            (TransferCandidate { credit: 0, ..candidate(2) }, TransferRejection::NoCredit),
        ] {
            assert_eq!(query.rejection(&rejected), Some(reason));
            assert_eq!(query.target([rejected]), None);
        }
        let only_here = TransferQuery { allowed: set(&[0]), ..query };
        assert_eq!(only_here.rejection(&candidate(2)), Some(TransferRejection::ForbiddenByResidency));
    }

    #[test]
    fn a_region_without_a_measured_speed_gets_requests_while_it_has_none() {
        let unmeasured = DeploymentLoad { ready: 1, ..DeploymentLoad::default() };
        let query = query(&[0, 1, 2], false);
        let idle = TransferCandidate { load: unmeasured, credit: 0, ..candidate(2) };
        assert_eq!(query.rejection(&idle), None);
        let busy = TransferCandidate { load: DeploymentLoad { pending_tokens: 1, ..unmeasured }, ..idle };
        assert_eq!(query.rejection(&busy), Some(TransferRejection::NoCredit));
    }

    #[test]
    fn each_group_gets_a_slot_before_another_one_gets_its_second() {
        let share = |running, last_started| TransferShare { running, last_started };
        let next = |shares: &[TransferShare]| next_group(shares.iter().copied(), 8);
        assert_eq!(next(&[share(0, 0), share(0, 0)]), Some(0), "in the order of the queue");
        assert_eq!(next(&[share(1, 1), share(0, 0)]), Some(1));
        assert_eq!(next(&[share(1, 2), share(1, 1)]), Some(1));
        assert_eq!(
            next(&[share(0, 7), share(0, 0)]),
            Some(1),
            "the slot of a group that has ended goes to another"
        );
        assert_eq!(next(&[share(7, 1), share(8, 0)]), Some(0));
        assert_eq!(next(&[share(8, 1)]), None, "at the limit");
        assert_eq!(next(&[]), None);
    }

    #[test]
    fn a_result_for_which_a_region_has_no_memory_is_no_failure_of_the_job() {
        for status in [200, 404] {
            assert_eq!(after_return(Some(status), 1), ReturnStep::Ended, "{status}");
        }
        for status in [Some(429), Some(503), Some(413), Some(500), None] {
            assert_eq!(after_return(status, RETURN_ATTEMPTS - 1), ReturnStep::Repeat, "{status:?}");
        }
        for status in [429, 503] {
            assert_eq!(after_return(Some(status), RETURN_ATTEMPTS), ReturnStep::WithoutResult, "{status}");
        }
        for status in [Some(413), Some(500), None] {
            assert_eq!(after_return(status, RETURN_ATTEMPTS), ReturnStep::GiveUp, "{status:?}");
        }
    }

    #[test]
    fn locked_jobs_pass_only_through_a_gateway_in_an_allowed_region() {
        let target = |query: TransferQuery| query.target([candidate(2)]).map(|target| target.region);
        assert_eq!(target(query(&[0, 1, 2], true)), Some(region(2)));
        assert_eq!(target(query(&[0, 2], true)), None, "the gateway");
        assert_eq!(target(query(&[0, 1], true)), None, "the target");
        assert_eq!(target(query(&[1, 2], true)), None, "the region of the queue");
    }

    proptest! {
        /// Invariant 1 (Residency).
        #[test]
        fn no_forbidden_region_is_selected(
            permitted in prop::collection::btree_set(0usize..6, 0..6),
            allowed in prop::collection::btree_set(0usize..6, 0..6),
            queue in 0usize..6, gateway in 0usize..6, is_locked: bool,
        ) {
            let set = |indexes: &std::collections::BTreeSet<usize>| indexes.iter().map(|index| region(*index)).collect();
            let query = TransferQuery {
                queue: region(queue), gateway: region(gateway), permitted: set(&permitted), allowed: set(&allowed), is_locked,
            };
            if let Some(target) = query.target((0..6).map(candidate)) {
                prop_assert!(query.permitted.contains(target.region) && query.allowed.contains(target.region));
                prop_assert!(target.region != query.queue && query.permitted.contains(query.queue));
                prop_assert!(!is_locked || query.permitted.contains(query.gateway));
            }
        }
    }
}
