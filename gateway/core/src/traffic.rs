//! Summary of finished requests, which a gateway reports to the consoles of the hubs.
//!
//! It is computed from the records of the last requests ([`crate::trail`]), when a report is due, so that it costs a request
//! nothing. If more requests have finished since the last report than are recorded, the counts are scaled.
//!
//! A row of each kind is kept for the highest counts, up to [`TRAFFIC_ROWS_MAX`], so a report never exceeds the size that a hub
//! reads. The report goes to the hubs of all regions: its examples of moves have no identifier of a request whose residency is
//! restricted, because clients choose identifiers, and may write anything into them. Only the explanation of a request that a
//! person looks up has that identifier.

use crate::trail::{AttemptCause, Trail};
use backoff::Backoff;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId, TenantId};
use regions::set::RegionIndex;
use scheduler_api::report::DeploymentLoad;
use scheduler_api::traffic::{
    Move, MoveCause, ObservedLoad, ServedTraffic, TRAFFIC_IDLE_PERIOD, TRAFFIC_PERIOD, TRAFFIC_ROWS_MAX,
    TenantTraffic,
};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// Finished request, as the summary needs it.
#[derive(Clone, Copy, Debug)]
pub struct FinishedTraffic<'a> {
    /// Identifier.
    pub id: &'a str,
    /// Whether its residency is restricted.
    pub is_locked: bool,
    /// Deployment, if the request was parsed.
    pub deployment: Option<&'a DeploymentName>,
    /// Tenant, if the request was authenticated.
    pub tenant: Option<&'a TenantId>,
    /// Region whose response was forwarded.
    pub region: Option<RegionIndex>,
    /// Outcome, such as an error code; `None` of a success.
    pub failure: Option<&'static str>,
    /// Whether it failed by no fault of the client.
    pub is_failed: bool,
    /// Whether a limit of its tenant rejected it.
    pub is_limited: bool,
    /// Inputs.
    pub inputs: u64,
    /// Computed tokens.
    pub tokens: u64,
    /// Time to the last byte of the response.
    pub total: Duration,
    /// Its attempts.
    pub trail: &'a Trail,
}

/// Counts of finished requests.
#[derive(Debug, Default)]
pub struct TrafficSummary {
    served: BTreeMap<(DeploymentName, Option<RegionIndex>), ServedTraffic>,
    failures: BTreeMap<(DeploymentName, &'static str), u64>,
    tenants: BTreeMap<TenantId, TenantTraffic>,
    moves: BTreeMap<(RegionIndex, RegionIndex, MoveCause), (u64, String)>,
    recorded: u64,
}

/// Rows of a report.
#[derive(Debug, Default, PartialEq)]
pub struct TrafficRows {
    /// By deployment and region.
    pub served: BTreeMap<(DeploymentName, Option<RegionId>), ServedTraffic>,
    /// Requests without success by deployment and outcome.
    pub failures: BTreeMap<(DeploymentName, String), u64>,
    /// By tenant.
    pub tenants: BTreeMap<TenantId, TenantTraffic>,
    /// Attempts that went to another region.
    pub moves: Vec<Move>,
}

/// Returns why an attempt with this cause went to another region than the one before.
fn move_cause(cause: AttemptCause) -> Option<MoveCause> {
    match cause {
        AttemptCause::First => None,
        AttemptCause::Spillover => Some(MoveCause::Spillover),
        AttemptCause::Replay | AttemptCause::Retry => Some(MoveCause::Retry),
        AttemptCause::FirstByteTimeout => Some(MoveCause::FirstByteTimeout),
        AttemptCause::Evacuation => Some(MoveCause::Evacuation),
        AttemptCause::Hedge => Some(MoveCause::Hedge),
    }
}

impl TrafficSummary {
    /// Adds a request.
    pub fn add(&mut self, finished: &FinishedTraffic<'_>) {
        self.recorded += 1;
        let failed = u64::from(finished.is_failed);
        if let Some(deployment) = finished.deployment {
            let served = self.served.entry((deployment.clone(), finished.region)).or_default();
            served.requests += 1;
            served.failed += failed;
            served.tokens += finished.tokens;
            served.latencies.record(finished.total);
            if let Some(outcome) = finished.failure {
                *self.failures.entry((deployment.clone(), outcome)).or_default() += 1;
            }
        }
        if let Some(tenant) = finished.tenant {
            let traffic = self.tenants.entry(tenant.clone()).or_default();
            traffic.requests += 1;
            traffic.failed += failed;
            traffic.limited += u64::from(finished.is_limited);
            traffic.inputs += finished.inputs;
            traffic.tokens += finished.tokens;
        }
        self.add_moves(finished);
    }

    fn add_moves(&mut self, finished: &FinishedTraffic<'_>) {
        // The parts of a split request are sent to several regions on purpose, and their attempts are mixed.
        if finished.trail.parts() > 1 {
            return;
        }
        // A request that spills over passes by the best of its candidates.
        let preferred = finished.trail.route().and_then(|route| route.candidates.first());
        let mut before = preferred.map(|candidate| candidate.region);
        for attempt in finished.trail.attempts() {
            let moved = move_cause(attempt.cause).zip(before.filter(|before| *before != attempt.region));
            if let Some((cause, from)) = moved {
                let (requests, example) = self.moves.entry((from, attempt.region, cause)).or_default();
                *requests += 1;
                if example.is_empty() && !finished.is_locked {
                    finished.id.clone_into(example);
                }
            }
            before = Some(attempt.region);
        }
    }

    /// Returns the rows, for `finished` requests of which those were recorded that were added.
    pub fn rows(self, finished: u64, catalogue: &Catalogue) -> TrafficRows {
        let TrafficSummary { served, failures, tenants, moves, recorded } = self;
        let factor = finished.max(recorded) as f64 / recorded.max(1) as f64;
        let scaled = |count: u64| (count as f64 * factor).round() as u64;
        let named = |region: RegionIndex| catalogue.region(region).id.clone();
        let served = most(served, |served| served.requests).map(|((deployment, region), served)| {
            let ServedTraffic { requests, failed, tokens, mut latencies } = served;
            latencies.scale(factor);
            let served = ServedTraffic {
                requests: scaled(requests),
                failed: scaled(failed),
                tokens: scaled(tokens),
                latencies,
            };
            ((deployment, region.map(named)), served)
        });
        let failures = most(failures, |requests| *requests)
            .map(|((deployment, outcome), requests)| ((deployment, outcome.to_owned()), scaled(requests)));
        let tenants = most(tenants, |traffic| traffic.requests).map(|(tenant, traffic)| {
            let TenantTraffic { requests, failed, limited, inputs, tokens } = traffic;
            let [requests, failed, limited, inputs, tokens] =
                [requests, failed, limited, inputs, tokens].map(scaled);
            (tenant, TenantTraffic { requests, failed, limited, inputs, tokens })
        });
        let moves = most(moves, |(requests, _)| *requests).map(|((from, to, cause), (requests, example))| {
            Move { from: named(from), to: named(to), cause, requests: scaled(requests), example }
        });
        TrafficRows {
            served: served.collect(),
            failures: failures.collect(),
            tenants: tenants.collect(),
            moves: moves.collect(),
        }
    }
}

/// Loads of the regions, of which a report has those with the most pending tokens.
#[derive(Debug, Default)]
pub struct ReportedLoads(Vec<(RegionIndex, DeploymentName, ObservedLoad)>);

impl ReportedLoads {
    /// Adds the loads of a deployment by region. Those that are asleep are left out.
    pub fn add(
        &mut self,
        deployment: &DeploymentName,
        loads: impl IntoIterator<Item = (RegionIndex, DeploymentLoad)>,
    ) {
        for (region, load) in loads.into_iter().filter(|(_, load)| !load.is_asleep()) {
            let load = ObservedLoad {
                ready: load.ready,
                pending_tokens: load.pending_tokens,
                tokens_per_second: load.tokens_per_second as u64,
                held_for: load.ready_in,
            };
            self.0.push((region, deployment.clone(), load));
        }
        // Seldom, so that the cost for each load is constant.
        if self.0.len() >= 2 * TRAFFIC_ROWS_MAX {
            self.keep_most();
        }
    }

    /// Returns the loads by region, at most [`TRAFFIC_ROWS_MAX`] in total.
    pub fn by_region(mut self) -> BTreeMap<RegionIndex, BTreeMap<DeploymentName, ObservedLoad>> {
        self.keep_most();
        let mut regions: BTreeMap<RegionIndex, BTreeMap<_, _>> = BTreeMap::new();
        for (region, deployment, load) in self.0 {
            regions.entry(region).or_default().insert(deployment, load);
        }
        regions
    }

    fn keep_most(&mut self) {
        self.0.sort_by_key(|(_, _, load)| Reverse(load.pending_tokens));
        self.0.truncate(TRAFFIC_ROWS_MAX);
    }
}

/// Delays after reports that a hub has rejected.
const REJECTED: Backoff = Backoff { first: TRAFFIC_PERIOD, max: TRAFFIC_IDLE_PERIOD };

/// Returns the time until the next report after `failures` consecutive ones that failed, the last with this status; `None` if
/// there was no response.
pub fn pause_after_failure(status: Option<u16>, failures: u32) -> Duration {
    match status {
        // The hub is of a release without this path, which has no console.
        Some(404) => TRAFFIC_IDLE_PERIOD,
        // The next report will probably be rejected too.
        Some(400..500) => REJECTED.delay(failures),
        Some(_) | None => TRAFFIC_PERIOD,
    }
}

/// Returns the rows with the highest counts.
fn most<K: Ord, V>(rows: BTreeMap<K, V>, count: impl Fn(&V) -> u64) -> impl Iterator<Item = (K, V)> {
    let mut rows: Vec<_> = rows.into_iter().collect();
    if rows.len() > TRAFFIC_ROWS_MAX {
        rows.sort_by_key(|(_, value)| Reverse(count(value)));
        rows.truncate(TRAFFIC_ROWS_MAX);
    }
    rows.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::AttemptFailure;
    use crate::trail::AttemptEnd;

    fn region(catalogue: &Catalogue, id: &str) -> RegionIndex {
        catalogue.index_of(&id.parse().unwrap()).unwrap()
    }

    fn finished<'a>(
        id: &'a str,
        deployment: &'a DeploymentName,
        region: Option<RegionIndex>,
        trail: &'a Trail,
    ) -> FinishedTraffic<'a> {
        FinishedTraffic {
            id,
            is_locked: false,
            deployment: Some(deployment),
            tenant: None,
            region,
            failure: None,
            is_failed: false,
            is_limited: false,
            inputs: 1,
            tokens: 8,
            total: Duration::from_millis(20),
            trail,
        }
    }

    #[test]
    fn a_request_that_failed_over_counts_at_its_last_region_and_as_a_move() {
        let catalogue = Catalogue::builtin();
        let (near, far) = (region(&catalogue, "gcp/europe-west4"), region(&catalogue, "aws/us-east-1"));
        let (name, now, mut trail) = ("minilm".parse().unwrap(), crate::some_instant(), Trail::default());
        let first = trail.began(near, None, AttemptCause::First, 1, now);
        trail.ended(first, AttemptEnd::Failed(AttemptFailure::RegionDown), now);
        let second = trail.began(far, None, AttemptCause::Evacuation, 2, now);
        trail.ended(second, AttemptEnd::Responded { status: 200 }, now);
        let mut summary = TrafficSummary::default();
        summary.add(&finished("r-1", &name, Some(far), &trail));
        summary.add(&finished("r-2", &name, Some(far), &trail));
        let rows = summary.rows(2, &catalogue);
        let moved = Move {
            from: "gcp/europe-west4".parse().unwrap(),
            to: "aws/us-east-1".parse().unwrap(),
            cause: MoveCause::Evacuation,
            requests: 2,
            example: "r-1".to_owned(),
        };
        assert_eq!(rows.moves, [moved]);
        let served: Vec<_> =
            rows.served.iter().map(|(key, served)| (key.1.clone(), served.requests)).collect();
        assert_eq!(served, [(Some("aws/us-east-1".parse().unwrap()), 2)]);
    }

    #[test]
    fn the_identifier_of_a_request_with_restricted_residency_is_not_reported() {
        let catalogue = Catalogue::builtin();
        let (near, far) = (region(&catalogue, "gcp/europe-west4"), region(&catalogue, "aws/us-east-1"));
        let (name, now, mut trail) = ("minilm".parse().unwrap(), crate::some_instant(), Trail::default());
        trail.began(near, None, AttemptCause::First, 1, now);
        trail.began(far, None, AttemptCause::Retry, 2, now);
        let request = |id, is_locked| FinishedTraffic { is_locked, ..finished(id, &name, Some(far), &trail) };
        let reported = |requests: &[FinishedTraffic<'_>]| {
            let mut summary = TrafficSummary::default();
            requests.iter().for_each(|request| summary.add(request));
            let moves = summary.rows(0, &catalogue).moves;
            moves.into_iter().map(|moved| (moved.requests, moved.example)).collect::<Vec<_>>()
        };
        assert_eq!(reported(&[request("jane@example.com", true)]), [(1, String::new())]);
        let both = [request("jane@example.com", true), request("r-2", false), request("r-3", false)];
        assert_eq!(reported(&both), [(3, "r-2".to_owned())]);
    }

    #[test]
    fn limit_of_loads_holds_over_all_regions_and_keeps_those_with_the_most_work() {
        let catalogue = Catalogue::builtin();
        let regions =
            ["gcp/europe-west4", "aws/us-east-1", "oci/ap-tokyo-1"].map(|id| region(&catalogue, id));
        let mut loads = ReportedLoads::default();
        for number in 0..TRAFFIC_ROWS_MAX {
            let load =
                |pending_tokens| DeploymentLoad { ready: 1, pending_tokens, ..DeploymentLoad::default() };
            let each = [load(number as u64), load(0), DeploymentLoad::default()];
            loads.add(&format!("d{number}").parse().unwrap(), regions.into_iter().zip(each));
        }
        let found = loads.by_region();
        let counts: Vec<_> =
            regions.iter().map(|region| found.get(region).map_or(0, BTreeMap::len)).collect();
        // The first deployment has no work in either region.
        assert_eq!(counts.iter().sum::<usize>(), TRAFFIC_ROWS_MAX, "{counts:?}");
        assert!(counts[0] >= TRAFFIC_ROWS_MAX - 1 && counts[2] == 0, "{counts:?}");
    }

    #[test]
    fn rejected_reports_become_rare_and_an_unreachable_hub_is_tried_each_second() {
        let pauses = |status| {
            [1, 2, 3, 4, 5, 6, 7, 99].map(|failures| pause_after_failure(status, failures).as_secs())
        };
        assert_eq!(pauses(Some(413)), [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses(Some(404)), [60; 8]);
        assert_eq!((pauses(Some(503)), pauses(None)), ([1; 8], [1; 8]));
    }

    #[test]
    fn counts_are_scaled_if_more_requests_finished_than_were_recorded() {
        let (catalogue, trail, name) = (Catalogue::builtin(), Trail::default(), "minilm".parse().unwrap());
        let mut summary = TrafficSummary::default();
        (0..10).for_each(|_| summary.add(&finished("r", &name, None, &trail)));
        let rows = summary.rows(25, &catalogue);
        let served = &rows.served[&(name, None)];
        assert_eq!((served.requests, served.tokens), (25, 200));
    }

    #[test]
    fn the_limit_of_rows_keeps_those_with_the_highest_counts() {
        let (catalogue, trail) = (Catalogue::builtin(), Trail::default());
        let mut summary = TrafficSummary::default();
        let names: Vec<DeploymentName> =
            (0..=TRAFFIC_ROWS_MAX).map(|number| format!("d{number}").parse().unwrap()).collect();
        for (number, name) in names.iter().enumerate() {
            let requests = if number == 3 { 1 } else { 2 };
            (0..requests).for_each(|_| summary.add(&finished("r", name, None, &trail)));
        }
        let rows = summary.rows(0, &catalogue);
        assert_eq!(rows.served.len(), TRAFFIC_ROWS_MAX);
        assert!(!rows.served.contains_key(&(names[3].clone(), None)), "the one with the fewest requests");
    }
}
