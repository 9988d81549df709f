//! Random situations in which a request is routed.

use gateway_core::candidate::Candidate;
use gateway_core::circuit::Permille;
use gateway_core::cold::ResponseEstimate;
use gateway_core::instances::InstanceIndex;
use gateway_core::route::{Observations, PlanQuery, RouteDecision, RouteQuery, SpilloverQuery, route};
use gateway_core::shed::{Shed, ShedReason};
use gateway_core::spill::{Spill, SpillRequest};
use gateway_core::weights::PlanWeights;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use regions::Catalogue;
use regions::health::Health;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::{Share, ShareReason};
use replica_api::priority::Priority;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(Catalogue::builtin);
static DEPLOYMENT: LazyLock<DeploymentName> = LazyLock::new(|| "d".parse().unwrap());
static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);

/// State of one region.
#[derive(Clone, Debug)]
pub(crate) struct RegionState {
    pub(crate) health: Health,
    pub(crate) rtt: Duration,
    pub(crate) held_for: Option<Duration>,
    /// Measured response time, if there were enough requests.
    pub(crate) measured: Option<Duration>,
    pub(crate) queue: Option<Duration>,
    pub(crate) credit: Option<u64>,
}

/// A request and the state of all regions.
#[derive(Clone, Debug)]
pub(crate) struct Situation {
    pub(crate) regions: Vec<RegionState>,
    pub(crate) allowed: RegionSet,
    pub(crate) order: Option<Arc<[RegionIndex]>>,
    pub(crate) routed: RegionSet,
    pub(crate) serving: RegionSet,
    pub(crate) draining: RegionSet,
    pub(crate) stopping: RegionSet,
    pub(crate) gateway: RegionIndex,
    pub(crate) is_client_located: bool,
    pub(crate) assigned: Option<RegionIndex>,
    pub(crate) plan: Option<PlanWeights>,
    pub(crate) interactive_share: Option<Permille>,
    pub(crate) draw: Permille,
    pub(crate) leave_draw: Permille,
    pub(crate) spills: bool,
    pub(crate) priority: Priority,
    pub(crate) tokens: u64,
    pub(crate) left: Duration,
    pub(crate) deployment: DeploymentName,
    /// Regions whose admission pools reject the request.
    pub(crate) rejecting: RegionSet,
    pub(crate) now: Instant,
}

pub(crate) fn at(number: usize) -> RegionIndex {
    RegionIndex::new(number).unwrap()
}

impl Situation {
    pub(crate) fn random(seed: u64) -> Situation {
        let mut rng = SmallRng::seed_from_u64(seed);
        let count = rng.random_range(1..7usize);
        let cold = rng.random_bool(0.3);
        let regions: Vec<RegionState> = (0..count).map(|_| random_region(&mut rng, cold)).collect();
        let mut set = |probability: f64| -> RegionSet {
            (0..count).filter(|_| rng.random_bool(probability)).map(at).collect()
        };
        let (allowed, routed, serving, draining) = (set(0.8), set(0.95), set(0.9), set(0.1));
        let gateway = at(rng.random_range(0..count));
        let is_client_located = rng.random_bool(0.3);
        let origins = 0..count;
        let plan = rng.random_bool(0.6).then(|| {
            let rows = origins.map(|origin| {
                let shares = (0..count).filter(|_| rng.random_bool(0.6));
                let shares: Vec<usize> = shares.collect();
                let shares = shares.into_iter().map(|region| Share {
                    region: at(region),
                    permille: rng.random_range(0..600),
                    reason: ShareReason::Nearest,
                });
                let shares: Box<[Share]> = shares.collect();
                (DEPLOYMENT.clone(), ResidencyPolicy::Anywhere, at(origin), shares)
            });
            let rows: Vec<_> = rows.collect();
            PlanWeights::new(Generation { epoch: 1, number: 1 }, rows, &CATALOGUE)
        });
        let permille = |rng: &mut SmallRng| Permille::new(rng.random_range(0..1000));
        Situation {
            allowed,
            order: None,
            routed,
            serving,
            draining,
            stopping: RegionSet::EMPTY,
            gateway,
            is_client_located,
            assigned: rng.random_bool(0.1).then(|| at(rng.random_range(0..count))),
            plan,
            interactive_share: rng.random_bool(0.8).then(|| permille(&mut rng)),
            draw: permille(&mut rng),
            leave_draw: permille(&mut rng),
            spills: rng.random_bool(0.8),
            priority: if rng.random_bool(0.7) { Priority::Interactive } else { Priority::Bulk },
            tokens: rng.random_range(0..500),
            left: Duration::from_millis(rng.random_range(0..5000)),
            deployment: DEPLOYMENT.clone(),
            rejecting: RegionSet::EMPTY,
            now: *NOW,
            regions,
        }
    }

    /// Credits as the regions granted them.
    pub(crate) fn credits(&self) -> Spill {
        let mut credits = Spill::default();
        for (number, state) in self.regions.iter().enumerate() {
            if let Some(tokens) = state.credit {
                credits.set_credits(
                    InstanceIndex::new(at(number), 0),
                    [(&self.deployment, Some(tokens))],
                    self.now,
                );
            }
        }
        credits
    }

    /// The request as spillover.
    pub(crate) fn spilling(&self) -> SpillRequest<'_> {
        let Situation { deployment, priority, tokens, left, leave_draw, .. } = self;
        SpillRequest {
            deployment,
            priority: *priority,
            tokens: *tokens,
            left: *left,
            is_shed: false,
            leave_draw: *leave_draw,
        }
    }

    pub(crate) fn route(&self) -> RouteDecision {
        self.route_in(Vec::new())
    }

    pub(crate) fn route_in(&self, buffer: Vec<Candidate>) -> RouteDecision {
        self.with_query(|query| route(query, self, buffer))
    }

    /// The same situation, in which the admission pools of these regions reject the request.
    pub(crate) fn rejected_by(&self, rejecting: impl IntoIterator<Item = RegionIndex>) -> Situation {
        Situation { rejecting: rejecting.into_iter().collect(), ..self.clone() }
    }

    fn with_query<T>(&self, decide: impl FnOnce(&RouteQuery<'_>) -> T) -> T {
        let credits = self.credits();
        let is_whole = self.assigned.is_none();
        let interactive_share = |_| self.interactive_share;
        decide(&RouteQuery {
            deployment: &self.deployment,
            priority: self.priority,
            allowed: self.allowed,
            order: self.order.as_ref(),
            routed: self.routed,
            serving: self.serving,
            draining: self.draining,
            stopping: self.stopping,
            gateway: self.gateway,
            is_client_located: self.is_client_located,
            assigned: self.assigned,
            plan: self.plan.as_ref().map(|weights| PlanQuery {
                weights,
                draw: is_whole.then_some(self.draw),
                interactive_share: &interactive_share,
            }),
            spillover: (self.spills && is_whole).then(|| SpilloverQuery {
                credits: &credits,
                now: self.now,
                request: self.spilling(),
            }),
        })
    }

    pub(crate) fn state(&self, region: RegionIndex) -> &RegionState {
        &self.regions[region.as_usize()]
    }
}

impl Observations for Situation {
    fn health(&self, region: RegionIndex) -> Health {
        self.state(region).health
    }

    fn rtt(&self, region: RegionIndex) -> Duration {
        self.state(region).rtt
    }

    fn is_any_cold(&self) -> bool {
        self.regions.iter().any(|state| state.held_for.is_some())
    }

    fn held_for(&self, region: RegionIndex) -> Option<Duration> {
        self.state(region).held_for
    }

    fn response_estimate(&self, region: RegionIndex, rtt: Duration) -> ResponseEstimate {
        let RegionState { held_for, measured, queue, .. } = *self.state(region);
        let responds_in = measured.unwrap_or_default().max(rtt) + queue.unwrap_or_default();
        ResponseEstimate { responds_in, held_for }
    }

    fn fastest(&self, mut near: impl Iterator<Item = RegionIndex> + Clone) -> Option<RegionIndex> {
        let best = near.clone().filter_map(|region| self.state(region).measured).min()?;
        near.find(|region| {
            self.state(*region).measured.is_none_or(|time| time <= 2 * best + Duration::from_millis(25))
        })
    }

    fn queue_wait(&self, region: RegionIndex) -> Option<Duration> {
        self.state(region).queue
    }

    fn rejection(&self, region: RegionIndex) -> Option<Shed> {
        let (wait, retry_after) = (self.state(region).queue.unwrap_or_default(), Duration::from_secs(1));
        self.rejecting.contains(region).then_some(Shed { reason: ShedReason::NoCapacity, wait, retry_after })
    }
}

fn random_region(rng: &mut SmallRng, cold: bool) -> RegionState {
    let ms = |rng: &mut SmallRng, below: u64| Duration::from_millis(rng.random_range(0..below));
    let health = match rng.random_range(0..10) {
        0..7 => Health::Healthy,
        7 => Health::Unknown,
        8 => Health::Suspect,
        _ => Health::Down,
    };
    RegionState {
        health,
        // Many are as near as others.
        rtt: if rng.random_bool(0.5) { ms(rng, 40) } else { ms(rng, 300) },
        held_for: (cold && rng.random_bool(0.5)).then(|| ms(rng, 2000)),
        measured: rng.random_bool(0.5).then(|| ms(rng, 200)),
        queue: rng.random_bool(0.7).then(|| if rng.random_bool(0.5) { ms(rng, 60) } else { ms(rng, 3000) }),
        credit: rng.random_bool(0.5).then(|| rng.random_range(0..1000)),
    }
}
