//! Usage of tenants over HTTP, with a real hub and store.

use super::world::{AMERICA, Hub, config};
use scheduler_api::paths;
use scheduler_api::usage::{QUERY_DAYS_MAX, REPORT_DAYS_MAX, UsageDay, UsageReportV1};
use serde_json::{Value, json};
use std::time::SystemTime;

fn today() -> UsageDay {
    UsageDay::of(SystemTime::now())
}

/// Returns a report with one row.
fn report(ledger: u64, sequence: u64, day: UsageDay, requests: u64) -> Value {
    let row = json!({"tenant": "acme", "deployment": "minilm", "region": AMERICA, "requests": requests, "inputs": requests, "tokens": 9});
    json!({"version": 1, "gateway": AMERICA, "ledger": ledger, "sequence": sequence, "day": day.to_string(), "rows": [row]})
}

/// Returns day and requests of each row.
async fn rows(hub: &Hub, query: &str) -> Vec<(String, u64)> {
    let (status, _, body) = hub.get(&format!("{}{query}", paths::USAGE)).await;
    assert_eq!(status, 200, "{body}");
    let report: UsageReportV1 = serde_json::from_value(body).unwrap();
    report.rows.into_iter().map(|daily| (daily.day, daily.row.counts.requests)).collect()
}

#[tokio::test]
async fn the_newest_version_of_each_ledger_counts_once_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (day, before) = (today(), today().before(1));
    let send = async |hub: &Hub, report: Value| {
        let (status, _, body) = hub.post(paths::USAGE, report.to_string()).await;
        assert_eq!(status, 204, "{body}");
    };
    send(&hub, report(1, 1, day, 5)).await;
    // Again, a newer one, and the first one delayed.
    for (sequence, requests) in [(1, 5), (2, 8), (1, 5)] {
        send(&hub, report(1, sequence, day, requests)).await;
    }
    send(&hub, report(2, 1, day, 100)).await;
    send(&hub, report(2, 1, before, 40)).await;
    let all = [(before.to_string(), 40), (day.to_string(), 108)];
    assert_eq!(rows(&hub, "").await, all);
    assert_eq!(rows(&hub, &format!("?to={before}")).await, all[..1]);
    hub.stop().await;
    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(rows(&hub, &format!("?from={before}")).await, all);
    hub.stop().await;
}

#[tokio::test]
async fn a_query_for_a_tenant_has_its_rows_only_and_unknown_parameters_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let mut both = report(1, 1, today(), 5);
    let mut other = both["rows"][0].clone();
    (other["tenant"], other["requests"]) = (json!("other"), json!(70));
    both["rows"].as_array_mut().unwrap().push(other);
    let (status, _, body) = hub.post(paths::USAGE, both.to_string()).await;
    assert_eq!(status, 204, "{body}");
    let day = today().to_string();
    assert_eq!(rows(&hub, "?tenant=other").await, [(day.clone(), 70)]);
    assert_eq!(rows(&hub, &format!("?from={day}&tenant=acme")).await, [(day.clone(), 5)]);
    assert_eq!(rows(&hub, "?tenant=unknown").await, []);
    assert_eq!(rows(&hub, "").await.len(), 2);
    for (query, param, part) in [
        ("?tennant=acme", "query", "write from, to, tenant"),
        ("?tenant=../acme", "tenant", "is not a tenant"),
        ("?tenant=acme&tenant=other", "tenant", "twice"),
    ] {
        let (status, _, body) = hub.get(&format!("{}{query}", paths::USAGE)).await;
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{body}");
        assert!(body["error"]["message"].as_str().is_some_and(|message| message.contains(part)), "{body}");
    }
    hub.stop().await;
}

#[tokio::test]
async fn days_that_no_gateway_keeps_and_long_queries_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (oldest, newest) = (today().before(REPORT_DAYS_MAX), UsageDay(today().0 + 1));
    for (day, expected) in
        [(oldest, 204), (oldest.before(1), 400), (newest, 204), (UsageDay(newest.0 + 1), 400)]
    {
        let (status, _, body) = hub.post(paths::USAGE, report(1, 1, day, 1).to_string()).await;
        assert_eq!(status, expected, "{day}: {body}");
    }
    let early = today().before(QUERY_DAYS_MAX);
    let (status, _, body) = hub.get(&format!("{}?from={early}", paths::USAGE)).await;
    assert_eq!(status, 400, "{body}");
    hub.stop().await;
}
