//! Room in the regions, asked for before a body is read and taken when it is known what is in it.
//!
//! `gateway_core::shed` decides; here are the lock around it and the question where a request would go first: to the nearest
//! of the regions that may see it, serve its deployment and are well, as the choice among them has it. Before its body is
//! read the deployment of most requests is not known (it is in the body), so a request is turned away at its head only if
//! none of those that its tenant may use has room for it, and no other region has offered any.
//!
//! Where the nearest is not calm, `gateway_core::spill` may send a request past it: to a region that has offered to take it.
//! Then its room is there, and that region is asked first.

use super::forward::Edge;
use super::refusals::shed;
use super::view::{Lawful, View};
use super::watch::{About, Known, Watch, chance};
use crate::respond::Refusal;
use gateway_core::ask::Ask;
use gateway_core::circuit::Permille;
use gateway_core::endpoint::Target;
use gateway_core::lane::Lane;
use gateway_core::pace::Size;
use gateway_core::shed::{self, Entered, Pools, Shed, Waits};
use gateway_core::spill;
use gateway_core::tenant::{Cost, Tenant};
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::selection::Health;
use regions::set::{RegionIndex, RegionSet};
use scheduler_core::spoke::{Load, Report};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Deployments that are looked at for a request that has not said yet which one it is for. A tenant of more is looked at
/// when its request is read; and only while something is shed at all.
const LOOKED_AT_MAX: usize = 16;

/// What is in flight, by region and deployment, and what may be.
#[derive(Default)]
pub(crate) struct Shedding(Mutex<Pools>);

/// Where a request has room.
#[derive(Default)]
pub(super) struct Room {
    /// Its room, if what it goes to is known.
    pub(super) place: Option<Place>,
    /// The region that has offered to take it, where it does not go to the nearest.
    pub(super) overflow: Option<RegionIndex>,
}

/// A request's room, given back when this is dropped.
pub(super) struct Place {
    watch: Arc<Watch>,
    entered: Entered,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.watch.shedding.pools().leave(&self.entered);
    }
}

impl Shedding {
    /// A region has said how much it has before it.
    pub(super) fn heard(&self, region: RegionIndex, report: &Report) {
        let waits = report.deployments.iter().map(|(name, load)| (name.clone(), waits(load)));
        self.pools().heard(region, waits, Instant::now());
    }

    fn pools(&self) -> MutexGuard<'_, Pools> {
        self.0.lock().expect("no decision panics while it holds the lock")
    }
}

/// Where a request may go, and what that is measured from.
pub(super) struct Way<'a> {
    pub(super) view: &'a View,
    pub(super) lawful: &'a Lawful,
    /// The regions that may see it.
    pub(super) allowed: RegionSet,
    pub(super) client: Option<GeoPoint>,
    /// By which it is decided whom of those that return from an ejection it may be sent to.
    pub(super) chance: Permille,
}

/// What of a request its room hangs on.
pub(super) struct Wants<'a> {
    pub(super) tenant: &'a Tenant,
    pub(super) lane: Lane,
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
        target: Target<'_>,
        view: &View,
        tenant: &Tenant,
        ask: &Ask,
        body_bytes: u64,
        arrived: Instant,
    ) -> Result<(), Refusal> {
        if self.watch.shedding.pools().are_calm() {
            return Ok(());
        }
        let named = target.deployment.and_then(|name| view.deployment(name, tenant));
        let usable: Vec<&Lawful> = match named {
            Some(lawful) => vec![lawful],
            None => view.lawful_for(tenant).take(LOOKED_AT_MAX + 1).collect(),
        };
        if usable.len() > LOOKED_AT_MAX {
            return Ok(());
        }
        let permitted = tenant.residency.narrow(&ask.residency).permitted(&self.config.catalogue);
        let (now, chance) = (Instant::now(), chance());
        let nearest = |known: &Known, lawful: &Lawful| {
            let allowed = lawful.allowed.intersect(permitted);
            Way { view, lawful, allowed, client: ask.client, chance }.nearest(known, now)
        };
        let pools: Option<Vec<_>> = {
            let known = &*self.watch.known();
            usable.iter().map(|lawful| Some((nearest(known, lawful)?, &lawful.deployment.name))).collect()
        };
        // Where nobody can serve it at all, another refusal has more to say.
        let Some(pools) = pools else { return Ok(()) };
        // Of no size, so that it is no more bulk than it can be: who is taken for a lookup now may turn out to be bulk.
        let Ok(lane) = tenant.lanes.lane(ask.lane, 0) else { return Ok(()) };
        let tokens = Cost::at_least(body_bytes).tokens;
        let asked = asked(tenant, lane, tokens, left(ask.timeout, arrived));
        let room = self.watch.shedding.pools().at_the_head(pools.iter().copied(), &asked, now);
        let Err(why) = room else { return Ok(()) };
        let known = self.watch.known();
        let offered = |(_, name): &(RegionIndex, &DeploymentName)| {
            known.spill.would_take(name, tokens, permitted.intersect(view.routed).iter(), now)
        };
        if self.config.spill && pools.iter().any(offered) {
            return Ok(());
        }
        self.metrics.shed.count(lane, why.reason);
        Err(shed(tenant, why))
    }

    /// Room for a request in the pool that it would go to first, or in one that has offered it; nothing if there is no such
    /// pool, of which it will hear.
    pub(super) fn room(&self, way: &Way<'_>, wants: &Wants<'_>) -> Result<Room, Refusal> {
        let Wants { tenant, lane, tokens, left, chance } = *wants;
        let name = &way.lawful.deployment.name;
        let asked = asked(tenant, lane, tokens, left);
        let overflow = spill::Ask { deployment: name, lane, tokens, left, turned_away: false, chance };
        let spills = self.config.spill;
        let (nearest, past) = {
            let (known, now) = (&mut *self.watch.known(), Instant::now());
            let Some(nearest) = way.nearest(known, now) else { return Ok(Room::default()) };
            (nearest, if spills { way.past(known, nearest, &overflow, now) } else { None })
        };
        let enter = |region| self.enter(region, name, &asked);
        // Room that was offered and is not there after all is no reason to be turned away here.
        let offered = |to: RegionIndex| {
            let place = enter(to).ok()?;
            Some(Room { place: Some(place), overflow: Some(to) })
        };
        if let Some(room) = past.and_then(offered) {
            return Ok(room);
        }
        match enter(nearest) {
            Ok(place) => Ok(Room { place: Some(place), overflow: None }),
            Err(why) => {
                let overflow = spill::Ask { turned_away: true, ..overflow };
                let past = || way.past(&mut self.watch.known(), nearest, &overflow, Instant::now());
                spills.then(past).flatten().and_then(offered).ok_or_else(|| {
                    self.metrics.shed.count(lane, why.reason);
                    shed(tenant, why)
                })
            }
        }
    }

    fn enter(&self, region: RegionIndex, name: &DeploymentName, asked: &shed::Ask) -> Result<Place, Shed> {
        let entered = self.watch.shedding.pools().enter(region, name, asked, Instant::now())?;
        Ok(Place { watch: self.watch.clone(), entered })
    }
}

impl Way<'_> {
    /// The region that the request would go to first.
    fn nearest(&self, known: &Known, now: Instant) -> Option<RegionIndex> {
        let name = &self.lawful.deployment.name;
        let near = self.serving(known).map(|region| {
            let held = known.held_for(region, name).unwrap_or_default();
            (self.health(known, region, now), rtt(known, self.client, region, now) + held, region)
        });
        near.filter(|(health, ..)| *health != Health::Down).min().map(|(.., region)| region)
    }

    /// Where it goes past that, if it does; then that region's offer is taken.
    fn past(
        &self,
        known: &mut Known,
        nearest: RegionIndex,
        overflow: &spill::Ask<'_>,
        now: Instant,
    ) -> Option<RegionIndex> {
        let place = |known: &Known, region| {
            let Waits { interactive, bulk } = waits(&known.load(region, overflow.deployment));
            let wait = match overflow.lane {
                // A region that does not know them apart has one queue for both.
                Lane::Interactive => interactive.or(bulk),
                Lane::Bulk => bulk,
            };
            spill::Place { region, rtt: rtt(known, self.client, region, now), wait }
        };
        let home = place(known, nearest);
        if overflow.is_calm_at(home) {
            return None;
        }
        let well = |region: &RegionIndex| self.health(known, *region, now) == Health::Healthy;
        let others = self.serving(known).filter(|region| *region != nearest).filter(well);
        let mut others: Vec<_> = others.map(|region| place(known, region)).collect();
        others.sort_unstable_by_key(|other| (other.rtt, other.region));
        known.spill.leaves(overflow, home, &others, now)
    }

    /// The health of a region for it: whoever is left alone for a while is a suspect, whatever it offers.
    fn health(&self, known: &Known, region: RegionIndex, now: Instant) -> Health {
        // Of no size: health does not hang on it.
        let about =
            About { deployment: &self.lawful.deployment.name, size: Size::of(0), chance: self.chance };
        known.health(region, &about, now)
    }

    /// The regions that may see it and serve its deployment.
    fn serving<'k>(&self, known: &'k Known) -> impl Iterator<Item = RegionIndex> + 'k {
        let Lawful { deployment, registered, .. } = self.lawful;
        known
            .fleet
            .serving(&deployment.name, *registered)
            .intersect(self.allowed)
            .intersect(self.view.routed)
            .iter()
    }
}

fn rtt(known: &Known, client: Option<GeoPoint>, region: RegionIndex, now: Instant) -> Duration {
    match client {
        Some(place) => known.latency.prior_from(place, region),
        None => known.latency.estimate(region, now),
    }
}

fn waits(load: &Load) -> Waits {
    Waits::of(load.lookup_tokens, load.pending_tokens, load.tokens_per_second)
}

fn asked(tenant: &Tenant, lane: Lane, tokens: u64, left: Duration) -> shed::Ask {
    shed::Ask { tenant: tenant.place, weight: tenant.weight.get().into(), lane, tokens, left }
}

pub(super) fn left(timeout: Duration, arrived: Instant) -> Duration {
    timeout.saturating_sub(arrived.elapsed())
}
