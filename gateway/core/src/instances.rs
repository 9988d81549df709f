//! Spoke instances of each region, as a gateway sees them, and the selection of the instance that gets an attempt.
//!
//! The routing decision ([`crate::route`]) selects a region and knows nothing of instances. A region is as healthy
//! as the best of its instances, because any report of one is a report of the region, and its load is the sum of
//! their reports ([`InstanceSet::region_report`]). All instances of a region serve the same replicas, so an instance
//! matters only for the connection: whether it answers, and how long its own queue is.
//!
//! - **Filter, score, pick.** Of the instances with the best [`Rank`], two are drawn and the one with the lower cost is
//!   taken (power of two choices): requests in flight, times the measured latency in multiples of the fastest. The
//!   obvious alternative, the least loaded of all, sends the requests of every gateway to the instance that
//!   restarted last.
//! - **Loss.** A failed connection or three missed reports move an instance behind the others at once; its next report
//!   readmits it. One that was [down](Health::Down) is readmitted after [`RECOVERY_TIME`], so that a flapping
//!   instance does not take its share of the requests up and down with it. Slow or failing instances are ejected by
//!   a circuit breaker of their own ([`crate::circuit`]), never the last one.
//! - **Draining.** An instance that announces in its report that it drains gets no new request for a deployment that another
//!   one serves.
//!
//! The last instance stays selectable, whatever its state, and the health of its region decides.

use crate::circuit::{BreakerState, Circuits, Permille};
use crate::health::{DOWN_AFTER, FAILURES_MAX, RECOVERY_TIME, SUSPECT_AFTER, TICK_PERIOD_MAX};
use crate::latency::decayed_slowness;
use crate::outlier::OutlierEvidence;
use regions::health::Health;
use regions::id::{DeploymentName, InstanceName};
use regions::set::{RegionIndex, RegionSet};
use scheduler_api::report::DeploymentLoad;
use scheduler_api::report::delta::DecodedReport;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Largest slowness in multiples of the fastest instance.
const SLOWNESS_MAX: u64 = 1000;
/// Reciprocal of the weight of a new latency in the average: an eighth, as in TCP.
const AVERAGE_WEIGHT: u32 = 8;

/// Spoke instance of a region. The number is never used again: an instance with another address is another one, so
/// that late information about the former is not attributed to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceIndex {
    region: RegionIndex,
    number: u32,
}

impl InstanceIndex {
    /// Returns the instance of `region` with this number.
    pub fn new(region: RegionIndex, number: u32) -> InstanceIndex {
        InstanceIndex { region, number }
    }

    /// Returns the region of the instance.
    pub fn region(self) -> RegionIndex {
        self.region
    }

    /// Returns the range of all instances of `region`.
    pub fn all_of(region: RegionIndex) -> RangeInclusive<InstanceIndex> {
        InstanceIndex { region, number: 0 }..=InstanceIndex { region, number: u32::MAX }
    }
}

/// Selected instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectedInstance {
    /// The instance.
    pub instance: InstanceIndex,
    /// Whether it is up, does not drain, and has not been tried: a failed attempt may continue there.
    pub is_alternative: bool,
    /// Whether it also sends reports, and its last request did not fail: an attempt that is late, but has not failed, may
    /// be cancelled for one there.
    pub is_sound_alternative: bool,
}

/// Sum of the current reports of a region's instances.
#[derive(Clone, Debug, PartialEq)]
pub struct RegionReport<'a> {
    /// Load of each deployment.
    pub deployments: &'a BTreeMap<DeploymentName, DeploymentLoad>,
    /// Deployments whose load has changed since the last sum or that were removed, and those that are not
    /// [asleep](DeploymentLoad::is_asleep). The others need no attention.
    pub touched: BTreeSet<DeploymentName>,
    /// Whether all of its instances drain.
    pub draining: bool,
}

/// State of one instance, for operators.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceStatus<'a, A> {
    /// Its number in this process.
    pub index: InstanceIndex,
    /// Its name.
    pub name: &'a InstanceName,
    /// Its address.
    pub address: &'a A,
    /// Its health.
    pub health: Health,
    /// Whether it drains.
    pub draining: bool,
    /// State of its circuit breaker.
    pub circuit: BreakerState,
    /// Requests of this gateway in flight.
    pub in_flight: u32,
    /// Time since its last report.
    pub report_age: Option<Duration>,
}

/// Rank of an instance for an attempt; less is better. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// The request is a job, and it has no queue of jobs: it could only reject it, as if its region had none.
    lacks_job_queue: bool,
    /// The request has failed there before.
    is_tried: bool,
    /// It sends no reports, or refuses connections.
    is_down: bool,
    /// It reports other deployments only.
    lacks_deployment: bool,
    /// It finishes its requests and stops.
    is_draining: bool,
    /// An instance that reports is better than one that has missed reports.
    health: Health,
    /// Its circuit breaker does not admit the request.
    is_ejected: bool,
}

#[derive(Clone, Debug)]
struct Instance<A> {
    name: InstanceName,
    address: A,
    last_report: Option<Instant>,
    round_trip: Duration,
    loads: BTreeMap<DeploymentName, DeploymentLoad>,
    /// Deployments that are not asleep.
    awake: BTreeSet<DeploymentName>,
    draining: bool,
    has_jobs: bool,
    /// Connection failures since the last response or report.
    failures: u32,
    /// Start of the unbroken reports after it was down.
    recovering_since: Option<Instant>,
    /// Health at the last check, to notify requests in flight of a change.
    known: Health,
    in_flight: u32,
    latency: Option<(Duration, Instant)>,
}

#[derive(Clone, Debug)]
struct RegionInstances<A> {
    each: BTreeMap<InstanceIndex, Instance<A>>,
    circuits: Circuits<InstanceIndex>,
    sum: LoadSum,
}

/// Sum of the loads of a region's instances. It is updated by what has changed, whatever is deployed.
#[derive(Clone, Debug, Default)]
struct LoadSum {
    /// Instances whose loads are in it, and whether each one drains.
    of: Vec<(InstanceIndex, bool)>,
    loads: BTreeMap<DeploymentName, DeploymentLoad>,
    /// Deployments that are not asleep.
    awake: BTreeSet<DeploymentName>,
    /// Deployments whose load at an instance has changed since.
    changed: BTreeSet<DeploymentName>,
}

impl LoadSum {
    /// Makes it the sum of the loads of these instances; those that drain count for the deployments that no other one
    /// serves. Returns the [touched](RegionReport::touched) deployments.
    fn update<A>(
        &mut self,
        of: Vec<(InstanceIndex, bool)>,
        each: &BTreeMap<InstanceIndex, Instance<A>>,
    ) -> BTreeSet<DeploymentName> {
        let mut touched = std::mem::take(&mut self.changed);
        if of != self.of {
            let loads = of.iter().flat_map(|(index, _)| each[index].loads.keys());
            touched.extend(self.loads.keys().chain(loads).cloned());
            self.of = of;
        }
        for name in &touched {
            let sum_where = |is_counted: fn(bool) -> bool| {
                let of = self.of.iter().filter(|(_, draining)| is_counted(*draining));
                let loads = of.filter_map(|(index, _)| each[index].loads.get(name).copied());
                loads.reduce(|sum, load| sum_of(&sum, &load))
            };
            let lasting = sum_where(|draining| !draining).filter(is_served);
            let sum = lasting.or_else(|| sum_where(|_| true));
            set_load(&mut self.loads, &mut self.awake, name, sum);
        }
        touched.extend(self.awake.iter().cloned());
        touched
    }
}

/// Sets the load of a deployment, and whether it is awake; `None` removes it.
fn set_load(
    loads: &mut BTreeMap<DeploymentName, DeploymentLoad>,
    awake: &mut BTreeSet<DeploymentName>,
    name: &DeploymentName,
    load: Option<DeploymentLoad>,
) {
    if load.is_some_and(|load| !load.is_asleep()) {
        awake.insert(name.clone());
    } else {
        awake.remove(name);
    }
    match load {
        Some(load) => drop(loads.insert(name.clone(), load)),
        None => drop(loads.remove(name)),
    }
}

/// All instances of all regions.
#[derive(Clone, Debug)]
pub struct InstanceSet<A> {
    regions: BTreeMap<RegionIndex, RegionInstances<A>>,
    /// Number of the next instance.
    next: u32,
    last_tick: Option<Instant>,
}

impl<A> Default for InstanceSet<A> {
    fn default() -> InstanceSet<A> {
        InstanceSet { regions: BTreeMap::new(), next: 0, last_tick: None }
    }
}

impl<A: Clone + PartialEq> InstanceSet<A> {
    /// Replaces the set of instances; the state of those that keep name and address is kept.
    pub fn set_instances<'a>(
        &mut self,
        routed: impl IntoIterator<Item = (RegionIndex, &'a InstanceName, &'a A)>,
    ) where
        A: 'a,
    {
        let mut before = std::mem::take(&mut self.regions);
        for (region, name, address) in routed {
            let kept = before.get_mut(&region).and_then(|known| {
                let same = |instance: &Instance<A>| instance.name == *name && instance.address == *address;
                known.each.extract_if(.., |_, instance| same(instance)).next()
            });
            let (index, instance) = kept.unwrap_or_else(|| {
                let index = InstanceIndex { region, number: self.next };
                self.next += 1;
                (index, Instance::new(name.clone(), address.clone()))
            });
            let instances = self.regions.entry(region).or_insert_with(|| RegionInstances {
                each: BTreeMap::new(),
                circuits: before
                    .get_mut(&region)
                    .map(|known| std::mem::take(&mut known.circuits))
                    .unwrap_or_default(),
                sum: before.get_mut(&region).map(|known| std::mem::take(&mut known.sum)).unwrap_or_default(),
            });
            instances.each.insert(index, instance);
        }
        for instances in self.regions.values_mut() {
            instances.circuits.set_targets(instances.each.keys().copied().collect::<Vec<_>>());
        }
    }

    /// Returns all instances with their addresses.
    pub fn each(&self) -> impl Iterator<Item = (InstanceIndex, &InstanceName, &A)> {
        let all = self.regions.values().flat_map(|region| &region.each);
        all.map(|(index, instance)| (*index, &instance.name, &instance.address))
    }

    /// Returns the name and the address of an instance, if it is still routed.
    pub fn get(&self, index: InstanceIndex) -> Option<(&InstanceName, &A)> {
        let instance = self.instance(index)?;
        Some((&instance.name, &instance.address))
    }

    fn instance(&self, index: InstanceIndex) -> Option<&Instance<A>> {
        self.regions.get(&index.region)?.each.get(&index)
    }

    fn instance_mut(&mut self, index: InstanceIndex) -> Option<&mut Instance<A>> {
        self.regions.get_mut(&index.region)?.each.get_mut(&index)
    }

    /// Applies a report of an instance. Returns the deployments whose load there has changed or that were removed, and those
    /// that are not asleep there.
    pub fn reported(
        &mut self,
        index: InstanceIndex,
        decoded: &DecodedReport,
        round_trip: Duration,
        now: Instant,
    ) -> BTreeSet<DeploymentName> {
        let DecodedReport { report, changed, .. } = decoded;
        let Some(region) = self.regions.get_mut(&index.region) else { return BTreeSet::new() };
        let Some(instance) = region.each.get_mut(&index) else { return BTreeSet::new() };
        let was = instance.health(now);
        let is_gap = instance.silence(now) > SUSPECT_AFTER;
        instance.recovering_since = match instance.recovering_since {
            _ if was == Health::Down => Some(now),
            Some(_) if is_gap => Some(now),
            Some(since) if now.saturating_duration_since(since) >= RECOVERY_TIME => None,
            since => since,
        };
        (instance.last_report, instance.round_trip) = (Some(now), round_trip);
        (instance.failures, instance.draining) = (0, report.draining);
        instance.has_jobs = report.has_jobs;
        instance.known = instance.health(now);
        let mut touched = match changed {
            Some(changed) => changed.clone(),
            None => instance.loads.keys().chain(report.deployments.keys()).cloned().collect(),
        };
        for name in &touched {
            let load = report.deployments.get(name).copied();
            set_load(&mut instance.loads, &mut instance.awake, name, load);
        }
        region.sum.changed.extend(touched.iter().cloned());
        touched.extend(instance.awake.iter().cloned());
        touched
    }

    /// Returns the sum of the reports of a region's instances that are up. Those that drain, and still accept requests,
    /// count for the deployments that no other one serves. If none is up, the last reports count; if all drain, so does
    /// the region.
    /// `None` if the region has no instance.
    pub fn region_report(&mut self, region: RegionIndex, now: Instant) -> Option<RegionReport<'_>> {
        let RegionInstances { each, sum, .. } = self.regions.get_mut(&region)?;
        let reported = || each.iter().filter(|(_, instance)| instance.last_report.is_some());
        let is_up = |instance: &Instance<A>| instance.silence(now) <= SUSPECT_AFTER;
        let any_up = reported().any(|(_, instance)| is_up(instance));
        let current = || reported().filter(|(_, instance)| !any_up || is_up(instance));
        let draining = current().all(|(_, instance)| instance.draining);
        let of = current().map(|(index, instance)| (*index, instance.draining));
        let touched = sum.update(of.collect(), each);
        Some(RegionReport { deployments: &sum.loads, touched, draining })
    }

    /// Returns the regions of which an instance has a queue of jobs, by its last report.
    pub fn regions_with_jobs(&self) -> RegionSet {
        let has_jobs = |region: &RegionInstances<A>| region.each.values().any(|instance| instance.has_jobs);
        self.regions.iter().filter(|(_, region)| has_jobs(region)).map(|(index, _)| *index).collect()
    }

    /// Returns the address of the instance with the queue of jobs of a region: of several one that is up and does not drain.
    pub fn job_host(&self, region: RegionIndex, now: Instant) -> Option<&A> {
        let hosts = self.regions.get(&region)?.each.values().filter(|instance| instance.has_jobs);
        let best = hosts.min_by_key(|instance| {
            let health = instance.health(now);
            (health == Health::Down, instance.draining, health)
        });
        best.map(|instance| &instance.address)
    }

    /// Selects the instance of `region` for an attempt; `tried` have failed this request, `draw` is its random draw, and a
    /// job needs an instance with a queue. `None` if the region has no instance.
    pub fn select(
        &self,
        region: RegionIndex,
        deployment: &DeploymentName,
        is_job: bool,
        tried: &[InstanceIndex],
        draw: Permille,
        now: Instant,
    ) -> Option<SelectedInstance> {
        let RegionInstances { each, circuits, .. } = self.regions.get(&region)?;
        let rank = |index: InstanceIndex, instance: &Instance<A>| {
            let health = instance.health(now);
            Rank {
                lacks_job_queue: is_job && !instance.has_jobs,
                is_tried: tried.contains(&index),
                is_down: health == Health::Down,
                lacks_deployment: instance.last_report.is_some() && !instance.serves(deployment),
                is_draining: instance.draining,
                health,
                is_ejected: !circuits.state(index, now).admits(draw),
            }
        };
        let mut ranked = each.iter().map(|(index, instance)| (rank(*index, instance), *index));
        let first = ranked.next().map(|(rank, index)| (rank, index, 1))?;
        let (best, only, count) =
            ranked.fold(first, |(best, first, count), (rank, index)| match rank.cmp(&best) {
                Ordering::Less => (rank, index, 1),
                Ordering::Equal => (best, first, count + 1),
                Ordering::Greater => (best, first, count),
            });
        let fit = || each.iter().filter(|(index, instance)| rank(**index, instance) == best);
        let instance = if count == 1 { only } else { faster_of_two(fit, count, draw, now)? };
        let lacks_any = best.lacks_job_queue || best.lacks_deployment;
        let is_alternative = !(best.is_tried || best.is_down || best.is_draining || lacks_any);
        let is_sound = best.health == Health::Healthy && circuits.is_sound(instance, now);
        Some(SelectedInstance { instance, is_alternative, is_sound_alternative: is_alternative && is_sound })
    }

    /// Returns whether a failure of this instance is its own: another one of its region is up, does not drain, and
    /// its last request did not fail. A failure of all instances is one of the region.
    pub fn has_sound_alternative(&self, index: InstanceIndex, now: Instant) -> bool {
        let Some(RegionInstances { each, circuits, .. }) = self.regions.get(&index.region) else {
            return false;
        };
        let is_sound = |(other, instance): (&InstanceIndex, &Instance<A>)| {
            !instance.draining && instance.health(now) == Health::Healthy && circuits.is_sound(*other, now)
        };
        each.iter().filter(|(other, _)| **other != index).any(is_sound)
    }

    /// Returns the health of an instance; `Down` if it is not routed any more.
    pub fn health(&self, index: InstanceIndex, now: Instant) -> Health {
        self.instance(index).map_or(Health::Down, |instance| instance.health(now))
    }

    /// Returns the number of requests in flight to an instance.
    pub fn in_flight(&self, index: InstanceIndex) -> u32 {
        self.instance(index).map_or(0, |instance| instance.in_flight)
    }

    /// Records that a request is sent. Returns whether it is the probe of an ejected instance.
    pub fn began(&mut self, index: InstanceIndex, now: Instant) -> bool {
        let Some(region) = self.regions.get_mut(&index.region) else { return false };
        if let Some(instance) = region.each.get_mut(&index) {
            instance.in_flight = instance.in_flight.saturating_add(1);
        }
        region.circuits.began(index, now)
    }

    /// Records that a request ended; a probe without evidence may be repeated.
    pub fn ended(&mut self, index: InstanceIndex, is_probe: bool, now: Instant) {
        let Some(region) = self.regions.get_mut(&index.region) else { return };
        if let Some(instance) = region.each.get_mut(&index) {
            instance.in_flight = instance.in_flight.saturating_sub(1);
        }
        if is_probe {
            region.circuits.probe_cancelled(index, now);
        }
    }

    /// Records a response after `latency`; `None` if its time says nothing about the instance.
    pub fn responded(&mut self, index: InstanceIndex, latency: Option<Duration>, now: Instant) {
        let Some(instance) = self.instance_mut(index) else { return };
        instance.failures = 0;
        if let Some(latency) = latency {
            let average = instance.latency.map_or(latency, |(average, _)| {
                average - average / AVERAGE_WEIGHT + latency / AVERAGE_WEIGHT
            });
            instance.latency = Some((average, now));
        }
    }

    /// Records a connection that failed. Returns whether the health of the instance got worse.
    pub fn failed(&mut self, index: InstanceIndex, now: Instant) -> bool {
        let Some(instance) = self.instance_mut(index) else { return false };
        instance.failures = instance.failures.saturating_add(1);
        instance.has_worsened(now)
    }

    /// Records evidence about an instance for its circuit breaker. Returns whether it ejects the instance.
    pub fn record(
        &mut self,
        index: InstanceIndex,
        evidence: OutlierEvidence,
        draw: Permille,
        now: Instant,
    ) -> bool {
        let region = self.regions.get_mut(&index.region);
        region.is_some_and(|region| region.circuits.record(index, evidence, draw, now))
    }

    /// Checks for instances whose reports have stopped while others of their region report; to be called at least every
    /// [`TICK_PERIOD_MAX`]. Returns those whose health got worse.
    pub fn tick(&mut self, now: Instant) -> Vec<InstanceIndex> {
        let paused = self.last_tick.replace(now).map_or(Duration::ZERO, |last| {
            now.saturating_duration_since(last).saturating_sub(TICK_PERIOD_MAX)
        });
        let mut worse = Vec::new();
        for region in self.regions.values_mut() {
            for (index, instance) in &mut region.each {
                // In that time reports may have come and not been read.
                instance.last_report = instance.last_report.map(|last| (last + paused).min(now));
                if instance.has_worsened(now) {
                    worse.push(*index);
                }
            }
        }
        worse
    }

    /// Returns the state of the instances of `region`, for operators.
    pub fn status(&self, region: RegionIndex, now: Instant) -> Vec<InstanceStatus<'_, A>> {
        let Some(RegionInstances { each, circuits, .. }) = self.regions.get(&region) else {
            return Vec::new();
        };
        let all = each.iter().map(|(index, instance)| InstanceStatus {
            index: *index,
            name: &instance.name,
            address: &instance.address,
            health: instance.health(now),
            draining: instance.draining,
            circuit: circuits.state(*index, now),
            in_flight: instance.in_flight,
            report_age: instance.last_report.map(|last| now.saturating_duration_since(last)),
        });
        all.collect()
    }
}

/// Draws two of `count` instances, at least two, and returns the one with the lower cost (power of two choices).
fn faster_of_two<'a, A: 'a, I>(
    fit: impl Fn() -> I,
    count: usize,
    draw: Permille,
    now: Instant,
) -> Option<InstanceIndex>
where
    I: Iterator<Item = (&'a InstanceIndex, &'a Instance<A>)>,
{
    let fastest = fit().filter_map(|(_, instance)| Some(instance.latency?.0)).min();
    let draw = usize::from(draw.get());
    let first = draw % count;
    let second = (first + 1 + draw / count % (count - 1)) % count;
    let cost = |slot: usize| fit().nth(slot).map(|(_, instance)| instance.cost(fastest, now));
    let slot = if cost(second) < cost(first) { second } else { first };
    fit().nth(slot).map(|(instance, _)| *instance)
}

impl<A> Instance<A> {
    fn new(name: InstanceName, address: A) -> Instance<A> {
        Instance {
            name,
            address,
            last_report: None,
            round_trip: Duration::ZERO,
            loads: BTreeMap::new(),
            awake: BTreeSet::new(),
            draining: false,
            has_jobs: false,
            failures: 0,
            recovering_since: None,
            known: Health::Unknown,
            in_flight: 0,
            latency: None,
        }
    }

    fn silence(&self, now: Instant) -> Duration {
        let since = self.last_report.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        since.saturating_sub(self.round_trip / 2)
    }

    fn health(&self, now: Instant) -> Health {
        match self.silence(now) {
            silence if silence > DOWN_AFTER || self.failures >= FAILURES_MAX => Health::Down,
            silence if silence > SUSPECT_AFTER || self.failures > 0 => Health::Suspect,
            _ if self.last_report.is_none() => Health::Unknown,
            _ if self.recovering_since.is_some() => Health::Suspect,
            _ => Health::Healthy,
        }
    }

    /// Returns whether its health is worse than at the last check.
    fn has_worsened(&mut self, now: Instant) -> bool {
        let health = self.health(now);
        let before = std::mem::replace(&mut self.known, health);
        health > before && health >= Health::Suspect
    }

    fn serves(&self, deployment: &DeploymentName) -> bool {
        self.loads.get(deployment).is_some_and(is_served)
    }

    /// Returns the requests in flight with one more, times the latency in multiples of the `fastest` instance.
    fn cost(&self, fastest: Option<Duration>, now: Instant) -> u64 {
        let slowness = self.latency.zip(fastest).map_or(1, |((latency, last), fastest)| {
            let multiple = latency.as_micros() / fastest.as_micros().max(1);
            let multiple = u64::try_from(multiple).unwrap_or(SLOWNESS_MAX).clamp(1, SLOWNESS_MAX);
            1 + decayed_slowness(multiple - 1, now.saturating_duration_since(last))
        });
        (u64::from(self.in_flight) + 1) * slowness
    }
}

/// Returns whether an instance or region with this load of a deployment serves it. One that holds requests until a replica
/// is ready does.
pub fn is_served(load: &DeploymentLoad) -> bool {
    load.ready > 0 || load.ready_in.is_some()
}

/// Returns the load of a deployment at two instances.
fn sum_of(one: &DeploymentLoad, other: &DeploymentLoad) -> DeploymentLoad {
    let serves_at_once = |load: &DeploymentLoad| load.ready > 0 && load.ready_in.is_none();
    let ready_in = match (one.ready_in, other.ready_in) {
        _ if serves_at_once(one) || serves_at_once(other) => None,
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    let interactive_tokens = match (one, other) {
        // An instance without a ready replica has no queue to report.
        (DeploymentLoad { ready: 0, .. }, load) | (load, DeploymentLoad { ready: 0, .. }) => {
            load.interactive_tokens
        }
        (one, other) => {
            one.interactive_tokens.zip(other.interactive_tokens).map(|(one, other)| one.saturating_add(other))
        }
    };
    DeploymentLoad {
        ready: one.ready.saturating_add(other.ready),
        ready_in,
        pending_tokens: one.pending_tokens.saturating_add(other.pending_tokens),
        interactive_tokens,
        tokens_per_second: one.tokens_per_second + other.tokens_per_second,
        granted_tokens: one.granted_tokens.saturating_add(other.granted_tokens),
        // An instance that serves the deployment or holds its requests knows more than one that reports a failure.
        failed: if is_served(one) || is_served(other) { None } else { one.failed.or(other.failed) },
    }
}

#[cfg(test)]
mod tests;
