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

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::plan::capacity::Capacity;
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
    /// When leases have ended lately.
    ended: VecDeque<Instant>,
    /// The last end of many leases in one moment, while it is taken for the store's fault.
    held: Option<Held>,
}

#[derive(Debug)]
struct Lapsed {
    route: RegionRoute,
    since: Instant,
    until: Instant,
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
        let (spokes, lapsed) = (BTreeMap::new(), BTreeMap::new());
        let mut registry = Registry { lapsed_keep, spokes, lapsed, ended: VecDeque::new(), held: None };
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
        self.lapsed.retain(|_, lapsed| lapsed.until > now);
        if self.held.as_ref().is_some_and(|held| held.since + HELD_MAX <= now) {
            self.held = None;
        }
    }

    /// When [`Registry::expire`] next has something to do.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.lapsed.values().map(|lapsed| lapsed.until).min()
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

    fn of(&self, region: &RegionId) -> impl Iterator<Item = &Standing> {
        self.spokes.range((region.clone(), 0)..=(region.clone(), u64::MAX)).map(|(_, standing)| standing)
    }

    fn lapse(&mut self, region: RegionId, route: RegionRoute, now: Instant) {
        let keep = if self.held.is_some() { HELD_MAX } else { self.lapsed_keep };
        self.lapsed.insert(region, Lapsed { route, since: now, until: now + keep });
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
    let Registration { region: _, endpoint, boot_id: _, deployments, capacity: _ } = &standing.registration;
    RegionRoute { endpoint: *endpoint, deployments: deployments.clone(), draining: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const EUROPE: &str = "gcp/europe-west4";
    const AMERICA: &str = "aws/us-east-1";

    /// The spoke of `region` that is reached at `port`, which is its boot identifier too.
    fn spoke(region: &str, port: u16, created: u64) -> Standing {
        let registration = Registration {
            region: region.parse().unwrap(),
            endpoint: ([10, 0, 0, 1], port).into(),
            boot_id: port.into(),
            deployments: BTreeSet::new(),
            capacity: Capacity::default(),
        };
        Standing { registration, created }
    }

    fn empty(now: Instant) -> Registry {
        Registry::new(&BTreeMap::new(), LAPSED_KEEP, now)
    }

    /// The ports that are routed to, in the order of their regions.
    fn routed(registry: &Registry) -> Vec<(String, u16)> {
        let routes = registry.routes().into_iter();
        routes.map(|(region, route)| (region.to_string(), route.endpoint.port())).collect()
    }

    fn of(region: &str, port: u16) -> (String, u16) {
        (region.to_owned(), port)
    }

    #[test]
    fn a_region_is_reached_at_the_spoke_that_registered_last_and_falls_back_on_the_other() {
        let now = some_instant();
        let mut registry = empty(now);
        registry.put(spoke(EUROPE, 9, 1), now);
        registry.put(spoke(EUROPE, 3, 2), now);
        assert_eq!(routed(&registry), [of(EUROPE, 3)]);
        registry.put(spoke(EUROPE, 9, 1), now);
        assert_eq!(routed(&registry), [of(EUROPE, 3)], "the old one said again what is ready");
        registry.remove(&EUROPE.parse().unwrap(), 3, now);
        assert_eq!(routed(&registry), [of(EUROPE, 9)]);
    }

    #[test]
    fn a_region_without_a_spoke_keeps_its_route_for_a_while_and_not_for_longer() {
        let now = some_instant();
        let mut registry = empty(now);
        registry.put(spoke(EUROPE, 1, 1), now);
        registry.put(spoke(AMERICA, 2, 2), now);
        registry.remove(&EUROPE.parse().unwrap(), 1, now);
        registry.remove(&EUROPE.parse().unwrap(), 1, now + LAPSED_KEEP);
        assert_eq!(registry.next_expiry(), Some(now + LAPSED_KEEP), "gone once is gone");

        registry.expire(now + LAPSED_KEEP - Duration::from_nanos(1));
        assert_eq!(routed(&registry), [of(AMERICA, 2), of(EUROPE, 1)]);
        registry.expire(now + LAPSED_KEEP);
        assert_eq!((routed(&registry), registry.next_expiry()), (vec![of(AMERICA, 2)], None));
    }

    #[test]
    fn a_region_that_comes_back_has_not_lapsed() {
        let now = some_instant();
        let mut registry = empty(now);
        registry.put(spoke(EUROPE, 1, 1), now);
        registry.remove(&EUROPE.parse().unwrap(), 1, now);
        registry.put(spoke(EUROPE, 2, 5), now);
        registry.expire(now + 2 * LAPSED_KEEP);
        assert_eq!(routed(&registry), [of(EUROPE, 2)]);
    }

    #[test]
    fn a_hub_that_starts_gives_every_published_region_time_to_come_forward() {
        let now = some_instant();
        let mut before = empty(now);
        before.put(spoke(EUROPE, 1, 1), now);
        before.put(spoke(AMERICA, 2, 2), now);
        let mut registry = Registry::new(&before.routes(), LAPSED_KEEP, now);
        registry.put(spoke(AMERICA, 3, 9), now);
        assert_eq!(routed(&registry), [of(AMERICA, 3), of(EUROPE, 1)]);
        registry.expire(now + LAPSED_KEEP);
        assert_eq!(routed(&registry), [of(AMERICA, 3)]);
    }

    #[test]
    fn a_list_of_all_spokes_takes_away_those_that_it_does_not_name() {
        let now = some_instant();
        let mut registry = empty(now);
        registry.put(spoke(EUROPE, 1, 1), now);
        registry.put(spoke(EUROPE, 2, 2), now);
        registry.put(spoke(AMERICA, 3, 3), now);
        registry.replace(vec![spoke(EUROPE, 1, 1), spoke(EUROPE, 4, 4)], now);
        assert_eq!(routed(&registry), [of(AMERICA, 3), of(EUROPE, 4)]);
        registry.expire(now + LAPSED_KEEP);
        assert_eq!(routed(&registry), [of(EUROPE, 4)]);
    }

    /// Ten regions with a spoke each, of which `lost` lose their leases one after another, `apart`.
    fn ten_lose(lost: usize, apart: Duration) -> (Registry, Instant) {
        const CLOUD: [&str; 10] = [
            "aws/us-east-1",
            "aws/us-east-2",
            "aws/us-west-1",
            "aws/us-west-2",
            "aws/eu-west-1",
            "aws/eu-west-2",
            "aws/eu-west-3",
            "aws/eu-north-1",
            "aws/sa-east-1",
            "aws/ca-central-1",
        ];
        let mut now = some_instant();
        let mut registry = empty(now);
        for (place, region) in CLOUD.iter().enumerate() {
            let place = u16::try_from(place).unwrap();
            registry.put(spoke(region, place + 1, u64::from(place)), now);
        }
        for (place, region) in CLOUD.iter().take(lost).enumerate() {
            if place > 0 {
                now += apart;
            }
            registry.remove(&region.parse().unwrap(), place as u64 + 1, now);
        }
        (registry, now)
    }

    #[test]
    fn when_more_than_three_of_ten_leases_end_within_two_seconds_their_regions_are_held() {
        let check = |lost: usize, apart_ms: u64, held: bool| {
            let (mut registry, now) = ten_lose(lost, Duration::from_millis(apart_ms));
            assert_eq!(registry.holds(), held, "{lost} lost, {apart_ms} ms apart");
            registry.expire(now + LAPSED_KEEP);
            let routed = registry.routes().len();
            assert_eq!(routed, if held { 10 } else { 10 - lost }, "{lost} lost, {apart_ms} ms apart");
            registry.expire(now + HELD_MAX);
            assert_eq!((registry.routes().len(), registry.holds()), (10 - lost, false), "not for ever");
        };
        check(3, 0, false);
        check(4, 0, true);
        check(10, 0, true);
        check(4, 666, true);
        check(4, 1001, false);
    }

    #[test]
    fn of_few_regions_one_or_two_that_die_are_no_fault_of_the_store() {
        let now = some_instant();
        let mut registry = empty(now);
        registry.put(spoke(EUROPE, 1, 1), now);
        registry.put(spoke(AMERICA, 2, 2), now);
        registry.remove(&EUROPE.parse().unwrap(), 1, now);
        registry.remove(&AMERICA.parse().unwrap(), 2, now);
        registry.expire(now + LAPSED_KEEP);
        assert_eq!((routed(&registry), registry.holds()), (vec![], false));
    }

    #[test]
    fn held_regions_are_let_go_when_so_many_are_back_that_the_rest_is_believed() {
        let (mut registry, now) = ten_lose(10, Duration::ZERO);
        let later = now + 2 * LAPSED_KEEP;
        let back: Vec<_> = registry.routes().into_keys().collect();
        for region in &back[..6] {
            registry.put(spoke(region.as_str(), 99, 99), later);
        }
        assert!(registry.holds(), "four of ten are still missing");
        registry.put(spoke(back[6].as_str(), 99, 99), later);
        assert!(!registry.holds(), "three of ten may be");
        registry.expire(later + LAPSED_KEEP - Duration::from_nanos(1));
        assert_eq!(registry.routes().len(), 10);
        registry.expire(later + LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 7);
    }
}
