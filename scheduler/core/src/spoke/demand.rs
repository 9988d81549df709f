//! Observations for a region's scaler: arrivals, backlog, and the replicas that serve them.
//!
//! Arrivals are counted whether or not a replica accepts them, because requests for a deployment without replicas start
//! one. Only deployments that the scaler [tracks](Spoke::track_demand) are counted, so that arbitrary names in requests
//! use no memory. Spillover of other regions counts like local traffic.
//!
//! The tokens of arrivals are estimated from bytes, while a replica's speed is in real tokens. The two settings,
//! utilization and concurrency, absorb a constant factor between the two; a backlog is as reported by the replicas.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::hold::HeldTotals;
use super::replica::ReplicaState;
use super::{Spoke, TrafficOrigin};
use regions::DeploymentName;
use scheduler_api::peer::SpokeDemand;

/// Demand for one deployment, and the replicas that serve it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeploymentDemand {
    /// Tokens that arrived since the last call.
    pub arrived: u64,
    /// Whether some of them were spillover of another region.
    pub has_spillover: bool,
    /// Tokens that are queued or being computed.
    pub pending: u64,
    /// Requests that were sent to a replica and have not ended.
    pub in_flight: u32,
    /// Ready replicas.
    pub ready: u32,
    /// Average speed of one replica, in tokens per second; 0 while unknown.
    pub speed: u64,
}

/// Arrivals since the start of the spoke.
#[derive(Debug, Default)]
pub(super) struct DemandCounters(BTreeMap<DeploymentName, ArrivalCount>);

/// Arrivals of one deployment.
#[derive(Clone, Copy, Debug, Default)]
struct ArrivalCount {
    total: ArrivedTokens,
    /// Total at the last call of [`Spoke::demand`].
    taken: ArrivedTokens,
}

/// Tokens of requests.
#[derive(Clone, Copy, Debug, Default)]
struct ArrivedTokens {
    all: u64,
    /// Those of them that were spillover of another region.
    spillover: u64,
}

impl DemandCounters {
    pub(super) fn record(&mut self, deployment: &DeploymentName, tokens: u64, origin: TrafficOrigin) {
        if let Some(count) = self.0.get_mut(deployment) {
            let ArrivedTokens { all, spillover } = &mut count.total;
            *all = all.wrapping_add(tokens);
            if origin == TrafficOrigin::Spillover {
                *spillover = spillover.wrapping_add(tokens);
            }
        }
    }
}

impl Spoke {
    /// Counts arrivals for these deployments only, from now on.
    pub fn track_demand(&mut self, deployments: &BTreeSet<DeploymentName>) {
        self.demand_counters.0.retain(|name, _| deployments.contains(name));
        self.track_further_demand(deployments);
    }

    /// Counts arrivals for these deployments too, from now on.
    pub(super) fn track_further_demand(&mut self, deployments: &BTreeSet<DeploymentName>) {
        for name in deployments {
            self.demand_counters.0.entry(name.clone()).or_default();
        }
    }

    /// Returns the demand of each tracked deployment at this spoke, and resets the arrivals.
    pub fn demand(&mut self, now: Instant) -> BTreeMap<DeploymentName, DeploymentDemand> {
        let mut each = self.observed_demand(now);
        for (name, demand) in &mut each {
            let Some(ArrivalCount { total, taken }) = self.demand_counters.0.get_mut(name) else { continue };
            demand.arrived = total.all.wrapping_sub(taken.all);
            demand.has_spillover = total.spillover != taken.spillover;
            *taken = *total;
        }
        each
    }

    /// Returns the demand of each tracked deployment in the region, for its scaler: that of this spoke and that of the
    /// others ([`super::peer_demand`]). Resets the arrivals.
    pub fn region_demand(&mut self, now: Instant) -> BTreeMap<DeploymentName, DeploymentDemand> {
        let own = self.demand(now).into_iter();
        let own = own.map(|(name, demand)| {
            let held = self.held(&name);
            (name, (demand, held))
        });
        let own = own.collect();
        self.peers.demands.sum(own, now)
    }

    /// Returns the demand of each tracked deployment at this spoke, for the scaler at another one. Deployments without
    /// any are omitted.
    pub(super) fn spoke_demand(&self, now: Instant) -> BTreeMap<DeploymentName, SpokeDemand> {
        let each = self.observed_demand(now).into_iter().filter_map(|(name, observed)| {
            let total = self.demand_counters.0.get(&name)?.total;
            let HeldTotals { requests, tokens } = self.held(&name);
            let demand = SpokeDemand {
                arrived_total: total.all,
                spillover_total: total.spillover,
                pending: observed.pending,
                in_flight: observed.in_flight,
                held: u32::try_from(requests).unwrap_or(u32::MAX),
                held_tokens: tokens,
            };
            (demand != SpokeDemand::default()).then_some((name, demand))
        });
        each.collect()
    }

    /// Returns the demand of each tracked deployment without its arrivals.
    fn observed_demand(&self, now: Instant) -> BTreeMap<DeploymentName, DeploymentDemand> {
        let names = self.demand_counters.0.keys();
        let mut each: BTreeMap<_, _> =
            names.map(|name| (name.clone(), DeploymentDemand::default())).collect();
        let (all_silent, mut speeds) = (self.all_silent(now), BTreeMap::new());
        for (_, replica) in self.replicas.each() {
            let accepts_requests = replica.accepts_requests() && (all_silent || replica.is_fresh(now));
            for name in replica.names() {
                let Some(demand) = each.get_mut(name) else { continue };
                demand.in_flight = demand.in_flight.saturating_add(replica.in_flight());
                demand.pending = demand.pending.saturating_add(replica.backlog_tokens());
                if accepts_requests && self.matches(replica, name) {
                    demand.ready += 1;
                    add_speed(speeds.entry(name).or_default(), replica);
                }
            }
        }
        for (name, (sum, count)) in speeds {
            let demand = each.get_mut(name).expect("speeds are collected for tracked deployments only");
            demand.speed = (sum / f64::from(count.max(1))) as u64;
        }
        each
    }
}

/// Adds a replica's speed, if known.
fn add_speed((sum, count): &mut (f64, u32), replica: &ReplicaState) {
    if let Some(speed) = replica.speed() {
        *sum += speed;
        *count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PassiveHealth, ReplicaStatus};
    use super::*;
    use crate::some_instant;

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    fn status(names: &[&str], pending_tokens: u64, tokens_per_second: f64) -> ReplicaStatus {
        let names = names.iter().map(|text| name(text)).collect();
        ReplicaStatus {
            model: None,
            failure: None,
            names,
            ready: true,
            draining: false,
            pending_tokens,
            interactive_tokens: None,
            tokens_per_second,
        }
    }

    #[test]
    fn arrivals_are_counted_once_and_for_tracked_deployments_only() {
        let (mut spoke, now) = (Spoke::new("aws/us-east-1".parse().unwrap(), 7, Vec::new()), some_instant());
        let [a, b] = ["a", "b"].map(name);
        spoke.track_demand(&BTreeSet::from([a.clone(), b.clone()]));
        spoke.arrived(&a, 10, TrafficOrigin::Local, now);
        spoke.arrived(&a, 5, TrafficOrigin::Spillover, now);
        spoke.arrived(&name("made-up"), 10, TrafficOrigin::Local, now);
        let demand = spoke.demand(now);
        assert_eq!(demand.len(), 2);
        assert_eq!(
            demand[&a],
            DeploymentDemand { arrived: 15, has_spillover: true, ..DeploymentDemand::default() }
        );
        assert_eq!(demand[&b], DeploymentDemand::default());
        assert_eq!(spoke.demand(now)[&a], DeploymentDemand::default(), "the counters were reset");
        spoke.track_demand(&BTreeSet::from([b.clone()]));
        spoke.arrived(&a, 10, TrafficOrigin::Local, now);
        assert_eq!(spoke.demand(now).into_keys().collect::<Vec<_>>(), [b]);
    }

    #[test]
    fn replicas_and_speed_are_reported_for_each_deployment() {
        let at = |port| regions::HostPort::from(([10, 0, 0, 1], port));
        let (mut spoke, now) =
            (Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=4).map(at).collect()), some_instant());
        let [a, b] = ["a", "b"].map(name);
        spoke.track_demand(&BTreeSet::from([a.clone(), b.clone()]));
        spoke.observe_replica(0, status(&["a"], 100, 1000.0), now);
        spoke.observe_replica(1, status(&["a", "b"], 20, 3000.0), now);
        spoke.observe_replica(2, status(&["a"], 0, 0.0), now);
        spoke.replica_failed(2, now);
        let selected = spoke.select_replica(&b, 7, |_| PassiveHealth::HEALTHY, now).unwrap();
        assert_eq!(selected.index, 1);
        let demand = spoke.demand(now);
        let both = DeploymentDemand {
            pending: 127,
            in_flight: 1,
            ready: 2,
            speed: 2000,
            ..DeploymentDemand::default()
        };
        assert_eq!(demand[&a], both);
        assert_eq!(
            demand[&b],
            DeploymentDemand {
                pending: 27,
                in_flight: 1,
                ready: 1,
                speed: 3000,
                ..DeploymentDemand::default()
            }
        );
        spoke.drain_replica(1);
        assert_eq!(spoke.demand(now)[&b].ready, 0);
        assert_eq!(spoke.demand(now)[&b].in_flight, 1, "requests in flight are still counted");
    }
}
