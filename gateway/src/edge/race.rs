//! The attempts of one request that are under way: one, or two that race.
//!
//! An attempt is a future, and whoever leaves drops it: the connection closes, and the region stops computing for nobody.
//! Each has one entry on the trail, which is closed here and nowhere else, and counts as waiting for its region until
//! whoever is given its end has judged it.

use super::watch::InFlight;
use crate::upstream::UpstreamResponse;
use gateway_core::outcome::AttemptFailure;
use gateway_core::trail::{AttemptCause, AttemptEnd, AttemptId, PolicyVersion, Trail};
use regions::set::RegionIndex;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// How an attempt's answer came about.
pub(super) struct Answered {
    pub(super) answer: UpstreamResponse,
    pub(super) region: RegionIndex,
    pub(super) waited: Duration,
}

/// What an attempt comes to.
type Ended = Result<Answered, AttemptFailure>;

/// The attempts of one request.
pub(super) struct Race<'a> {
    trail: &'a mut Trail,
    /// In the order in which they began.
    runners: Vec<Runner<'a>>,
    /// How many of those began before the one that ended last.
    earlier: usize,
}

/// Start of an attempt.
pub(super) struct Beginning {
    pub(super) began: Instant,
    /// Its number among all of the process.
    pub(super) key: u64,
    /// The policy that it is sent under, where that is not the one by which its request was admitted.
    pub(super) policy: Option<Arc<PolicyVersion>>,
}

struct Runner<'a> {
    on_trail: AttemptId,
    in_flight: InFlight<'a>,
    attempt: Pin<Box<dyn Future<Output = Ended> + Send + 'a>>,
}

impl<'a> Race<'a> {
    pub(super) fn new(trail: &'a mut Trail) -> Race<'a> {
        Race { trail, runners: Vec::with_capacity(1), earlier: 0 }
    }

    /// Another attempt begins.
    pub(super) fn enter(
        &mut self,
        cause: AttemptCause,
        in_flight: InFlight<'a>,
        Beginning { began, key, policy }: Beginning,
        attempt: impl Future<Output = Ended> + Send + 'a,
    ) {
        let on_trail = self.trail.began(in_flight.region(), cause, key, began);
        if let Some(policy) = policy {
            self.trail.set_policy(on_trail, policy);
        }
        self.runners.push(Runner { on_trail, in_flight, attempt: Box::pin(attempt) });
    }

    /// The next attempt that ends, and what it came to; for ever where there is none.
    pub(super) async fn next(&mut self) -> (InFlight<'a>, Ended) {
        let (place, ended) = poll_fn(|context| {
            for (place, runner) in self.runners.iter_mut().enumerate() {
                if let Poll::Ready(ended) = runner.attempt.as_mut().poll(context) {
                    return Poll::Ready((place, ended));
                }
            }
            Poll::Pending
        })
        .await;
        let end = match &ended {
            Ok(answered) => AttemptEnd::Responded { status: answered.answer.head.status.as_u16() },
            Err(failure) => AttemptEnd::Failed(*failure),
        };
        self.earlier = place;
        (self.close(place, end), ended)
    }

    /// The first of the regions that are asked for which this holds.
    pub(super) fn find(&self, holds: impl Fn(RegionIndex) -> bool) -> Option<RegionIndex> {
        self.runners.iter().map(|runner| runner.in_flight.region()).find(|region| holds(*region))
    }

    /// Those that are under way still and began before the one that ended last.
    pub(super) fn overtaken(&self) -> impl Iterator<Item = &InFlight<'a>> {
        self.runners[..self.earlier].iter().map(|runner| &runner.in_flight)
    }

    /// Nobody waits for the attempt at `region` any longer.
    pub(super) fn leave(&mut self, region: RegionIndex, end: AttemptEnd) -> InFlight<'a> {
        let place = self.runners.iter().position(|runner| runner.in_flight.region() == region);
        self.close(place.expect("only who is asked is left"), end)
    }

    /// Nobody waits for any.
    pub(super) fn leave_all(&mut self, end: AttemptEnd) {
        while !self.runners.is_empty() {
            self.close(0, end);
        }
    }

    fn close(&mut self, place: usize, end: AttemptEnd) -> InFlight<'a> {
        let Runner { on_trail, in_flight, attempt: _ } = self.runners.remove(place);
        self.trail.ended(on_trail, end, Instant::now());
        in_flight
    }
}
