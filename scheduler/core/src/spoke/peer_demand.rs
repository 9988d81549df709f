//! Demand of a region: the sum over its spokes.
//!
//! The spoke that scales sees only the requests that arrived at itself; the others report theirs
//! ([`scheduler_api::peer`]). Arrivals, requests in flight and held requests are different ones at each spoke, and add
//! up. The backlog at the replicas is the same one, which every spoke observes, so the highest observation counts, not
//! the sum. Ready replicas and their speed are those that the spoke itself observes.
//!
//! A spoke that stops responding counts with its last demand, and with its last arrival rate, for [`SILENCE_MAX`]: a
//! short stall is no decrease in traffic. After that it does not count, because its clients use other spokes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::{DeploymentName, InstanceName};
use scheduler_api::peer::{PEER_WAIT_MAX, SpokeDemand};

use super::DeploymentDemand;
use super::hold::HeldTotals;

/// Time without a response for which a spoke counts with its last demand: the lease time of a spoke.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Time without a response from which on arrivals are estimated from the last rate: two exchanges.
const LATE_AFTER: Duration = PEER_WAIT_MAX.saturating_mul(2);
/// Minimum time over which an arrival rate is measured.
const RATE_WINDOW: Duration = Duration::from_secs(1);

/// Demand that the other spokes of a region have reported.
#[derive(Debug, Default)]
pub(super) struct PeerDemands {
    peers: BTreeMap<InstanceName, PeerDemand>,
    /// Time of the last sum.
    summed_at: Option<Instant>,
}

/// Demand of one spoke.
#[derive(Debug)]
struct PeerDemand {
    boot_id: u64,
    received_at: Instant,
    latest: BTreeMap<DeploymentName, SpokeDemand>,
    arrivals: BTreeMap<DeploymentName, PeerArrivals>,
    /// Start of the measurement of the arrival rates.
    measured_since: Instant,
}

/// Arrivals of one deployment at one spoke.
#[derive(Clone, Copy, Debug, Default)]
struct PeerArrivals {
    /// Tokens since the last sum.
    tokens: u64,
    has_spillover: bool,
    /// Tokens since the start of the measurement.
    measured: u64,
    /// Last measured rate, in tokens per second.
    rate: f64,
}

impl PeerDemands {
    /// Records the demand of a spoke. The first response of a spoke, and the first after its restart, is the baseline
    /// of its totals. Of a deployment that is listed for the first time after that, all arrivals are new.
    pub(super) fn record(
        &mut self,
        peer: &InstanceName,
        boot_id: u64,
        demand: BTreeMap<DeploymentName, SpokeDemand>,
        now: Instant,
    ) {
        let known = self.peers.get_mut(peer).filter(|known| known.boot_id == boot_id);
        let Some(known) = known else {
            let (latest, arrivals) = (demand, BTreeMap::new());
            let first = PeerDemand { boot_id, received_at: now, latest, arrivals, measured_since: now };
            self.peers.insert(peer.clone(), first);
            return;
        };
        for (name, demand) in &demand {
            let before = known.latest.get(name).copied().unwrap_or_default();
            // Totals are lower if the spoke did not count the deployment for a while.
            let since = |total: u64, before: u64| total.checked_sub(before).unwrap_or(total);
            let tokens = since(demand.arrived_total, before.arrived_total);
            let spilled = since(demand.spillover_total, before.spillover_total);
            let arrivals = known.arrivals.entry(name.clone()).or_default();
            arrivals.tokens = arrivals.tokens.saturating_add(tokens);
            arrivals.measured = arrivals.measured.saturating_add(tokens);
            arrivals.has_spillover |= spilled > 0;
        }
        known.arrivals.retain(|name, _| demand.contains_key(name));
        (known.latest, known.received_at) = (demand, now);
        let measured_for = now.saturating_duration_since(known.measured_since);
        if measured_for >= RATE_WINDOW {
            for arrivals in known.arrivals.values_mut() {
                arrivals.rate = std::mem::take(&mut arrivals.measured) as f64 / measured_for.as_secs_f64();
            }
            known.measured_since = now;
        }
    }

    /// Forgets the spokes for which `is_kept` is false.
    pub(super) fn retain(&mut self, mut is_kept: impl FnMut(&InstanceName) -> bool) {
        self.peers.retain(|peer, _| is_kept(peer));
    }

    /// Returns the demand of the region: that of this spoke, with its held requests, and that of the others. Resets the
    /// arrivals.
    pub(super) fn sum(
        &mut self,
        own: BTreeMap<DeploymentName, (DeploymentDemand, HeldTotals)>,
        now: Instant,
    ) -> BTreeMap<DeploymentName, DeploymentDemand> {
        let elapsed =
            self.summed_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.peers.retain(|_, peer| now.saturating_duration_since(peer.received_at) <= SILENCE_MAX);
        let sum = own.into_iter().map(|(name, (own, held))| {
            let mut sum = own;
            let mut held_tokens = held.tokens;
            let mut held_requests = u32::try_from(held.requests).unwrap_or(u32::MAX);
            for peer in self.peers.values_mut() {
                let (tokens, has_spillover) = peer.take_arrivals(&name, elapsed, now);
                let latest = peer.latest.get(&name).copied().unwrap_or_default();
                sum.arrived = sum.arrived.saturating_add(tokens);
                sum.has_spillover |= has_spillover;
                sum.pending = sum.pending.max(latest.pending);
                sum.in_flight = sum.in_flight.saturating_add(latest.in_flight);
                held_tokens = held_tokens.saturating_add(latest.held_tokens);
                held_requests = held_requests.saturating_add(latest.held);
            }
            sum.pending = sum.pending.saturating_add(held_tokens);
            sum.in_flight = sum.in_flight.saturating_add(held_requests);
            (name, sum)
        });
        sum.collect()
    }
}

impl PeerDemand {
    /// Returns the tokens that arrived since the last sum, `elapsed` ago, and whether some were spillover.
    fn take_arrivals(&mut self, name: &DeploymentName, elapsed: Duration, now: Instant) -> (u64, bool) {
        let is_late = now.saturating_duration_since(self.received_at) > LATE_AFTER;
        let Some(arrivals) = self.arrivals.get_mut(name) else { return (0, false) };
        let tokens = std::mem::take(&mut arrivals.tokens);
        let has_spillover = std::mem::take(&mut arrivals.has_spillover);
        let estimate = if is_late { (arrivals.rate * elapsed.as_secs_f64()) as u64 } else { 0 };
        (tokens.max(estimate), has_spillover)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const S: Duration = Duration::from_secs(1);

    fn name() -> DeploymentName {
        "minilm".parse().unwrap()
    }

    fn peer(text: &str) -> InstanceName {
        text.parse().unwrap()
    }

    fn total(arrived_total: u64) -> SpokeDemand {
        SpokeDemand { arrived_total, ..SpokeDemand::default() }
    }

    fn reported(demand: SpokeDemand) -> BTreeMap<DeploymentName, SpokeDemand> {
        BTreeMap::from([(name(), demand)])
    }

    fn sum_with(
        demands: &mut PeerDemands,
        own: DeploymentDemand,
        held: HeldTotals,
        now: Instant,
    ) -> DeploymentDemand {
        demands.sum(BTreeMap::from([(name(), (own, held))]), now)[&name()]
    }

    fn sum(demands: &mut PeerDemands, now: Instant) -> DeploymentDemand {
        sum_with(demands, DeploymentDemand::default(), HeldTotals::default(), now)
    }

    #[test]
    fn requests_add_up_and_the_backlog_of_the_shared_replicas_counts_once() {
        let (mut demands, now) = (PeerDemands::default(), some_instant());
        let at_peer = SpokeDemand {
            arrived_total: 500,
            spillover_total: 10,
            pending: 90,
            in_flight: 3,
            held: 2,
            held_tokens: 20,
        };
        demands.record(&peer("b"), 1, reported(total(400)), now);
        demands.record(&peer("b"), 1, reported(at_peer), now);
        demands.record(&peer("c"), 1, reported(SpokeDemand { pending: 120, in_flight: 1, ..total(0) }), now);
        let own = DeploymentDemand {
            arrived: 50,
            has_spillover: false,
            pending: 100,
            in_flight: 4,
            ready: 2,
            speed: 1000,
        };
        let sum = sum_with(&mut demands, own, HeldTotals { requests: 1, tokens: 7 }, now);
        let expected = DeploymentDemand {
            arrived: 150,
            has_spillover: true,
            pending: 120 + 7 + 20,
            in_flight: 4 + 1 + 3 + 2 + 1,
            ready: 2,
            speed: 1000,
        };
        assert_eq!(sum, expected);
    }

    #[test]
    fn a_repeated_response_adds_no_arrivals_and_a_lost_one_loses_none() {
        let (mut demands, now) = (PeerDemands::default(), some_instant());
        demands.record(&peer("b"), 1, reported(total(1000)), now);
        assert_eq!(sum(&mut demands, now).arrived, 0, "the first response is the baseline");
        for _ in 0..2 {
            demands.record(&peer("b"), 1, reported(total(1100)), now);
        }
        assert_eq!(sum(&mut demands, now).arrived, 100);
        assert_eq!(sum(&mut demands, now).arrived, 0, "they were counted");
        // The response with 1200 was lost.
        demands.record(&peer("b"), 1, reported(total(1300)), now);
        assert_eq!(sum(&mut demands, now).arrived, 200);
        demands.record(&peer("b"), 2, reported(total(70)), now);
        assert_eq!(sum(&mut demands, now).arrived, 0, "another process has another baseline");
        demands.record(&peer("b"), 2, reported(total(80)), now);
        demands.record(&peer("b"), 2, reported(total(5)), now);
        assert_eq!(sum(&mut demands, now).arrived, 15, "counted from zero again");
    }

    #[test]
    fn a_deployment_that_is_reported_for_the_first_time_has_arrived_since_the_last_response() {
        let (mut demands, now) = (PeerDemands::default(), some_instant());
        demands.record(&peer("b"), 1, BTreeMap::new(), now);
        demands.record(&peer("b"), 1, reported(total(30)), now);
        assert_eq!(sum(&mut demands, now).arrived, 30);
    }

    #[test]
    fn a_silent_spoke_counts_with_its_last_demand_for_a_limited_time() {
        let (mut demands, now) = (PeerDemands::default(), some_instant());
        demands.record(&peer("b"), 1, reported(total(0)), now);
        sum(&mut demands, now);
        let demand = SpokeDemand { in_flight: 6, ..total(4000) };
        demands.record(&peer("b"), 1, reported(demand), now + 2 * S);
        let counted = |demands: &mut PeerDemands, at| {
            let sum = sum(demands, at);
            (sum.arrived, sum.in_flight)
        };
        assert_eq!(counted(&mut demands, now + 2 * S), (4000, 6), "2000 tokens per second");
        assert_eq!(counted(&mut demands, now + 4 * S), (0, 6), "its next response may be under way");
        assert_eq!(counted(&mut demands, now + 6 * S), (4000, 6), "late: its last rate over two seconds");
        let end = now + 2 * S + SILENCE_MAX;
        assert_eq!(counted(&mut demands, end), (2000, 6));
        assert_eq!(counted(&mut demands, end + Duration::from_millis(1)), (0, 0));
    }

    #[test]
    fn a_spoke_that_has_left_the_region_does_not_count() {
        let (mut demands, now) = (PeerDemands::default(), some_instant());
        for name in ["b", "c"] {
            demands.record(&peer(name), 1, reported(SpokeDemand { held: 1, ..total(0) }), now);
        }
        demands.retain(|name| *name == peer("c"));
        assert_eq!(sum(&mut demands, now).in_flight, 1);
    }
}
