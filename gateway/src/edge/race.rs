//! Attempts of one request in flight: one, or two with a hedged request.
//!
//! An attempt is a future. To cancel it is to drop it: its connection closes, and the region stops computing. Each
//! attempt has one entry on the trail, which is closed only here. It counts as in flight at its region until the caller
//! that receives its [`InFlight`] guard has recorded its outcome.

use super::region_monitor::InFlight;
use crate::upstream::UpstreamResponse;
use gateway_core::outcome::AttemptFailure;
use gateway_core::trail::{AttemptCause, AttemptEnd, AttemptId, PolicyVersion, Trail};
use regions::set::RegionIndex;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Response of a region to an attempt.
pub(super) struct AttemptResponse {
    pub(super) response: UpstreamResponse,
    pub(super) region: RegionIndex,
    /// Time from sending the attempt to the head of its response.
    pub(super) waited: Duration,
}

/// Result of an attempt.
type AttemptCompletion = Result<AttemptResponse, AttemptFailure>;

/// Attempts of one request that are in flight.
pub(super) struct Race<'a> {
    trail: &'a mut Trail,
    /// In the order of their start.
    attempts: Vec<RacingAttempt<'a>>,
    /// Number of attempts in flight that started before the one that ended last.
    earlier_count: usize,
}

/// Start of an attempt.
pub(super) struct AttemptStart {
    pub(super) began: Instant,
    /// Number of the attempt, unique in the process.
    pub(super) key: u64,
    /// Policy under which it is sent, if it differs from the one that the request was admitted under.
    pub(super) policy: Option<Arc<PolicyVersion>>,
}

struct RacingAttempt<'a> {
    attempt_id: AttemptId,
    in_flight: InFlight<'a>,
    attempt: Pin<Box<dyn Future<Output = AttemptCompletion> + Send + 'a>>,
}

impl<'a> Race<'a> {
    pub(super) fn new(trail: &'a mut Trail) -> Race<'a> {
        Race { trail, attempts: Vec::with_capacity(1), earlier_count: 0 }
    }

    /// Starts an attempt.
    pub(super) fn start(
        &mut self,
        cause: AttemptCause,
        in_flight: InFlight<'a>,
        AttemptStart { began, key, policy }: AttemptStart,
        attempt: impl Future<Output = AttemptCompletion> + Send + 'a,
    ) {
        let attempt_id = self.trail.began(in_flight.region(), cause, key, began);
        if let Some(policy) = policy {
            self.trail.set_policy(attempt_id, policy);
        }
        self.attempts.push(RacingAttempt { attempt_id, in_flight, attempt: Box::pin(attempt) });
    }

    /// Waits for the next attempt to end and returns its result; pending for ever while no attempt is in flight.
    pub(super) async fn next(&mut self) -> (InFlight<'a>, AttemptCompletion) {
        let (index, ended) = poll_fn(|context| {
            for (index, racing) in self.attempts.iter_mut().enumerate() {
                if let Poll::Ready(ended) = racing.attempt.as_mut().poll(context) {
                    return Poll::Ready((index, ended));
                }
            }
            Poll::Pending
        })
        .await;
        let end = match &ended {
            Ok(response) => AttemptEnd::Responded { status: response.response.head.status.as_u16() },
            Err(failure) => AttemptEnd::Failed(*failure),
        };
        self.earlier_count = index;
        (self.close(index, end), ended)
    }

    /// First region with an attempt in flight that satisfies `holds`.
    pub(super) fn find_region(&self, holds: impl Fn(RegionIndex) -> bool) -> Option<RegionIndex> {
        self.attempts.iter().map(|racing| racing.in_flight.region()).find(|region| holds(*region))
    }

    /// Attempts in flight that started before the one that ended last.
    pub(super) fn slower(&self) -> impl Iterator<Item = &InFlight<'a>> {
        self.attempts[..self.earlier_count].iter().map(|racing| &racing.in_flight)
    }

    /// Cancels the attempt at `region`.
    pub(super) fn cancel(&mut self, region: RegionIndex, end: AttemptEnd) -> InFlight<'a> {
        let index = self.attempts.iter().position(|racing| racing.in_flight.region() == region);
        self.close(index.expect("a cancelled region has an attempt in flight"), end)
    }

    /// Cancels all attempts.
    pub(super) fn cancel_all(&mut self, end: AttemptEnd) {
        while !self.attempts.is_empty() {
            self.close(0, end);
        }
    }

    fn close(&mut self, index: usize, end: AttemptEnd) -> InFlight<'a> {
        let RacingAttempt { attempt_id, in_flight, attempt: _ } = self.attempts.remove(index);
        self.trail.ended(attempt_id, end, Instant::now());
        in_flight
    }
}
