//! `/metrics` of a replica: exemplars, and labels whatever clients send.

use std::collections::BTreeSet;

use serde_json::json;

use super::served::{Response, TestReplica};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

fn scrape(replica: &TestReplica, accept: &str) -> String {
    let response = replica.call("GET", "/metrics", &[("accept", accept)], b"");
    String::from_utf8(response.body).expect("text")
}

fn embed(replica: &TestReplica, model: &str, headers: &[(&str, &str)]) -> Response {
    let body = json!({"model": model, "input": "w5 w6 w7"}).to_string();
    replica.call("POST", "/v1/embeddings", headers, body.as_bytes())
}

/// Returns the names and labels of all samples.
fn series(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').expect("a value").0.to_owned()).collect()
}

#[test]
fn open_metrics_has_the_trace_of_a_request_whose_spans_are_exported() {
    // A collector that cannot be reached.
    let tracing = "[tracing]\nendpoint = \"http://127.0.0.1:1\"\ntimeout = \"200ms\"\nslow = \"60s\"\n";
    let replica = TestReplica::start(tracing);
    let [sampled, other] = ["4bf92f3577b34da6a3ce929d0e0e4736", "5bf92f3577b34da6a3ce929d0e0e4736"];
    for (trace, flag) in [(other, "00"), (sampled, "01")] {
        let parent = format!("00-{trace}-00f067aa0ba902b7-{flag}");
        assert_eq!(embed(&replica, "small", &[("traceparent", &parent)]).status, 200);
    }
    let text = scrape(&replica, OPEN_METRICS);
    let exemplar = format!(" # {{trace_id=\"{sampled}\"}} ");
    for bucket in [
        "meridian_replica_stage_seconds_bucket{stage=\"total\"",
        "meridian_replica_stage_seconds_bucket{stage=\"queue\"",
        "meridian_replica_stage_seconds_bucket{stage=\"tokenize\"",
        "meridian_replica_stage_seconds_bucket{stage=\"engine\"",
        "meridian_replica_batch_seconds_bucket{",
    ] {
        let is_found = text.lines().any(|line| line.starts_with(bucket) && line.contains(&exemplar));
        assert!(is_found, "{bucket} in {text}");
    }
    assert!(!text.contains(other), "{text}");
    assert!(!scrape(&replica, "text/plain").contains(sampled), "only OpenMetrics has exemplars");
}

#[test]
fn text_of_clients_creates_no_series() {
    let replica = TestReplica::start("");
    assert_eq!(embed(&replica, "small", &[]).status, 200);
    let hostile = |n: usize| {
        let long = format!("evil{n}{}", "x".repeat(10_000));
        for name in [&format!("evil{n}"), &format!("evil{n}\"}} 1\\"), &format!("evil{n}äß😀"), &long] {
            embed(&replica, name, &[]);
            embed(&replica, &format!("{name}\nevil 1"), &[]);
            for header in [
                "x-request-id",
                "x-meridian-priority",
                "x-meridian-tenant",
                "x-meridian-timeout-ms",
                "traceparent",
            ] {
                embed(&replica, "small", &[(header, name)]);
            }
        }
        replica.call("POST", &format!("/evil{n}"), &[], b"{}");
        replica.call("POST", &format!("/{long}"), &[], b"{}");
        replica.call(&format!("EVIL{n}"), "/v1/embeddings", &[], b"{}");
    };
    // Each outcome has a series from its first request on, so one of each kind is sent before the comparison.
    hostile(0);
    let before = series(&scrape(&replica, "*/*"));
    (1..10).for_each(hostile);
    let text = scrape(&replica, "*/*");
    // The reason for which a batch is closed depends on the time.
    let is_fixed = |name: &&String| !name.starts_with("meridian_replica_batches_total{");
    let more: Vec<_> = series(&text).difference(&before).filter(is_fixed).cloned().collect();
    assert!(more.is_empty(), "{more:#?}");
    assert!(!text.to_lowercase().contains("evil"), "{text}");
}
