//! What became of a request: every attempt, in the order in which they began.
//!
//! The trail is what everything that is told of a request afterwards is told from: its headers, its line in the log, its
//! metrics, its receipts. It is written while the request is under way and outlives whatever ends it, so an attempt whose
//! client hung up is in it too. There is one entry for every attempt that was begun, and one end for each (invariant 9).

use crate::outcome::Failure;
use crate::residency::Residency;
use regions::route::Generation;
use crate::route::RouteDecision;
use regions::set::{RegionIndex, RegionSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why an attempt was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It is the first.
    First,
    /// It is the first, and goes past a nearer region that has too much, to one that has offered to take it.
    Overflow,
    /// The connection of the one before was stale.
    Replay,
    /// The one before failed.
    Retry,
    /// The first byte of the one before did not come in time.
    Late,
    /// The region of the one before was lost.
    Evacuation,
    /// The one before takes longer than nearly all do, and this one races it.
    Hedge,
}

impl Cause {
    /// Why an attempt follows one that failed so.
    pub fn after(failure: Failure) -> Cause {
        match failure {
            Failure::StaleConnection => Cause::Replay,
            Failure::Lost => Cause::Evacuation,
            Failure::Late => Cause::Late,
            Failure::Unreachable
            | Failure::WrongPeer
            | Failure::Elsewhere
            | Failure::DeadlinePassed
            | Failure::ReceiptUnavailable => Cause::Retry,
        }
    }
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With an answer of this status.
    Answered {
        /// Of HTTP.
        status: u16,
    },
    /// Without one.
    Failed(Failure),
    /// Nobody waited for it any longer: another attempt was faster, or the client hung up.
    Abandoned,
}

/// The residency policy of a request as one route table has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyVersion {
    /// The generation of that table.
    pub generation: Generation,
    /// The policy.
    pub residency: Residency,
    /// The regions that may see the request under it.
    pub allowed: RegionSet,
}

/// One attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempted {
    /// Which attempt at the request, or at its piece, from 1: what the region is told.
    pub number: u32,
    /// Where it was sent.
    pub region: RegionIndex,
    /// Why it was made.
    pub cause: Cause,
    /// When it began.
    pub began: Instant,
    /// How long it took.
    pub took: Duration,
    /// How it ended.
    pub end: End,
    /// The number of this attempt among all of the gateway process: [`crate::receipt::AttemptKey::number`].
    pub key: u64,
    /// The policy that it was sent under, where a newer route table has another than the one by which the request was
    /// admitted.
    pub policy: Option<Arc<PolicyVersion>>,
}

/// All attempts of a request.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    attempts: Vec<(Attempted, bool)>,
    route: Option<RouteDecision>,
}

/// Which attempt of a [`Trail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptId(usize);

impl Trail {
    /// Records the routing decision; of several decisions the last counts.
    pub fn routed(&mut self, decision: RouteDecision) {
        self.route = Some(decision);
    }

    /// Routing decision of the request, if there was one.
    pub fn route(&self) -> Option<&RouteDecision> {
        self.route.as_ref()
    }

    /// Another attempt begins, with this number among all of the process.
    pub fn began(&mut self, region: RegionIndex, cause: Cause, key: u64, now: Instant) -> AttemptId {
        let number = self.attempts.len() as u32 + 1;
        let (took, end, policy) = (Duration::ZERO, End::Abandoned, None);
        let attempt = Attempted { number, region, cause, began: now, took, end, key, policy };
        self.attempts.push((attempt, true));
        AttemptId(self.attempts.len() - 1)
    }

    /// An attempt is sent under another version of its policy than the one by which the request was admitted.
    pub fn sent_under(&mut self, id: AttemptId, policy: Arc<PolicyVersion>) {
        self.attempts[id.0].0.policy = Some(policy);
    }

    /// An attempt that began is over.
    pub fn ended(&mut self, id: AttemptId, end: End, now: Instant) {
        let (attempt, running) = &mut self.attempts[id.0];
        assert!(*running, "an attempt ends once");
        *running = false;
        attempt.took = now.saturating_duration_since(attempt.began);
        attempt.end = end;
    }

    /// The attempts of a piece of the request are attempts of the request.
    pub fn absorb(&mut self, piece: Trail) {
        self.attempts.extend(piece.attempts);
        self.attempts.sort_by_key(|(attempt, _)| attempt.began);
    }

    /// The request is over: whatever is still under way is abandoned.
    pub fn close(&mut self, now: Instant) {
        for (attempt, running) in &mut self.attempts {
            if std::mem::take(running) {
                attempt.took = now.saturating_duration_since(attempt.began);
            }
        }
    }

    /// All attempts so far, in the order in which they began.
    pub fn attempts(&self) -> impl ExactSizeIterator<Item = &Attempted> {
        self.attempts.iter().map(|(attempt, _)| attempt)
    }

    /// Into how many parts the request was split: each has a first attempt of its own. One, where it was not split.
    pub fn parts(&self) -> usize {
        self.attempts().filter(|attempt| attempt.number == 1).count().max(1)
    }

    /// How many so far.
    pub fn count(&self) -> usize {
        self.attempts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    #[test]
    fn the_attempts_of_pieces_are_told_in_the_order_in_which_they_began() {
        let (now, second) = (some_instant(), Duration::from_secs(1));
        let region = |number| RegionIndex::new(number).unwrap_or_else(|| panic!("{number} is small"));
        let (mut whole, mut piece) = (Trail::default(), Trail::default());
        whole.began(region(0), Cause::First, 0, now + second);
        let first = piece.began(region(1), Cause::First, 0, now);
        piece.ended(first, End::Answered { status: 200 }, now + second);
        piece.began(region(2), Cause::Retry, 0, now + 2 * second);
        assert_eq!((whole.count(), whole.parts()), (1, 1));
        whole.absorb(piece);
        assert_eq!((whole.count(), whole.parts()), (3, 2), "a part is no retry");
        whole.close(now + 3 * second);
        let seen: Vec<_> =
            whole.attempts().map(|attempt| (attempt.region, attempt.took, attempt.end)).collect();
        let answered = End::Answered { status: 200 };
        let abandoned = |at, seconds| (region(at), seconds * second, End::Abandoned);
        assert_eq!(seen, [(region(1), second, answered), abandoned(0, 2), abandoned(2, 1)]);
    }

    #[test]
    fn every_attempt_that_began_has_one_end_whatever_became_of_it() {
        let (now, second) = (some_instant(), Duration::from_secs(1));
        let region = |number| RegionIndex::new(number).unwrap_or_else(|| panic!("{number} is small"));
        let mut trail = Trail::default();
        let first = trail.began(region(0), Cause::First, 0, now);
        trail.ended(first, End::Failed(Failure::Unreachable), now + second);
        trail.began(region(1), Cause::after(Failure::Unreachable), 0, now + second);
        trail.close(now + 3 * second);
        trail.close(now + 9 * second);
        assert!(trail.attempts().map(|attempt| attempt.number).eq([1, 2]));
        let seen: Vec<_> =
            trail.attempts().map(|attempt| (attempt.cause, attempt.took, attempt.end)).collect();
        assert_eq!(
            seen,
            [
                (Cause::First, second, End::Failed(Failure::Unreachable)),
                (Cause::Retry, 2 * second, End::Abandoned)
            ]
        );
    }
}
