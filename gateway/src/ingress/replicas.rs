//! Observations of each replica by this ingress's own requests, in addition to the replicas' reports.
//!
//! [`Spoke`] selects by the replicas' reports and consults these observations: `gateway_core::targets` decides,
//! measuring the replicas against the best of them. The lock is held for one decision, and taken before the spoke's
//! where both are needed.

use super::hold::Hold;
use super::request::ForwardedRequest;
use crate::circuits::{self, random_draw};
use gateway_core::budget::Budgets;
use gateway_core::endpoint;
use gateway_core::latency::FirstByteTimeout;
use gateway_core::outcome::AttemptFailure;
use gateway_core::outlier::{DeadlineSetBy, OutlierEvidence, UpstreamAction, evidence};
use gateway_core::plan::replica::{ReplicaPlan, ReplicaStep};
use gateway_core::targets::{InFlightRequest, LatencyBaseline, TargetStatus, TargetTracker};
use regions::{HostPort, ModelRevision};
use scheduler_core::spoke::{self, Eligibility, ReplicaOutcome, SelectedReplica, Spoke};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use supervision::{Mutex, MutexGuard};

/// Maximum requests in flight per replica: more than a replica's own queue can use, and few enough that a replica that
/// does not respond cannot exhaust the memory of an ingress.
pub(super) const REPLICA_IN_FLIGHT_MAX: u32 = 1024;

/// Replicas of a region, as observed by its ingress.
pub(super) struct Replicas {
    spoke: Arc<Mutex<Spoke>>,
    hold: Arc<Hold>,
    observations: Mutex<ReplicaObservations>,
}

/// Observations of the replicas.
struct ReplicaObservations {
    /// Addresses by replica number.
    addresses: BTreeMap<usize, HostPort>,
    targets: TargetTracker<usize>,
    budgets: Budgets<usize>,
}

impl Replicas {
    /// Creates the state of the replicas in the spoke's list.
    pub(super) fn new(spoke: Arc<Mutex<Spoke>>, hold: Arc<Hold>) -> Replicas {
        let targets =
            TargetTracker::new(FirstByteTimeout::FOR_REPLICA, LatencyBaseline::Best, REPLICA_IN_FLIGHT_MAX);
        let (budgets, addresses) = (Budgets::new(Instant::now()), BTreeMap::new());
        let observations = Mutex::new(ReplicaObservations { addresses, targets, budgets });
        let replicas = Replicas { spoke, hold, observations };
        replicas.refresh();
        replicas
    }

    /// Replaces the set of replicas by those in the spoke's list, and keeps the observations of those that remain.
    pub(super) fn refresh(&self) -> BTreeMap<usize, HostPort> {
        let mut observations = self.observations();
        let addresses = self.spoke.lock().endpoints();
        observations.targets.set_targets(addresses.keys().copied().collect::<Vec<_>>());
        observations.budgets.retain_targets(|number| addresses.contains_key(&number));
        observations.addresses.clone_from(&addresses);
        addresses
    }

    /// Records that the process of a replica was restarted.
    pub(super) fn restarted(&self, number: usize) {
        self.observations().targets.restarted(number);
    }

    /// Selects a replica for the next attempt of `plan`. Returns an error while earlier requests are held, unless this request
    /// has waited itself.
    pub(super) fn choose(
        &self,
        request: &ForwardedRequest,
        plan: &mut ReplicaPlan<usize>,
    ) -> Result<ReplicaAttempt<'_>, spoke::NoReplica> {
        let now = Instant::now();
        let observations = &mut *self.observations();
        let choice = {
            let mut spoke = self.spoke.lock();
            if !plan.has_waited() && spoke.has_held_requests(&request.deployment) {
                return Err(spoke::NoReplica::QueueNotEmpty);
            }
            observations.choose(&mut spoke, request, plan.attempted(), now)?
        };
        Ok(self.attempt(observations, choice, request, plan, now))
    }

    /// Records a first-byte timeout of an attempt. Returns the attempt that takes over from it, if one does: at a replica that is
    /// not ejected, and only if the budget allows it.
    pub(super) fn timed_out(
        &self,
        plan: &mut ReplicaPlan<usize>,
        attempt: &ReplicaAttempt<'_>,
        request: &ForwardedRequest,
    ) -> Option<ReplicaAttempt<'_>> {
        let now = Instant::now();
        let observations = &mut *self.observations();
        let may_take_over = plan.first_byte_timed_out(now);
        observations.observe(attempt.choice.index, AttemptFailure::FirstByteTimeout.evidence(None), now);
        if !may_take_over {
            return None;
        }
        let choice = {
            let mut spoke = self.spoke.lock();
            let choice = observations.choose(&mut spoke, request, plan.attempted(), now).ok()?;
            let is_admitted = observations.targets.state(choice.index, now).admits(request.draw);
            if !is_admitted || plan.take_over(&mut observations.budgets, now) != ReplicaStep::Send {
                spoke.finished(&choice, ReplicaOutcome::Canceled, now);
                return None;
            }
            choice
        };
        Some(self.attempt(observations, choice, request, plan, now))
    }

    /// Returns the state of each replica, for operators.
    pub(super) fn status(&self) -> Vec<Value> {
        let now = Instant::now();
        let (states, addresses) = {
            let observations = self.observations();
            (observations.targets.states(now), observations.addresses.clone())
        };
        let shown = |state: &TargetStatus<usize>| {
            let endpoint = addresses[&state.target].to_string();
            json!({"endpoint": endpoint, "circuit": circuits::to_json(state, now)})
        };
        states.iter().map(shown).collect()
    }

    /// Returns the available retries, and the state of each replica.
    pub(super) fn limits(&self) -> (u32, Vec<TargetStatus<usize>>) {
        let now = Instant::now();
        let observations = self.observations();
        (observations.budgets.retry.left(now), observations.targets.states(now))
    }

    fn attempt(
        &self,
        observations: &mut ReplicaObservations,
        choice: SelectedReplica,
        request: &ForwardedRequest,
        plan: &mut ReplicaPlan<usize>,
        now: Instant,
    ) -> ReplicaAttempt<'_> {
        let targets = &mut observations.targets;
        let under_way = targets.began(choice.index, now);
        let first_byte = targets.first_byte_timeout(choice.index, &request.deployment, request.size());
        plan.selected(choice.index, first_byte, now);
        ReplicaAttempt { replicas: self, choice, under_way, started: now, outcome: ReplicaOutcome::Canceled }
    }

    fn observations(&self) -> MutexGuard<'_, ReplicaObservations> {
        self.observations.lock()
    }
}

impl ReplicaObservations {
    fn choose(
        &self,
        spoke: &mut Spoke,
        request: &ForwardedRequest,
        tried: &[usize],
        now: Instant,
    ) -> Result<SelectedReplica, spoke::NoReplica> {
        let turn = |index: usize| {
            if tried.contains(&index) {
                Eligibility::AlreadyTried
            } else if self.targets.is_full(index) {
                Eligibility::Full
            } else if self.targets.state(index, now).admits(request.draw) {
                Eligibility::Normal
            } else {
                Eligibility::LastResort
            }
        };
        let seen = |index: usize| spoke::PassiveHealth {
            eligibility: turn(index),
            slowness_permille: self.targets.slowness_permille(
                index,
                &request.deployment,
                request.size(),
                now,
            ),
        };
        spoke.select_replica_for(&request.deployment, request.revision, request.tokens, seen, now)
    }

    fn observe(&mut self, index: usize, evidence: Option<OutlierEvidence>, now: Instant) {
        let Some(evidence) = evidence else { return };
        if self.targets.record(index, evidence, random_draw(), now) {
            let replica = self.addresses.get(&index).map(tracing::field::display);
            // A replica failed or was slower than the others, and gets only probes until they succeed. Read its log.
            tracing::warn!(replica, ?evidence, "replica ejected");
            self.budgets.evacuate(index, self.targets.in_flight(index), now);
        }
    }
}

/// Attempt at a replica, until this is dropped, also when the client disconnects.
pub(super) struct ReplicaAttempt<'a> {
    replicas: &'a Replicas,
    choice: SelectedReplica,
    under_way: InFlightRequest<usize>,
    started: Instant,
    outcome: ReplicaOutcome,
}

impl ReplicaAttempt<'_> {
    pub(super) fn endpoint(&self) -> &HostPort {
        &self.choice.endpoint
    }

    /// Returns the model revision that the response must have, if the replica reports one.
    pub(super) fn revision(&self) -> Option<ModelRevision> {
        self.choice.revision
    }

    /// Records the head of a response; `is_in_time`: it met the first-byte timeout.
    pub(super) fn responded(&mut self, request: &ForwardedRequest, status: u16, is_in_time: bool) {
        let now = Instant::now();
        let observations = &mut *self.replicas.observations();
        observations.budgets.retry.succeeded();
        let mut action = UpstreamAction::Responded { status };
        // Error responses are fast and say nothing about the time of the computation.
        if (200..300).contains(&status) && endpoint::uses_engine(request.path) {
            let took = now.saturating_duration_since(self.started);
            let (index, deployment, size) = (self.choice.index, &request.deployment, request.size());
            if observations.targets.is_too_slow_for_probe(index, deployment, size, took, now) {
                action = UpstreamAction::RespondedSlowlyToProbe;
            }
            observations.targets.record_latency(index, deployment, size, took, now);
        }
        if is_in_time {
            observations.observe(self.choice.index, evidence(DeadlineSetBy::Measurement, action), now);
        }
    }

    /// Records that the response was forwarded.
    pub(super) fn finish(mut self) {
        self.outcome = ReplicaOutcome::Responded;
    }

    /// Records a failed attempt; it counts against the replica only if the replica caused it.
    pub(super) fn failed(&mut self, failure: AttemptFailure) {
        let evidence = failure.evidence(None);
        if evidence.is_some_and(OutlierEvidence::is_failure) {
            self.outcome = ReplicaOutcome::Failed;
        }
        self.replicas.observations().observe(self.choice.index, evidence, Instant::now());
    }

    /// Records that the replica runs another model than it reported: it gets no requests until it is observed again.
    /// This is not a failure of the replica.
    pub(super) fn model_changed(&mut self) {
        self.outcome = ReplicaOutcome::Failed;
    }

    /// Records that another replica took over after a first-byte timeout.
    pub(super) fn abandon(&mut self, request: &ForwardedRequest) {
        self.outcome = ReplicaOutcome::TimedOut;
        let now = Instant::now();
        let waited = now.saturating_duration_since(self.started);
        let targets = &mut self.replicas.observations().targets;
        targets.record_abandoned(self.choice.index, &request.deployment, request.size(), waited, now);
    }
}

impl Drop for ReplicaAttempt<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        let has_held = {
            let mut spoke = self.replicas.spoke.lock();
            spoke.finished(&self.choice, self.outcome, now);
            spoke.any_request_held()
        };
        self.replicas.observations().targets.ended(&self.under_way, now);
        if has_held {
            self.replicas.hold.call();
        }
    }
}
