//! Report as JSON: everything in the table, the causes of failures per region, task and stage, and the statistics of
//! every second, which show where requests were sent when a region failed.
//!
//! Regions are keyed by name; tasks and stages are lists, even with one element. Times are in milliseconds, as their
//! names state. `version` increases when a field is removed or changes its meaning.
//!
//! The latencies of a second are a text, `812*3 820`: microseconds, each rounded up by at most 0.8 %, with their
//! counts. Distributions of any part of a run can be reconstructed from them, as `load compare` does.

mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Report;
use crate::client::HttpProtocol;
use crate::options::Options;
use crate::profile::RateStage;
use crate::record::{Group, Latencies, Mark, SecondStats, Seconds, TaskRecord};
use crate::task::{Pacing, Task};
use wire::{
    FailureV1, GroupV2, LatencySummaryV1, MarkV2, ReportV2, SecondRegionV2, SecondV2, SloV2, StageV2, TaskV2,
};

/// Points of the percentile curve per decade of the share of slower requests, and decades: down to one in a hundred
/// thousand.
const CURVE_PER_DECADE: u32 = 12;
const CURVE_DECADES: u32 = 5;

impl Report {
    /// Formats the report as one JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(&ReportV2::from(self))
            .expect("numbers, strings and lists serialise to JSON")
    }

    /// Formats the report as JSON without line breaks.
    pub(in crate::report) fn to_json_line(&self) -> String {
        serde_json::to_string(&ReportV2::from(self)).expect("numbers, strings and lists serialise to JSON")
    }
}

impl Report {
    /// Formats the report of a drill like [`Report::to_json_line`], without the address of the fleet: it was made for the
    /// drill and names only the machine.
    pub(crate) fn to_json_line_without_target(&self) -> String {
        let report = ReportV2 { target: None, ..ReportV2::from(self) };
        serde_json::to_string(&report).expect("numbers, strings and lists serialise to JSON")
    }
}

impl From<&Report> for ReportV2 {
    fn from(report: &Report) -> ReportV2 {
        let Report { options, elapsed, stopped_early, record, marks } = report;
        // The API key and the TLS roots are not part of the report; the limit of requests in flight shows in the
        // failures.
        let Options {
            base,
            trust: _,
            authorization: _,
            model,
            tasks,
            timeout,
            slo,
            seed,
            geo,
            protocol,
            in_flight_max: _,
            process_share: _,
        } = options;
        let slo_requests = report.slo_requests();
        let slo = slo.as_ref().map(|slo| SloV2 {
            objective: slo.to_string(),
            quantile: slo.quantile,
            within_ms: milliseconds(slo.within),
            requests: slo_requests.requests(),
            good: slo.good(&slo_requests),
            goodput_per_s: report.goodput_per_s().unwrap_or_default(),
            holds: report.holds(),
        });
        let mut priorities: BTreeMap<String, BTreeMap<String, GroupV2>> = BTreeMap::new();
        for ((served, priority), group) in record.priorities() {
            priorities.entry(priority.to_string()).or_default().insert(served.to_string(), group.into());
        }
        ReportV2 {
            version: 2,
            target: Some(base.to_string()),
            http: match protocol {
                HttpProtocol::Http1 => "1.1",
                HttpProtocol::Http2 => "2",
            },
            model: model.clone(),
            duration_ms: milliseconds(options.duration()),
            timeout_ms: milliseconds(*timeout),
            seed: *seed,
            geo: geo.map(|geo| [geo.lat(), geo.lon()]),
            elapsed_ms: milliseconds(*elapsed),
            stopped_early: *stopped_early,
            lag_ms: record.lag().into(),
            lag_notable: report.lag_is_notable(),
            slo,
            marks: marks
                .iter()
                .map(|Mark { at, is_action, label }| MarkV2 {
                    at_ms: milliseconds(*at),
                    is_action: *is_action,
                    label: label.clone(),
                })
                .collect(),
            total: (&record.total()).into(),
            regions: by_name(&record.regions()),
            priorities,
            tasks: tasks.iter().zip(record.tasks()).map(TaskV2::from).collect(),
            stages: tasks.iter().zip(record.tasks()).next().map(stages).unwrap_or_default(),
            seconds: seconds(&record.seconds()),
        }
    }
}

fn stages((task, record): (&Task, &TaskRecord)) -> Vec<StageV2> {
    let Pacing::Open { profile, arrival: _ } = &task.pacing else { return Vec::new() };
    profile.stages().zip(record.stages()).map(StageV2::from).collect()
}

impl From<(&Task, &TaskRecord)> for TaskV2 {
    fn from((task, record): (&Task, &TaskRecord)) -> TaskV2 {
        let Task { name, workload, pacing } = task;
        let (kind, profile, arrival, callers) = match pacing {
            Pacing::Open { profile, arrival } => ("open", Some(profile), Some(arrival), None),
            Pacing::Closed { callers, duration: _ } => ("closed", None, None, Some(*callers)),
            Pacing::Replay { .. } => ("replayed", None, None, None),
        };
        TaskV2 {
            name: name.clone(),
            workload: workload.kind.to_string(),
            priority: workload.kind.priority().to_string(),
            pacing: kind,
            rate: profile.map(ToString::to_string),
            rate_per_s: profile.map(|profile| profile.mean_per_second()),
            arrival: arrival.map(ToString::to_string),
            callers,
            duration_ms: milliseconds(pacing.duration()),
            inputs_per_request: workload.inputs,
            texts: workload.texts.count(),
            texts_source: workload.texts.source().to_owned(),
            requests: (&record.total()).into(),
            regions: by_name(record.regions()),
            stages: stages((task, record)),
            seconds: seconds(record.seconds()),
        }
    }
}

fn by_name<'a, Name: ToString, Record, Wire>(regions: &'a BTreeMap<Name, Record>) -> BTreeMap<String, Wire>
where
    Wire: From<&'a Record>,
{
    regions.iter().map(|(served, record)| (served.to_string(), record.into())).collect()
}

fn seconds(seconds: &Seconds) -> Vec<SecondV2> {
    seconds.iter().map(|(second, regions)| SecondV2 { second: *second, regions: by_name(regions) }).collect()
}

impl From<&Group> for GroupV2 {
    fn from(record: &Group) -> GroupV2 {
        let failures = record.failures().map(|(cause, tally)| FailureV1 {
            cause: cause.to_string(),
            count: tally.count,
            latency_ms: (&tally.latencies).into(),
        });
        let latencies = record.latencies();
        GroupV2 {
            requests: record.requests(),
            ok: record.ok(),
            failed: record.failed(),
            retried: record.retried,
            latency_ms: (&latencies).into(),
            percentiles: curve(&latencies),
            failures: failures.collect(),
        }
    }
}

impl From<((Duration, &RateStage), &Group)> for StageV2 {
    fn from(((begins, stage), group): ((Duration, &RateStage), &Group)) -> StageV2 {
        let RateStage { from, to, duration } = stage;
        StageV2 {
            rate_from_per_s: from.per_second(),
            rate_to_per_s: to.per_second(),
            start_ms: milliseconds(begins),
            duration_ms: milliseconds(*duration),
            requests: group.into(),
        }
    }
}

impl From<&SecondStats> for SecondRegionV2 {
    fn from(record: &SecondStats) -> SecondRegionV2 {
        let SecondStats { ok, failed, latencies } = record;
        SecondRegionV2 {
            ok: *ok,
            failed: *failed,
            p50_ms: latencies.quantile(0.5).map(milliseconds),
            p99_ms: latencies.quantile(0.99).map(milliseconds),
            latency_max_ms: latencies.max().map(milliseconds),
            latencies_us: latencies.to_string(),
        }
    }
}

impl From<&Latencies> for LatencySummaryV1 {
    fn from(latencies: &Latencies) -> LatencySummaryV1 {
        let at = |quantile| latencies.quantile(quantile).map(milliseconds);
        LatencySummaryV1 {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: latencies.max().map(milliseconds),
        }
    }
}

/// Returns the percentile curve, as far as the number of requests supports it.
fn curve(latencies: &Latencies) -> Vec<[f64; 2]> {
    let count = latencies.count() as f64;
    let evenly = (0..=CURVE_PER_DECADE * CURVE_DECADES).map(|step| {
        let slower = 10_f64.powf(-f64::from(step) / f64::from(CURVE_PER_DECADE));
        ((1.0 - slower) * 1e7).round() / 1e7
    });
    // The named percentiles are always part of the curve.
    let named = [0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999];
    let shares: BTreeSet<u64> = evenly.chain(named).map(|share| (share * 1e7).round() as u64).collect();
    let supported =
        shares.into_iter().map(|share| share as f64 / 1e7).filter(|share| (1.0 - share) * count >= 0.999);
    supported.filter_map(|share| Some([share, milliseconds(latencies.quantile(share)?)])).collect()
}

fn milliseconds(span: Duration) -> f64 {
    span.as_micros() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;
    use serde_json::{Value, json};

    #[test]
    fn the_json_shows_where_requests_went_second_by_second() {
        let text = report().to_json();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["version"], 2);
        assert_eq!(value["total"]["requests"], 250);
        assert_eq!(value["total"]["failures"][0]["cause"], "timeout");
        assert_eq!(value["regions"]["gcp/europe-west4"]["ok"], 100);
        let here = |ok: u64, failed: u64, ms: Option<f64>, us: &str| json!({"ok": ok, "failed": failed, "p50_ms": ms, "p99_ms": ms, "latency_max_ms": ms, "latencies_us": us});
        let seconds = json!([
            {"second": 0, "regions": {"gcp/europe-west4": here(100, 0, Some(8.031), "8031*100")}},
            {"second": 1, "regions": {
                "aws/us-east-1": here(100, 0, Some(90.111), "90111*100"),
                "(no region)": here(0, 50, None, ""),
            }},
        ]);
        assert_eq!(value["seconds"], seconds);
        let task = &value["tasks"][0];
        assert_eq!(
            (&task["name"], &task["priority"], &task["pacing"]),
            (&json!("queries"), &json!("interactive"), &json!("open"))
        );
        assert_eq!((&task["rate"], &task["requests"]), (&json!("100 for 1s, 150 for 1s"), &json!(250)));
        assert_eq!(task["seconds"], seconds);
        assert_eq!(value["priorities"]["interactive"]["gcp/europe-west4"]["ok"], 100);
        let stage = &task["stages"][1];
        assert_eq!((&stage["start_ms"], &stage["duration_ms"]), (&json!(1000.0), &json!(1000.0)));
        assert_eq!((&stage["rate_from_per_s"], &stage["rate_to_per_s"]), (&json!(150.0), &json!(150.0)));
        assert_eq!(
            (&stage["requests"], &stage["ok"], &stage["failed"]),
            (&json!(150), &json!(100), &json!(50))
        );
        assert_eq!(stage["latency_ms"]["p50"], 90.047);
        assert_eq!(
            value["marks"],
            json!([{"at_ms": 1000.0, "is_action": true, "label": "kill region gcp/europe-west4"}])
        );
        assert!(!text.contains("local\""), "the key is not in the report");
    }

    #[test]
    fn the_curve_ends_where_the_number_of_requests_does() {
        let of = |count: u64| {
            let mut latencies = Latencies::default();
            (1..=count).for_each(|micros| latencies.record(Duration::from_micros(micros)));
            curve(&latencies)
        };
        let last = |count| of(count).last().map(|point| point[0]);
        assert_eq!((last(0), last(1), last(10), last(1000)), (None, Some(0.0), Some(0.9), Some(0.999)));
        assert_eq!(last(100_000), Some(0.99999));
        assert!(of(1000).contains(&[0.5, 0.5]), "{:?}", of(1000));
        assert!(of(1000).is_sorted());
    }
}
