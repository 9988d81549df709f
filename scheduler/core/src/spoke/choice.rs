//! Which replica takes a request, and how that ended.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use regions::{DeploymentName, ModelRevision};

use super::{RevisionAsked, Spoke};

/// When to ask again where no replica is ready: by then every replica was asked five times how it is.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The replica that takes a request. Its tokens count as pending there until [`Spoke::finished`] is told how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct ReplicaChoice {
    /// Its number, by which [`Spoke::observe_replica`] knows it.
    pub index: usize,
    /// Where it is reached.
    pub endpoint: SocketAddr,
    /// The model revision that its answer must be of; `None` where it does not report one.
    pub revision: Option<ModelRevision>,
    tokens: u64,
}

/// What the caller's own requests have seen of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Whether to ask it.
    pub turn: Turn,
    /// How many thousandths of the time of the best it takes: 1000 and more.
    pub slowness_permille: u64,
}

/// Whether to ask a replica. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// As any.
    Open,
    /// After all others: it has failed or been late, and is left alone for a while.
    LastResort,
    /// Not now: as many requests wait for it as may.
    Full,
    /// Not for this request, which was there.
    Tried,
}

impl Seen {
    /// Nothing, or nothing that speaks against it.
    pub const FINE: Seen = Seen { turn: Turn::Open, slowness_permille: 1000 };
}

/// Why no replica takes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No replica of this region answers to the deployment.
    UnknownHere,
    /// There are some, or may be, and none takes work now.
    NoneReady {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The answer must be of a model revision that is not served here, and no ready replica has it.
    OtherRevision,
    /// Others wait for one who came before (see [`super::hold`]).
    OthersWait,
    /// As many requests wait for each of them as may.
    Full {
        /// When to ask again.
        retry_after: Duration,
    },
}

/// How a request ended at a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered, whatever the answer was.
    Answered,
    /// The replica could not be reached or broke off. It is left alone until it is heard again.
    Failed,
    /// Its first byte did not come in time, and the request went to another.
    Late,
    /// Whoever waited gave up first, which says nothing about the replica.
    GivenUp,
}

/// How soon a replica would be done; less is better. **The order of the fields is the policy.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    turn: Turn,
    finish: Duration,
    /// Among the equally quick the first, so that the same question has the same answer.
    index: usize,
}

impl Spoke {
    /// The replica that takes a request of about `cost_tokens` for `deployment`, and counts as sent there from now on;
    /// `seen` is what the caller's own requests have seen of each.
    ///
    /// # Errors
    ///
    /// When none does.
    pub fn choose(
        &mut self,
        deployment: &DeploymentName,
        cost_tokens: u64,
        seen: impl Fn(usize) -> Seen,
        now: Instant,
    ) -> Result<ReplicaChoice, Refusal> {
        self.choose_for(deployment, RevisionAsked::default(), cost_tokens, seen, now)
    }

    /// The same, for a request that says something about the model revision of its answer.
    ///
    /// # Errors
    ///
    /// When none does.
    pub fn choose_for(
        &mut self,
        deployment: &DeploymentName,
        asked: RevisionAsked,
        cost_tokens: u64,
        seen: impl Fn(usize) -> Seen,
        now: Instant,
    ) -> Result<ReplicaChoice, Refusal> {
        let revision = self.revision_for(deployment, asked);
        let serving = || self.serving_revision(deployment, revision, now);
        // Somebody whose speed nobody knows yet is taken for as fast as the fastest: given work, it will be known.
        let speeds = serving().filter_map(|(_, replica)| replica.speed());
        let fastest = speeds.fold(None, |fastest: Option<f64>, speed| {
            Some(fastest.map_or(speed, |fastest| fastest.max(speed)))
        });
        let scores = serving().map(|(index, replica)| {
            let Seen { turn, slowness_permille } = seen(index);
            let tokens = replica.backlog_tokens().saturating_add(cost_tokens);
            let seconds = tokens as f64 / replica.speed().or(fastest).unwrap_or(1.0);
            let seconds = seconds * slowness_permille as f64 / 1000.0;
            Score { turn, finish: Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX), index }
        });
        let index = match scores.min() {
            Some(Score { turn: Turn::Open | Turn::LastResort, index, .. }) => index,
            Some(Score { turn: Turn::Full, .. }) => return Err(Refusal::Full { retry_after: RETRY_AFTER }),
            Some(Score { turn: Turn::Tried, .. }) => {
                return Err(Refusal::NoneReady { retry_after: RETRY_AFTER });
            }
            None => return Err(self.refusal(deployment, revision)),
        };
        let endpoint = self.replicas.with(index, |replica| {
            replica.sent(cost_tokens);
            replica.endpoint()
        });
        let endpoint = endpoint.expect("whoever serves is there");
        Ok(ReplicaChoice { index, endpoint, revision, tokens: cost_tokens })
    }

    /// A request ended at the replica that was chosen for it.
    pub fn finished(&mut self, choice: &ReplicaChoice, outcome: Outcome, now: Instant) {
        self.replicas.with(choice.index, |replica| {
            replica.ended(choice.tokens);
            match outcome {
                Outcome::Answered => replica.answered(choice.tokens),
                // Whoever is late is heard of otherwise, or left alone by whoever saw it.
                Outcome::Late | Outcome::GivenUp => {}
                Outcome::Failed => replica.fail(now),
            }
        });
        if outcome == Outcome::Failed {
            self.choose_revisions();
        }
    }

    fn refusal(&self, deployment: &DeploymentName, wanted: Option<ModelRevision>) -> Refusal {
        if wanted.is_some() && wanted != self.revision(deployment) {
            return Refusal::OtherRevision;
        }
        if self.replicas.each().any(|(_, replica)| replica.may_answer_to(deployment)) {
            Refusal::NoneReady { retry_after: RETRY_AFTER }
        } else {
            Refusal::UnknownHere
        }
    }
}
