//! Output of a drill: a timeline as text, JSON, and the page.

use std::time::Duration;

use serde::Serialize;

use crate::record::{Record, ServingRegions};
use crate::report::{PageContext, Report};

use super::{Drill, DrillEngine, DrillFleet, DrillStore, ExpectationResult};

/// Event of a drill: an executed action or an observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Since the start of the load.
    pub at: Duration,
    /// Whether this is an action of the drill, as opposed to an observation.
    pub is_action: bool,
    /// Description.
    pub text: String,
}

/// Result of a drill.
#[derive(Clone, Copy)]
pub struct DrillResult<'a> {
    /// Name of the drill: that of its file, without the folder and the extension.
    pub name: &'a str,
    /// The drill.
    pub drill: &'a Drill,
    /// Statistics of the requests.
    pub record: &'a Record,
    /// Actions and observations.
    pub events: &'a [Event],
    /// Results of the expectations.
    pub results: &'a [ExpectationResult],
}

#[derive(Serialize)]
struct DrillResultV1<'a> {
    version: u32,
    name: &'a str,
    description: &'a str,
    demand: String,
    fleet: String,
    loads: Vec<LoadV1<'a>>,
    duration_ms: u128,
    held: bool,
    expectations: Vec<ExpectationResultV1<'a>>,
    events: Vec<EventV1<'a>>,
    seconds: Vec<SecondV1>,
}

#[derive(Serialize)]
struct LoadV1<'a> {
    name: &'a str,
    near: String,
    model: String,
    requests_per_second: f64,
    inputs: usize,
}

#[derive(Serialize)]
struct ExpectationResultV1<'a> {
    expectation: &'a str,
    from_ms: u128,
    to_ms: u128,
    held: bool,
    observed: &'a str,
}

#[derive(Serialize)]
struct EventV1<'a> {
    at_ms: u128,
    is_action: bool,
    text: &'a str,
}

#[derive(Serialize)]
struct SecondV1 {
    second: u64,
    ok: u64,
    failed: u64,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    regions: std::collections::BTreeMap<String, u64>,
}

impl DrillResult<'_> {
    /// Returns whether all expectations held.
    pub fn held(&self) -> bool {
        self.results.iter().all(|result| result.held)
    }

    /// Formats request statistics for each second, with actions and observations in between.
    pub fn timeline(&self) -> String {
        let mut lines = vec![format!(
            "{:>7} {:>7} {:>7} {:>9} {:>9}  served by",
            "second", "ok", "failed", "p50 ms", "p99 ms"
        )];
        let mut events: Vec<&Event> = self.events.iter().collect();
        events.sort_by_key(|event| event.at);
        let mut events = events.into_iter().peekable();
        for second in self.seconds() {
            let SecondV1 { second, ok, failed, p50_ms, p99_ms, regions } = second;
            let ms = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.0}"));
            let regions: Vec<_> = regions.iter().map(|(region, count)| format!("{region} {count}")).collect();
            lines.push(format!(
                "{second:>7} {ok:>7} {failed:>7} {:>9} {:>9}  {}",
                ms(p50_ms),
                ms(p99_ms),
                regions.join(", ")
            ));
            while let Some(event) = events.next_if(|event| event.at < Duration::from_secs(second + 1)) {
                lines.push(event_line(event));
            }
        }
        lines.extend(events.map(event_line));
        lines.join("\n")
    }

    /// Formats the request rate before the first step, its share of the capacity, and the rate of ok responses.
    pub fn demand(&self) -> String {
        let Drill { duration, warm_up, fleet, loads, steps, .. } = self.drill;
        let requests: f64 = loads.iter().map(|load| load.rate).sum();
        let inputs: f64 = loads.iter().map(|load| load.rate * load.inputs as f64).sum();
        let share = match (fleet.capacity, &fleet.engine) {
            (None, _) => String::new(),
            (Some(capacity), DrillEngine::Cpu) => {
                format!(": {:.0} % of the configured capacity of {capacity:.0}", 100.0 * requests / capacity)
            }
            (Some(capacity), DrillEngine::Scripted { inputs_per_second, replicas }) => format!(
                ": {:.0} % of the {capacity:.0} inputs/s of {} scripted replicas, {inputs_per_second} each",
                100.0 * inputs / capacity,
                replicas.iter().sum::<u32>(),
            ),
        };
        // Statistics are kept per whole second.
        let from = warm_up.as_secs() + u64::from(warm_up.subsec_nanos() > 0);
        let to = steps.first().map_or(*duration, |step| step.at).as_secs();
        let ok = self.record.between(Duration::from_secs(from), Duration::from_secs(to)).ok;
        let ok_rate = match to.checked_sub(from) {
            Some(seconds @ 1..) => format!("; {:.1} ok/s from {from} to {to} s", ok as f64 / seconds as f64),
            Some(0) | None => String::new(),
        };
        format!("demand: {requests:.1} requests/s{share}{ok_rate}")
    }

    /// Formats the result of each expectation.
    pub fn results(&self) -> String {
        let width = self.results.iter().map(|result| result.expectation.chars().count()).max().unwrap_or(0);
        let line = |result: &ExpectationResult| {
            let ExpectationResult { expectation, span, held, observed } = result;
            let held = if *held { "holds" } else { "FAILS" };
            format!("{held}  {expectation:<width$}  {:>9}  {observed}", span.to_string())
        };
        let held = self.results.iter().filter(|result| result.held).count();
        let mut lines: Vec<_> = self.results.iter().map(line).collect();
        let causes = self.record.total();
        lines.extend(causes.failures().map(|(cause, tally)| format!("failed: {} × {cause}", tally.count)));
        lines.push(format!("{held} of {} expectations hold", self.results.len()));
        lines.join("\n")
    }

    /// Formats the fleet in one sentence.
    fn fleet(&self) -> String {
        let DrillFleet { regions, store, hubs, spokes, deployments: _, engine, capacity: _ } =
            &self.drill.fleet;
        let count = |count: usize, one: &str, several: &str| {
            format!("{count} {}", if count == 1 { one } else { several })
        };
        let replicas = match engine {
            DrillEngine::Cpu => "replicas with the CPU engine".to_owned(),
            DrillEngine::Scripted { replicas, .. } => {
                count(replicas.iter().sum::<u32>() as usize, "scripted replica", "scripted replicas")
            }
        };
        let store = match store {
            DrillStore::Embedded => "an embedded store",
            DrillStore::Etcd => "etcd",
        };
        let regions = count(regions.len(), "region", "regions");
        let spokes = count(*spokes as usize, "spoke", "spokes");
        let hubs = count(*hubs as usize, "hub", "hubs");
        format!("{regions} with a gateway and {spokes} each, {replicas}, {hubs} with {store}")
    }

    /// Formats the result as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(&self.wire()).expect("numbers and texts are JSON")
    }

    /// Returns the page of the drill: the report of its load, below the verdict. `report` belongs to the same run.
    pub fn to_html(&self, report: &Report, context: &PageContext) -> String {
        let drill = serde_json::to_string(&self.wire()).expect("numbers and texts are JSON");
        report.page(context, &report.to_json_line_without_target(), Some(&drill))
    }

    fn wire(&self) -> DrillResultV1<'_> {
        let expectations = self.results.iter().map(|each| {
            let (from_ms, to_ms) = (each.span.from.as_millis(), each.span.to.as_millis());
            ExpectationResultV1 {
                expectation: &each.expectation,
                from_ms,
                to_ms,
                held: each.held,
                observed: &each.observed,
            }
        });
        let events = self.events.iter().map(|Event { at, is_action, text }| EventV1 {
            at_ms: at.as_millis(),
            is_action: *is_action,
            text,
        });
        let loads = self.drill.loads.iter().map(|load| LoadV1 {
            name: &load.name,
            near: load.near.to_string(),
            model: load.model.to_string(),
            requests_per_second: load.rate,
            inputs: load.inputs,
        });
        DrillResultV1 {
            version: 1,
            name: self.name,
            description: &self.drill.description,
            demand: self.demand(),
            fleet: self.fleet(),
            loads: loads.collect(),
            duration_ms: self.drill.duration.as_millis(),
            held: self.held(),
            expectations: expectations.collect(),
            events: events.collect(),
            seconds: self.seconds(),
        }
    }

    fn seconds(&self) -> Vec<SecondV1> {
        let ms = |span: Option<Duration>| span.map(|span| span.as_secs_f64() * 1e3);
        let last = self.drill.duration.as_secs() + u64::from(self.drill.duration.subsec_nanos() > 0);
        let second = |second: u64| {
            let window = self.record.between(Duration::from_secs(second), Duration::from_secs(second + 1));
            let (p50_ms, p99_ms) = (ms(window.quantile(0.5)), ms(window.quantile(0.99)));
            let with_ok = window
                .by_region
                .iter()
                .filter(|(served, by)| by.ok > 0 && **served != ServingRegions::Unknown);
            let regions = with_ok.map(|(served, by)| (served.to_string(), by.ok)).collect();
            SecondV1 { second, ok: window.ok, failed: window.failed, p50_ms, p99_ms, regions }
        };
        (0..last).map(second).collect()
    }
}

fn event_line(event: &Event) -> String {
    let Event { at, is_action, text } = event;
    let mark = if *is_action { ">>" } else { "  " };
    format!("{:>7.2} s {mark} {text}", at.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::evaluation::tests::drill;
    use super::*;
    use crate::report::html_tests::{context, embedded};
    use crate::report::tests::report;

    fn page(held: bool) -> String {
        let (drill, report) = (drill("", "expect = ['failed <= 50']"), report());
        let span = drill.expectations[0].span;
        let expectation = drill.expectations[0].text.clone();
        let result = ExpectationResult { expectation, span, held, observed: "50 of 250 failed".to_owned() };
        let events = [Event { at: Duration::from_secs(1), is_action: true, text: "kill region".to_owned() }];
        let (record, results) = (&report.record, &[result]);
        let result = DrillResult { name: "a-test", drill: &drill, record, events: &events, results };
        result.to_html(&report, &context())
    }

    #[test]
    fn the_page_has_the_name_the_purpose_and_the_verdict_of_each_expectation() {
        for held in [true, false] {
            let page = page(held);
            let drill = embedded(&page, "drill");
            assert_eq!((&drill["name"], &drill["description"]), (&"a-test".into(), &"a test".into()));
            assert_eq!((&drill["held"], &drill["expectations"][0]["held"]), (&held.into(), &held.into()));
            assert_eq!(drill["expectations"][0]["observed"], "50 of 250 failed");
            assert_eq!(drill["loads"][1]["near"], "gcp/europe-west4");
            let fleet =
                "2 regions with a gateway and 1 spoke each, replicas with the CPU engine, 2 hubs with etcd";
            assert_eq!(drill["fleet"], fleet);
            assert_eq!(embedded(&page, "context")["date"], "2026-11-26 12:00 UTC");
            assert_eq!(embedded(&page, "report")["total"]["failed"], 50);
        }
    }

    #[test]
    fn the_page_names_no_host() {
        let page = page(true);
        assert!(!page.contains("127.0.0.1") && !page.contains("localhost"), "{page}");
        assert!(embedded(&page, "report")["target"].is_null());
    }
}
