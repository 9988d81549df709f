//! Room in the regions, asked for before a body is read and taken when it is known what is in it.
//!
//! `gateway_core::shed` decides; here are the lock around it and the question where a request would go first: to the nearest
//! of the regions that may see it, serve its deployment and are well, as the choice among them has it. Before its body is
//! read the deployment of most requests is not known (it is in the body), so a request is turned away at its head only if
//! none of those that its tenant may use has room for it.

use super::forward::Edge;
use super::refusals::shed;
use super::view::{Lawful, View};
use super::watch::Watch;
use crate::respond::Refusal;
use gateway_core::ask::Ask;
use gateway_core::endpoint::Target;
use gateway_core::lane::Lane;
use gateway_core::shed::{self, Entered, Pools, Waits};
use gateway_core::tenant::{Cost, Tenant};
use regions::geography::GeoPoint;
use regions::selection::Health;
use regions::set::{RegionIndex, RegionSet};
use scheduler_core::spoke::Report;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Deployments that are looked at for a request that has not said yet which one it is for. A tenant of more is looked at
/// when its request is read; and only while something is shed at all.
const LOOKED_AT_MAX: usize = 16;

/// What is in flight, by region and deployment, and what may be.
#[derive(Default)]
pub(crate) struct Shedding(Mutex<Pools>);

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
        let waits = report.deployments.iter().map(|(name, load)| {
            (name.clone(), Waits::of(load.lookup_tokens, load.pending_tokens, load.tokens_per_second))
        });
        self.pools().heard(region, waits, Instant::now());
    }

    fn pools(&self) -> MutexGuard<'_, Pools> {
        self.0.lock().expect("no decision panics while it holds the lock")
    }
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
        let mut pools = Vec::with_capacity(usable.len());
        for lawful in usable {
            // Where nobody can serve it at all, another refusal has more to say.
            let Some(region) =
                self.first_region(view, lawful, lawful.allowed.intersect(permitted), ask.client)
            else {
                return Ok(());
            };
            pools.push((region, &lawful.deployment.name));
        }
        // Of no size, so that it is no more bulk than it can be: who is taken for a lookup now may turn out to be bulk.
        let Ok(lane) = tenant.lanes.lane(ask.lane, 0) else { return Ok(()) };
        let tokens = Cost::at_least(body_bytes).tokens;
        let asked = asked(tenant, lane, tokens, left(ask.timeout, arrived));
        let room = self.watch.shedding.pools().at_the_head(pools.iter().copied(), &asked, Instant::now());
        room.map_err(|why| shed(tenant, why))
    }

    /// Room for a request in the pool that it would go to first; nothing if there is no such pool, of which it will hear.
    #[expect(
        clippy::too_many_arguments,
        reason = "this is what it hangs on, and all of it is at hand in one place"
    )]
    pub(super) fn room(
        &self,
        view: &View,
        lawful: &Lawful,
        allowed: RegionSet,
        tenant: &Tenant,
        ask: &Ask,
        lane: Lane,
        cost: Cost,
        arrived: Instant,
    ) -> Result<Option<Place>, Refusal> {
        let Some(region) = self.first_region(view, lawful, allowed, ask.client) else { return Ok(None) };
        let asked = asked(tenant, lane, cost.tokens, left(ask.timeout, arrived));
        let entered =
            self.watch.shedding.pools().enter(region, &lawful.deployment.name, &asked, Instant::now());
        match entered {
            Ok(entered) => Ok(Some(Place { watch: self.watch.clone(), entered })),
            Err(why) => Err(shed(tenant, why)),
        }
    }

    fn first_region(
        &self,
        view: &View,
        lawful: &Lawful,
        allowed: RegionSet,
        client: Option<GeoPoint>,
    ) -> Option<RegionIndex> {
        let (name, now) = (&lawful.deployment.name, Instant::now());
        let known = self.watch.known();
        let serving = allowed.intersect(view.routed).iter().filter(|region| {
            let reported = known.fleet.serves(*region, name);
            reported.unwrap_or(lawful.registered.contains(*region))
        });
        let near = serving.map(|region| {
            let rtt = match client {
                Some(place) => known.latency.prior_from(place, region),
                None => known.latency.estimate(region, now),
            };
            (known.fleet.health(region, name), rtt, region)
        });
        near.filter(|(health, ..)| *health != Health::Down).min().map(|(.., region)| region)
    }
}

fn asked(tenant: &Tenant, lane: Lane, tokens: u64, left: Duration) -> shed::Ask {
    shed::Ask { tenant: tenant.place, weight: tenant.weight.get().into(), lane, tokens, left }
}

fn left(timeout: Duration, arrived: Instant) -> Duration {
    timeout.saturating_sub(arrived.elapsed())
}
