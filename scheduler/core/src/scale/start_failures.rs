//! Decision whether a deployment has failed in a region: no replica of its model can start.
//!
//! ```text
//!            every running replica reports a permanent failure,
//!            or another failure for 30 s; or 3 starts ended before readiness in 10 min
//!  Starting ─────────────────────────────────────────────────────────────────────────▶ Failed
//!     ▲                                                                                   │
//!     └────────────── a replica is ready, or another model is deployed ───────────────────┘
//! ```
//!
//! The requests of a failed deployment are not held: a start that never succeeds would hold them until their deadlines,
//! although another region may respond at once. The starts go on, with their backoff ([`super::restarts`]); the state
//! ends with the first ready replica and not with a start, so that it does not alternate with every attempt.
//!
//! A single replica that starts normally is reason enough to wait: only if *all* of them fail is the model the likely
//! cause, and not a machine. A failure of the network or of the source of the model often ends by itself, so it must
//! last. A missing model, a denied access, an unknown family, a corrupt file and a full disk do not end by themselves.
//!
//! The obvious alternative, a deadline for the start as in Kubernetes (`progressDeadlineSeconds`), detects a missing
//! model only when the largest model would have been loaded.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use replica_api::start_failure::{StartFailure, StartFailureReport};

/// Number of starts that end before readiness after which the deployment has failed. With the delays of the restarts
/// the third one ends a second after the first, if the process ends at once.
pub const FAILED_STARTS: usize = 3;
/// Time within which they end: more than three of the longest delays, with starts of a minute between them.
pub const FAILED_STARTS_WITHIN: Duration = Duration::from_secs(600);
/// Time for which a failure that may end by itself must last.
pub const TRANSIENT_FAILURE_AFTER: Duration = Duration::from_secs(30);

/// Returns whether a failure does not end by itself: an operator must correct the deployment, its model or the machine.
pub fn is_permanent(reason: StartFailure) -> bool {
    match reason {
        StartFailure::ModelMissing
        | StartFailure::ModelForbidden
        | StartFailure::ModelCorrupt
        | StartFailure::UnknownFamily
        | StartFailure::DiskFull => true,
        // A process that has ended once is no loop yet; repeated ends are counted.
        StartFailure::ModelUnavailable | StartFailure::CrashLoop | StartFailure::Other => false,
    }
}

/// State of one replica of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaStartState<'a> {
    /// It is ready.
    Ready,
    /// It is not ready, and reports no failure.
    Starting {
        /// Time of its start.
        since: Instant,
    },
    /// It is not ready, because of this failure.
    Failing(&'a StartFailureReport),
}

/// Failed starts of one model of a deployment in a region.
#[derive(Clone, Debug, Default)]
pub struct StartFailures {
    /// Starts that ended before readiness since the last ready replica, oldest first: at most [`FAILED_STARTS`].
    ended: VecDeque<(Instant, StartFailureReport)>,
    /// Time since which every running replica fails.
    failing_since: Option<Instant>,
    /// The deployment has failed for this reason.
    failed: Option<StartFailureReport>,
}

impl StartFailures {
    /// Records that a replica ended before it was ready.
    pub fn start_ended(&mut self, failure: StartFailureReport, now: Instant) {
        if self.ended.len() == FAILED_STARTS {
            self.ended.pop_front();
        }
        self.ended.push_back((now, failure));
    }

    /// Evaluates the state of all replicas that run. Returns the reason if the deployment has failed.
    pub fn observe<'a>(
        &mut self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        now: Instant,
    ) -> Option<&StartFailureReport> {
        // A start after a permanent failure repeats that failure until the opposite is known.
        let last = self.ended.back().filter(|(_, last)| is_permanent(last.reason));
        let last = last.map(|(at, failure)| (*at, failure.clone()));
        let (mut failing, mut starts) = (None, false);
        for replica in replicas {
            match replica {
                ReplicaStartState::Ready => {
                    *self = StartFailures::default();
                    return None;
                }
                ReplicaStartState::Starting { since } => {
                    starts |= last.as_ref().is_none_or(|(failed_at, _)| since < *failed_at);
                }
                ReplicaStartState::Failing(failure) => {
                    let is_worse = |known: &&StartFailureReport| {
                        is_permanent(failure.reason) && !is_permanent(known.reason)
                    };
                    if failing.is_none_or(|known| is_worse(&known)) {
                        failing = Some(failure);
                    }
                }
            }
        }
        let failure = failing.cloned().or(last.map(|(_, failure)| failure)).filter(|_| !starts);
        self.failing_since = failure.as_ref().map(|_| self.failing_since.unwrap_or(now));
        let lasts = |since: Instant| now.saturating_duration_since(since) >= TRANSIENT_FAILURE_AFTER;
        let has_lasted = self.failing_since.is_some_and(lasts);
        if let Some(failure) = failure.filter(|failure| is_permanent(failure.reason) || has_lasted) {
            self.failed = Some(failure);
        } else if self.is_crash_loop(now) {
            self.failed = self.ended.back().map(|(_, failure)| failure.clone());
        }
        self.failed.as_ref()
    }

    /// Returns the reason if the deployment has failed, as of the last evaluation.
    pub fn failed(&self) -> Option<&StartFailureReport> {
        self.failed.as_ref()
    }

    fn is_crash_loop(&self, now: Instant) -> bool {
        let first = self.ended.front().filter(|_| self.ended.len() == FAILED_STARTS);
        first.is_some_and(|(at, _)| now.saturating_duration_since(*at) <= FAILED_STARTS_WITHIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const S: Duration = Duration::from_secs(1);

    fn report(reason: StartFailure) -> StartFailureReport {
        StartFailureReport::new(reason, reason.as_str())
    }

    /// Returns the reason after one evaluation.
    fn reason(
        failures: &mut StartFailures,
        replicas: &[ReplicaStartState<'_>],
        now: Instant,
    ) -> Option<StartFailure> {
        failures.observe(replicas.iter().copied(), now).map(|failure| failure.reason)
    }

    #[test]
    fn a_permanent_failure_of_every_replica_fails_the_deployment_at_once() {
        let now = some_instant();
        for permanent in StartFailure::ALL.into_iter().filter(|reason| is_permanent(*reason)) {
            let (missing, other) = (report(permanent), report(StartFailure::ModelUnavailable));
            let mut failures = StartFailures::default();
            let all = [ReplicaStartState::Failing(&other), ReplicaStartState::Failing(&missing)];
            assert_eq!(reason(&mut failures, &all, now), Some(permanent), "the permanent one is the reason");
            assert_eq!(failures.failed(), Some(&missing));
        }
    }

    /// Violates the rule on purpose: one failed replica beside one that starts is no failed deployment.
    #[test]
    fn one_failed_replica_of_two_does_not_fail_the_deployment() {
        let now = some_instant();
        let missing = report(StartFailure::ModelMissing);
        let mut failures = StartFailures::default();
        let both = [ReplicaStartState::Failing(&missing), ReplicaStartState::Starting { since: now }];
        for second in 0..3600 {
            assert_eq!(reason(&mut failures, &both, now + S * second), None);
        }
        let later = now + 3600 * S;
        assert_eq!(reason(&mut failures, &both[..1], later), Some(StartFailure::ModelMissing));
        let ready = [ReplicaStartState::Failing(&missing), ReplicaStartState::Ready];
        assert_eq!(reason(&mut failures, &ready, later), None, "one is ready");
    }

    #[test]
    fn a_failure_that_may_end_by_itself_must_last() {
        let now = some_instant();
        let unavailable = report(StartFailure::ModelUnavailable);
        let failing = [ReplicaStartState::Failing(&unavailable)];
        let mut failures = StartFailures::default();
        let almost = now + TRANSIENT_FAILURE_AFTER - S;
        assert_eq!(reason(&mut failures, &failing, now), None);
        assert_eq!(reason(&mut failures, &failing, almost), None);
        assert_eq!(
            reason(&mut failures, &[ReplicaStartState::Starting { since: now }], almost),
            None,
            "it ended"
        );
        assert_eq!(
            reason(&mut failures, &failing, now + TRANSIENT_FAILURE_AFTER),
            None,
            "the time starts again"
        );
        let after = now + 2 * TRANSIENT_FAILURE_AFTER;
        assert_eq!(reason(&mut failures, &failing, after), Some(StartFailure::ModelUnavailable));
    }

    #[test]
    fn three_starts_that_end_within_the_window_fail_the_deployment_and_two_do_not() {
        let now = some_instant();
        let crash = || report(StartFailure::CrashLoop);
        let mut failures = StartFailures::default();
        for at in [0, 1] {
            failures.start_ended(crash(), now + S * at);
            assert_eq!(reason(&mut failures, &[], now + S * at), None);
        }
        failures.start_ended(crash(), now + 3 * S);
        let next = [ReplicaStartState::Starting { since: now + 3 * S }];
        assert_eq!(reason(&mut failures, &next, now + 3 * S), Some(StartFailure::CrashLoop));
        assert_eq!(
            reason(&mut failures, &next, now + 3600 * S),
            Some(StartFailure::CrashLoop),
            "until one is ready"
        );

        let mut slow = StartFailures::default();
        for at in [0, 400, 800, 1200] {
            slow.start_ended(crash(), now + S * at);
            assert_eq!(reason(&mut slow, &[], now + S * at), None, "they are not within the window");
        }
    }

    /// Violates the rule on purpose: replicas that become ready between their crashes are unstable, not failed.
    #[test]
    fn replicas_that_become_ready_and_crash_again_and_again_do_not_fail_the_deployment() {
        let now = some_instant();
        let mut failures = StartFailures::default();
        for second in 0..100 {
            let at = now + S * second;
            failures.start_ended(report(StartFailure::CrashLoop), at);
            failures.start_ended(report(StartFailure::CrashLoop), at);
            assert_eq!(reason(&mut failures, &[ReplicaStartState::Starting { since: at }], at), None);
            assert_eq!(reason(&mut failures, &[ReplicaStartState::Ready], at), None);
        }
    }

    #[test]
    fn a_failed_deployment_recovers_with_a_ready_replica_and_not_with_a_start() {
        let now = some_instant();
        let missing = report(StartFailure::ModelMissing);
        let mut failures = StartFailures::default();
        assert!(reason(&mut failures, &[ReplicaStartState::Failing(&missing)], now).is_some());
        assert!(reason(&mut failures, &[ReplicaStartState::Starting { since: now + S }], now + S).is_some());
        assert!(reason(&mut failures, &[], now + S).is_some(), "between two starts");
        assert_eq!(reason(&mut failures, &[ReplicaStartState::Ready], now + 2 * S), None);
        assert_eq!(
            reason(&mut failures, &[ReplicaStartState::Starting { since: now + 3 * S }], now + 3 * S),
            None
        );
    }

    #[test]
    fn a_replica_that_ended_with_a_permanent_failure_fails_the_deployment_unless_another_one_was_starting() {
        let now = some_instant();
        let (before, after) = (
            [ReplicaStartState::Starting { since: now }],
            [ReplicaStartState::Starting { since: now + 2 * S }],
        );
        let mut failures = StartFailures::default();
        failures.start_ended(report(StartFailure::DiskFull), now + S);
        assert_eq!(reason(&mut failures, &before, now + 2 * S), None, "it may become ready");
        assert_eq!(
            reason(&mut failures, &after, now + 2 * S),
            Some(StartFailure::DiskFull),
            "it is a further attempt"
        );
    }
}
