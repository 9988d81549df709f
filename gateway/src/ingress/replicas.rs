//! What this ingress's own requests have seen of each replica, beside what the replicas say of themselves.
//!
//! [`Spoke`] chooses by the replicas' word and asks here what speaks against one: `gateway_core::targets` decides, with the
//! replicas measured against the best of them. The lock is held for one decision, and taken before the spoke's where both
//! are needed.

use super::attempts::Passing;
use super::hold::Hold;
use crate::circuits;
use gateway_core::budget::{EvacuationBudget, RetryBudget};
use gateway_core::circuit::Permille;
use gateway_core::endpoint;
use gateway_core::latency::FirstByteTimeout;
use gateway_core::outcome::AttemptFailure;
use gateway_core::outlier::{DeadlineSetBy, OutlierEvidence, UpstreamAction, evidence};
use gateway_core::targets::{InFlightRequest, LatencyBaseline, TargetStatus, TargetTracker};
use rand::Rng;
use regions::ModelRevision;
use scheduler_core::spoke::{self, Outcome, ReplicaChoice, Spoke, Turn};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

/// Requests that may wait for one replica: more than its own queue is good for, and few enough that one that does not
/// answer cannot take an ingress's memory.
pub(super) const REPLICA_IN_FLIGHT_MAX: u32 = 1024;

/// The replicas of a region, as seen by its ingress.
pub(super) struct Replicas {
    spoke: Arc<Mutex<Spoke>>,
    hold: Arc<Hold>,
    known: Mutex<Known>,
}

struct Known {
    /// Where each is reached, by its number.
    addresses: BTreeMap<usize, SocketAddr>,
    targets: TargetTracker<usize>,
    retry: RetryBudget,
    /// Pays for leaving a replica that was ejected lately.
    evacuation: BTreeMap<usize, EvacuationBudget>,
}

/// A throw of the dice.
pub(super) fn chance() -> Permille {
    Permille::new(rand::rng().random_range(0..1000))
}

/// Comes back after so long; never where it is not known when a replica is late.
pub(super) async fn replica_is_late(after: Option<Duration>) {
    match after {
        Some(after) => tokio::time::sleep(after).await,
        None => std::future::pending().await,
    }
}

impl Replicas {
    /// Those that the spoke knows now.
    pub(super) fn new(spoke: Arc<Mutex<Spoke>>, hold: Arc<Hold>) -> Replicas {
        let targets =
            TargetTracker::new(FirstByteTimeout::FOR_REPLICA, LatencyBaseline::Best, REPLICA_IN_FLIGHT_MAX);
        let (retry, addresses) = (RetryBudget::new(Instant::now()), BTreeMap::new());
        let known = Mutex::new(Known { addresses, targets, retry, evacuation: BTreeMap::new() });
        let replicas = Replicas { spoke, hold, known };
        replicas.refresh();
        replicas
    }

    /// Keeps exactly those that the spoke knows now, and what was seen of those who stay.
    pub(super) fn refresh(&self) -> BTreeMap<usize, SocketAddr> {
        let mut known = self.known();
        let addresses = self.spoke.lock().endpoints();
        known.targets.set_targets(addresses.keys().copied().collect::<Vec<_>>());
        known.evacuation.retain(|number, _| addresses.contains_key(number));
        known.addresses.clone_from(&addresses);
        addresses
    }

    /// The replica that takes a request, of those that were not tried for it; nobody, while others wait for one who came
    /// before, unless it has `waited` itself.
    pub(super) fn choose(
        &self,
        request: &Passing,
        tried: &[usize],
        waited: bool,
    ) -> Result<Sent<'_>, spoke::Refusal> {
        let now = Instant::now();
        let known = &mut *self.known();
        let choice = {
            let mut spoke = self.spoke.lock();
            if !waited && spoke.has_a_line(&request.deployment) {
                return Err(spoke::Refusal::OthersWait);
            }
            known.choose(&mut spoke, request, tried, now)?
        };
        Ok(self.sent(known, choice, now))
    }

    /// After how long the first byte from the replica that was chosen is late.
    pub(super) fn first_byte(&self, sent: &Sent<'_>, request: &Passing) -> Option<Duration> {
        self.known().targets.first_byte_timeout(sent.index(), &request.deployment, request.size())
    }

    /// The first byte was late.
    pub(super) fn missed(&self, sent: &mut Sent<'_>) {
        sent.in_time = false;
        self.known().saw(sent.index(), AttemptFailure::FirstByteTimeout.evidence(None), Instant::now());
    }

    /// Somebody who takes over a request from a replica that is late: not one that is left alone itself, and only if the
    /// budget pays.
    pub(super) fn instead_of(&self, sent: &Sent<'_>, request: &Passing, tried: &[usize]) -> Option<Sent<'_>> {
        let now = Instant::now();
        let known = &mut *self.known();
        let choice = {
            let mut spoke = self.spoke.lock();
            let choice = known.choose(&mut spoke, request, tried, now).ok()?;
            let open = known.targets.state(choice.index, now).admits(request.chance);
            if !open || !known.pays(sent.index(), now) {
                spoke.finished(&choice, Outcome::GivenUp, now);
                return None;
            }
            choice
        };
        Some(self.sent(known, choice, now))
    }

    /// How each replica stands, for operators.
    pub(super) fn status(&self) -> Vec<Value> {
        let now = Instant::now();
        let (states, addresses) = {
            let known = self.known();
            (known.targets.states(now), known.addresses.clone())
        };
        let shown = |state: &TargetStatus<usize>| {
            let endpoint = addresses[&state.target].to_string();
            json!({"endpoint": endpoint, "circuit": circuits::shown(state, now)})
        };
        states.iter().map(shown).collect()
    }

    /// Retries that could be paid for now, and what waits for each replica.
    pub(super) fn limits(&self) -> (u32, Vec<TargetStatus<usize>>) {
        let now = Instant::now();
        let known = self.known();
        (known.retry.left(now), known.targets.states(now))
    }

    fn sent(&self, known: &mut Known, choice: ReplicaChoice, now: Instant) -> Sent<'_> {
        let under_way = known.targets.began(choice.index, now);
        Sent { replicas: self, choice, under_way, begun: now, in_time: true, outcome: Outcome::GivenUp }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }
}

impl Known {
    fn choose(
        &self,
        spoke: &mut Spoke,
        request: &Passing,
        tried: &[usize],
        now: Instant,
    ) -> Result<ReplicaChoice, spoke::Refusal> {
        let turn = |index: usize| {
            if tried.contains(&index) {
                Turn::Tried
            } else if self.targets.is_full(index) {
                Turn::Full
            } else if self.targets.state(index, now).admits(request.chance) {
                Turn::Open
            } else {
                Turn::LastResort
            }
        };
        let seen = |index: usize| spoke::Seen {
            turn: turn(index),
            slowness_permille: self.targets.slowness_permille(
                index,
                &request.deployment,
                request.size(),
                now,
            ),
        };
        spoke.choose_for(&request.deployment, request.revision, request.tokens, seen, now)
    }

    fn saw(&mut self, index: usize, evidence: Option<OutlierEvidence>, now: Instant) {
        let Some(evidence) = evidence else { return };
        if self.targets.record(index, evidence, chance(), now) {
            tracing::warn!(replica = index, ?evidence, "replica ejected");
            let in_flight = self.targets.in_flight(index);
            self.evacuation.insert(index, EvacuationBudget::open(in_flight, now));
        }
    }

    fn pays(&mut self, index: usize, now: Instant) -> bool {
        let evacuation = self.evacuation.get_mut(&index);
        evacuation.is_some_and(|budget| budget.withdraw(now)) || self.retry.withdraw(now)
    }
}

/// A request that waits for a replica, until this is dropped: also when whoever waited hung up.
pub(super) struct Sent<'a> {
    replicas: &'a Replicas,
    choice: ReplicaChoice,
    under_way: InFlightRequest<usize>,
    begun: Instant,
    in_time: bool,
    outcome: Outcome,
}

impl Sent<'_> {
    pub(super) fn index(&self) -> usize {
        self.choice.index
    }

    pub(super) fn endpoint(&self) -> SocketAddr {
        self.choice.endpoint
    }

    /// The model revision that its answer must be of, if it reports one.
    pub(super) fn revision(&self) -> Option<ModelRevision> {
        self.choice.revision
    }

    /// Its answer begins, with `status`.
    pub(super) fn took(&mut self, request: &Passing, status: u16) {
        let now = Instant::now();
        let known = &mut *self.replicas.known();
        known.retry.succeeded();
        let mut action = UpstreamAction::Responded { status };
        // A refusal is quick, whoever gives it: it says nothing of how long the work takes.
        if (200..300).contains(&status) && endpoint::uses_engine(request.path) {
            let took = now.saturating_duration_since(self.begun);
            let (index, deployment, size) = (self.choice.index, &request.deployment, request.size());
            if known.targets.is_too_slow_for_probe(index, deployment, size, took, now) {
                action = UpstreamAction::RespondedSlowlyToProbe;
            }
            known.targets.record_latency(index, deployment, size, took, now);
        }
        if self.in_time {
            known.saw(self.choice.index, evidence(DeadlineSetBy::Measurement, action), now);
        }
    }

    /// Its answer was passed on.
    pub(super) fn answered(mut self) {
        self.outcome = Outcome::Answered;
    }

    /// The attempt failed; it speaks against the replica only where that is the replica's doing.
    pub(super) fn failed(&mut self, failure: AttemptFailure) {
        let evidence = failure.evidence(None);
        if evidence.is_some_and(OutlierEvidence::is_failure) {
            self.outcome = Outcome::Failed;
        }
        self.replicas.known().saw(self.choice.index, evidence, Instant::now());
    }

    /// The replica runs another model than it has reported: it gets nothing until it is observed again. That is no failure
    /// of the replica.
    pub(super) fn changed(&mut self) {
        self.outcome = Outcome::Failed;
    }

    /// The replica was late, and another has taken over.
    pub(super) fn left(&mut self, request: &Passing) {
        self.outcome = Outcome::Late;
        let now = Instant::now();
        let waited = now.saturating_duration_since(self.begun);
        let targets = &mut self.replicas.known().targets;
        targets.record_abandoned(self.choice.index, &request.deployment, request.size(), waited, now);
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        let somebody_waits = {
            let mut spoke = self.replicas.spoke.lock();
            spoke.finished(&self.choice, self.outcome, now);
            spoke.somebody_waits()
        };
        self.replicas.known().targets.ended(&self.under_way, now);
        if somebody_waits {
            self.replicas.hold.call();
        }
    }
}
