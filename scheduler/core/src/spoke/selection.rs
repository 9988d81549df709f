//! Replica selection, and the outcome of a request at its replica.

use std::time::{Duration, Instant};

use regions::{DeploymentName, HostPort, ModelRevision};

use super::{RequestedRevision, Spoke};

/// Retry delay when no replica is ready: by then the status of every replica has been polled five times.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Selected replica of a request. The request's tokens count as pending there until [`Spoke::finished`].
#[derive(Debug, PartialEq, Eq)]
pub struct SelectedReplica {
    /// Number of the replica, as in [`Spoke::observe_replica`].
    pub index: usize,
    /// Address of the replica.
    pub endpoint: HostPort,
    /// Model revision that the response must have; `None` where replicas report none.
    pub revision: Option<ModelRevision>,
    tokens: u64,
}

/// Health of a replica according to the caller's own requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassiveHealth {
    /// Whether to use it.
    pub eligibility: Eligibility,
    /// Its latency relative to the best replica, in permille: at least 1000.
    pub slowness_permille: u64,
}

/// Eligibility of a replica, in the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Eligibility {
    /// No restriction.
    Normal,
    /// Only after all others: it has failed or timed out and is ejected for a while.
    LastResort,
    /// Not now: its limit of concurrent requests is reached.
    Full,
    /// Not for this request, which has already been sent there.
    AlreadyTried,
}

impl PassiveHealth {
    /// No negative evidence.
    pub const HEALTHY: PassiveHealth =
        PassiveHealth { eligibility: Eligibility::Normal, slowness_permille: 1000 };
}

/// Reason for not selecting any replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoReplica {
    /// No replica of this region serves the deployment.
    UnknownDeployment,
    /// There are replicas, or may be, but none is ready.
    NoneReady {
        /// Time after which to retry.
        retry_after: Duration,
    },
    /// The response must have a model revision that is not served here, and no ready replica runs it.
    RevisionNotServed,
    /// Earlier requests are held for the deployment (see [`super::hold`]).
    QueueNotEmpty,
    /// All replicas have reached their limit of concurrent requests.
    Full {
        /// Time after which to retry.
        retry_after: Duration,
    },
}

/// Outcome of a request at its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaOutcome {
    /// The replica responded, with any status.
    Responded,
    /// The replica could not be reached or reset the connection. It is not used until its next status.
    Failed,
    /// Its first byte did not arrive in time, and the request was sent to another replica.
    TimedOut,
    /// The client gave up first, which is no evidence about the replica.
    Canceled,
}

/// Score of a replica; the lowest wins. **The order of the fields is the policy.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct ReplicaScore {
    eligibility: Eligibility,
    finish: Duration,
    /// Tie-break, so that the same state gives the same result.
    index: usize,
}

impl Spoke {
    /// Selects a replica for a request of about `cost_tokens` for `deployment`, and counts the request as sent to it.
    /// `health` returns the evidence of the caller's own requests about each replica.
    ///
    /// # Errors
    ///
    /// The reason for not selecting any replica.
    pub fn select_replica(
        &mut self,
        deployment: &DeploymentName,
        cost_tokens: u64,
        health: impl Fn(usize) -> PassiveHealth,
        now: Instant,
    ) -> Result<SelectedReplica, NoReplica> {
        self.select_replica_for(deployment, RequestedRevision::default(), cost_tokens, health, now)
    }

    /// Like [`Spoke::select_replica`], for a request with requirements on the model revision of its response.
    ///
    /// # Errors
    ///
    /// The reason for not selecting any replica.
    pub fn select_replica_for(
        &mut self,
        deployment: &DeploymentName,
        requested: RequestedRevision,
        cost_tokens: u64,
        health: impl Fn(usize) -> PassiveHealth,
        now: Instant,
    ) -> Result<SelectedReplica, NoReplica> {
        let revision = self.revision_for(deployment, requested);
        let serving = || self.serving_revision(deployment, revision, now);
        // A replica of unknown speed is assumed to be as fast as the fastest one, so that it gets work and is measured.
        let speeds = serving().filter_map(|(_, replica)| replica.speed());
        let fastest = speeds.fold(None, |fastest: Option<f64>, speed| {
            Some(fastest.map_or(speed, |fastest| fastest.max(speed)))
        });
        let scores = serving().map(|(index, replica)| {
            let PassiveHealth { eligibility, slowness_permille } = health(index);
            let tokens = replica.backlog_tokens().saturating_add(cost_tokens);
            let seconds = tokens as f64 / replica.speed().or(fastest).unwrap_or(1.0);
            let seconds = seconds * slowness_permille as f64 / 1000.0;
            ReplicaScore {
                eligibility,
                finish: Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX),
                index,
            }
        });
        let index = match scores.min() {
            Some(ReplicaScore {
                eligibility: Eligibility::Normal | Eligibility::LastResort, index, ..
            }) => index,
            Some(ReplicaScore { eligibility: Eligibility::Full, .. }) => {
                return Err(NoReplica::Full { retry_after: RETRY_AFTER });
            }
            Some(ReplicaScore { eligibility: Eligibility::AlreadyTried, .. }) => {
                return Err(NoReplica::NoneReady { retry_after: RETRY_AFTER });
            }
            None => return Err(self.no_replica(deployment, revision)),
        };
        let endpoint = self.replicas.with(index, |replica| {
            replica.sent(cost_tokens);
            replica.endpoint().clone()
        });
        let endpoint = endpoint.expect("a serving replica exists");
        Ok(SelectedReplica { index, endpoint, revision, tokens: cost_tokens })
    }

    /// Records the outcome of a request at its selected replica.
    pub fn finished(&mut self, selected: &SelectedReplica, outcome: ReplicaOutcome, now: Instant) {
        self.replicas.with(selected.index, |replica| {
            replica.ended(selected.tokens);
            match outcome {
                ReplicaOutcome::Responded => replica.responded(selected.tokens),
                // Timeouts are covered by the status polls and by the caller's circuit breaker.
                ReplicaOutcome::TimedOut | ReplicaOutcome::Canceled => {}
                ReplicaOutcome::Failed => replica.failed(now),
            }
        });
        if outcome == ReplicaOutcome::Failed {
            self.update_chosen_revisions();
        }
    }

    fn no_replica(&self, deployment: &DeploymentName, revision: Option<ModelRevision>) -> NoReplica {
        if revision.is_some() && revision != self.revision(deployment) {
            return NoReplica::RevisionNotServed;
        }
        if self.replicas.each().any(|(_, replica)| replica.may_serve(deployment)) {
            NoReplica::NoneReady { retry_after: RETRY_AFTER }
        } else {
            NoReplica::UnknownDeployment
        }
    }
}
