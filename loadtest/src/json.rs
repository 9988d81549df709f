//! The report as JSON: everything in the table, every cause in every region and stage, and the run second by second, so
//! that one can see where requests went when a region died.
//!
//! Regions are keyed by their names; stages stand in their order, also if there is only one. Times are milliseconds and
//! the names say so. `version` rises when a field changes its meaning or goes.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::options::Options;
use crate::profile::Stage;
use crate::record::{Group, Latencies, SecondRecord, Served};
use crate::report::Report;

#[derive(Serialize)]
struct ReportV1 {
    version: u32,
    target: String,
    model: String,
    /// As it was asked for, and its mean over the run.
    rate: String,
    rate_per_s: f64,
    arrival: String,
    duration_ms: f64,
    timeout_ms: f64,
    inputs_per_request: usize,
    texts: usize,
    texts_source: String,
    seed: u64,
    geo: Option<[f64; 2]>,
    elapsed_ms: f64,
    stopped_early: bool,
    lag_ms: SpansV1,
    lag_notable: bool,
    total: GroupV1,
    regions: BTreeMap<String, GroupV1>,
    stages: Vec<StageV1>,
    seconds: Vec<SecondV1>,
}

#[derive(Serialize)]
struct GroupV1 {
    requests: u64,
    ok: u64,
    failed: u64,
    retried: u64,
    latency_ms: SpansV1,
    failures: Vec<FailureV1>,
}

#[derive(Serialize)]
struct StageV1 {
    rate_from_per_s: f64,
    rate_to_per_s: f64,
    start_ms: f64,
    duration_ms: f64,
    #[serde(flatten)]
    requests: GroupV1,
}

#[derive(Serialize)]
struct FailureV1 {
    cause: String,
    count: u64,
    latency_ms: SpansV1,
}

/// `null` where nothing was measured.
#[derive(Serialize)]
struct SpansV1 {
    p50: Option<f64>,
    p90: Option<f64>,
    p99: Option<f64>,
    p999: Option<f64>,
    max: Option<f64>,
}

#[derive(Serialize)]
struct SecondV1 {
    second: u64,
    regions: BTreeMap<String, SecondRegionV1>,
}

#[derive(Serialize)]
struct SecondRegionV1 {
    ok: u64,
    failed: u64,
    latency_max_ms: f64,
}

impl Report {
    /// The report as one JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(&ReportV1::from(self))
            .expect("numbers, strings and lists serialise to JSON")
    }
}

impl From<&Report> for ReportV1 {
    fn from(report: &Report) -> ReportV1 {
        let Report { options, elapsed, stopped_early, record } = report;
        // The key stays here; how many may be in flight shows in the failures.
        let Options {
            target,
            authorization: _,
            model,
            profile,
            arrival,
            texts,
            inputs,
            timeout,
            seed,
            geo,
            in_flight_max: _,
        } = options;
        let seconds = record.seconds().iter();
        ReportV1 {
            version: 1,
            target: target.to_string(),
            model: model.clone(),
            rate: profile.to_string(),
            rate_per_s: profile.mean_per_second(),
            arrival: arrival.to_string(),
            duration_ms: milliseconds(profile.lasts()),
            timeout_ms: milliseconds(*timeout),
            inputs_per_request: *inputs,
            texts: texts.count(),
            texts_source: texts.source().to_owned(),
            seed: *seed,
            geo: geo.map(|geo| [geo.lat(), geo.lon()]),
            elapsed_ms: milliseconds(*elapsed),
            stopped_early: *stopped_early,
            lag_ms: record.lag().into(),
            lag_notable: report.lag_is_notable(),
            total: (&record.total()).into(),
            regions: by_name(record.regions()),
            stages: profile.stages().zip(record.stages()).map(StageV1::from).collect(),
            seconds: seconds
                .map(|(second, regions)| SecondV1 { second: *second, regions: by_name(regions) })
                .collect(),
        }
    }
}

fn by_name<'a, Record, Wire>(regions: &'a BTreeMap<Served, Record>) -> BTreeMap<String, Wire>
where
    Wire: From<&'a Record>,
{
    regions.iter().map(|(served, record)| (served.to_string(), record.into())).collect()
}

impl From<&Group> for GroupV1 {
    fn from(record: &Group) -> GroupV1 {
        let failures = record.failures().map(|(cause, tally)| FailureV1 {
            cause: cause.to_string(),
            count: tally.count,
            latency_ms: (&tally.latencies).into(),
        });
        GroupV1 {
            requests: record.requests(),
            ok: record.ok(),
            failed: record.failed(),
            retried: record.retried,
            latency_ms: (&record.latencies()).into(),
            failures: failures.collect(),
        }
    }
}

impl From<((Duration, &Stage), &Group)> for StageV1 {
    fn from(((begins, stage), group): ((Duration, &Stage), &Group)) -> StageV1 {
        let Stage { from, to, lasts } = stage;
        StageV1 {
            rate_from_per_s: from.per_second(),
            rate_to_per_s: to.per_second(),
            start_ms: milliseconds(begins),
            duration_ms: milliseconds(*lasts),
            requests: group.into(),
        }
    }
}

impl From<&SecondRecord> for SecondRegionV1 {
    fn from(record: &SecondRecord) -> SecondRegionV1 {
        let SecondRecord { ok, failed, latency_max } = *record;
        SecondRegionV1 { ok, failed, latency_max_ms: milliseconds(latency_max) }
    }
}

impl From<&Latencies> for SpansV1 {
    fn from(latencies: &Latencies) -> SpansV1 {
        let at = |quantile| latencies.quantile(quantile).map(milliseconds);
        SpansV1 {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: latencies.max().map(milliseconds),
        }
    }
}

fn milliseconds(span: Duration) -> f64 {
    span.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use crate::report::tests::report;
    use serde_json::{Value, json};

    #[test]
    fn the_json_shows_where_requests_went_second_by_second() {
        let text = report().to_json();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["version"], 1);
        assert_eq!(value["total"]["requests"], 250);
        assert_eq!(value["total"]["failures"][0]["cause"], "no answer in time");
        assert_eq!(value["regions"]["gcp/europe-west4"]["ok"], 100);
        let nearby = json!({"ok": 100, "failed": 0, "latency_max_ms": 8.0});
        let far_off = json!({"ok": 100, "failed": 0, "latency_max_ms": 90.0});
        let nowhere = json!({"ok": 0, "failed": 50, "latency_max_ms": 0.0});
        assert_eq!(
            value["seconds"],
            json!([
                {"second": 0, "regions": {"gcp/europe-west4": nearby}},
                {"second": 1, "regions": {"aws/us-east-1": far_off, "(no region)": nowhere}},
            ])
        );
        assert_eq!(value["rate"], "100 for 1s, 150 for 1s");
        let stage = &value["stages"][1];
        assert_eq!((&stage["start_ms"], &stage["duration_ms"]), (&json!(1000.0), &json!(1000.0)));
        assert_eq!((&stage["rate_from_per_s"], &stage["rate_to_per_s"]), (&json!(150.0), &json!(150.0)));
        assert_eq!(
            (&stage["requests"], &stage["ok"], &stage["failed"]),
            (&json!(150), &json!(100), &json!(50))
        );
        assert_eq!(stage["latency_ms"]["p50"], 90.047);
        assert!(!text.contains("local"), "the key is not in the report");
    }
}
