//! What a region decides by itself: which replica takes a request, and what the region tells others about itself.
//!
//! The region's ingress and its agent share one [`Spoke`]. The ingress feeds it with what it hears from replicas (their
//! status, five times a second) and with what becomes of each request; it answers from that alone, so a region works for
//! ever without the hub.
//!
//! A replica is chosen by *estimated finish*: what it has before it, plus the new request, divided by its measured
//! speed. What it has before it is reckoned forward from its last word (see `replica`), so that a hundred requests
//! which arrive between two words do not all go to whoever was idle at the first.
//!
//! A replica's own word is not all: one that is frozen says nothing, and one whose machine is throttled says that it is
//! well. So the caller says what its own requests have seen of each ([`Seen`]): whether to ask it now, and how much slower
//! than the best of them it is, by which its estimated finish is multiplied.
//!
//! The obvious other way, fewest requests in flight, counts a request of one word like one of two thousand texts.
//!
//! What the region could take beyond what comes by itself it offers to gateways whose own region is full (see `grants`).
//! Where no replica is ready and one is on its way (see `coming`), requests wait for it (see [`hold`]).

mod arrivals;
mod capacity;
mod choice;
mod coming;
mod decided;
mod demand;
mod fleet;
mod grants;
pub mod hold;
mod model;
mod offer;
mod replica;
mod report;
mod residency;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use arrivals::Arrivals;
pub use choice::{Outcome, RETRY_AFTER, Refusal, ReplicaChoice, Seen, Turn};
use coming::Coming;
pub use decided::Decided;
use demand::Counted;
pub use demand::Demand;
use fleet::Fleet;
pub use fleet::{Member, Standing};
use grants::Grants;
pub use grants::{GATEWAYS_MAX, GRANT_FOR, GRANT_PERIOD, Gateway};
use hold::Line;
use model::Models;
pub use model::{Mismatch, RevisionAsked};
pub use offer::Question;
use regions::{Catalogue, DeploymentName, RegionId, ReportedModel, RouteTable};
use replica::Replica;
pub use replica::{AHEAD, RAMP_TOKENS, SILENCE_MAX, STATUS_AGE_MAX};
pub use report::{Load, Report};
use residency::ResidencyState;

/// What a replica says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaObserved {
    /// What it runs, if it reports that.
    pub model: Option<ReportedModel>,
    /// The deployments that it answers to.
    pub names: BTreeSet<DeploymentName>,
    /// It takes work.
    pub ready: bool,
    /// It finishes what it has and takes nothing new.
    pub draining: bool,
    /// Tokens that wait or are being computed.
    pub pending_tokens: u64,
    /// Of those, lookups that wait, if it says.
    pub lookup_tokens: Option<u64>,
    /// Its measured speed; 0 until it is known.
    pub tokens_per_second: f64,
}

/// Whose request it is that comes to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// It comes by itself: no region is nearer to it.
    Own,
    /// It is another region's overflow, and pays with what was granted.
    Overflow,
}

/// A region's view of itself.
#[derive(Debug)]
pub struct Spoke {
    region: RegionId,
    boot_id: u64,
    draining: bool,
    replicas: Fleet,
    arrivals: Arrivals,
    counted: Counted,
    decided: BTreeMap<DeploymentName, Decided>,
    grants: Grants,
    coming: Coming,
    line: Line,
    policy: ResidencyState,
    models: Models,
    capacity: capacity::Fleet,
}

impl Spoke {
    /// A region whose replicas are reached at `replicas` and have not been heard yet.
    pub fn new(region: RegionId, boot_id: u64, replicas: Vec<SocketAddr>) -> Spoke {
        let replicas = Fleet::of(replicas);
        let (arrivals, counted, grants) = (Arrivals::default(), Counted::default(), Grants::default());
        let (coming, line, decided) = (Coming::default(), Line::default(), BTreeMap::new());
        let (policy, models, capacity) =
            (ResidencyState::default(), Models::default(), capacity::Fleet::default());
        Spoke {
            region,
            boot_id,
            draining: false,
            replicas,
            arrivals,
            counted,
            decided,
            grants,
            coming,
            line,
            policy,
            models,
            capacity,
        }
    }

    /// Whose spoke it is.
    pub fn region(&self) -> &RegionId {
        &self.region
    }

    /// Drawn anew whenever the spoke starts.
    pub fn boot_id(&self) -> u64 {
        self.boot_id
    }

    /// A replica said how it is. One that is not there any longer is not listened to, here and below. Returns the deployments
    /// of which it has begun to have another model than they are served with.
    pub fn observe_replica(
        &mut self,
        index: usize,
        observed: ReplicaObserved,
        now: Instant,
    ) -> Vec<Mismatch> {
        self.replicas.with(index, |replica| {
            replica.observe(observed, now);
            if let Some(speed) = replica.speed() {
                replica.names().for_each(|name| self.coming.saw(name, speed));
            }
        });
        self.choose_revisions();
        self.note_mismatches(index)
    }

    /// A replica did not say how it is. It is left alone until it is heard again.
    pub fn replica_failed(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.fail(now));
        self.choose_revisions();
    }

    /// A replica has not said in time how it is. Others are preferred meanwhile; after [`SILENCE_MAX`] it is left alone
    /// until it is heard again.
    pub fn replica_late(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.late(now));
        self.choose_revisions();
    }

    /// A request of about so many tokens came for a deployment.
    pub fn arrived(&mut self, deployment: &DeploymentName, tokens: u64, whose: Whose, now: Instant) {
        self.counted.came(deployment, tokens, whose);
        match whose {
            // What a name that nobody here answers to asks for is refused, and takes no room in memory.
            Whose::Own if self.replicas.each().any(|(_, replica)| replica.serves(deployment)) => {
                self.arrivals.came(deployment, tokens, now);
            }
            Whose::Own | Whose::Overflow => {}
        }
    }

    /// How many replicas there are.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// The deployments that somebody outside may count on: none while the region drains.
    pub fn deployments_ready(&self, now: Instant) -> BTreeSet<DeploymentName> {
        if self.draining {
            return BTreeSet::new();
        }
        let names = self.replicas.each().flat_map(|(_, replica)| replica.names());
        names.filter(|name| self.serving(name, now).next().is_some()).cloned().collect()
    }

    /// From now on this table says what may be seen here, and which model revision each deployment is served with.
    pub fn heed(&mut self, table: &RouteTable, catalogue: &Catalogue) {
        self.policy.heed(table, &self.region, catalogue);
        self.models.heed(table);
        self.choose_revisions();
    }

    /// From now on the residency policies of the table count as too old when no hub has confirmed it for longer than this.
    pub fn limit_policy_age(&mut self, max: Duration, now: Instant) {
        self.policy.confirmed = Some((now, max));
    }

    /// A hub has confirmed the table, or given a newer one.
    pub fn confirm_policy(&mut self, now: Instant) {
        if let Some((confirmed, _)) = &mut self.policy.confirmed {
            *confirmed = now;
        }
    }

    /// The time since a hub confirmed the table, or since the spoke started, and the most that it may be; absent where there
    /// is no limit.
    pub fn policy_age(&self, now: Instant) -> Option<(Duration, Duration)> {
        self.policy.confirmed.map(|(confirmed, max)| (now.saturating_duration_since(confirmed), max))
    }

    /// A table was not taken; the residency policy of the one before stays.
    pub fn refuse_table(&mut self) {
        self.policy.refused += 1;
    }

    /// How many were not.
    pub fn tables_refused(&self) -> u64 {
        self.policy.refused
    }

    /// Whether requests for `deployment` must not be seen here, whatever they say of it themselves.
    pub fn forbids(&self, deployment: &DeploymentName) -> bool {
        self.policy.forbids(deployment)
    }

    /// From now on the region says that it takes nothing new. It still serves what comes, from gateways that have not
    /// heard it yet.
    pub fn set_draining(&mut self) {
        self.draining = true;
    }

    /// The replicas that take work for `deployment` and have the model that it is served with, in the order of their
    /// numbers.
    fn serving<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a Replica)> {
        self.serving_revision(deployment, self.revision(deployment), now)
    }

    /// The replicas that take work for `deployment`, whatever they run.
    fn taking<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a Replica)> {
        let deaf = self.is_deaf(now);
        self.replicas
            .each()
            .filter(move |(_, replica)| replica.serves(deployment) && (deaf || replica.heard_lately(now)))
    }

    /// When nobody was heard lately the likelier cause is this process (stopped, starved): the last state stands.
    fn is_deaf(&self, now: Instant) -> bool {
        !self.replicas.each().any(|(_, replica)| replica.heard_lately(now))
    }
}

#[cfg(test)]
mod tests;
