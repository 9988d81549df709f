//! What a region's scaler sees: what has arrived, what waits, who does it.
//!
//! Arrivals are counted whether or not anybody takes them, because what comes for a deployment that has no replica is what
//! starts one; but only under names that the scaler has [asked for](Spoke::count_for), so that what strangers write into a
//! request takes no room. Overflow of other regions counts like the region's own: it is work.
//!
//! Tokens of arrivals are estimates from bytes, and a replica's speed is in real tokens. Both knobs that people have,
//! utilization and concurrency, take up a constant factor between the two; a backlog is in the replicas' own words.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::replica::Replica;
use super::{Spoke, Whose};
use regions::DeploymentName;

/// What there is to do for one deployment, and who does it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Tokens that have arrived since the last look.
    pub arrived: u64,
    /// Some of them were another region's overflow.
    pub overflow: bool,
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
pub(super) struct Counted(BTreeMap<DeploymentName, Came>);

#[derive(Clone, Copy, Debug, Default)]
struct Came {
    tokens: u64,
    overflow: bool,
}

impl Counted {
    pub(super) fn came(&mut self, deployment: &DeploymentName, tokens: u64, whose: Whose) {
        if let Some(came) = self.0.get_mut(deployment) {
            came.tokens = came.tokens.saturating_add(tokens);
            came.overflow |= whose == Whose::Overflow;
        }
    }
}

impl Spoke {
    /// From now on what arrives for these is counted, and for no others.
    pub fn count_for(&mut self, deployments: &BTreeSet<DeploymentName>) {
        self.counted.0.retain(|name, _| deployments.contains(name));
        for name in deployments {
            self.counted.0.entry(name.clone()).or_default();
        }
    }

    /// What there is to do for each deployment that is counted. The next look sees what has arrived after this one.
    pub fn demand(&mut self, now: Instant) -> BTreeMap<DeploymentName, Demand> {
        let mut each: BTreeMap<DeploymentName, Demand> = BTreeMap::new();
        for (name, came) in &mut self.counted.0 {
            let Came { tokens, overflow } = std::mem::take(came);
            each.insert(name.clone(), Demand { arrived: tokens, overflow, ..Demand::default() });
        }
        let (deaf, mut speeds) = (self.is_deaf(now), BTreeMap::new());
        for (_, replica) in self.replicas.each() {
            let takes_work = replica.takes_work() && (deaf || replica.heard_lately(now));
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
            let demand = each.get_mut(name).expect("only of those that are counted");
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
    use super::super::{ReplicaObserved, Seen};
    use super::*;
    use crate::some_instant;

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    fn well(names: &[&str], pending_tokens: u64, tokens_per_second: f64) -> ReplicaObserved {
        let names = names.iter().map(|text| name(text)).collect();
        ReplicaObserved {
            model: None,
            names,
            ready: true,
            draining: false,
            pending_tokens,
            lookup_tokens: None,
            tokens_per_second,
        }
    }

    #[test]
    fn what_arrives_is_counted_once_and_only_under_names_that_are_known() {
        let (mut spoke, now) = (Spoke::new("aws/us-east-1".parse().unwrap(), 7, Vec::new()), some_instant());
        let [a, b] = ["a", "b"].map(name);
        spoke.count_for(&BTreeSet::from([a.clone(), b.clone()]));
        spoke.arrived(&a, 10, Whose::Own, now);
        spoke.arrived(&a, 5, Whose::Overflow, now);
        spoke.arrived(&name("made-up"), 10, Whose::Own, now);
        let seen = spoke.demand(now);
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[&a], Demand { arrived: 15, overflow: true, ..Demand::default() });
        assert_eq!(seen[&b], Demand::default());
        assert_eq!(spoke.demand(now)[&a], Demand::default(), "the next look sees what came after");
        spoke.count_for(&BTreeSet::from([b.clone()]));
        spoke.arrived(&a, 10, Whose::Own, now);
        assert_eq!(spoke.demand(now).into_keys().collect::<Vec<_>>(), [b]);
    }

    #[test]
    fn who_does_it_is_seen_for_each_deployment() {
        let at = |port| std::net::SocketAddr::from(([10, 0, 0, 1], port));
        let (mut spoke, now) =
            (Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=4).map(at).collect()), some_instant());
        let [a, b] = ["a", "b"].map(name);
        spoke.count_for(&BTreeSet::from([a.clone(), b.clone()]));
        spoke.observe_replica(0, well(&["a"], 100, 1000.0), now);
        spoke.observe_replica(1, well(&["a", "b"], 20, 3000.0), now);
        spoke.observe_replica(2, well(&["a"], 0, 0.0), now);
        spoke.replica_failed(2, now);
        let choice = spoke.choose(&b, 7, |_| Seen::FINE, now).unwrap();
        assert_eq!(choice.index, 1);
        let seen = spoke.demand(now);
        let both = Demand { pending: 127, in_flight: 1, ready: 2, speed: 2000, ..Demand::default() };
        assert_eq!(seen[&a], both);
        assert_eq!(
            seen[&b],
            Demand { pending: 27, in_flight: 1, ready: 1, speed: 3000, ..Demand::default() }
        );
        spoke.let_go(1);
        assert_eq!(spoke.demand(now)[&b].ready, 0);
        assert_eq!(spoke.demand(now)[&b].in_flight, 1, "what is under way is still to be done");
    }
}
