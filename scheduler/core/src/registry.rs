//! Spokes that the hub knows, as a view of the keys under `spokes/` in the store.
//!
//! A spoke's key is attached to its lease, so the store decides which spokes are alive. This module decides what that
//! means for routing:
//!
//! - All spokes of a region are its *instances* and get traffic. They serve the same replicas, so the region's
//!   capacity and model revisions are those that one of them reports ([`representatives`]), never a sum.
//! - A spoke that drains leaves the table at once when it deregisters, if its region has another one.
//! - A spoke that is gone without having drained *lapses*: it keeps its route for [`LAPSED_KEEP`]. Gateways judge
//!   the health of each instance by its own reports, five per second, and do not need the hub for that. A stalling
//!   store, on the other hand, can revoke every lease at once (etcd issue 15247), and a table without regions would
//!   turn that stall into an outage.
//! - If many leases end at once ([`MASS_LOSS`]), the cause is the store, not the spokes. These spokes are *held*
//!   beyond `LAPSED_KEEP`, until so many spokes are back that the remaining losses are credible. Their time then
//!   starts.
//! - Gateways exchange reports with regions directly and report to the hub which regions they reach
//!   ([`Registry::gateway_reported`]). A region that any gateway reaches keeps its route regardless of its lease. A
//!   region that no gateway reaches loses its route when its time is over, even if it would be held
//!   ([`Reachability`]). For a lapsed spoke beside others that are registered, this says nothing: its time counts.
//!   A gateway that reaches no region may be isolated itself and does not count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::revisions::Reports;
use regions::route::MAX_INSTANCES;
use regions::{DeploymentName, HostPort, InstanceName, RegionId, RegionRoute};
use scheduler_api::plan::GatewayBoot;
use scheduler_api::registration::{JobLogKind, Registration};

/// Time for which a spoke keeps its route after its lease ended: a dozen lease periods. Every running spoke has
/// registered again by then, and gateways stop polling a region that was shut down.
pub const LAPSED_KEEP: Duration = Duration::from_secs(60);

/// Rule for blaming the store for ended leases: more than this share of all spokes lost within this time, and at least
/// this many of them. The loss of one region, or of two that share a site, is never blamed on the store, however small
/// the fleet; three losses without another common cause are.
pub const MASS_LOSS: MassLoss = MassLoss { percent_over: 30, within: Duration::from_secs(2), spokes_min: 3 };

/// Thresholds of the mass-loss detection.
#[derive(Clone, Copy, Debug)]
pub struct MassLoss {
    /// Percentage of the spokes that must be exceeded.
    pub percent_over: usize,
    /// Time window.
    pub within: Duration,
    /// Minimum number of lost spokes.
    pub spokes_min: usize,
}

/// Maximum time for which regions are held. An operator has inspected or removed them by then.
pub const HOLD_MAX: Duration = Duration::from_secs(3600);

/// Maximum number of registered spokes of one region.
pub const SPOKES_PER_REGION_MAX: usize = MAX_INSTANCES;

/// Registered spoke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisteredSpoke {
    /// Its registration.
    pub registration: Registration,
    /// Store revision of its first registration; the later of two spokes has the higher one.
    pub created: u64,
}

/// Registered and lapsed spokes.
#[derive(Debug)]
pub struct Registry {
    lapsed_keep: Duration,
    spokes: BTreeMap<(RegionId, u64), RegisteredSpoke>,
    lapsed: BTreeMap<(RegionId, InstanceName), LapsedSpoke>,
    /// Regions that each gateway reaches, if it reports them.
    gateways: GatewayReach,
    /// Times of the recent lease losses.
    recent_losses: VecDeque<Instant>,
    /// Current mass loss that is blamed on the store, if any.
    hold: Option<MassLossHold>,
}

/// Spoke that is gone, and has not drained before.
#[derive(Debug)]
struct LapsedSpoke {
    endpoint: HostPort,
    deployments: BTreeSet<DeploymentName>,
    /// Its registration; unknown if that was in the term of another leader.
    last: Option<RegisteredSpoke>,
    since: Instant,
    /// End of its route while reachability is unknown.
    until: Instant,
    /// Time since which no gateway reaches it, if one did after it lapsed.
    unreachable_since: Option<Instant>,
}

/// Regions that each gateway reaches, if it reports them.
type GatewayReach = BTreeMap<GatewayBoot, Option<BTreeSet<RegionId>>>;

/// Reachability of a region according to the gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reachability {
    /// At least one gateway reaches it.
    Reachable,
    /// All gateways reach other regions, and none reaches this one.
    Unreachable,
    /// There are no gateways, or one does not report its regions.
    Unknown,
}

/// Returns the reachability of `region` by the reports of all gateways.
pub fn reachability<'a>(
    gateways: impl IntoIterator<Item = &'a Option<BTreeSet<RegionId>>>,
    region: &RegionId,
) -> Reachability {
    let (mut any_reports, mut all_report) = (false, true);
    for reached in gateways {
        match reached.as_ref().filter(|reached| !reached.is_empty()) {
            Some(reached) if reached.contains(region) => return Reachability::Reachable,
            Some(_) => any_reports = true,
            None => all_report = false,
        }
    }
    if any_reports && all_report { Reachability::Unreachable } else { Reachability::Unknown }
}

impl LapsedSpoke {
    /// Returns the time at which the route ends; `None` while a gateway reaches the region. With `others` registered
    /// in its region, reachability says nothing about this spoke.
    fn ends(&self, others: bool, reachability: Reachability, keep: Duration) -> Option<Instant> {
        let earliest = self.unreachable_since.unwrap_or(self.since) + keep;
        match reachability {
            _ if others => Some(self.until),
            Reachability::Reachable => None,
            Reachability::Unreachable => Some(earliest),
            Reachability::Unknown => Some(self.until.max(earliest)),
        }
    }
}

/// Hold of the spokes that lapsed since the start of a mass loss.
#[derive(Debug)]
struct MassLossHold {
    since: Instant,
    /// Number of spokes before it.
    spokes_before: usize,
}

impl Registry {
    /// Creates a registry from the routes published last: the spokes of these regions have `lapsed_keep` to register.
    pub fn new(published: &BTreeMap<RegionId, RegionRoute>, lapsed_keep: Duration, now: Instant) -> Registry {
        let (spokes, lapsed, gateways) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let recent_losses = VecDeque::new();
        let mut registry = Registry { lapsed_keep, spokes, lapsed, gateways, recent_losses, hold: None };
        for (region, RegionRoute { instances, deployments, draining: _ }) in published {
            for (instance, endpoint) in instances {
                registry.lapse(
                    (region.clone(), instance.clone()),
                    endpoint.clone(),
                    deployments.clone(),
                    None,
                    now,
                );
            }
        }
        registry
    }

    /// Adds a spoke, or updates its registration.
    pub fn put(&mut self, spoke: RegisteredSpoke, now: Instant) {
        let Registration { region, instance, boot_id, .. } = &spoke.registration;
        self.lapsed.remove(&(region.clone(), instance.clone()));
        self.spokes.insert((region.clone(), *boot_id), spoke);
        self.release_hold(now);
    }

    /// Removes a spoke whose lease ended, by expiry or at the spoke's request.
    pub fn remove(&mut self, region: &RegionId, boot_id: u64, now: Instant) {
        let Some(last) = self.spokes.remove(&(region.clone(), boot_id)) else {
            return;
        };
        let Registration { instance, endpoint, deployments, draining, .. } = last.registration.clone();
        let is_replaced = self.of(region).any(|other| other.registration.instance == instance);
        if !(is_replaced || draining && self.of(region).next().is_some()) {
            self.lapse((region.clone(), instance), endpoint, deployments, Some(last), now);
        }
        if !draining {
            self.detect_mass_loss(now);
        }
    }

    /// Stores the regions that a gateway reaches; `None` if it does not report them.
    pub fn gateway_reported(
        &mut self,
        gateway: GatewayBoot,
        reachable_regions: Option<BTreeSet<RegionId>>,
        now: Instant,
    ) {
        self.update_reach(now, |gateways| drop(gateways.insert(gateway, reachable_regions)));
    }

    /// Removes an expired gateway and its report.
    pub fn gateway_expired(&mut self, gateway: &GatewayBoot, now: Instant) {
        self.update_reach(now, |gateways| drop(gateways.remove(gateway)));
    }

    /// Replaces the reports of all gateways.
    pub fn replace_gateways(
        &mut self,
        all: impl IntoIterator<Item = (GatewayBoot, Option<BTreeSet<RegionId>>)>,
        now: Instant,
    ) {
        self.update_reach(now, |gateways| *gateways = all.into_iter().collect());
    }

    /// Changes the gateway reports. For a lapsed region that no gateway reaches any longer, the time starts now.
    fn update_reach(&mut self, now: Instant, change: impl FnOnce(&mut GatewayReach)) {
        let is_reachable = |gateways: &GatewayReach, region: &RegionId| {
            reachability(gateways.values(), region) == Reachability::Reachable
        };
        let regions = self.lapsed.keys().map(|(region, _)| region);
        let before: BTreeSet<_> =
            regions.filter(|region| is_reachable(&self.gateways, region)).cloned().collect();
        change(&mut self.gateways);
        for ((region, _), lapsed) in self.lapsed.iter_mut().filter(|((region, _), _)| before.contains(region))
        {
            if !is_reachable(&self.gateways, region) {
                lapsed.unreachable_since = Some(now);
            }
        }
    }

    /// Returns whether regions are held because of a mass loss of leases.
    pub fn is_holding(&self) -> bool {
        self.hold.is_some()
    }

    /// Replaces all spokes.
    pub fn replace(&mut self, all: Vec<RegisteredSpoke>, now: Instant) {
        let key = |spoke: &RegisteredSpoke| (spoke.registration.region.clone(), spoke.registration.boot_id);
        let named: BTreeSet<_> = all.iter().map(key).collect();
        all.into_iter().for_each(|spoke| self.put(spoke, now));
        let gone: Vec<_> = self.spokes.keys().filter(|spoke| !named.contains(*spoke)).cloned().collect();
        for (region, boot_id) in gone {
            self.remove(&region, boot_id, now);
        }
    }

    /// Removes the lapsed spokes whose time is over. Returns whether anything has changed.
    pub fn expire(&mut self, now: Instant) -> bool {
        let Registry { lapsed, gateways, lapsed_keep, spokes, .. } = self;
        let before = lapsed.len();
        lapsed.retain(|(region, _), lapsed| {
            let others = spokes_of(spokes, region).next().is_some();
            let ends = lapsed.ends(others, reachability(gateways.values(), region), *lapsed_keep);
            ends.is_none_or(|ends| ends > now)
        });
        let has_expired = lapsed.len() < before;
        let hold_ends = self.hold.as_ref().is_some_and(|hold| hold.since + HOLD_MAX <= now);
        if hold_ends {
            self.hold = None;
        }
        has_expired || hold_ends
    }

    /// Returns the next time at which [`Registry::expire`] has an effect.
    pub fn next_expiry(&self) -> Option<Instant> {
        let ends = |((region, _), lapsed): (&(RegionId, InstanceName), &LapsedSpoke)| {
            let others = self.of(region).next().is_some();
            lapsed.ends(others, reachability(self.gateways.values(), region), self.lapsed_keep)
        };
        self.lapsed.iter().filter_map(ends).min()
    }

    /// Returns the route of each region with a registered or lapsed spoke. Of more than [`MAX_INSTANCES`], lapsed
    /// ones are left out first.
    pub fn routes(&self) -> BTreeMap<RegionId, RegionRoute> {
        let mut routes: BTreeMap<RegionId, RegionRoute> = BTreeMap::new();
        let mut registered: Vec<_> = self.spokes.values().collect();
        // Of two with one name, the later one is routed to.
        registered.sort_by_key(|spoke| spoke.created);
        for spoke in &registered {
            // One that drains stays until it deregisters: gateways know from its reports that it drains, and still need it for what
            // the others do not serve yet; and the next scaler exchanges with it until its replicas are replaced.
            let Registration { region, instance, endpoint, deployments, .. } = &spoke.registration;
            let route = routes.entry(region.clone()).or_insert_with(no_route);
            route.instances.insert(instance.clone(), endpoint.clone());
            add(&mut route.deployments, deployments);
        }
        for ((region, instance), lapsed) in &self.lapsed {
            let route = routes.entry(region.clone()).or_insert_with(no_route);
            if route.instances.len() < MAX_INSTANCES {
                route.instances.entry(instance.clone()).or_insert_with(|| lapsed.endpoint.clone());
            }
            // The deployments of registered spokes are newer.
            if self.of(region).next().is_none() {
                add(&mut route.deployments, &lapsed.deployments);
            }
        }
        routes
    }

    /// Returns the [representative](representatives) of each region.
    pub fn representatives(&self) -> BTreeMap<&RegionId, &RegisteredSpoke> {
        representatives(self.spokes.values())
    }

    /// Returns the [representative](representatives) of the lapsed spokes of each region without a registered one, as it was
    /// registered last.
    pub fn lapsed_representatives(&self) -> BTreeMap<&RegionId, &RegisteredSpoke> {
        let lapsed = self.lapsed.iter().filter(|((region, _), _)| self.of(region).next().is_none());
        representatives(lapsed.filter_map(|(_, lapsed)| lapsed.last.as_ref()))
    }

    /// Returns the model reports of all regions with a spoke.
    pub fn reports(&self) -> Reports<'_> {
        let each = self.representatives().into_iter();
        each.map(|(region, spoke)| (region, &spoke.registration.models)).collect()
    }

    /// Returns the regions whose spokes have several queues of jobs.
    pub fn regions_with_several_job_queues(&self) -> BTreeSet<&RegionId> {
        let queues = self.spokes.values().filter_map(|RegisteredSpoke { registration, .. }| {
            registration.job_log.map(|log| (&registration.region, log))
        });
        let mut known: BTreeMap<&RegionId, JobLogKind> = BTreeMap::new();
        queues
            .filter_map(|(region, log)| {
                let other = known.insert(region, log)?;
                log.is_another_queue(other).then_some(region)
            })
            .collect()
    }

    fn of(&self, region: &RegionId) -> impl Iterator<Item = &RegisteredSpoke> {
        spokes_of(&self.spokes, region)
    }

    fn lapse(
        &mut self,
        spoke: (RegionId, InstanceName),
        endpoint: HostPort,
        deployments: BTreeSet<DeploymentName>,
        last: Option<RegisteredSpoke>,
        now: Instant,
    ) {
        let keep = if self.hold.is_some() { HOLD_MAX } else { self.lapsed_keep };
        let (until, unreachable_since) = (now + keep, None);
        self.lapsed
            .insert(spoke, LapsedSpoke { endpoint, deployments, last, since: now, until, unreachable_since });
    }

    /// Records a lost lease. If that makes a mass loss, the regions that lapsed in it are held.
    fn detect_mass_loss(&mut self, now: Instant) {
        let MassLoss { percent_over, within, spokes_min } = MASS_LOSS;
        self.recent_losses.push_back(now);
        while self.recent_losses.front().is_some_and(|lost| *lost + within < now) {
            self.recent_losses.pop_front();
        }
        let (lost, spokes_before) = (self.recent_losses.len(), self.spokes.len() + self.recent_losses.len());
        if self.hold.is_some() || lost < spokes_min || lost * 100 <= spokes_before * percent_over {
            return;
        }
        let since = *self.recent_losses.front().expect("an entry has just been added");
        self.hold = Some(MassLossHold { since, spokes_before });
        for lapsed in self.lapsed.values_mut().filter(|lapsed| lapsed.since >= since) {
            lapsed.until = since + HOLD_MAX;
        }
    }

    /// Ends the hold when so many spokes have registered again that the store works and the number of missing spokes is
    /// below the mass-loss threshold. The remaining losses are then credible, and their time starts now.
    fn release_hold(&mut self, now: Instant) {
        let Some(MassLossHold { since, spokes_before }) = self.hold else { return };
        let missing = spokes_before.saturating_sub(self.spokes.len());
        if missing * 100 > spokes_before * MASS_LOSS.percent_over {
            return;
        }
        self.hold = None;
        let until = now + self.lapsed_keep;
        for lapsed in self.lapsed.values_mut().filter(|lapsed| lapsed.since >= since) {
            lapsed.until = until;
        }
    }
}

fn spokes_of<'a>(
    spokes: &'a BTreeMap<(RegionId, u64), RegisteredSpoke>,
    region: &RegionId,
) -> impl Iterator<Item = &'a RegisteredSpoke> {
    spokes.range((region.clone(), 0)..=(region.clone(), u64::MAX)).map(|(_, spoke)| spoke)
}

/// Returns the spoke of each region that knows the most ready replicas, of several the latest: one that has just
/// started has no status of them yet. It reports for its region, whose spokes serve the same replicas.
pub fn representatives<'a>(
    spokes: impl IntoIterator<Item = &'a RegisteredSpoke>,
) -> BTreeMap<&'a RegionId, &'a RegisteredSpoke> {
    let rank = |spoke: &RegisteredSpoke| {
        let Registration { capacity, draining, .. } = &spoke.registration;
        let ready = capacity.pools.iter().fold(0u64, |sum, pool| sum.saturating_add(pool.ready.into()));
        (!draining, ready, spoke.created)
    };
    let mut best: BTreeMap<&RegionId, &RegisteredSpoke> = BTreeMap::new();
    for spoke in spokes {
        let known = best.entry(&spoke.registration.region).or_insert(spoke);
        if rank(spoke) > rank(known) {
            *known = spoke;
        }
    }
    best
}

/// Adds the deployments of an instance to those of its region. Usually they are the same, and to compare two sets costs a
/// tenth of inserting each element.
fn add(all: &mut BTreeSet<DeploymentName>, more: &BTreeSet<DeploymentName>) {
    if all.is_empty() {
        all.clone_from(more);
    } else if all != more {
        all.extend(more.iter().cloned());
    }
}

fn no_route() -> RegionRoute {
    RegionRoute { instances: BTreeMap::new(), deployments: BTreeSet::new(), draining: false }
}

#[cfg(test)]
mod tests;
