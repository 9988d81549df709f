//! Required receipts: durable before a request is forwarded, at both ends, or the request is rejected.

use super::fixture::{EUROPE, Fixture, Scrape};
use crate::hub::{deployment, hub};
use gateway::receipts::{audit, files_in};
use gateway_core::receipt::audit::{AuditOptions, Report};
use regions::catalogue::Catalogue;
use serde_json::json;
use std::fs;
use std::time::{Duration, Instant};

/// Starts a fixture of one region with required receipts at both ends.
async fn fixture() -> Fixture {
    let deployments = [deployment("locked", json!("eu")), deployment("anywhere", json!(null))];
    let change = |config: &mut gateway::config::EdgeConfig| {
        let receipts = config.receipts.as_mut().unwrap();
        receipts.required = true;
        // Each batch creates a file, which fails in a missing directory.
        receipts.file_bytes = 1;
    };
    Fixture::of(&[EUROPE], true, change, async |rows| hub(3, 14, &rows, &deployments).await).await
}

fn report(fixture: &Fixture) -> Report {
    let files = files_in(&fixture.receipts()).unwrap();
    audit(&files, &Catalogue::builtin(), AuditOptions::default(), || {}).unwrap()
}

/// Returns the number of requests that the region received, with any outcome.
async fn arrived(fixture: &Fixture) -> f64 {
    let europe = format!("http://{}", fixture.regions[EUROPE].address);
    Scrape::of(&fixture.client, &europe).await.sum("meridian_ingress_requests_total", "/v1/embeddings")
}

#[tokio::test]
async fn a_locked_request_is_rejected_before_a_byte_is_sent_if_its_receipt_is_not_durable() {
    let mut fixture = fixture().await;
    assert_eq!(fixture.send("before", "locked", "x").await.status(), 200);
    let (dir, away) = (fixture.dir.path().join("receipts"), fixture.dir.path().join("away"));
    fixture
        .wait_until("its outcome is written", async || {
            fixture.scrape().await.get("meridian_receipts_written_total") == 1.0
        })
        .await;
    assert_eq!(fixture.scrape().await.get("meridian_receipts_commit_seconds_count"), 1.0);
    fs::rename(&dir, &away).unwrap();
    // The disk failure is not detected yet: this request is the first that needs the disk.
    assert_eq!(fixture.scrape().await.get("meridian_receipts_failing"), 0.0);
    let rejected = fixture.send("rejected", "locked", "x").await;
    assert_eq!(rejected.status(), 503);
    assert_eq!(rejected.headers()["x-meridian-error"], "receipt_unavailable");
    assert!(rejected.text().await.unwrap().contains("require a receipt"));
    assert_eq!(arrived(&fixture).await, 1.0, "the region has received no request");
    fs::rename(&away, &dir).unwrap();
    fixture
        .wait_until("the disk is back", async || {
            fixture.scrape().await.get("meridian_receipts_failing") == 0.0
        })
        .await;
    assert_eq!(fixture.send("after", "locked", "x").await.status(), 200);
    assert!(fixture.scrape().await.get("meridian_receipts_rejected_total") >= 1.0);
    fixture.stop().await;

    let found = report(&fixture);
    assert!(found.holds, "{found:#?}");
    assert_eq!((found.attempts, found.arrivals, found.confirmed), (2, 2, 2), "{found:#?}");
    assert_eq!((found.missing, found.without_outcome), (0, 0));
    assert!(found.rejected >= 1, "{found:#?}");
}

#[tokio::test]
async fn requests_with_one_id_under_different_policies_pass_the_audit() {
    let mut fixture = fixture().await;
    for policy in ["eu", "nl", "eu,us", "nl"] {
        let narrowed = fixture.request("same", "locked", "x").header("x-meridian-residency", policy);
        assert_eq!(narrowed.send().await.unwrap().status(), 200, "{policy}");
    }
    let at_once: Vec<_> = ["eu", "nl", "eu", "nl"]
        .map(|policy| fixture.request("same", "locked", "x").header("x-meridian-residency", policy).send())
        .into_iter()
        .map(tokio::spawn)
        .collect();
    for response in at_once {
        assert_eq!(response.await.unwrap().unwrap().status(), 200);
    }
    fixture.stop().await;
    let found = report(&fixture);
    assert!(found.holds, "{found:#?}");
    assert_eq!((found.attempts, found.confirmed), (8, 8));
}

#[tokio::test]
async fn a_region_with_receipts_stops_as_fast_as_one_without_and_logs_no_error() {
    let mut fixture = fixture().await;
    assert_eq!(fixture.send("before", "locked", "x").await.status(), 200);
    let europe = fixture.regions.get_mut(EUROPE).unwrap().running.take().unwrap();
    let begun = Instant::now();
    europe.stop().await;
    let took = begun.elapsed();
    // 0.7 s of it is the time in which gateways receive that it drains; before the fix, it was 5 s more.
    assert!(took < Duration::from_secs(4), "{took:?}");
    let log = super::fixture::logged();
    assert!(!log.contains("last receipts"), "no disk was slow");
    let begun = Instant::now();
    fixture.stop().await;
    assert!(
        begun.elapsed() < Duration::from_secs(9),
        "the edge, with 5 s of lame duck: {:?}",
        begun.elapsed()
    );
    assert!(report(&fixture).chains.iter().all(|chain| chain.closed), "{:#?}", report(&fixture));
}
