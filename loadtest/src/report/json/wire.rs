//! JSON schema of the report.

use std::collections::BTreeMap;

use serde::Serialize;

#[derive(Serialize)]
pub(super) struct ReportV2 {
    pub(super) version: u32,
    /// Absent on the page of a drill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) target: Option<String>,
    /// HTTP version.
    pub(super) http: &'static str,
    pub(super) model: String,
    pub(super) duration_ms: f64,
    pub(super) timeout_ms: f64,
    pub(super) seed: u64,
    pub(super) geo: Option<[f64; 2]>,
    pub(super) elapsed_ms: f64,
    pub(super) stopped_early: bool,
    pub(super) lag_ms: LatencySummaryV1,
    pub(super) lag_notable: bool,
    pub(super) slo: Option<SloV2>,
    pub(super) marks: Vec<MarkV2>,
    pub(super) total: GroupV2,
    pub(super) regions: BTreeMap<String, GroupV2>,
    pub(super) priorities: BTreeMap<String, BTreeMap<String, GroupV2>>,
    pub(super) tasks: Vec<TaskV2>,
    /// Stages of the first task, which is the only one of most runs.
    pub(super) stages: Vec<StageV2>,
    pub(super) seconds: Vec<SecondV2>,
}

#[derive(Serialize)]
pub(super) struct SloV2 {
    pub(super) objective: String,
    pub(super) quantile: f64,
    pub(super) within_ms: f64,
    pub(super) requests: u64,
    pub(super) good: u64,
    pub(super) goodput_per_s: f64,
    pub(super) holds: bool,
}

#[derive(Serialize)]
pub(super) struct MarkV2 {
    pub(super) at_ms: f64,
    /// Whether this is an action of a drill, as opposed to an observation.
    pub(super) is_action: bool,
    pub(super) label: String,
}

#[derive(Serialize)]
pub(super) struct TaskV2 {
    pub(super) name: String,
    pub(super) workload: String,
    pub(super) priority: String,
    /// `open`, `closed` or `replayed`.
    pub(super) pacing: &'static str,
    /// Open loop: rate as given, and its mean over the run.
    pub(super) rate: Option<String>,
    pub(super) rate_per_s: Option<f64>,
    pub(super) arrival: Option<String>,
    pub(super) callers: Option<usize>,
    pub(super) duration_ms: f64,
    pub(super) inputs_per_request: usize,
    pub(super) texts: usize,
    pub(super) texts_source: String,
    #[serde(flatten)]
    pub(super) requests: GroupV2,
    pub(super) regions: BTreeMap<String, GroupV2>,
    pub(super) stages: Vec<StageV2>,
    pub(super) seconds: Vec<SecondV2>,
}

#[derive(Serialize)]
pub(super) struct GroupV2 {
    pub(super) requests: u64,
    pub(super) ok: u64,
    pub(super) failed: u64,
    pub(super) retried: u64,
    pub(super) latency_ms: LatencySummaryV1,
    /// Share of the ok requests, 0 to 1, with the latency at this quantile.
    pub(super) percentiles: Vec<[f64; 2]>,
    pub(super) failures: Vec<FailureV1>,
}

#[derive(Serialize)]
pub(super) struct StageV2 {
    pub(super) rate_from_per_s: f64,
    pub(super) rate_to_per_s: f64,
    pub(super) start_ms: f64,
    pub(super) duration_ms: f64,
    #[serde(flatten)]
    pub(super) requests: GroupV2,
}

#[derive(Serialize)]
pub(super) struct FailureV1 {
    pub(super) cause: String,
    pub(super) count: u64,
    pub(super) latency_ms: LatencySummaryV1,
}

/// `null` where there are no values.
#[derive(Serialize)]
pub(super) struct LatencySummaryV1 {
    pub(super) p50: Option<f64>,
    pub(super) p90: Option<f64>,
    pub(super) p99: Option<f64>,
    pub(super) p999: Option<f64>,
    pub(super) max: Option<f64>,
}

#[derive(Serialize)]
pub(super) struct SecondV2 {
    pub(super) second: u64,
    pub(super) regions: BTreeMap<String, SecondRegionV2>,
}

#[derive(Serialize)]
pub(super) struct SecondRegionV2 {
    pub(super) ok: u64,
    pub(super) failed: u64,
    pub(super) p50_ms: Option<f64>,
    pub(super) p99_ms: Option<f64>,
    pub(super) latency_max_ms: Option<f64>,
    pub(super) latencies_us: String,
}
