//! Record of all attempts of a request, in the order in which they began.
//!
//! The trail is the source of all later statements about a request: its headers, its log line, its metrics, its
//! receipts. It is written while the request is in flight and outlives it, so it also holds an attempt whose client has
//! disconnected. It has one entry for every attempt that began, with exactly one end (invariant 9).

use crate::outcome::AttemptFailure;
use crate::residency::Residency;
use crate::route::RouteDecision;
use regions::HostPort;
use regions::id::InstanceName;
use regions::route::Generation;
use regions::set::{RegionIndex, RegionSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry_core::context::SpanId;
use telemetry_core::sampling::FailoverTrace;

/// Cause of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttemptCause {
    /// First attempt.
    First,
    /// First attempt that spilled over: sent past a nearer region with a long queue, to one that has offered capacity.
    Spillover,
    /// Replay after a stale connection.
    Replay,
    /// Retry after a failure.
    Retry,
    /// Retry after a first-byte timeout.
    FirstByteTimeout,
    /// Retry because the region of the attempt before is down.
    Evacuation,
    /// Hedge: the attempt before is slower than the 95th percentile, and this one races it.
    Hedge,
}

impl AttemptCause {
    /// Returns whether an earlier attempt failed. A hedged request is slow only, and a stale connection says nothing about
    /// its region.
    pub fn is_failover(self) -> bool {
        match self {
            AttemptCause::Retry | AttemptCause::FirstByteTimeout | AttemptCause::Evacuation => true,
            AttemptCause::First | AttemptCause::Spillover | AttemptCause::Replay | AttemptCause::Hedge => {
                false
            }
        }
    }

    /// Returns the cause of the attempt that follows `failure`.
    pub fn after(failure: AttemptFailure) -> AttemptCause {
        match failure {
            AttemptFailure::StaleConnection => AttemptCause::Replay,
            AttemptFailure::RegionDown => AttemptCause::Evacuation,
            AttemptFailure::FirstByteTimeout => AttemptCause::FirstByteTimeout,
            AttemptFailure::Unreachable
            | AttemptFailure::WrongPeer
            | AttemptFailure::Declined
            | AttemptFailure::DeadlineExceeded
            | AttemptFailure::ReceiptUnavailable => AttemptCause::Retry,
        }
    }
}

/// End of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptEnd {
    /// A response with this status.
    Responded {
        /// HTTP status.
        status: u16,
    },
    /// A failure without a response.
    Failed(AttemptFailure),
    /// Cancelled: another attempt was faster, or the client disconnected.
    Cancelled,
}

/// Residency policy of a request as of one route table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyVersion {
    /// Generation of that table.
    pub generation: Generation,
    /// Residency policy.
    pub residency: Residency,
    /// Regions that may see the request under it.
    pub allowed: RegionSet,
}

/// Trace of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptTrace {
    /// Its span, to which the region's span refers.
    pub span: SpanId,
    /// Whether the region exports its part of the trace: the flag that it was sent with.
    pub is_exported: bool,
    /// Address that it was sent to.
    pub address: Option<HostPort>,
}

/// Record of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRecord {
    /// Number of the attempt within the request or sub-request, from 1, as sent to the region.
    pub number: u32,
    /// Region of the attempt.
    pub region: RegionIndex,
    /// Spoke instance of the attempt; `None` if the region had none any more.
    pub instance: Option<InstanceName>,
    /// Cause of the attempt.
    pub cause: AttemptCause,
    /// Start of the attempt.
    pub began: Instant,
    /// Duration of the attempt.
    pub took: Duration,
    /// End of the attempt.
    pub end: AttemptEnd,
    /// Number of this attempt among all of the gateway process: [`crate::receipt::AttemptKey::number`].
    pub key: u64,
    /// Policy under which it was sent, where a newer route table has another policy than the one at admission.
    pub policy: Option<Arc<PolicyVersion>>,
    /// Trace of the attempt, if the process records traces.
    pub trace: Option<AttemptTrace>,
}

/// All attempts of a request.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    attempts: Vec<(AttemptRecord, bool)>,
    route: Option<RouteDecision>,
}

/// Identifier of an attempt in a [`Trail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptId(usize);

impl Trail {
    /// Records the routing decision of the request as a whole. Parts of a split request are assigned to its candidates.
    pub fn routed(&mut self, decision: RouteDecision) {
        self.route = Some(decision);
    }

    /// Returns the routing decision of the request, if there was one.
    pub fn route(&self) -> Option<&RouteDecision> {
        self.route.as_ref()
    }

    /// Records the start of an attempt with this number among all of the process.
    pub fn began(
        &mut self,
        region: RegionIndex,
        instance: Option<InstanceName>,
        cause: AttemptCause,
        key: u64,
        now: Instant,
    ) -> AttemptId {
        let number = self.attempts.len() as u32 + 1;
        let (took, end) = (Duration::ZERO, AttemptEnd::Cancelled);
        let (began, policy, trace) = (now, None, None);
        let attempt = AttemptRecord { number, region, instance, cause, began, took, end, key, policy, trace };
        self.attempts.push((attempt, true));
        AttemptId(self.attempts.len() - 1)
    }

    /// Records that an attempt is sent under another version of its policy than the one at admission.
    pub fn set_policy(&mut self, id: AttemptId, policy: Arc<PolicyVersion>) {
        self.attempts[id.0].0.policy = Some(policy);
    }

    /// Records the trace of an attempt.
    pub fn set_trace(&mut self, id: AttemptId, trace: AttemptTrace) {
        self.attempts[id.0].0.trace = Some(trace);
    }

    /// Records the end of an attempt.
    pub fn ended(&mut self, id: AttemptId, end: AttemptEnd, now: Instant) {
        let (attempt, running) = &mut self.attempts[id.0];
        assert!(*running, "an attempt ends once");
        *running = false;
        attempt.took = now.saturating_duration_since(attempt.began);
        attempt.end = end;
    }

    /// Adds the attempts of a sub-request.
    pub fn merge(&mut self, part: Trail) {
        self.attempts.extend(part.attempts);
        self.attempts.sort_by_key(|(attempt, _)| attempt.began);
    }

    /// Ends the request: attempts in flight are cancelled.
    pub fn close(&mut self, now: Instant) {
        for (attempt, running) in &mut self.attempts {
            if std::mem::take(running) {
                attempt.took = now.saturating_duration_since(attempt.began);
            }
        }
    }

    /// Returns all attempts so far, in the order in which they began.
    pub fn attempts(&self) -> impl ExactSizeIterator<Item = &AttemptRecord> {
        self.attempts.iter().map(|(attempt, _)| attempt)
    }

    /// Returns whether the request was sent again after a failure, and whether the trace of one of these attempts is exported.
    pub fn failover(&self) -> FailoverTrace {
        let is_exported =
            |attempt: &AttemptRecord| attempt.trace.as_ref().is_some_and(|trace| trace.is_exported);
        let failovers = || self.attempts().filter(|attempt| attempt.cause.is_failover());
        match failovers().next() {
            None => FailoverTrace::None,
            Some(_) if failovers().any(is_exported) => FailoverTrace::Exported,
            Some(_) => FailoverTrace::Limited,
        }
    }

    /// Returns the number of parts of a split request, each of which has a first attempt; 1 if it was not split.
    pub fn parts(&self) -> usize {
        self.attempts().filter(|attempt| attempt.number == 1).count().max(1)
    }

    /// Returns the number of attempts so far.
    pub fn count(&self) -> usize {
        self.attempts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    #[test]
    fn the_attempts_of_sub_requests_are_listed_in_the_order_in_which_they_began() {
        let (now, second) = (some_instant(), Duration::from_secs(1));
        let region = |number| RegionIndex::new(number).unwrap_or_else(|| panic!("{number} is small"));
        let (mut whole, mut part) = (Trail::default(), Trail::default());
        whole.began(region(0), None, AttemptCause::First, 0, now + second);
        let first = part.began(region(1), None, AttemptCause::First, 0, now);
        part.ended(first, AttemptEnd::Responded { status: 200 }, now + second);
        part.began(region(2), None, AttemptCause::Retry, 0, now + 2 * second);
        assert_eq!((whole.count(), whole.parts()), (1, 1));
        whole.merge(part);
        assert_eq!((whole.count(), whole.parts()), (3, 2), "a part is not a retry");
        whole.close(now + 3 * second);
        let recorded: Vec<_> =
            whole.attempts().map(|attempt| (attempt.region, attempt.took, attempt.end)).collect();
        let responded = AttemptEnd::Responded { status: 200 };
        let cancelled = |at, seconds| (region(at), seconds * second, AttemptEnd::Cancelled);
        assert_eq!(recorded, [(region(1), second, responded), cancelled(0, 2), cancelled(2, 1)]);
    }

    #[test]
    fn a_failover_is_exported_if_one_of_its_attempts_was_told_to() {
        let (now, region) = (some_instant(), RegionIndex::new(0).unwrap_or_else(|| panic!("0 is small")));
        let mut trail = Trail::default();
        let mut began = |cause, is_exported| {
            let id = trail.began(region, None, cause, 0, now);
            trail.set_trace(id, AttemptTrace { span: SpanId::from_random(1), is_exported, address: None });
            trail.failover()
        };
        assert_eq!(began(AttemptCause::First, true), FailoverTrace::None);
        assert_eq!(began(AttemptCause::Hedge, true), FailoverTrace::None);
        assert_eq!(began(AttemptCause::Retry, false), FailoverTrace::Limited);
        assert_eq!(began(AttemptCause::Retry, true), FailoverTrace::Exported);
    }

    #[test]
    fn every_attempt_that_began_has_exactly_one_end() {
        let (now, second) = (some_instant(), Duration::from_secs(1));
        let region = |number| RegionIndex::new(number).unwrap_or_else(|| panic!("{number} is small"));
        let mut trail = Trail::default();
        let first = trail.began(region(0), None, AttemptCause::First, 0, now);
        trail.ended(first, AttemptEnd::Failed(AttemptFailure::Unreachable), now + second);
        trail.began(region(1), None, AttemptCause::after(AttemptFailure::Unreachable), 0, now + second);
        trail.close(now + 3 * second);
        trail.close(now + 9 * second);
        assert!(trail.attempts().map(|attempt| attempt.number).eq([1, 2]));
        let recorded: Vec<_> =
            trail.attempts().map(|attempt| (attempt.cause, attempt.took, attempt.end)).collect();
        assert_eq!(
            recorded,
            [
                (AttemptCause::First, second, AttemptEnd::Failed(AttemptFailure::Unreachable)),
                (AttemptCause::Retry, 2 * second, AttemptEnd::Cancelled)
            ]
        );
    }
}
