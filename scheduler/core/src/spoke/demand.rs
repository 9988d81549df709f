//! What a region's scaler sees: what has arrived, what waits, who does it.
//!
//! Arrivals are demand_counters whether or not anybody takes them, because what comes for a deployment that has no replica is what
//! starts one; but only under names that the scaler has [asked for](Spoke::track_demand), so that what strangers write into a
//! request takes no room. Overflow of other regions counts like the region's own: it is work.
//!
//! Tokens of arrivals are estimates from bytes, and a replica's speed is in real tokens. Both knobs that people have,
//! utilization and concurrency, take up a constant factor between the two; a backlog is in the replicas' own words.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::replica::Replica;
use super::{Spoke, TrafficOrigin};
use regions::DeploymentName;

/// What there is to do for one deployment, and who does it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeploymentDemand {
    /// Tokens that have arrived since the last look.
    pub arrived: u64,
    /// Some of them were another region's has_spillover.
    pub has_spillover: bool,
    /// Tokens that wait or are being computed.
    pub pending: u64,
    /// Requests that were sent to a replica and have not ended.
    pub in_flight: u32,
    /// Replicas that take work.
    pub ready: u32,
    /// What one of them computes, in tokens per second; 0 until it is known.
    pub speed: u64,
}

/// What has arrived since the last look.
#[derive(Debug, Default)]
pub(super) struct DemandCounters(BTreeMap<DeploymentName, ArrivalCount>);

#[derive(Clone, Copy, Debug, Default)]
struct ArrivalCount {
    tokens: u64,
    has_spillover: bool,
}

impl DemandCounters {
    pub(super) fn record(&mut self, deployment: &DeploymentName, tokens: u64, origin: TrafficOrigin) {
        if let Some(record) = self.0.get_mut(deployment) {
            record.tokens = record.tokens.saturating_add(tokens);
            record.has_spillover |= origin == TrafficOrigin::Spillover;
        }
    }
}

impl Spoke {
    /// From now on what arrives for these is demand_counters, and for no others.
    pub fn track_demand(&mut self, deployments: &BTreeSet<DeploymentName>) {
        self.demand_counters.0.retain(|name, _| deployments.contains(name));
        for name in deployments {
            self.demand_counters.0.entry(name.clone()).or_default();
        }
    }

    /// What there is to do for each deployment that is demand_counters. The next look sees what has arrived after this one.
    pub fn demand(&mut self, now: Instant) -> BTreeMap<DeploymentName, DeploymentDemand> {
        let mut each: BTreeMap<DeploymentName, DeploymentDemand> = BTreeMap::new();
        for (name, record) in &mut self.demand_counters.0 {
            let ArrivalCount { tokens, has_spillover } = std::mem::take(record);
            each.insert(name.clone(), DeploymentDemand { arrived: tokens, has_spillover, ..DeploymentDemand::default() });
        }
        let (all_silent, mut speeds) = (self.all_silent(now), BTreeMap::new());
        for (_, replica) in self.replicas.each() {
            let takes_work = replica.takes_work() && (all_silent || replica.is_fresh(now));
            for name in replica.names() {
                let Some(demand) = each.get_mut(name) else { continue };
                demand.in_flight = demand.in_flight.saturating_add(replica.in_flight());
                demand.pending = demand.pending.saturating_add(replica.backlog_tokens());
                if takes_work && self.matches(replica, name) {
                    demand.ready += 1;
                    add_speed(speeds.entry(name).or_default(), replica);
                }
            }
        }
        for (name, (sum, count)) in speeds {
            let demand = each.get_mut(name).expect("only of those that are demand_counters");
            demand.speed = (sum / f64::from(count.max(1))) as u64;
        }
        each
    }
}

/// Whoever does not know its speed yet says nothing about that of the others.
fn add_speed((sum, count): &mut (f64, u32), replica: &Replica) {
    if let Some(speed) = replica.speed() {
        *sum += speed;
        *count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ReplicaStatus, PassiveHealth};
    use super::*;
    use crate::some_instant;

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    fn well(names: &[&str], pending_tokens: u64, tokens_per_second: f64) -> ReplicaStatus {
        let names = names.iter().map(|text| name(text)).collect();
        ReplicaStatus {
            model: None,
            names,
            ready: true,
            draining: false,
            pending_tokens,
            interactive_tokens: None,
            tokens_per_second,
        }
    }

    #[test]
    fn what_arrives_is_counted_once_and_only_under_names_that_are_known() {
        let (mut spoke, now) = (Spoke::new("aws/us-east-1".parse().unwrap(), 7, Vec::new()), some_instant());
        let [a, b] = ["a", "b"].map(name);
        spoke.track_demand(&BTreeSet::from([a.clone(), b.clone()]));
        spoke.arrived(&a, 10, TrafficOrigin::Local, now);
        spoke.arrived(&a, 5, TrafficOrigin::Spillover, now);
        spoke.arrived(&name("made-up"), 10, TrafficOrigin::Local, now);
        let seen = spoke.demand(now);
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[&a], DeploymentDemand { arrived: 15, has_spillover: true, ..DeploymentDemand::default() });
        assert_eq!(seen[&b], DeploymentDemand::default());
        assert_eq!(spoke.demand(now)[&a], DeploymentDemand::default(), "the next look sees what record after");
        spoke.track_demand(&BTreeSet::from([b.clone()]));
        spoke.arrived(&a, 10, TrafficOrigin::Local, now);
        assert_eq!(spoke.demand(now).into_keys().collect::<Vec<_>>(), [b]);
    }

    #[test]
    fn who_does_it_is_seen_for_each_deployment() {
        let at = |port| std::net::SocketAddr::from(([10, 0, 0, 1], port));
        let (mut spoke, now) =
            (Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=4).map(at).collect()), some_instant());
        let [a, b] = ["a", "b"].map(name);
        spoke.track_demand(&BTreeSet::from([a.clone(), b.clone()]));
        spoke.observe_replica(0, well(&["a"], 100, 1000.0), now);
        spoke.observe_replica(1, well(&["a", "b"], 20, 3000.0), now);
        spoke.observe_replica(2, well(&["a"], 0, 0.0), now);
        spoke.replica_failed(2, now);
        let choice = spoke.select_replica(&b, 7, |_| PassiveHealth::HEALTHY, now).unwrap();
        assert_eq!(choice.index, 1);
        let seen = spoke.demand(now);
        let both = DeploymentDemand { pending: 127, in_flight: 1, ready: 2, speed: 2000, ..DeploymentDemand::default() };
        assert_eq!(seen[&a], both);
        assert_eq!(
            seen[&b],
            DeploymentDemand { pending: 27, in_flight: 1, ready: 1, speed: 3000, ..DeploymentDemand::default() }
        );
        spoke.let_go(1);
        assert_eq!(spoke.demand(now)[&b].ready, 0);
        assert_eq!(spoke.demand(now)[&b].in_flight, 1, "what is under way is still to be done");
    }
}
