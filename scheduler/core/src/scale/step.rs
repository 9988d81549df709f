//! Reconciliation of a deployment's replicas with their desired number: which ones to start, to drain and to keep.
//!
//! Scaling up: draining replicas are kept first, because they are warm; the rest is started. Scaling down: replicas
//! that are not ready go first, as they have no requests to finish; then those with the fewest requests in flight, the
//! youngest first, so that the same replicas stay and stay warm. Where the platform chooses (a StatefulSet removes its
//! highest ordinal), [`OwnReplica::removal_rank`] takes precedence.
//!
//! Stale replicas ([`OwnReplica::is_stale`]) are replaced in a rolling update: replacements are started, up to a
//! quarter above the desired number at a time, and one stale replica is drained for each replacement that becomes
//! ready, so that the number of serving replicas never falls below the desired one. The desired number is determined as
//! usual; new replicas are never stale. A stale replica that has not become ready serves no requests, so it is drained as soon as
//! that is certain ([`UNREADY_MIN`]): it would keep a port or a device that its replacement needs.
//!
//! A lost replica, frozen or unreachable, is replaced at once but drained only after [`LOST_MAX`]: a replica that is
//! starved of CPU for a moment recovers, and the actuator detects a crash.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::spoke::{LOST_MAX, MemberState};

/// Maximum number of replicas above the desired number during a rolling update.
const SURGE_PERCENT: u32 = 25;

/// [`OwnReplica::removal_rank`] of a replica that is ordered and does not exist yet: it is removed before all others.
pub const ORDERED_RANK: u64 = u64::MAX;

/// Time for which a stale replica must not have been ready before it is drained. After a restart of the spoke, a replica that
/// serves is not known to be ready before its first report.
const UNREADY_MIN: Duration = Duration::from_secs(3);

/// Replica that this region has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnReplica<I> {
    /// Identifier of the replica at its actuator.
    pub id: I,
    /// Order of removal where the platform chooses: the highest goes first.
    pub removal_rank: u64,
    /// The replica runs something else than the current deployment.
    pub is_stale: bool,
    /// Time at which it was ordered.
    pub ordered_at: Instant,
    /// State of the replica.
    pub state: MemberState,
    /// Time since which it has been lost; kept while it drains for that reason.
    pub lost_since: Option<Instant>,
    /// Time since which it has been seen as not yet ready.
    pub pending_since: Option<Instant>,
    /// Requests that were sent to it and have not ended.
    pub in_flight: u32,
}

/// Actions of one reconciliation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step<I> {
    /// Draining replicas that are kept after all.
    pub undrain: BTreeSet<I>,
    /// Replicas to drain; each terminates when its requests have ended.
    pub drain: BTreeSet<I>,
    /// Number of replicas to start.
    pub start: u32,
}

/// Returns the actions that lead to `target` replicas. `others` of them are not managed here: the spoke's file lists
/// them.
pub fn step<I: Clone + Ord>(own: &[OwnReplica<I>], others: u32, target: u32, now: Instant) -> Step<I> {
    let mut step = Step { undrain: BTreeSet::new(), drain: BTreeSet::new(), start: 0 };
    let lost_for_good = |replica: &&OwnReplica<I>| {
        let long = |since: Instant| now.saturating_duration_since(since) >= LOST_MAX;
        replica.state == MemberState::Lost && replica.lost_since.is_some_and(long)
    };
    // Where the platform chooses, it would remove another replica instead.
    let existing = own.iter().map(|replica| replica.removal_rank).filter(|rank| *rank != ORDERED_RANK);
    let highest = existing.max();
    let abandoned = |replica: &&OwnReplica<I>| {
        let long = |since: Instant| now.saturating_duration_since(since) >= UNREADY_MIN;
        replica.is_stale
            && replica.state == MemberState::Pending
            && replica.pending_since.is_some_and(long)
            && Some(replica.removal_rank) == highest
    };
    let ended = |replica: &&OwnReplica<I>| lost_for_good(replica) || abandoned(replica);
    step.drain.extend(own.iter().filter(ended).map(|replica| replica.id.clone()));
    let present = |replica: &&OwnReplica<I>| match replica.state {
        MemberState::Pending | MemberState::Serving => !abandoned(replica),
        MemberState::Lost | MemberState::Draining => false,
    };
    let serving = |replica: &&OwnReplica<I>| replica.state == MemberState::Serving;
    let all = others.saturating_add(own.iter().filter(present).count() as u32);
    let stale = own.iter().filter(present).filter(|it| it.is_stale).count() as u32;
    let fresh = all - stale;
    if target >= fresh {
        let reusable = |it: &&OwnReplica<I>| {
            it.state == MemberState::Draining && !it.is_stale && it.lost_since.is_none()
        };
        let mut draining: Vec<_> = own.iter().filter(reusable).collect();
        // The lowest rank first: the platform removes the highest.
        draining.sort_by_key(|it| (it.removal_rank, it.ordered_at, it.id.clone()));
        let missing = target - fresh;
        step.undrain.extend(draining.into_iter().take(missing as usize).map(|it| it.id.clone()));
        let missing = missing - step.undrain.len() as u32;
        // During a rolling update only the surge may be started.
        let surge = if stale == 0 { missing } else { (target * SURGE_PERCENT).div_ceil(100).max(1) };
        let available = target.saturating_add(surge).saturating_sub(all + step.undrain.len() as u32);
        step.start = missing.min(available);
    }
    let over = if stale == 0 {
        all.saturating_sub(target)
    } else {
        // A replacement counts once it is ready.
        let unready = own.iter().filter(|it| it.state == MemberState::Pending && !it.is_stale).count() as u32;
        all.saturating_sub(unready).saturating_sub(target).max(fresh.saturating_sub(target))
    };
    let mut candidates: Vec<_> = own.iter().filter(present).collect();
    candidates.sort_by_key(|it| {
        let youngest = std::cmp::Reverse((it.ordered_at, it.id.clone()));
        (!it.is_stale, std::cmp::Reverse(it.removal_rank), serving(it), it.in_flight, youngest)
    });
    step.drain.extend(candidates.into_iter().take(over as usize).map(|it| it.id.clone()));
    step
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;
    use std::time::Duration;

    fn own(id: u32, state: MemberState, in_flight: u32, now: Instant) -> OwnReplica<u32> {
        let lost_since = (state == MemberState::Lost).then_some(now);
        let pending_since = (state == MemberState::Pending).then_some(now);
        OwnReplica {
            id,
            removal_rank: 0,
            is_stale: false,
            ordered_at: now + Duration::from_secs(u64::from(id)),
            state,
            lost_since,
            pending_since,
            in_flight,
        }
    }

    /// Checks the step for `replicas`, which are (state, requests in flight), numbered and aged from 1. Expected:
    /// undrain, drain, start.
    #[track_caller]
    fn check(replicas: &[(MemberState, u32)], others: u32, target: u32, expected: (&[u32], &[u32], u32)) {
        let now = some_instant();
        let numbered = (1..).zip(replicas);
        let all: Vec<_> = numbered.map(|(id, (state, busy))| own(id, *state, *busy, now)).collect();
        let Step { undrain, drain, start } = step(&all, others, target, now);
        let (undrain, drain): (Vec<_>, Vec<_>) = (undrain.into_iter().collect(), drain.into_iter().collect());
        assert_eq!((&undrain[..], &drain[..], start), expected);
    }

    use MemberState::{Draining, Lost, Pending, Serving};

    #[test]
    fn a_draining_replica_is_kept_before_another_is_started() {
        check(&[], 0, 3, (&[], &[], 3));
        check(&[(Serving, 0)], 1, 3, (&[], &[], 1));
        check(&[(Serving, 0), (Draining, 2), (Draining, 0)], 0, 2, (&[2], &[], 0));
        check(&[(Serving, 0), (Draining, 2), (Draining, 0)], 0, 5, (&[2, 3], &[], 2));
        check(&[(Serving, 0), (Draining, 2)], 0, 1, (&[], &[], 0));
    }

    #[test]
    fn unready_replicas_are_drained_first_then_the_least_loaded_then_the_youngest() {
        let all = [(Serving, 5), (Serving, 0), (Serving, 0), (Pending, 0), (Pending, 0)];
        check(&all, 0, 4, (&[], &[5], 0));
        check(&all, 0, 3, (&[], &[4, 5], 0));
        check(&all, 0, 2, (&[], &[3, 4, 5], 0));
        check(&all, 0, 1, (&[], &[2, 3, 4, 5], 0));
        check(&all, 0, 0, (&[], &[1, 2, 3, 4, 5], 0));
        check(&all[..1], 2, 1, (&[], &[1], 0));
    }

    #[test]
    fn a_lost_replica_is_replaced_at_once_and_drained_later() {
        check(&[(Serving, 0), (Lost, 3)], 0, 2, (&[], &[], 1));
        let now = some_instant();
        let lost = [own(1, Lost, 3, now)];
        assert!(step(&lost, 0, 1, now + LOST_MAX - Duration::from_millis(1)).drain.is_empty());
        let after = step(&lost, 0, 1, now + LOST_MAX);
        assert_eq!((after.drain, after.start), (BTreeSet::from([1]), 1));
        let draining = [OwnReplica { state: Draining, ..lost[0].clone() }];
        let more = step(&draining, 0, 2, now);
        assert!(more.undrain.is_empty() && more.start == 2, "a lost replica that drains is not reused");
    }

    #[test]
    fn a_stale_replica_that_is_not_ready_frees_its_port_for_its_replacement() {
        let now = some_instant();
        let stale = |id, state| OwnReplica { is_stale: true, ..own(id, state, 0, now) };
        let all = [stale(1, Pending), stale(2, Serving)];
        let early = step(&all, 0, 2, now + UNREADY_MIN - Duration::from_millis(1));
        assert_eq!((early.drain, early.start), (BTreeSet::new(), 1), "it may be ready, and is not known yet");
        let late = step(&all, 0, 2, now + UNREADY_MIN);
        assert_eq!((late.drain, late.start), (BTreeSet::from([1]), 2), "the one that serves stays");
        let ranked = [stale(1, Pending), OwnReplica { removal_rank: 1, ..stale(2, Serving) }];
        assert!(
            step(&ranked, 0, 2, now + UNREADY_MIN).drain.is_empty(),
            "the platform would remove the other"
        );
        let ordered = OwnReplica { removal_rank: ORDERED_RANK, ..own(2, Pending, 0, now) };
        let full = [stale(1, Pending), ordered];
        assert_eq!(
            step(&full, 0, 1, now + UNREADY_MIN).drain,
            BTreeSet::from([1]),
            "the other waits for its device"
        );
        let fresh = [own(1, Pending, 0, now)];
        assert!(step(&fresh, 0, 1, now + 10 * UNREADY_MIN).drain.is_empty(), "it is what is wanted");
    }

    #[test]
    fn the_highest_removal_rank_is_drained_first_even_if_busy() {
        let now = some_instant();
        let ranked: Vec<_> = (0..3)
            .map(|id| OwnReplica { removal_rank: u64::from(id), ..own(id, Serving, id * 10, now) })
            .collect();
        assert_eq!(step(&ranked, 0, 1, now).drain, BTreeSet::from([1, 2]));
        let draining: Vec<_> = ranked.iter().map(|it| OwnReplica { state: Draining, ..it.clone() }).collect();
        assert_eq!(step(&draining, 0, 2, now).undrain, BTreeSet::from([0, 1]), "the lowest stay");
    }

    /// Runs a rolling update from `stale` replicas to `target` current ones, where replicas are ready one evaluation
    /// after their start. Returns the number of evaluations.
    #[track_caller]
    fn rolling_update(stale: u32, target: u32) -> u32 {
        let now = some_instant();
        let mut all: Vec<_> =
            (0..stale).map(|id| OwnReplica { is_stale: true, ..own(id, Serving, 0, now) }).collect();
        let (mut next, mut evaluations) = (stale, 0);
        while all.iter().any(|it| it.is_stale) || all.len() as u32 != target {
            evaluations += 1;
            assert!(evaluations < 500, "does not converge: {all:?}");
            let Step { undrain, drain, start } = step(&all, 0, target, now);
            assert!(undrain.is_empty());
            all.retain(|it| !drain.contains(&it.id));
            let serving = all.iter().filter(|it| it.state == Serving).count() as u32;
            assert!(serving >= target.min(stale), "{serving} of {target} are serving");
            all.iter_mut().for_each(|it| it.state = Serving);
            all.extend((0..start).map(|more| own(next + more, Pending, 0, now)));
            next += start;
            let most = (target + (target * SURGE_PERCENT).div_ceil(100).max(1)).max(stale);
            assert!(all.len() as u32 <= most, "{} replicas run for a target of {target}", all.len());
        }
        evaluations
    }

    #[test]
    fn stale_replicas_are_replaced_without_a_gap() {
        for (stale, target) in [(1, 1), (4, 4), (40, 40), (2, 8), (8, 2), (3, 0)] {
            let evaluations = rolling_update(stale, target);
            assert!(evaluations <= 20, "{stale} to {target} took {evaluations} evaluations");
        }
    }

    proptest! {
        /// After a step there are exactly `target` replicas, unless more are managed elsewhere, and no replica is both
        /// kept and drained.
        #[test]
        fn a_step_leads_to_the_target(
            replicas in prop::collection::vec((0usize..4, 0u32..5, 0u64..3), 0..12),
            others in 0u32..4,
            target in 0u32..16,
        ) {
            let now = some_instant();
            let all: Vec<_> = (0..).zip(replicas).map(|(id, (state, busy, removal_rank))| {
                OwnReplica { removal_rank, ..own(id, [Pending, Serving, Lost, Draining][state], busy, now) }
            }).collect();
            let Step { undrain, drain, start } = step(&all, others, target, now);
            prop_assert!(undrain.is_disjoint(&drain));
            let present = all.iter().filter(|it| matches!(it.state, Pending | Serving)).count() as u32;
            let after = others + present + undrain.len() as u32 + start - drain.len() as u32;
            prop_assert_eq!(after, target.max(others), "no replica is lost for long here");
        }
    }
}
