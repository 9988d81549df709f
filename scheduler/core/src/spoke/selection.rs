//! Which replica takes a request, and how that ended.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use regions::{DeploymentName, ModelRevision};

use super::{RequestedRevision, Spoke};

/// When to ask again where no replica is ready: by then every replica was asked five times how it is.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The replica that takes a request. Its tokens count as pending there until [`Spoke::finished`] is told how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct SelectedReplica {
    /// Its number, by which [`Spoke::observe_replica`] knows it.
    pub index: usize,
    /// Where it is reached.
    pub endpoint: SocketAddr,
    /// The model revision that its answer must be of; `None` where it does not report one.
    pub revision: Option<ModelRevision>,
    tokens: u64,
}

/// What the caller's own requests have health of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassiveHealth {
    /// Whether to ask it.
    pub eligibility: Eligibility,
    /// How many thousandths of the time of the best it takes: 1000 and more.
    pub slowness_permille: u64,
}

/// Whether to ask a replica. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Eligibility {
    /// As any.
    Normal,
    /// After all others: it has failed or been late, and is left alone for a while.
    LastResort,
    /// Not now: as many requests wait for it as may.
    Full,
    /// Not for this request, which was there.
    AlreadyTried,
}

impl PassiveHealth {
    /// Nothing, or nothing that speaks against it.
    pub const HEALTHY: PassiveHealth = PassiveHealth { eligibility: Eligibility::Normal, slowness_permille: 1000 };
}

/// Why no replica takes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoReplica {
    /// No replica of this region answers to the deployment.
    UnknownDeployment,
    /// There are some, or may be, and none takes work now.
    NoneReady {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The answer must be of a model revision that is not served here, and no ready replica has it.
    RevisionNotServed,
    /// Others wait for one who came before (see [`super::hold`]).
    QueueNotEmpty,
    /// As many requests wait for each of them as may.
    Full {
        /// When to ask again.
        retry_after: Duration,
    },
}

/// How a request ended at a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaOutcome {
    /// It was answered, whatever the answer was.
    Responded,
    /// The replica could not be reached or broke off. It is left alone until it is heard again.
    Failed,
    /// Its first byte did not come in time, and the request went to another.
    TimedOut,
    /// Whoever waited gave up first, which says nothing about the replica.
    Canceled,
}

/// How soon a replica would be done; less is better. **The order of the fields is the policy.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct ReplicaScore {
    eligibility: Eligibility,
    finish: Duration,
    /// Among the equally quick the first, so that the same question has the same answer.
    index: usize,
}

impl Spoke {
    /// The replica that takes a request of about `cost_tokens` for `deployment`, and counts as sent there from now on;
    /// `health` is what the caller's own requests have health of each.
    ///
    /// # Errors
    ///
    /// When none does.
    pub fn select_replica(
        &mut self,
        deployment: &DeploymentName,
        cost_tokens: u64,
        health: impl Fn(usize) -> PassiveHealth,
        now: Instant,
    ) -> Result<SelectedReplica, NoReplica> {
        self.select_replica_for(deployment, RequestedRevision::default(), cost_tokens, health, now)
    }

    /// The same, for a request that says something about the model revision of its answer.
    ///
    /// # Errors
    ///
    /// When none does.
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
        // Somebody whose speed nobody knows yet is taken for as fast as the fastest: given work, it will be known.
        let speeds = serving().filter_map(|(_, replica)| replica.speed());
        let fastest = speeds.fold(None, |fastest: Option<f64>, speed| {
            Some(fastest.map_or(speed, |fastest| fastest.max(speed)))
        });
        let scores = serving().map(|(index, replica)| {
            let PassiveHealth { eligibility, slowness_permille } = health(index);
            let tokens = replica.backlog_tokens().saturating_add(cost_tokens);
            let seconds = tokens as f64 / replica.speed().or(fastest).unwrap_or(1.0);
            let seconds = seconds * slowness_permille as f64 / 1000.0;
            ReplicaScore { eligibility, finish: Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX), index }
        });
        let index = match scores.min() {
            Some(ReplicaScore { eligibility: Eligibility::Normal | Eligibility::LastResort, index, .. }) => index,
            Some(ReplicaScore { eligibility: Eligibility::Full, .. }) => return Err(NoReplica::Full { retry_after: RETRY_AFTER }),
            Some(ReplicaScore { eligibility: Eligibility::AlreadyTried, .. }) => {
                return Err(NoReplica::NoneReady { retry_after: RETRY_AFTER });
            }
            None => return Err(self.refusal(deployment, revision)),
        };
        let endpoint = self.replicas.with(index, |replica| {
            replica.sent(cost_tokens);
            replica.endpoint()
        });
        let endpoint = endpoint.expect("whoever serves is there");
        Ok(SelectedReplica { index, endpoint, revision, tokens: cost_tokens })
    }

    /// A request ended at the replica that was chosen for it.
    pub fn finished(&mut self, choice: &SelectedReplica, outcome: ReplicaOutcome, now: Instant) {
        self.replicas.with(choice.index, |replica| {
            replica.ended(choice.tokens);
            match outcome {
                ReplicaOutcome::Responded => replica.answered(choice.tokens),
                // Whoever is late is heard of otherwise, or left alone by whoever saw it.
                ReplicaOutcome::TimedOut | ReplicaOutcome::Canceled => {}
                ReplicaOutcome::Failed => replica.fail(now),
            }
        });
        if outcome == ReplicaOutcome::Failed {
            self.choose_revisions();
        }
    }

    fn refusal(&self, deployment: &DeploymentName, wanted: Option<ModelRevision>) -> NoReplica {
        if wanted.is_some() && wanted != self.revision(deployment) {
            return NoReplica::RevisionNotServed;
        }
        if self.replicas.each().any(|(_, replica)| replica.may_answer_to(deployment)) {
            NoReplica::NoneReady { retry_after: RETRY_AFTER }
        } else {
            NoReplica::UnknownDeployment
        }
    }
}
