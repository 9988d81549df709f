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
mod coming;
mod decided;
mod demand;
mod fleet;
mod grants;
pub mod hold;
mod law;
mod replica;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use arrivals::Arrivals;
use coming::Coming;
pub use decided::Decided;
use demand::Counted;
pub use demand::Demand;
use fleet::Fleet;
pub use fleet::{Member, Standing};
pub use grants::{GATEWAYS_MAX, GRANT_FOR, GRANT_PERIOD, Gateway};
use grants::{Grants, Pool};
use hold::Line;
use law::Law;
use regions::{Catalogue, DeploymentName, RegionId, RouteTable};
use replica::Replica;
pub use replica::{AHEAD, RAMP_TOKENS, SILENCE_MAX, STATUS_AGE_MAX};

/// When to ask again where no replica is ready: by then every replica was asked five times how it is.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What a replica says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaObserved {
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

/// The replica that takes a request. Its tokens count as pending there until [`Spoke::finished`] is told how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct ReplicaChoice {
    /// Its number, by which [`Spoke::observe_replica`] knows it.
    pub index: usize,
    /// Where it is reached.
    pub endpoint: SocketAddr,
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
    /// Others wait for one who came before (see [`hold`]).
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

/// What a gateway asks a region, five times a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Who asks.
    pub gateway: Gateway,
    /// Counts the questions of this gateway to this region.
    pub sequence: u64,
    /// What it would have liked to send elsewhere in the last period, in tokens; what is not named it does not want.
    pub wanted: BTreeMap<DeploymentName, u64>,
}

/// Whose request it is that comes to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// It comes by itself: no region is nearer to it.
    Own,
    /// It is another region's overflow, and pays with what was granted.
    Overflow,
}

/// What a region says of itself to a gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Which region.
    pub region: RegionId,
    /// Drawn anew whenever the spoke starts.
    pub boot_id: u64,
    /// That of the question.
    pub sequence: u64,
    /// Every deployment that some replica answers to, or would.
    pub deployments: BTreeMap<DeploymentName, Load>,
    /// The region takes nothing new.
    pub draining: bool,
}

/// One deployment in a region, over those of its replicas that take work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// How many they are.
    pub ready: u32,
    /// How long a request that comes now would be held until one takes it (see [`hold`]); nothing where it would not be.
    pub ready_in: Option<Duration>,
    /// Tokens that wait or are being computed in them.
    pub pending_tokens: u64,
    /// Of those, lookups that wait, by the replicas' last words; nothing if one of them does not say.
    pub lookup_tokens: Option<u64>,
    /// What they compute together, as far as it is known.
    pub tokens_per_second: f64,
    /// Tokens of others' overflow that the asker may send until it asks again.
    pub granted_tokens: u64,
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
    law: Law,
    capacity: capacity::Fleet,
}

/// Of a region's speed so much is offered: the rest is for what nobody can foresee (an estimate of tokens that is off, the
/// next beat of its own traffic).
const OFFERED_PERCENT: u64 = 90;
/// And of that so much while more than a period's work waits already.
const OFFERED_BUSY_PERCENT: u64 = 30;

/// How soon a replica would be done; less is better. **The order of the fields is the policy.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    turn: Turn,
    finish: Duration,
    /// Among the equally quick the first, so that the same question has the same answer.
    index: usize,
}

impl Spoke {
    /// A region whose replicas are reached at `replicas` and have not been heard yet.
    pub fn new(region: RegionId, boot_id: u64, replicas: Vec<SocketAddr>) -> Spoke {
        let replicas = Fleet::of(replicas);
        let (arrivals, counted, grants) = (Arrivals::default(), Counted::default(), Grants::default());
        let (coming, line, decided) = (Coming::default(), Line::default(), BTreeMap::new());
        let (law, capacity) = (Law::default(), capacity::Fleet::default());
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
            law,
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

    /// A replica said how it is. One that is not there any longer is not listened to, here and below.
    pub fn observe_replica(&mut self, index: usize, observed: ReplicaObserved, now: Instant) {
        self.replicas.with(index, |replica| {
            replica.observe(observed, now);
            if let Some(speed) = replica.speed() {
                replica.names().for_each(|name| self.coming.saw(name, speed));
            }
        });
    }

    /// A replica did not say how it is. It is left alone until it is heard again.
    pub fn replica_failed(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.fail(now));
    }

    /// A replica has not said in time how it is. Others are preferred meanwhile; after [`SILENCE_MAX`] it is left alone
    /// until it is heard again.
    pub fn replica_late(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.late(now));
    }

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
        // Somebody whose speed nobody knows yet is taken for as fast as the fastest: given work, it will be known.
        let speeds = self.serving(deployment, now).filter_map(|(_, replica)| replica.speed());
        let fastest = speeds.fold(None, |fastest: Option<f64>, speed| {
            Some(fastest.map_or(speed, |fastest| fastest.max(speed)))
        });
        let scores = self.serving(deployment, now).map(|(index, replica)| {
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
            None => return Err(self.refusal(deployment)),
        };
        let endpoint = self.replicas.with(index, |replica| {
            replica.sent(cost_tokens);
            replica.endpoint()
        });
        let endpoint = endpoint.expect("whoever serves is there");
        Ok(ReplicaChoice { index, endpoint, tokens: cost_tokens })
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

    /// What the region says of itself to a gateway, and how much of others' overflow that one may send it.
    pub fn answer(&mut self, question: &Question, now: Instant) -> Report {
        let mut report = self.report(question.sequence, now);
        let pools = self.pools(&report.deployments, now);
        let granted = self.grants.grant(&question.gateway, &question.wanted, &pools, now);
        for (name, tokens) in granted {
            report.deployments.entry(name).or_default().granted_tokens = tokens;
        }
        report
    }

    /// What gateways may still send of others' overflow, in tokens.
    pub fn granted(&self, deployment: &DeploymentName) -> u64 {
        self.grants.outstanding(deployment)
    }

    /// Deployments that share replicas, with their spare room.
    fn pools<'a>(&self, loads: &'a BTreeMap<DeploymentName, Load>, now: Instant) -> Vec<Pool<'a>> {
        let pools = self.shared(loads.keys(), now).into_iter().map(|(deployments, replicas)| {
            let spare = self.spare(&deployments, &replicas, now);
            Pool { deployments, spare }
        });
        pools.collect()
    }

    /// Which of these deployments share replicas, and which replicas.
    fn shared<'a>(
        &self,
        names: impl Iterator<Item = &'a DeploymentName>,
        now: Instant,
    ) -> Vec<(Vec<&'a DeploymentName>, BTreeSet<usize>)> {
        let mut shared: Vec<(Vec<&DeploymentName>, BTreeSet<usize>)> = Vec::new();
        for name in names {
            let mut names = vec![name];
            let mut replicas: BTreeSet<usize> = self.serving(name, now).map(|(index, _)| index).collect();
            // One deployment can be what joins two pools that had nothing in common.
            let joined: Vec<_> =
                shared.extract_if(.., |(_, others)| !others.is_disjoint(&replicas)).collect();
            for (others, on) in joined {
                names.extend(others);
                replicas.extend(on);
            }
            shared.push((names, replicas));
        }
        shared
    }

    /// What these replicas can take in a period beyond what comes by itself for their deployments, in tokens.
    fn spare(&self, deployments: &[&DeploymentName], replicas: &BTreeSet<usize>, now: Instant) -> u64 {
        if self.draining {
            return 0;
        }
        let speed: f64 = replicas.iter().filter_map(|index| self.replicas.get(*index)?.speed()).sum();
        let backlog = |index: &usize| self.replicas.get(*index).map_or(0, Replica::backlog_tokens);
        let backlog: u64 = replicas.iter().map(backlog).sum();
        let in_a_period = (speed * GRANT_PERIOD.as_secs_f64()) as u64;
        let own: u64 = deployments.iter().map(|name| self.arrivals.in_a_period(name, now)).sum();
        let spare = (in_a_period / 100 * OFFERED_PERCENT).saturating_sub(own);
        if backlog > in_a_period { spare / 100 * OFFERED_BUSY_PERCENT } else { spare }
    }

    /// What the region says of itself in answer to the question `sequence`; nothing is granted by it.
    pub fn report(&self, sequence: u64, now: Instant) -> Report {
        let known = self.replicas.each().flat_map(|(_, replica)| replica.names()).chain(self.coming.names());
        let mut deployments: BTreeMap<_, _> = known.map(|name| (name.clone(), Load::default())).collect();
        for (name, load) in &mut deployments {
            for (_, replica) in self.serving(name, now) {
                let before = if load.ready == 0 { Some(0) } else { load.lookup_tokens };
                load.lookup_tokens =
                    before.zip(replica.lookup_tokens()).map(|(sum, more)| sum.saturating_add(more));
                load.ready += 1;
                load.pending_tokens = load.pending_tokens.saturating_add(replica.backlog_tokens());
                load.tokens_per_second += replica.speed().unwrap_or(0.0);
            }
            load.ready_in = self.turn_in(name, now);
        }
        Report {
            region: self.region.clone(),
            boot_id: self.boot_id,
            sequence,
            deployments,
            draining: self.draining,
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

    /// From now on this table says what may be seen here.
    pub fn heed(&mut self, table: &RouteTable, catalogue: &Catalogue) {
        self.law.heed(table, &self.region, catalogue);
    }

    /// A table was not taken; the law of the one before stays.
    pub fn refuse_table(&mut self) {
        self.law.refused += 1;
    }

    /// How many were not.
    pub fn tables_refused(&self) -> u64 {
        self.law.refused
    }

    /// Whether requests for `deployment` must not be seen here, whatever they say of it themselves.
    pub fn forbids(&self, deployment: &DeploymentName) -> bool {
        self.law.forbids(deployment)
    }

    /// From now on the region says that it takes nothing new. It still serves what comes, from gateways that have not
    /// heard it yet.
    pub fn set_draining(&mut self) {
        self.draining = true;
    }

    /// The replicas that take work for `deployment`, in the order of their numbers.
    fn serving(&self, deployment: &DeploymentName, now: Instant) -> impl Iterator<Item = (usize, &Replica)> {
        let deaf = self.is_deaf(now);
        self.replicas
            .each()
            .filter(move |(_, replica)| replica.serves(deployment) && (deaf || replica.heard_lately(now)))
    }

    /// When nobody was heard lately the likelier cause is this process (stopped, starved): the last state stands.
    fn is_deaf(&self, now: Instant) -> bool {
        !self.replicas.each().any(|(_, replica)| replica.heard_lately(now))
    }

    fn refusal(&self, deployment: &DeploymentName) -> Refusal {
        if self.replicas.each().any(|(_, replica)| replica.may_answer_to(deployment)) {
            Refusal::NoneReady { retry_after: RETRY_AFTER }
        } else {
            Refusal::UnknownHere
        }
    }
}

#[cfg(test)]
mod tests;
