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
        self.evaluate(replicas, |evidence| evidence.starts && evidence.failing.is_none(), now)
    }

    /// Evaluates replicas that no scaler starts, and that report their state with each poll: the deployment has failed as long as
    /// they fail, and not until one is ready. The failure of an unavailable origin must have ended for as long as beside a scaler.
    pub fn observe_current<'a>(
        &mut self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        now: Instant,
    ) -> Option<&StartFailureReport> {
        self.failed.take_if(|failed| failed.reason != StartFailure::ModelUnavailable);
        self.evaluate(replicas, |evidence| evidence.starts || evidence.failing.is_none(), now)
    }

    /// Evaluates the state of replicas; `is_available` returns whether the origin of the model is available.
    fn evaluate<'a>(
        &mut self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        is_available: impl FnOnce(&StartEvidence<'a>) -> bool,
        now: Instant,
    ) -> Option<&StartFailureReport> {
        self.forget_old_starts(now);
        let Some(evidence) = self.evidence(replicas, now) else {
            *self = StartFailures::default();
            return None;
        };
        self.end_unavailable(is_available(&evidence), now);
        self.decide(evidence, now)
    }

    /// Summarizes the states of the replicas; `None` if one is ready.
    fn evidence<'a>(
        &self,
        replicas: impl IntoIterator<Item = ReplicaStartState<'a>>,
        now: Instant,
    ) -> Option<StartEvidence<'a>> {
        let last = self.last_permanent();
        let longest = self.ended.iter().map(|ended| ended.lasted).max().unwrap_or_default();
        let begin = |evidence: &mut StartEvidence<'_>, since: Instant| {
            evidence.starts |= last.is_none_or(|last| since < last.at);
            evidence.outlasts |= now.saturating_duration_since(since) > longest;
        };
        let (mut evidence, mut waiting) = (StartEvidence::default(), StartEvidence::default());
        for replica in replicas {
            match replica {
                ReplicaStartState::Ready => return None,
                ReplicaStartState::Starting { since } => begin(&mut evidence, since),
                ReplicaStartState::Waiting { since } => begin(&mut waiting, since),
                ReplicaStartState::Failing(failure) => {
                    let fails_sooner =
                        |known: &StartFailureReport| fails_after(failure.reason) < fails_after(known.reason);
                    if evidence.failing.is_none_or(fails_sooner) {
                        evidence.failing = Some(failure);
                    }
                }
            }
        }
        if evidence.failing.is_none() {
            evidence.starts |= waiting.starts;
            evidence.outlasts |= waiting.outlasts;
        }
        Some(evidence)
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
    fn decide(&mut self, evidence: StartEvidence<'_>, now: Instant) -> Option<&StartFailureReport> {
        let StartEvidence { failing, starts, outlasts } = evidence;
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
mod tests;
