//! The spokes that the hub knows, as a view of what stands in the store under `spokes/`.
//!
//! A spoke stands there under its lease, so who is alive is the store's question and not asked here. Here it is decided
//! what that means for routing:
//!
//! - Of several spokes of one region the one that registered last is routed to. During a rolling restart the new one
//!   takes over as it registers; if it dies at once, the old one has it back. Neither has to know of the other.
//! - A region whose last spoke is gone *lapses*: it keeps its route for [`LAPSED_KEEP`]. Gateways judge a region by its
//!   own reports, five a second, and need the hub's opinion for nothing; whereas a store that stalls can revoke every
//!   lease at once (etcd issue 15247), and a table without regions would turn that hiccup into an outage.
//! - Where many leases end in one moment ([`MASS_LOSS`]) it is the store's doing and not the regions': then these regions
//!   are *held* beyond that, until so many are back that the rest can be taken at its word. Their time begins then.
//! - Gateways hear regions directly, and say which ([`Registry::heard`]). Who is heard by any of them lives, and keeps its
//!   route whatever became of its lease; who is heard by none goes when its time is over, also where it would be held
//!   ([`Evidence`]). A gateway that hears nobody may be cut off itself, and is no witness.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::plan::capacity::Capacity;
use crate::revisions::{Reported, Reports};
use crate::wire::plan::GatewayBoot;
use regions::{DeploymentName, RegionId, RegionRoute};

/// How long a region keeps its route after its last lease ended: a dozen leases' worth, in which every spoke that lives
/// has come back, and after which a region that was given up is no longer asked for reports.
pub const LAPSED_KEEP: Duration = Duration::from_secs(60);

/// When the end of leases is taken for the store's fault: when of all that stood more than this share ended within this
/// time, and at least so many of them. One region that dies, or two that share a site, are no fault of the store however
/// few there are; three that have nothing in common but their store are.
pub const MASS_LOSS: MassLoss = MassLoss { percent_over: 30, within: Duration::from_secs(2), spokes_min: 3 };

/// See [`MASS_LOSS`].
#[derive(Clone, Copy, Debug)]
pub struct MassLoss {
    /// More than this many of a hundred.
    pub percent_over: usize,
    /// In this time.
    pub within: Duration,
    /// At least so many.
    pub spokes_min: usize,
}

/// How long regions are held at most. By then somebody has looked, or has taken them away on purpose.
pub const HELD_MAX: Duration = Duration::from_secs(3600);

/// Spokes that one region may have at a time: an old and a new one, and room for a few failed starts whose leases run.
pub const SPOKES_PER_REGION_MAX: usize = 8;

/// What a spoke says of itself when it registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The region whose spoke it is.
    pub region: RegionId,
    /// Where gateways reach it.
    pub endpoint: SocketAddr,
    /// Drawn anew whenever the spoke starts.
    pub boot_id: u64,
    /// The deployments that have a replica ready, or would have one for whoever asks.
    pub deployments: BTreeSet<DeploymentName>,
    /// What the region can do.
    pub capacity: Capacity,
    /// What its replicas run.
    pub models: BTreeMap<DeploymentName, Reported>,
}

/// A registration that stands, and when it came to stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What the spoke said.
    pub registration: Registration,
    /// The store's revision at which this spoke first registered; of two spokes the later has the higher.
    pub created: u64,
}

/// The spokes that are registered, and the regions that were until lately.
#[derive(Debug)]
pub struct Registry {
    lapsed_keep: Duration,
    spokes: BTreeMap<(RegionId, u64), Standing>,
    lapsed: BTreeMap<RegionId, Lapsed>,
    /// The regions that each gateway hears, if it says.
    witnesses: Witnesses,
    /// When leases have ended lately.
    ended: VecDeque<Instant>,
    /// The last end of many leases in one moment, while it is taken for the store's fault.
    held: Option<Held>,
}

#[derive(Debug)]
struct Lapsed {
    route: RegionRoute,
    since: Instant,
    /// How long it keeps its route where no gateway knows better.
    until: Instant,
    /// When gateways ceased to hear it, if any did since.
    unheard: Option<Instant>,
}

/// The regions that each gateway hears, if it says.
type Witnesses = BTreeMap<GatewayBoot, Option<BTreeSet<RegionId>>>;

/// What gateways say of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// One hears it, at least.
    Heard,
    /// All hear others and none hears it.
    Unheard,
    /// There is none, or one that does not say.
    None,
}

/// What the gateways that speak say of `region`.
pub fn evidence<'a>(
    witnesses: impl IntoIterator<Item = &'a Option<BTreeSet<RegionId>>>,
    region: &RegionId,
) -> Evidence {
    let (mut some, mut all_say) = (false, true);
    for witness in witnesses {
        match witness.as_ref().filter(|heard| !heard.is_empty()) {
            Some(heard) if heard.contains(region) => return Evidence::Heard,
            Some(_) => some = true,
            None => all_say = false,
        }
    }
    if some && all_say { Evidence::Unheard } else { Evidence::None }
}

impl Lapsed {
    /// When it loses its route, by what gateways say of it; never, while one hears it.
    fn ends(&self, evidence: Evidence, keep: Duration) -> Option<Instant> {
        let given = self.unheard.unwrap_or(self.since) + keep;
        match evidence {
            Evidence::Heard => None,
            Evidence::Unheard => Some(given),
            Evidence::None => Some(self.until.max(given)),
        }
    }
}

/// Regions that have lapsed since then are held.
#[derive(Debug)]
struct Held {
    since: Instant,
    /// Spokes that stood before it.
    stood: usize,
}

impl Registry {
    /// A registry that starts with the routes that were published last: each of these regions has `lapsed_keep` to
    /// come forward.
    pub fn new(published: &BTreeMap<RegionId, RegionRoute>, lapsed_keep: Duration, now: Instant) -> Registry {
        let (spokes, lapsed, witnesses) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let ended = VecDeque::new();
        let mut registry = Registry { lapsed_keep, spokes, lapsed, witnesses, ended, held: None };
        for (region, route) in published {
            registry.lapse(region.clone(), route.clone(), now);
        }
        registry
    }

    /// A spoke registered, or said anew what is ready.
    pub fn put(&mut self, standing: Standing, now: Instant) {
        let Registration { region, boot_id, .. } = &standing.registration;
        self.lapsed.remove(region);
        self.spokes.insert((region.clone(), *boot_id), standing);
        self.let_go(now);
    }

    /// A spoke's lease ended, or the spoke ended it.
    pub fn remove(&mut self, region: &RegionId, boot_id: u64, now: Instant) {
        let Some(last) = self.spokes.remove(&(region.clone(), boot_id)) else {
            return;
        };
        if self.of(region).next().is_none() {
            self.lapse(region.clone(), route(&last), now);
        }
        self.suspect(now);
    }

    /// A gateway hears these regions; nothing, if it does not say.
    pub fn heard(&mut self, gateway: GatewayBoot, reaches: Option<BTreeSet<RegionId>>, now: Instant) {
        self.note_unheard(now, |witnesses| drop(witnesses.insert(gateway, reaches)));
    }

    /// A gateway is gone, and its word with it.
    pub fn silent(&mut self, gateway: &GatewayBoot, now: Instant) {
        self.note_unheard(now, |witnesses| drop(witnesses.remove(gateway)));
    }

    /// These are all the gateways there are.
    pub fn hear_only(
        &mut self,
        all: impl IntoIterator<Item = (GatewayBoot, Option<BTreeSet<RegionId>>)>,
        now: Instant,
    ) {
        self.note_unheard(now, |witnesses| *witnesses = all.into_iter().collect());
    }

    /// Changes who says what. Of whom that was the last good word, the time begins now.
    fn note_unheard(&mut self, now: Instant, change: impl FnOnce(&mut Witnesses)) {
        let heard = |witnesses: &Witnesses, region: &RegionId| {
            evidence(witnesses.values(), region) == Evidence::Heard
        };
        let before: BTreeSet<_> =
            self.lapsed.keys().filter(|region| heard(&self.witnesses, region)).cloned().collect();
        change(&mut self.witnesses);
        for (region, lapsed) in self.lapsed.iter_mut().filter(|(region, _)| before.contains(*region)) {
            if !heard(&self.witnesses, region) {
                lapsed.unheard = Some(now);
            }
        }
    }

    /// Whether regions are held because many leases ended in one moment.
    pub fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// These are all the spokes there are.
    pub fn replace(&mut self, all: Vec<Standing>, now: Instant) {
        let key = |standing: &Standing| (standing.registration.region.clone(), standing.registration.boot_id);
        let named: BTreeSet<_> = all.iter().map(key).collect();
        all.into_iter().for_each(|standing| self.put(standing, now));
        let gone: Vec<_> = self.spokes.keys().filter(|spoke| !named.contains(*spoke)).cloned().collect();
        for (region, boot_id) in gone {
            self.remove(&region, boot_id, now);
        }
    }

    /// Forgets the regions that lapsed too long ago.
    pub fn expire(&mut self, now: Instant) {
        let Registry { lapsed, witnesses, lapsed_keep, .. } = self;
        lapsed.retain(|region, lapsed| {
            let ends = lapsed.ends(evidence(witnesses.values(), region), *lapsed_keep);
            ends.is_none_or(|ends| ends > now)
        });
        if self.held.as_ref().is_some_and(|held| held.since + HELD_MAX <= now) {
            self.held = None;
        }
    }

    /// When [`Registry::expire`] next has something to do.
    pub fn next_expiry(&self) -> Option<Instant> {
        let ends = |(region, lapsed): (&RegionId, &Lapsed)| {
            lapsed.ends(evidence(self.witnesses.values(), region), self.lapsed_keep)
        };
        self.lapsed.iter().filter_map(ends).min()
    }

    /// Where each region is reached and what is ready there.
    pub fn routes(&self) -> BTreeMap<RegionId, RegionRoute> {
        let newest = self.newest().into_iter();
        let standing = newest.map(|(region, standing)| (region.clone(), route(standing)));
        let lapsed = self.lapsed.iter().map(|(region, lapsed)| (region.clone(), lapsed.route.clone()));
        standing.chain(lapsed).collect()
    }

    /// Of the spokes of each region the one that is routed to.
    pub fn newest(&self) -> BTreeMap<&RegionId, &Standing> {
        let mut newest: BTreeMap<&RegionId, &Standing> = BTreeMap::new();
        for ((region, _), standing) in &self.spokes {
            let known = newest.entry(region).or_insert(standing);
            if standing.created > known.created {
                *known = standing;
            }
        }
        newest
    }

    /// What the replicas of each region with a spoke run.
    pub fn reports(&self) -> Reports<'_> {
        let newest = self.newest().into_iter();
        newest.map(|(region, standing)| (region, &standing.registration.models)).collect()
    }

    fn of(&self, region: &RegionId) -> impl Iterator<Item = &Standing> {
        self.spokes.range((region.clone(), 0)..=(region.clone(), u64::MAX)).map(|(_, standing)| standing)
    }

    fn lapse(&mut self, region: RegionId, route: RegionRoute, now: Instant) {
        let keep = if self.held.is_some() { HELD_MAX } else { self.lapsed_keep };
        self.lapsed.insert(region, Lapsed { route, since: now, until: now + keep, unheard: None });
    }

    /// A lease has ended. If that makes too many in one moment, everything that has lapsed in it is held.
    fn suspect(&mut self, now: Instant) {
        let MassLoss { percent_over, within, spokes_min } = MASS_LOSS;
        self.ended.push_back(now);
        while self.ended.front().is_some_and(|ended| *ended + within < now) {
            self.ended.pop_front();
        }
        let (ended, stood) = (self.ended.len(), self.spokes.len() + self.ended.len());
        if self.held.is_some() || ended < spokes_min || ended * 100 <= stood * percent_over {
            return;
        }
        let since = *self.ended.front().expect("it has just been added to");
        self.held = Some(Held { since, stood });
        for lapsed in self.lapsed.values_mut().filter(|lapsed| lapsed.since >= since) {
            lapsed.until = since + HELD_MAX;
        }
    }

    /// A spoke has come. If so many have that the store takes leases again and no more are missing than may be missing,
    /// the rest is believed to be gone, and has its time from now.
    fn let_go(&mut self, now: Instant) {
        let Some(Held { since, stood }) = self.held else { return };
        let missing = stood.saturating_sub(self.spokes.len());
        if missing * 100 > stood * MASS_LOSS.percent_over {
            return;
        }
        self.held = None;
        let until = now + self.lapsed_keep;
        for lapsed in self.lapsed.values_mut().filter(|lapsed| lapsed.since >= since) {
            lapsed.until = until;
        }
    }
}

fn route(standing: &Standing) -> RegionRoute {
    let Registration { region: _, endpoint, boot_id: _, deployments, capacity: _, models: _ } =
        &standing.registration;
    RegionRoute { endpoint: *endpoint, deployments: deployments.clone(), draining: false }
}

#[cfg(test)]
mod tests;
