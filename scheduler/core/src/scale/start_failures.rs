//! Decision whether a deployment has failed in a region: no replica of its model can start.
//!
//! ```text
//!            every running replica reports a permanent failure, or an unavailable origin of the
//!            model for 3 s, or another failure for 30 s; or 3 starts ended before readiness in
//!            10 min, and no replica has been starting for longer than they lasted
//!  Starting ──────────────────────────────────────────────────────────────────────────────▶ Failed
//!     ▲                                                                                        │
//!     └── a replica is ready; or the origin of the model responds for 6 s; or another model ───┘
//! ```
//!
//! The requests of a failed deployment are not held: a start that never succeeds would hold them until their deadlines,
//! although another region may respond at once. The starts go on, with their backoff ([`super::restarts`]); the state
//! ends with the first ready replica and not with a start, so that it does not alternate with every attempt. Only an
//! unavailable origin of the model is known to respond again before that: its failure ends when bytes have arrived for some
//! seconds.
//!
//! A single replica that starts normally is reason enough to wait: only if *all* of them fail is the model the likely
//! cause, and not a machine. A replica that waits for another process on its machine to pull the model is no such reason beside one
//! that fails, because it waits for the same origin.
//!
//! A failure that often ends by itself must last: half a minute for an image that could not be pulled, or a container that ended,
//! and three seconds for an unavailable origin of the model, because a replica has waited for three seconds before it reports
//! that, and requests wait meanwhile. A missing model, a denied access, an unknown family, a corrupt file and a full disk do not end
//! by themselves.
//!
//! Whether a replica starts normally while others end is seen from the time that it has taken: one that has outlasted those
//! that ended may become ready, and a younger one is a further attempt of the same.
//!
//! The obvious alternative, a deadline for the start as in Kubernetes (`progressDeadlineSeconds`), detects a missing
//! model only when the largest model would have been loaded.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use replica_api::start_failure::{StartFailure, StartFailureReport};

/// Number of starts that end before readiness after which the deployment has failed. With the delays of the restarts
/// the third one ends a second after the first, if the process ends at once.
pub const FAILED_STARTS: usize = 3;
/// Time within which they end, without the time that the starts themselves have lasted after the first end: more than three of
/// the longest delays. A process that never becomes ready is killed after ten minutes, which is a failed start like another.
pub const FAILED_STARTS_WITHIN: Duration = Duration::from_secs(600);
/// Time for which a failure that may end by itself must last: an image whose pull has failed once is pulled again within it, and a
/// container of Kubernetes that has ended twice is started again.
pub const TRANSIENT_FAILURE_AFTER: Duration = Duration::from_secs(30);
/// The same for an unavailable origin of the model. With the three seconds after which a replica reports one, and the periods of the
/// reports, a deployment has failed within ten seconds.
pub const MODEL_UNAVAILABLE_AFTER: Duration = Duration::from_secs(3);
/// Time for which replicas must start normally until an unavailable origin of the model counts as available again. After some bytes, or
/// after its start, a replica reports no failure for three seconds; twice as long includes the periods of the reports. So an
/// origin that is too slow does not end the state with each piece that arrives.
pub const MODEL_AVAILABLE_AFTER: Duration = Duration::from_secs(6);

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

/// Returns the time for which every replica must report a failure until the deployment has failed.
fn fails_after(reason: StartFailure) -> Duration {
    if is_permanent(reason) {
        Duration::ZERO
    } else if reason == StartFailure::ModelUnavailable {
        MODEL_UNAVAILABLE_AFTER
    } else {
        TRANSIENT_FAILURE_AFTER
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
    /// It is not ready, and waits for another process on its machine that pulls the model. It is ignored beside a replica that
    /// fails, and else counts as one that starts.
    Waiting {
        /// Time of its start.
        since: Instant,
    },
    /// It is not ready, because of this failure.
    Failing(&'a StartFailureReport),
}

/// Start that ended before readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedStart {
    /// Time of the end.
    pub at: Instant,
    /// Time that the start had lasted.
    pub lasted: Duration,
    /// Reason.
    pub failure: StartFailureReport,
}

/// Failure of every running replica.
#[derive(Clone, Copy, Debug)]
struct Failing {
    /// Time since which all of them fail.
    since: Instant,
    /// Reason, and the time since which it is this one.
    reason: StartFailure,
    reason_since: Instant,
}

impl Failing {
    /// Returns whether it has lasted long enough.
    fn has_lasted(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.reason_since) >= fails_after(self.reason)
            || now.saturating_duration_since(self.since) >= TRANSIENT_FAILURE_AFTER
    }
}

/// Evidence of the replicas that run about the model.
#[derive(Clone, Copy, Debug, Default)]
struct StartEvidence<'a> {
    /// Failure of a replica, the one that fails a deployment soonest.
    failing: Option<&'a StartFailureReport>,
    /// A replica starts normally.
    starts: bool,
    /// It has taken longer than the starts that ended.
    outlasts: bool,
}

/// Failed starts of one model of a deployment in a region.
#[derive(Clone, Debug, Default)]
pub struct StartFailures {
    /// Starts that ended before readiness since the last ready replica, oldest first: at most [`FAILED_STARTS`].
    ended: VecDeque<EndedStart>,
    /// Failure of every running replica.
    failing: Option<Failing>,
    /// Time since which replicas start normally, after an unavailable origin of the model has failed the deployment.
    available_since: Option<Instant>,
    /// The deployment has failed for this reason.
    failed: Option<StartFailureReport>,
}

impl StartFailures {
    /// Records that a replica ended before it was ready.
    pub fn start_ended(&mut self, ended: EndedStart) {
        if self.ended.len() == FAILED_STARTS {
            self.ended.pop_front();
        }
        self.ended.push_back(ended);
    }

    /// Evaluates the state of all replicas that run. Returns the reason if the deployment has failed.
    pub fn observe<'a>(
        &mut self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        now: Instant,
    ) -> Option<&StartFailureReport> {
        self.forget_old_starts(now);
        let Some(observed) = self.observed(replicas, now) else {
            *self = StartFailures::default();
            return None;
        };
        self.end_unavailable(observed.starts && observed.failing.is_none(), now);
        self.decide(observed, now)
    }

    /// Evaluates replicas that no scaler starts, and that report their state with each poll: the deployment has failed as long as
    /// they fail, and not until one is ready. The failure of an unavailable origin must have ended for as long as beside a scaler.
    pub fn observe_current<'a>(
        &mut self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        now: Instant,
    ) -> Option<&StartFailureReport> {
        self.forget_old_starts(now);
        let Some(observed) = self.observed(replicas, now) else {
            *self = StartFailures::default();
            return None;
        };
        self.failed.take_if(|failed| failed.reason != StartFailure::ModelUnavailable);
        self.end_unavailable(observed.starts || observed.failing.is_none(), now);
        self.decide(observed, now)
    }

    /// Summarizes the states of the replicas; `None` if one is ready.
    fn observed<'a>(
        &self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        now: Instant,
    ) -> Option<StartEvidence<'a>> {
        let last = self.last_permanent();
        let longest = self.ended.iter().map(|ended| ended.lasted).max().unwrap_or_default();
        let begin = |observed: &mut StartEvidence<'_>, since: Instant| {
            observed.starts |= last.is_none_or(|last| since < last.at);
            observed.outlasts |= now.saturating_duration_since(since) > longest;
        };
        let (mut observed, mut waiting) = (StartEvidence::default(), StartEvidence::default());
        for replica in replicas {
            match replica {
                ReplicaStartState::Ready => return None,
                ReplicaStartState::Starting { since } => begin(&mut observed, since),
                ReplicaStartState::Waiting { since } => begin(&mut waiting, since),
                ReplicaStartState::Failing(failure) => {
                    let fails_sooner =
                        |known: &StartFailureReport| fails_after(failure.reason) < fails_after(known.reason);
                    if observed.failing.is_none_or(fails_sooner) {
                        observed.failing = Some(failure);
                    }
                }
            }
        }
        if observed.failing.is_none() {
            observed.starts |= waiting.starts;
            observed.outlasts |= waiting.outlasts;
        }
        Some(observed)
    }

    /// Ends the failure of an unavailable origin of the model once it has been available for long enough.
    fn end_unavailable(&mut self, is_available: bool, now: Instant) {
        let is_unavailable =
            self.failed.as_ref().is_some_and(|failed| failed.reason == StartFailure::ModelUnavailable);
        let since = (is_unavailable && is_available).then(|| self.available_since.unwrap_or(now));
        self.available_since = since;
        if since.is_some_and(|since| now.saturating_duration_since(since) >= MODEL_AVAILABLE_AFTER) {
            (self.failed, self.available_since) = (None, None);
        }
    }

    /// Decides whether the deployment has failed.
    fn decide(&mut self, observed: StartEvidence<'_>, now: Instant) -> Option<&StartFailureReport> {
        let StartEvidence { failing, starts, outlasts } = observed;
        let last = || self.last_permanent().map(|last| &last.failure);
        let failure = failing.or_else(last).filter(|_| !starts).cloned();
        self.failing = failure.as_ref().map(|StartFailureReport { reason, .. }| {
            let since = self.failing.map_or(now, |failing| failing.since);
            let same = self.failing.filter(|failing| failing.reason == *reason);
            let reason_since = same.map_or(now, |failing| failing.reason_since);
            Failing { since, reason: *reason, reason_since }
        });
        let has_lasted = self.failing.is_some_and(|failing| failing.has_lasted(now));
        if let Some(failure) = failure.filter(|_| has_lasted) {
            self.failed = Some(failure);
        } else if self.ended.len() == FAILED_STARTS && !outlasts {
            self.failed = self.ended.back().map(|last| last.failure.clone());
        }
        self.failed.as_ref()
    }

    /// Returns the last ended start if its failure is permanent: a start after it repeats that failure until the opposite is known.
    fn last_permanent(&self) -> Option<&EndedStart> {
        self.ended.back().filter(|last| is_permanent(last.failure.reason))
    }

    /// Returns the reason if the deployment has failed, as of the last evaluation.
    pub fn failed(&self) -> Option<&StartFailureReport> {
        self.failed.as_ref()
    }

    /// Forgets the starts that ended too long before the present, or before the next one that ended.
    fn forget_old_starts(&mut self, now: Instant) {
        let mut within = FAILED_STARTS_WITHIN;
        let recent = self.ended.iter().rev().take_while(|ended| {
            let is_recent = now.saturating_duration_since(ended.at) <= within;
            within = within.saturating_add(ended.lasted);
            is_recent
        });
        let forgotten = self.ended.len() - recent.count();
        self.ended.drain(..forgotten);
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

    /// Returns a start that ended at once.
    fn ended(reason: StartFailure, at: Instant) -> EndedStart {
        EndedStart { at, lasted: Duration::ZERO, failure: report(reason) }
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
        for (transient, lasts) in [
            (StartFailure::ModelUnavailable, 3 * S),
            (StartFailure::CrashLoop, 30 * S),
            (StartFailure::Other, 30 * S),
        ] {
            let failure = report(transient);
            let failing = [ReplicaStartState::Failing(&failure)];
            let starting = [ReplicaStartState::Starting { since: now }];
            let mut failures = StartFailures::default();
            let almost = now + lasts - S;
            assert_eq!(reason(&mut failures, &failing, now), None);
            assert_eq!(reason(&mut failures, &failing, almost), None);
            assert_eq!(reason(&mut failures, &starting, almost), None, "it ended");
            assert_eq!(reason(&mut failures, &failing, now + lasts), None, "the time starts again");
            assert_eq!(reason(&mut failures, &failing, now + 2 * lasts - S), None, "{transient:?}");
            assert_eq!(reason(&mut failures, &failing, now + 2 * lasts), Some(transient));
        }
    }

    #[test]
    fn an_unavailable_origin_after_another_failure_must_last_as_well() {
        let now = some_instant();
        let [other, unavailable] = [StartFailure::Other, StartFailure::ModelUnavailable].map(report);
        let [other, unavailable] = [&other, &unavailable].map(|it| [ReplicaStartState::Failing(it)]);
        let mut failures = StartFailures::default();
        assert_eq!(reason(&mut failures, &other, now), None);
        assert_eq!(reason(&mut failures, &unavailable, now + 10 * S), None, "for 0 s");
        assert_eq!(reason(&mut failures, &unavailable, now + 12 * S), None, "for 2 s");
        assert_eq!(reason(&mut failures, &other, now + 29 * S), None);
        assert_eq!(reason(&mut failures, &other, now + 30 * S), Some(StartFailure::Other), "of either kind");

        let both = [other[0], unavailable[0]];
        let mut failures = StartFailures::default();
        assert_eq!(reason(&mut failures, &both, now), None);
        assert_eq!(reason(&mut failures, &both, now + 3 * S), Some(StartFailure::ModelUnavailable));
    }

    #[test]
    fn the_failure_of_an_unavailable_origin_ends_when_bytes_arrive_for_some_seconds_and_not_between_two_starts()
     {
        let now = some_instant();
        let unavailable = report(StartFailure::ModelUnavailable);
        let (failing, starting) =
            (ReplicaStartState::Failing(&unavailable), ReplicaStartState::Starting { since: now });
        let mut failures = StartFailures::default();
        assert_eq!(reason(&mut failures, &[failing], now), None);
        let mut at = now + MODEL_UNAVAILABLE_AFTER;
        for replicas in [&[failing][..], &[failing, starting], &[]] {
            assert_eq!(reason(&mut failures, replicas, at), Some(StartFailure::ModelUnavailable));
            at += S;
        }
        let almost = at + MODEL_AVAILABLE_AFTER - S;
        for at in [at, almost] {
            assert!(reason(&mut failures, &[starting], at).is_some(), "bytes arrive");
        }
        assert_eq!(reason(&mut failures, &[starting], at + MODEL_AVAILABLE_AFTER), None, "for long enough");
        let later = at + MODEL_AVAILABLE_AFTER + S;
        assert_eq!(reason(&mut failures, &[failing], later), None, "the time starts again");
        let later = later + MODEL_UNAVAILABLE_AFTER;
        assert!(reason(&mut failures, &[failing], later).is_some());
        assert_eq!(reason(&mut failures, &[ReplicaStartState::Ready], later), None, "one is ready");
    }

    /// A replica that gets 8 KiB a second has its 64 KiB every eight seconds, and reports no failure for three of them.
    #[test]
    fn the_failure_of_a_slow_origin_does_not_end_with_each_piece_that_arrives() {
        let now = some_instant();
        let unavailable = report(StartFailure::ModelUnavailable);
        for is_current in [false, true] {
            let mut failures = StartFailures::default();
            for second in 0..600u32 {
                let at = now + S * second;
                let state = if second % 8 < 3 {
                    ReplicaStartState::Starting { since: now }
                } else {
                    ReplicaStartState::Failing(&unavailable)
                };
                let failed = if is_current {
                    failures.observe_current([state], at)
                } else {
                    failures.observe([state], at)
                };
                assert_eq!(failed.is_some(), second >= 6, "second {second}");
            }
        }
    }

    #[test]
    fn a_replica_that_waits_for_the_pull_of_another_one_is_ignored_beside_a_failure_and_else_starts() {
        let now = some_instant();
        let unavailable = report(StartFailure::ModelUnavailable);
        let failing = ReplicaStartState::Failing(&unavailable);
        let waiting = ReplicaStartState::Waiting { since: now };
        let starting = ReplicaStartState::Starting { since: now };
        let later = now + MODEL_UNAVAILABLE_AFTER;
        let after = |replicas: &[ReplicaStartState<'_>]| {
            let mut failures = StartFailures::default();
            assert_eq!(reason(&mut failures, replicas, now), None);
            reason(&mut failures, replicas, later)
        };
        for both in [[failing, waiting], [waiting, failing]] {
            assert_eq!(after(&both), Some(StartFailure::ModelUnavailable), "it waits for the same origin");
        }
        assert_eq!(after(&[failing, waiting, starting]), None, "one starts normally");
        assert_eq!(after(&[waiting, waiting]), None);

        let mut failures = StartFailures::default();
        let crash = ended(StartFailure::CrashLoop, now + S);
        (0..FAILED_STARTS).for_each(|_| failures.start_ended(crash.clone()));
        assert_eq!(reason(&mut failures, &[waiting], now + S), None, "it has outlasted those that ended");
    }

    #[test]
    fn three_starts_that_end_within_the_window_fail_the_deployment_and_two_do_not() {
        let now = some_instant();
        let crash = |at: u32| ended(StartFailure::CrashLoop, now + S * at);
        let mut failures = StartFailures::default();
        for at in [0, 1] {
            failures.start_ended(crash(at));
            assert_eq!(reason(&mut failures, &[], now + S * at), None);
        }
        failures.start_ended(crash(3));
        let next = [ReplicaStartState::Starting { since: now + 3 * S }];
        assert_eq!(reason(&mut failures, &next, now + 3 * S), Some(StartFailure::CrashLoop));
        assert_eq!(
            reason(&mut failures, &next, now + 3600 * S),
            Some(StartFailure::CrashLoop),
            "until one is ready"
        );

        let mut slow = StartFailures::default();
        for at in [0, 400, 800, 1200] {
            slow.start_ended(crash(at));
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
            failures.start_ended(ended(StartFailure::CrashLoop, at));
            failures.start_ended(ended(StartFailure::CrashLoop, at));
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
        failures.start_ended(ended(StartFailure::DiskFull, now + S));
        assert_eq!(reason(&mut failures, &before, now + 2 * S), None, "it may become ready");
        assert_eq!(
            reason(&mut failures, &after, now + 2 * S),
            Some(StartFailure::DiskFull),
            "it is a further attempt"
        );
    }

    #[test]
    fn a_replica_that_has_outlasted_those_that_ended_may_become_ready_and_a_younger_one_is_a_further_attempt()
    {
        let now = some_instant();
        let crash = |at: u32| EndedStart { lasted: 5 * S, ..ended(StartFailure::CrashLoop, now + S * at) };
        let mut failures = StartFailures::default();
        [10, 20, 30].into_iter().for_each(|at| failures.start_ended(crash(at)));
        let [old, young] = [24, 25].map(|since| ReplicaStartState::Starting { since: now + S * since });
        assert_eq!(reason(&mut failures, &[old, young], now + 30 * S), None, "one has started for 6 s");
        assert_eq!(
            reason(&mut failures, &[young], now + 30 * S),
            Some(StartFailure::CrashLoop),
            "it has ended"
        );
    }

    #[test]
    fn starts_that_never_become_ready_within_their_timeout_fail_the_deployment() {
        let now = some_instant();
        let lasted = Duration::from_secs(600);
        let mut failures = StartFailures::default();
        for (start, expected) in [(1, None), (2, None), (3, Some(StartFailure::CrashLoop))] {
            let at = now + (lasted + S) * start;
            failures.start_ended(EndedStart { lasted, ..ended(StartFailure::CrashLoop, at) });
            let next = [ReplicaStartState::Starting { since: at }];
            assert_eq!(reason(&mut failures, &next, at), expected, "start {start}");
        }
    }

    #[test]
    fn an_ended_start_is_forgotten_after_the_window() {
        let now = some_instant();
        let later = now + FAILED_STARTS_WITHIN + S;
        for reason_of_end in [StartFailure::CrashLoop, StartFailure::DiskFull] {
            let mut failures = StartFailures::default();
            (0..FAILED_STARTS).for_each(|_| failures.start_ended(ended(reason_of_end, now)));
            let next = [ReplicaStartState::Starting { since: later }];
            assert_eq!(
                reason(&mut failures, &next, later),
                None,
                "learned late, for example by another scaler"
            );
        }
    }
}
