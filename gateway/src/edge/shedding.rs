//! Room in the regions, asked for before a body is read and taken when it is known what is in it.
//!
//! `gateway_core::shed` decides; here are the lock around it and the question where a request would go first: to the region
//! that is drawn by the plan's weights, or where there are none to the nearest, of those that may see it, serve its
//! deployment and are well, as the choice among them has it. Before its body is read the deployment of most requests is
//! not known (it is in the body), so a request is turned away at its head only if none of those that its tenant may use has
//! room for it, and no other region has offered any.
//!
//! Where the nearest is not calm, `gateway_core::spill` may send a request past it: to a region that has offered to take it.
//! Then its room is there, and that region is asked first.

use super::forward::Edge;
use super::known::{About, Known};
use super::refusals::shed;
use super::view::{RoutedDeployment, View};
use super::watch::{Watch, chances};
use crate::respond::Refusal;
use gateway_core::circuit::Permille;
use gateway_core::endpoint::ForwardTarget;
use gateway_core::latency::SizeClass;
use gateway_core::priority::Priority;
use gateway_core::request_options::RequestOptions;
use gateway_core::residency::Residency;
use gateway_core::shed::{self, AdmissionPools, AdmittedRequest, QueueWaits, Shed};
use gateway_core::spill;
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::weights::{GatewayWeights, throw};
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::selection::Health;
use regions::set::{RegionIndex, RegionSet};
use regions::weights;
use scheduler_core::spoke::{Load, Report};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

/// Deployments that are looked at for a request that has not said yet which one it is for. A tenant of more is looked at
/// when its request is read; and only while something is shed at all.
const LOOKED_AT_MAX: usize = 16;

/// What is in flight, by region and deployment, and what may be.
#[derive(Default)]
pub(crate) struct Shedding(Mutex<AdmissionPools>);

/// Where a request has room.
pub(super) struct Room {
    /// Where it comes from, as a plan has it.
    pub(super) origin: RegionIndex,
    /// Where the plan sends it, if it says anything of it.
    pub(super) drawn: Option<RegionIndex>,
    /// Its room, if what it goes to is known.
    pub(super) place: Option<Place>,
    /// The region that has offered to take it, where it does not go to the nearest.
    pub(super) overflow: Option<RegionIndex>,
}

/// Where a request would go first.
#[derive(Clone, Copy)]
pub(super) struct Home {
    region: RegionIndex,
    origin: RegionIndex,
    /// The plan says so.
    drawn: bool,
}

/// A request's room, given back when this is dropped.
pub(super) struct Place {
    watch: Arc<Watch>,
    /// Until this is dropped.
    entered: Option<AdmittedRequest>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(entered) = self.entered.take() {
            self.watch.shedding.pools().leave(entered);
        }
    }
}

impl Shedding {
    /// A region has said how much it has before it.
    pub(super) fn heard(&self, region: RegionIndex, report: &Report) {
        let waits = report.deployments.iter().map(|(name, load)| (name.clone(), waits(load)));
        self.pools().report(region, waits, Instant::now());
    }

    fn pools(&self) -> MutexGuard<'_, AdmissionPools> {
        self.0.lock()
    }
}

/// Whether no pool turns anybody away.
pub(super) fn is_calm(watch: &Watch) -> bool {
    watch.shedding.pools().are_unlimited()
}

/// Where a request may go, and what that is measured from.
pub(super) struct Way<'a> {
    pub(super) view: &'a View,
    pub(super) routed: &'a RoutedDeployment,
    /// The regions that may see it.
    pub(super) allowed: RegionSet,
    pub(super) client: Option<GeoPoint>,
    /// By which it is decided whom of those that return from an ejection it may be sent to.
    pub(super) chance: Permille,
    /// By which its region is drawn.
    pub(super) draw: Permille,
    /// Where this gateway stands.
    pub(super) place: RegionIndex,
    /// What the hub plans for it.
    pub(super) weights: Option<&'a GatewayWeights>,
}

/// What of a request its room hangs on.
pub(super) struct Wants<'a> {
    pub(super) tenant: &'a Tenant,
    /// The residency policy that it travels under, in the words in which it is told of.
    pub(super) residency: &'a Residency,
    pub(super) priority: Priority,
    pub(super) tokens: u64,
    /// How long its caller will still wait.
    pub(super) left: Duration,
    /// By which it is decided whether it leaves a region that is full.
    pub(super) chance: Permille,
}

impl Edge {
    /// Turns a request away of which only the head was read, if it would be turned away whatever its body is.
    pub(super) fn room_at_the_head(
        &self,
        target: ForwardTarget<'_>,
        view: &View,
        tenant: &Tenant,
        ask: &RequestOptions,
        body_bytes: u64,
        arrived: Instant,
    ) -> Result<(), Refusal> {
        if is_calm(&self.watch) {
            return Ok(());
        }
        let named = target.deployment.and_then(|name| view.deployment(name, tenant));
        let usable: Vec<&RoutedDeployment> = match named {
            Some(routed) => vec![routed],
            None => view.usable_by(tenant).take(LOOKED_AT_MAX + 1).collect(),
        };
        if usable.len() > LOOKED_AT_MAX {
            return Ok(());
        }
        let permitted = tenant.residency.narrow(&ask.residency).permitted(&self.config.catalogue);
        // Of no size, so that it is no more bulk than it can be: who is taken for a lookup now may turn out to be bulk.
        let Ok(priority) = tenant.priorities.priority(ask.priority, 0) else { return Ok(()) };
        let (now, chances, planned) = (Instant::now(), chances(), self.planned.borrow().clone());
        let home = |known: &Known, routed: &RoutedDeployment| {
            let (allowed, weights) = (routed.allowed.intersect(permitted), planned.as_deref());
            let [chance, _, draw] = chances;
            let (client, place) = (ask.client, self.place);
            let lookups = |origin| self.demands.lookups(&routed.deployment.name, allowed, origin);
            let way = Way { view, routed, allowed, client, chance, draw, place, weights };
            way.home(known, priority, lookups, now)
        };
        let pools: Option<Vec<_>> = {
            let known = &*self.watch.known();
            let pool = |routed: &&'_ RoutedDeployment| home(known, routed).map(|home| home.region);
            usable.iter().map(|routed| Some((pool(routed)?, &routed.deployment.name))).collect()
        };
        // Where nobody can serve it at all, another refusal has more to say.
        let Some(pools) = pools else { return Ok(()) };
        let tokens = Cost::at_least(body_bytes).tokens;
        let asked = asked(tenant, priority, tokens, left(ask.timeout, arrived));
        let room = self.watch.shedding.pools().check_head(pools.iter().copied(), &asked, now);
        let Err(why) = room else { return Ok(()) };
        let known = self.watch.known();
        let offered = |(_, name): &(RegionIndex, &DeploymentName)| {
            known.spill.would_take(name, tokens, permitted.intersect(view.routed).iter(), now)
        };
        if self.config.spill && pools.iter().any(offered) {
            return Ok(());
        }
        self.metrics.shed.count(priority, why.reason);
        Err(shed(tenant, why))
    }

    /// Room for a request in the pool that it would go to first, or in one that has offered it; nothing if there is no such
    /// pool, of which it will hear.
    pub(super) fn room(&self, way: &Way<'_>, wants: &Wants<'_>) -> Result<Room, Refusal> {
        let Wants { tenant, residency, priority, tokens, left, chance } = *wants;
        let name = &way.routed.deployment.name;
        let asked = asked(tenant, priority, tokens, left);
        let overflow =
            spill::SpillRequest { deployment: name, priority, tokens, left, turned_away: false, chance };
        let (spills, now) = (self.config.spill, Instant::now());
        let (home, past) = {
            let known = &mut *self.watch.known();
            let policy = (residency, way.allowed);
            let asked = |origin| self.demands.asked(name, policy, origin, (priority, tokens), now);
            let Some(home) = way.home(known, priority, asked, now) else {
                return Ok(Room { origin: self.place, drawn: None, place: None, overflow: None });
            };
            (home, if spills { way.past(known, home.region, &overflow, now) } else { None })
        };
        let Home { region: nearest, origin, drawn } = home;
        let drawn = drawn.then_some(nearest);
        let enter = |region| self.enter(region, name, &asked);
        // Room that was offered and is not there after all is no reason to be turned away here.
        let offered = |to: RegionIndex| {
            let place = enter(to).ok()?;
            Some(Room { origin, drawn, place: Some(place), overflow: Some(to) })
        };
        if let Some(room) = past.and_then(offered) {
            return Ok(room);
        }
        match enter(nearest) {
            Ok(place) => Ok(Room { origin, drawn, place: Some(place), overflow: None }),
            Err(why) => {
                let overflow = spill::SpillRequest { turned_away: true, ..overflow };
                let past = || way.past(&mut self.watch.known(), nearest, &overflow, Instant::now());
                spills.then(past).flatten().and_then(offered).ok_or_else(|| {
                    self.metrics.shed.count(priority, why.reason);
                    shed(tenant, why)
                })
            }
        }
    }

    fn enter(
        &self,
        region: RegionIndex,
        name: &DeploymentName,
        asked: &shed::AdmissionRequest,
    ) -> Result<Place, Shed> {
        let entered = self.watch.shedding.pools().enter(region, name, asked, Instant::now())?;
        Ok(Place { watch: self.watch.clone(), entered: Some(entered) })
    }
}

impl Way<'_> {
    /// Where it would go first: to the region that is drawn for it, of those that are as well as the best and would not
    /// hold it, or to the nearest. `lookups` says what part they are of what is asked from an origin.
    pub(super) fn home(
        &self,
        known: &Known,
        priority: Priority,
        lookups: impl FnOnce(RegionIndex) -> Option<Permille>,
        now: Instant,
    ) -> Option<Home> {
        let name = &self.routed.deployment.name;
        let holds = |region| known.held_for(region, name);
        // The best to go to, and the nearest to come from: one that is drained is near all the same.
        let (mut to, mut from) = (None, None);
        for region in self.serving(known) {
            let health = self.health(known, region, now);
            if health != Health::Down {
                let away = rtt(known, self.client, region, now);
                let draining = self.view.draining.contains(region);
                let there = (health, draining, away + holds(region).unwrap_or_default(), region);
                to = Some(to.map_or(there, |best| there.min(best)));
                from = Some(from.map_or((health, away, region), |best| (health, away, region).min(best)));
            }
        }
        let ((best, .., nearest), (.., from)) = (to?, from?);
        let origin = self.client.map_or(self.place, |_| from);
        let shares = self.weights.map_or(&[][..], |weights| weights.of(name, origin, &self.allowed));
        let serving = self.serving_set(known);
        let usable = |region: RegionIndex| {
            serving.contains(region)
                && self.health(known, region, now) == best
                && (region == nearest || holds(region).is_none())
        };
        let drawn = weights::draw(shares, usable, throw(priority, lookups(origin), self.draw));
        Some(Home { region: drawn.unwrap_or(nearest), origin, drawn: drawn.is_some() })
    }

    /// Where it goes past that, if it does; then that region's offer is taken.
    fn past(
        &self,
        known: &mut Known,
        nearest: RegionIndex,
        overflow: &spill::SpillRequest<'_>,
        now: Instant,
    ) -> Option<RegionIndex> {
        let place = |known: &Known, region| {
            let QueueWaits { interactive, bulk } = waits(&known.load(region, overflow.deployment));
            let wait = match overflow.priority {
                // A region that does not know them apart has one queue for both.
                Priority::Interactive => interactive.or(bulk),
                Priority::Bulk => bulk,
            };
            spill::SpillCandidate { region, rtt: rtt(known, self.client, region, now), wait }
        };
        let home = place(known, nearest);
        if overflow.is_calm_at(home) {
            return None;
        }
        let well = |region: &RegionIndex| self.health(known, *region, now) == Health::Healthy;
        let stays = |region: &RegionIndex| *region != nearest && !self.view.draining.contains(*region);
        let others = self.serving(known).filter(stays).filter(well);
        let mut others: Vec<_> = others.map(|region| place(known, region)).collect();
        others.sort_unstable_by_key(|other| (other.rtt, other.region));
        known.spill.leaves(overflow, home, &others, now)
    }

    /// The health of a region for it: whoever is left alone for a while is a suspect, whatever it offers.
    fn health(&self, known: &Known, region: RegionIndex, now: Instant) -> Health {
        // Of no size and of any priority: health hangs on neither.
        let (deployment, priority, size) =
            (&self.routed.deployment.name, Priority::Interactive, SizeClass::of(0));
        let about = About { deployment, priority, size, chance: self.chance, uses_engine: true };
        known.health(region, &about, now)
    }

    /// The regions that may see it and serve its deployment.
    fn serving(&self, known: &Known) -> impl Iterator<Item = RegionIndex> + use<> {
        self.serving_set(known).iter()
    }

    fn serving_set(&self, known: &Known) -> RegionSet {
        let RoutedDeployment { deployment, registered, .. } = self.routed;
        known.fleet.serving(&deployment.name, *registered).intersect(self.allowed).intersect(self.view.routed)
    }
}

fn rtt(known: &Known, client: Option<GeoPoint>, region: RegionIndex, now: Instant) -> Duration {
    match client {
        Some(place) => known.latency.prior_from(place, region),
        None => known.latency.estimate(region, now),
    }
}

fn waits(load: &Load) -> QueueWaits {
    QueueWaits::of(load.lookup_tokens, load.pending_tokens, load.tokens_per_second)
}

fn asked(tenant: &Tenant, priority: Priority, tokens: u64, left: Duration) -> shed::AdmissionRequest {
    shed::AdmissionRequest {
        tenant: tenant.index,
        weight: tenant.weight.get().into(),
        priority,
        tokens,
        left,
    }
}

pub(super) fn left(timeout: Duration, arrived: Instant) -> Duration {
    timeout.saturating_sub(arrived.elapsed())
}
