//! Evaluation of expectations against the record and the observations of a run.

use std::collections::BTreeMap;
use std::time::Duration;

use regions::{Catalogue, Generation, RegionId, ResidencyPolicy};
use replica_api::error::ErrorCode;

use crate::exchange::RequestFailure;
use crate::record::{Record, ServingRegions, TimeWindow};

use super::Drill;
use super::expectation::{Expectation, ExpectationKind, LatencyBound, Quantile, Span};
use super::observations::DrillObservations;

/// Result of one expectation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectationResult {
    /// Text of the expectation as written in the file.
    pub expectation: String,
    /// Time span of the evaluation.
    pub span: Span,
    /// Whether it held.
    pub held: bool,
    /// Observed value, for the report.
    pub observed: String,
}

/// Evaluates all expectations. The tasks of `record` are the loads of the drill, in their order.
pub fn evaluate(
    drill: &Drill,
    record: &Record,
    observations: &DrillObservations,
    catalogue: &Catalogue,
) -> Vec<ExpectationResult> {
    let evaluator = Evaluator { drill, record, observations, catalogue };
    let result = |expectation: &Expectation| {
        let (held, observed) = match evaluator.evaluate(expectation) {
            Ok(observed) => (true, observed),
            Err(observed) => (false, observed),
        };
        ExpectationResult { expectation: expectation.text.clone(), span: expectation.span, held, observed }
    };
    drill.expectations.iter().map(result).collect()
}

struct Evaluator<'a> {
    drill: &'a Drill,
    record: &'a Record,
    observations: &'a DrillObservations,
    catalogue: &'a Catalogue,
}

/// Observed value: `Ok` if the expectation held, `Err` if not.
type Evaluation = Result<String, String>;

impl Evaluator<'_> {
    fn evaluate(&self, expectation: &Expectation) -> Evaluation {
        let Expectation { text: _, kind, load, span } = expectation;
        let load = load.as_deref();
        let (from, to) = span.seconds();
        match kind {
            ExpectationKind::FailedAtMost(most) => {
                let window = self.window(load, span.from, span.to);
                let observed = format!("{} of {} failed", window.failed, window.ok + window.failed);
                held(window.failed <= *most && window.ok + window.failed > 0, observed)
            }
            ExpectationKind::FailuresOnly(code) => self.failures(*code, load),
            ExpectationKind::Latency { quantile, below, bound } => {
                self.latency(&self.window(load, from, to), *quantile, *below, *bound, load)
            }
            ExpectationKind::ServedInOnly(policy) => self.served_in(&self.window(load, from, to), policy),
            ExpectationKind::ServedBy(region) => {
                let here = served_by(&self.window(load, from, to), region);
                held(here > 0, format!("{here} responses"))
            }
            ExpectationKind::Evacuated(region) => self.evacuated(region, &self.window(load, from, to), *span),
            ExpectationKind::GenerationNeverFalls => self.never_falls(),
            ExpectationKind::GenerationRises => self.rises(*span),
            ExpectationKind::HubsAgree => self.agree(*span),
        }
    }

    fn window(&self, load: Option<&str>, from: Duration, to: Duration) -> TimeWindow {
        let index = load.and_then(|name| self.drill.loads.iter().position(|load| load.name == name));
        match index {
            Some(index) => self.record.between_of(index, from, to),
            None => self.record.between(from, to),
        }
    }

    /// Failure causes are recorded only for the whole run.
    fn failures(&self, expected: ErrorCode, load: Option<&str>) -> Evaluation {
        let index = load.and_then(|name| self.drill.loads.iter().position(|load| load.name == name));
        let total = match index {
            Some(index) => self.record.tasks().get(index).map(|task| task.total()).unwrap_or_default(),
            None => self.record.total(),
        };
        let observed: Vec<_> =
            total.failures().map(|(cause, tally)| format!("{} × {cause}", tally.count)).collect();
        let right = |cause: RequestFailure| matches!(cause, RequestFailure::ErrorStatus { code: Some(code), .. } if code == expected);
        let only = total.failed() > 0 && total.failures().all(|(cause, _)| right(cause));
        held(only, if observed.is_empty() { "none failed".to_owned() } else { observed.join(", ") })
    }

    fn latency(
        &self,
        window: &TimeWindow,
        quantile: Quantile,
        below: bool,
        bound: LatencyBound,
        load: Option<&str>,
    ) -> Evaluation {
        let Quantile { name, share, .. } = quantile;
        let Some(latency) = window.quantile(share) else { return Err("no ok response".to_owned()) };
        let (bound, observed) = match bound {
            LatencyBound::Time(bound) => (bound, format!("{name} {}", ms(latency))),
            LatencyBound::TimesBefore(times) => {
                let (from, to) = self.drill.before().seconds();
                let Some(before) = self.window(load, from, to).quantile(share) else {
                    return Err("no ok response before the first step".to_owned());
                };
                let ratio = latency.as_secs_f64() / before.as_secs_f64().max(1e-6);
                (before.mul_f64(times), format!("{name} {} after {}: {ratio:.2}x", ms(latency), ms(before)))
            }
        };
        held(if below { latency < bound } else { latency <= bound }, observed)
    }

    fn served_in(&self, window: &TimeWindow, policy: &ResidencyPolicy) -> Evaluation {
        let permitted = policy.permitted(self.catalogue);
        let is_allowed = |region: &RegionId| {
            self.catalogue.index_of(region).is_some_and(|index| permitted.contains(index))
        };
        // A response without a region name may have come from anywhere.
        let allowed =
            |served: &ServingRegions| !served.regions().is_empty() && served.regions().iter().all(is_allowed);
        let with_ok = window.by_region.iter().filter(|(_, second)| second.ok > 0);
        let by: BTreeMap<&ServingRegions, u64> =
            with_ok.map(|(served, second)| (served, second.ok)).collect();
        let observed: Vec<_> = by.iter().map(|(served, count)| format!("{served} {count}")).collect();
        let observed = if observed.is_empty() { "no ok response".to_owned() } else { observed.join(", ") };
        held(!by.is_empty() && by.keys().all(|served| allowed(served)), observed)
    }

    fn evacuated(&self, region: &RegionId, window: &TimeWindow, span: Span) -> Evaluation {
        let here = served_by(window, region);
        let in_use =
            |region: &super::observations::RegionObservation| region.health == "healthy" && !region.draining;
        // Without observations of the gateways, only the responses count. A gateway that does not respond sends no request.
        let at = self.observations.region_at(region, span.from);
        let using: Vec<&str> =
            at.iter().filter(|(_, region)| in_use(region)).map(|(name, _)| *name).collect();
        let again = self.observations.region_within(region, span.from, span.to).into_iter().any(in_use);
        let unreachable = match &self.observations.unreachable_at(region, span.from)[..] {
            [] => String::new(),
            several => format!("; {} did not respond", several.join(" and ")),
        };
        let observed = match at.len() {
            _ if !using.is_empty() => format!(", and {} considered it healthy", using.join(" and ")),
            _ if again => ", and it was considered healthy again".to_owned(),
            0 => String::new(),
            1 => ", and the gateway does not use it".to_owned(),
            _ => ", and no gateway uses it".to_owned(),
        };
        held(
            here == 0 && using.is_empty() && !again,
            format!("{here} responses from it{observed}{unreachable}"),
        )
    }

    fn never_falls(&self) -> Evaluation {
        let mut contents: BTreeMap<Generation, (&str, u64)> = BTreeMap::new();
        let mut observed = Vec::new();
        for (reader, tables) in self.observations.tables() {
            for pair in tables.windows(2) {
                let ((_, before), (at, after)) = (pair[0], pair[1]);
                if after.generation < before.generation {
                    let at = at.as_secs_f64();
                    return Err(format!(
                        "{reader} had {} after {} at {at:.1} s",
                        after.generation, before.generation
                    ));
                }
            }
            for (_, table) in tables {
                let Some(content) = table.content else { continue };
                let (other, first) = *contents.entry(table.generation).or_insert((reader, content));
                if first != content {
                    return Err(format!("{other} and {reader} had different tables {}", table.generation));
                }
            }
            if let (Some((_, first)), Some((_, last))) = (tables.first(), tables.last()) {
                observed.push(format!("{reader} {} to {}", first.generation, last.generation));
            }
        }
        held(
            !observed.is_empty(),
            if observed.is_empty() { "no reader was observed".to_owned() } else { observed.join(", ") },
        )
    }

    fn rises(&self, span: Span) -> Evaluation {
        let (before, after) =
            (self.observations.tables_at(span.anchor), self.observations.tables_at(span.from));
        let newest = before.values().map(|table| table.generation).max();
        let observed: Vec<_> =
            after.iter().map(|(reader, table)| format!("{reader} {}", table.generation)).collect();
        let risen = after.values().filter(|table| Some(table.generation) > newest).count();
        let newest = newest.map_or("none".to_owned(), |newest| newest.to_string());
        held(risen > 0, format!("{newest}, then {}", observed.join(", ")))
    }

    fn agree(&self, span: Span) -> Evaluation {
        let tables = self.observations.tables_at(span.to);
        let hubs: Vec<_> = tables.iter().filter(|(reader, _)| reader.starts_with("hub")).collect();
        let observed: Vec<_> =
            hubs.iter().map(|(hub, table)| format!("{hub} {}", table.generation)).collect();
        let one = hubs.iter().all(|(_, table)| *table == hubs[0].1);
        held(one && hubs.len() == self.drill.fleet.hubs as usize, observed.join(", "))
    }
}

/// Counts responses in which the region took part.
fn served_by(window: &TimeWindow, region: &RegionId) -> u64 {
    let here = window.by_region.iter().filter(|(served, _)| served.regions().contains(region));
    here.map(|(_, second)| second.ok).sum()
}

fn held(held: bool, observed: String) -> Evaluation {
    if held { Ok(observed) } else { Err(observed) }
}

fn ms(span: Duration) -> String {
    format!("{:.0} ms", span.as_secs_f64() * 1e3)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::observations::{RegionObservation, TableObservation};
    use super::super::{ReadContext, read};
    use super::*;
    use crate::exchange::Sample;
    use replica_api::priority::Priority;

    const NEAR: &str = "aws/us-east-1";
    const FAR: &str = "gcp/europe-west4";

    /// A drill of 20 s with a step at 10 s that kills the far region, with `step` under it and `top` at the top level.
    pub(in crate::drill) fn drill(top: &str, step: &str) -> Drill {
        let text = format!(
            "description = 'a test'\nduration = '20s'\n{top}\n[fleet]\nregions = ['{NEAR}', '{FAR}']\nstore = 'etcd'\nhubs = 2\n\
             [[load]]\nname = 'one'\nnear = '{NEAR}'\nrate = 50\n[[load]]\nname = 'two'\nnear = '{FAR}'\nrate = 50\n\
             [[step]]\nat = '10s'\ndo = 'kill region {FAR}'\n{step}\n"
        );
        let catalogue = Catalogue::builtin();
        let deployments = |_: Option<&str>| {
            let text = include_str!("../../../configs/deployments.toml");
            Ok(regions::parse_deployments(text, &Catalogue::builtin()).unwrap())
        };
        let context = ReadContext { catalogue: &catalogue, deployments: &deployments, against: false };
        read(&text, &context).unwrap_or_else(|problems| panic!("{problems:#?}"))
    }

    fn sample(task: usize, second: u64, region: &str, latency_ms: u64) -> Sample {
        Sample {
            task,
            priority: Priority::Interactive,
            intended: Duration::from_secs(second),
            lag: Duration::ZERO,
            latency: Some(Duration::from_millis(latency_ms)),
            served: ServingRegions::parse(region),
            retried: false,
            outcome: Ok(()),
        }
    }

    /// Fifty responses a second per load: 10 ms from the near region; 100 ms from the far region until it dies in
    /// second 10, then 300 ms for two seconds and 110 ms from the near region.
    fn record() -> Record {
        let mut record = Record::of([Vec::new(), Vec::new()]);
        for second in 0..20 {
            for _ in 0..50 {
                record.add(sample(0, second, NEAR, 10));
                let (region, ms) = match second {
                    0..10 => (FAR, 100),
                    10..12 => (NEAR, 300),
                    _ => (NEAR, 110),
                };
                record.add(sample(1, second, region, ms));
            }
        }
        record
    }

    fn failed(mut record: Record, second: u64, code: ErrorCode) -> Record {
        let refused = RequestFailure::ErrorStatus { status: 503, code: Some(code) };
        record.add(Sample {
            outcome: Err(refused),
            served: ServingRegions::Unknown,
            ..sample(1, second, NEAR, 1)
        });
        record
    }

    fn observations(changes: &[(u64, &str)], tables: &[(u64, &str, u64, u64)]) -> DrillObservations {
        let mut observations = DrillObservations::default();
        for (at, health) in changes {
            let region = RegionObservation { health: (*health).to_owned(), draining: false };
            observations.region(Duration::from_millis(*at), "gateway", &FAR.parse().unwrap(), region);
        }
        for (at, reader, number, content) in tables {
            let generation = Generation { epoch: 1, number: *number };
            observations.table(
                Duration::from_millis(*at),
                reader,
                TableObservation { generation, content: Some(*content) },
            );
        }
        observations
    }

    fn held(drill: &Drill, record: &Record, observations: &DrillObservations) -> (bool, String) {
        let results = evaluate(drill, record, observations, &Catalogue::builtin());
        assert_eq!(results.len(), 1, "{results:?}");
        (results[0].held, results[0].observed.clone())
    }

    #[test]
    fn expectations_about_requests_are_evaluated() {
        let outage = ErrorCode::NoCapacityInAllowedRegions;
        let check = |at_top: bool, text: &str, record: &Record, expected: bool, part: &str| {
            let line = format!("expect = ['{text}']");
            let drill = if at_top { drill(&line, "") } else { drill("", &line) };
            let (held, observed) = held(&drill, record, &DrillObservations::default());
            assert!(held == expected && observed.contains(part), "{text}: {held}, {observed}");
        };
        let (good, one_lost) = (record(), failed(record(), 10, outage));
        check(true, "failed == 0", &good, true, "0 of 2000 failed");
        check(true, "failed == 0", &one_lost, false, "1 of 2001 failed");
        check(true, "failed <= 1", &one_lost, true, "1 of");
        check(true, "failed == 0 for one", &one_lost, true, "0 of 1000");
        check(false, "failed == 0", &one_lost, false, "1 of 1001");
        check(false, "failed == 0 within 1s", &one_lost, true, "0 of 900");
        check(true, "failed == 0", &Record::default(), false, "0 of 0");
        check(true, "failures only no_capacity_in_allowed_regions for two", &one_lost, true, "1 ×");
        check(true, "failures only region_not_permitted for two", &one_lost, false, "1 ×");
        check(true, "failures only no_capacity_in_allowed_regions for two", &good, false, "none failed");
        check(false, "p99 < 250ms", &good, false, "p99 30");
        check(false, "p99 < 250ms within 2s", &good, true, "p99 11");
        check(false, "p99 <= 1.2x before within 2s", &good, true, "1.1");
        check(false, "p99 <= 1.05x before within 2s", &good, false, "1.1");
        check(false, "p50 < 20ms for two within 2s", &good, false, "p50 11");
        check(true, "served_in us only for one", &good, true, "aws/us-east-1 1000");
        check(true, "served_in us only", &good, false, "gcp/europe-west4 500");
        check(true, "served_in us only", &Record::default(), false, "no ok response");
        let together = |regions: &str| {
            let mut record = record();
            record.add(sample(0, 15, regions, 10));
            record
        };
        let near_alone = together("aws/us-east-1,aws/us-east-2");
        check(true, "served_in us only for one", &near_alone, true, "aws/us-east-1 + aws/us-east-2 1");
        check(
            true,
            "served_in us only for one",
            &together("aws/us-east-1,gcp/europe-west4"),
            false,
            "west4 1",
        );
        check(
            false,
            "served_by gcp/europe-west4 for one",
            &together("aws/us-east-1,gcp/europe-west4"),
            true,
            "1 responses",
        );
        check(false, "served_by gcp/europe-west4", &good, false, "0 responses");
        check(false, "served_by aws/us-east-1 for two", &good, true, "500 responses");
    }

    #[test]
    fn a_region_is_evacuated_without_responses_and_with_the_gateway_not_using_it() {
        let check = |observations: &DrillObservations, record: &Record, expected: bool, part: &str| {
            let (held, observed) = held(&drill("", "expect = ['evacuated within 3s']"), record, observations);
            assert!(held == expected && observed.contains(part), "{held}, {observed}");
        };
        let mut straggler = record();
        straggler.add(sample(1, 14, FAR, 100));
        let left = [(0, "healthy"), (10_300, "suspect"), (12_900, "down")];
        check(&observations(&left, &[]), &record(), true, "does not use it");
        check(&observations(&left, &[]), &straggler, false, "1 responses");
        check(
            &observations(&[(0, "healthy"), (13_100, "down")], &[]),
            &record(),
            false,
            "gateway considered it healthy",
        );
        let back = [(0, "healthy"), (10_300, "down"), (15_000, "healthy")];
        check(&observations(&back, &[]), &record(), false, "healthy again");
        check(&DrillObservations::default(), &record(), true, "0 responses");
        // Another gateway still uses the region.
        let mut two = observations(&left, &[]);
        let healthy = RegionObservation { health: "healthy".to_owned(), draining: false };
        two.region(Duration::ZERO, "gateway far", &FAR.parse().unwrap(), healthy.clone());
        check(&two, &record(), false, "gateway far considered it healthy");
        let down = RegionObservation { health: "down".to_owned(), ..healthy.clone() };
        two.region(Duration::from_secs(12), "gateway far", &FAR.parse().unwrap(), down);
        check(&two, &record(), true, "no gateway uses it");
        // That gateway ends with the region before it reports the loss.
        let mut gone = observations(&left, &[]);
        gone.region(Duration::ZERO, "gateway far", &FAR.parse().unwrap(), healthy.clone());
        assert!(gone.unreachable(Duration::from_millis(10_200), "gateway far"));
        assert!(!gone.unreachable(Duration::from_millis(10_300), "gateway far"), "it is recorded once");
        check(&gone, &record(), true, "the gateway does not use it; gateway far did not respond");
        check(&gone, &straggler, false, "1 responses");
        let mut all = observations(&[(0, "healthy")], &[]);
        all.unreachable(Duration::from_millis(12_900), "gateway");
        check(&all, &record(), true, "0 responses from it; gateway did not respond");
        let mut late = observations(&[(0, "healthy")], &[]);
        late.unreachable(Duration::from_millis(13_100), "gateway");
        check(&late, &record(), false, "gateway considered it healthy");
        // It responds again, and its view is what it was before.
        assert!(gone.is_unreachable("gateway far") && !gone.is_unreachable("gateway"));
        gone.region(Duration::from_secs(15), "gateway far", &FAR.parse().unwrap(), healthy);
        assert!(!gone.is_unreachable("gateway far"));
        check(&gone, &record(), false, "healthy again; gateway far did not respond");
        let mut part = record();
        part.add(sample(1, 14, "aws/us-east-1,gcp/europe-west4", 100));
        check(&observations(&left, &[]), &part, false, "1 responses");
    }

    #[test]
    fn regressing_and_conflicting_tables_are_detected() {
        let check = |text: &str, tables: &[(u64, &str, u64, u64)], expected: bool, part: &str| {
            let at_top = text.starts_with("generation never");
            let line = format!("expect = ['{text}']");
            let drill = if at_top { drill(&line, "") } else { drill("", &line) };
            let (held, observed) = held(&drill, &record(), &observations(&[], tables));
            assert!(held == expected && observed.contains(part), "{text}: {held}, {observed}");
        };
        let never = "generation never falls";
        check(never, &[(0, "hub 1", 5, 50), (11_000, "hub 2", 6, 60)], true, "hub 1 1.5 to 1.5");
        check(never, &[(0, "hub 1", 6, 60), (11_000, "hub 1", 5, 50)], false, "hub 1 had 1.5 after 1.6");
        check(never, &[(0, "hub 1", 6, 60), (11_000, "hub 2", 6, 61)], false, "different tables 1.6");
        check(never, &[], false, "no reader");
        let rises = "generation rises within 3s";
        check(rises, &[(0, "hub 1", 5, 50), (12_000, "hub 2", 6, 60)], true, "1.5, then");
        check(rises, &[(0, "hub 1", 5, 50), (13_500, "hub 2", 6, 60)], false, "1.5, then hub 1 1.5");
        let agree = "hubs agree within 3s";
        check(agree, &[(0, "hub 1", 5, 50), (0, "hub 2", 5, 50)], true, "hub 2 1.5");
        check(agree, &[(0, "hub 1", 5, 50), (0, "hub 2", 4, 40)], false, "hub 2 1.4");
        check(agree, &[(0, "hub 1", 5, 50)], false, "hub 1 1.5");
    }
}
