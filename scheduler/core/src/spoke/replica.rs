//! What a spoke knows of one replica.
//!
//! Its backlog is dead reckoning, as at sea: the last fix is what the replica said, and from there on the spoke adds what
//! it has sent and takes off what has ended. The fix counts everybody's requests in real tokens; the reckoning counts
//! ours, at once, in tokens estimated before anybody has tokenised. An estimate that is off, or a request whose end
//! nobody told, is forgotten at the next fix.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::ReplicaStatus;
use regions::{DeploymentName, ReportedModel};

/// How old a replica's last word may be: five that were due.
pub const STATUS_AGE_MAX: Duration = Duration::from_secs(1);

/// How long a replica may be silent before it is taken for frozen. One that computes on every core of a machine that
/// others use as well was seen to say nothing for 2 s and to answer every request.
pub const SILENCE_MAX: Duration = Duration::from_secs(3);

/// Of those who were held (see `hold`) a replica is given what it does in this time, beside what it has: enough that it
/// never waits for the next, and little enough that whoever is more urgent is not behind it for long.
pub const AHEAD: Duration = Duration::from_millis(500);

/// And one that has just become ready so much, in tokens: a batch or two. Its first answers come from cold caches.
pub const RAMP_TOKENS: u64 = 1024;

/// TrafficOrigin speed is not known by then is given no more than this, in tokens at a time: far from the million that a replica
/// queues by default before it turns requests away.
const UNMEASURED_TOKENS_MAX: u64 = 32 << 10;

/// One replica, as its spoke sees it.
#[derive(Debug)]
pub(super) struct Replica {
    endpoint: SocketAddr,
    /// The last fix.
    observed: Option<ReplicaStatus>,
    /// When it last gave a sign, good or bad.
    heard: Option<Instant>,
    /// It failed and has not been observed since.
    failed: bool,
    /// Estimated tokens that were sent to it and have not ended.
    outstanding: u64,
    /// The same, at the last fix.
    outstanding_at_fix: u64,
    /// Requests that were sent to it and have not ended.
    in_flight: u32,
    /// It is let go: what it has it finishes, and nothing new goes there.
    leaving: bool,
    /// Tokens that it has answered since it became ready.
    answered: u64,
}

impl Replica {
    pub(super) fn new(endpoint: SocketAddr) -> Replica {
        Replica {
            endpoint,
            observed: None,
            heard: None,
            failed: false,
            outstanding: 0,
            outstanding_at_fix: 0,
            in_flight: 0,
            leaving: false,
            answered: 0,
        }
    }

    pub(super) fn endpoint(&self) -> SocketAddr {
        self.endpoint
    }

    pub(super) fn observe(&mut self, observed: ReplicaStatus, now: Instant) {
        if !self.is_ready() {
            self.answered = 0;
        }
        self.observed = Some(observed);
        self.heard = Some(now);
        self.failed = false;
        self.outstanding_at_fix = self.outstanding;
    }

    pub(super) fn fail(&mut self, now: Instant) {
        self.heard = Some(now);
        self.failed = true;
    }

    /// It does not answer, and does not refuse either.
    pub(super) fn late(&mut self, now: Instant) {
        if self.heard.is_none_or(|heard| now.saturating_duration_since(heard) > SILENCE_MAX) {
            self.failed = true;
        }
    }

    pub(super) fn sent(&mut self, tokens: u64) {
        self.outstanding = self.outstanding.saturating_add(tokens);
        self.in_flight = self.in_flight.saturating_add(1);
    }

    pub(super) fn ended(&mut self, tokens: u64) {
        self.outstanding = self.outstanding.saturating_sub(tokens);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    pub(super) fn set_leaving(&mut self, leaving: bool) {
        self.leaving = leaving;
    }

    pub(super) fn leaving(&self) -> bool {
        self.leaving
    }

    /// Nothing was heard of it yet, good or bad.
    pub(super) fn unheard(&self) -> bool {
        self.heard.is_none()
    }

    /// It has answered so much.
    pub(super) fn answered(&mut self, tokens: u64) {
        self.answered = self.answered.saturating_add(tokens);
    }

    /// So many tokens it may have before it when more is given to it of those who were held: twice as many with each round
    /// of answers, until it is what it does [`AHEAD`].
    pub(super) fn window(&self) -> u64 {
        let ahead = |speed: f64| (speed * AHEAD.as_secs_f64()) as u64;
        let most = self.speed().map_or(UNMEASURED_TOKENS_MAX, ahead).max(RAMP_TOKENS);
        RAMP_TOKENS.saturating_add(self.answered).min(most)
    }

    fn is_ready(&self) -> bool {
        !self.failed && self.observed.as_ref().is_some_and(|observed| observed.ready && !observed.draining)
    }

    /// The deployments that it answers to, as far as it has said.
    pub(super) fn names(&self) -> impl Iterator<Item = &DeploymentName> {
        self.observed.iter().flat_map(|observed| &observed.names)
    }

    /// Whether it takes work for `deployment`, going by its last word.
    pub(super) fn serves(&self, deployment: &DeploymentName) -> bool {
        self.takes_work()
            && self.observed.as_ref().is_some_and(|observed| observed.names.contains(deployment))
    }

    /// What it runs, by its last word, if it says so.
    pub(super) fn model(&self) -> Option<&ReportedModel> {
        self.observed.as_ref()?.model.as_ref()
    }

    /// Whether it takes work for any, going by its last word.
    pub(super) fn takes_work(&self) -> bool {
        !self.leaving && self.is_ready()
    }

    /// Whether it answers to `deployment` when it is well; nobody knows before it has spoken.
    pub(super) fn may_answer_to(&self, deployment: &DeploymentName) -> bool {
        self.observed.as_ref().is_none_or(|observed| observed.names.contains(deployment))
    }

    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        self.heard.is_some_and(|heard| now.saturating_duration_since(heard) <= STATUS_AGE_MAX)
    }

    /// Tokens that it has before it.
    pub(super) fn backlog_tokens(&self) -> u64 {
        let fix = self.observed.as_ref().map_or(0, |observed| observed.pending_tokens);
        fix.saturating_add(self.outstanding).saturating_sub(self.outstanding_at_fix)
    }

    /// Lookups of it that waited, by its last word. They are not reckoned forward: the words come as often as the reports
    /// that this is for.
    pub(super) fn interactive_tokens(&self) -> Option<u64> {
        self.observed.as_ref()?.interactive_tokens
    }

    /// Tokens per second, once they were measured.
    pub(super) fn speed(&self) -> Option<f64> {
        let speed = self.observed.as_ref()?.tokens_per_second;
        (speed.is_finite() && speed > 0.0).then_some(speed)
    }
}
