//! Receipts of both ends, audited after all processes have stopped.

use super::fixture::{AMERICA, EUROPE, Fixture, Scrape, Script};
use super::{SECRET, line};
use gateway::receipts::{audit, files_in};
use gateway_core::receipt::audit::{AuditOptions, Kind, Report};
use regions::catalogue::Catalogue;
use std::fs;

fn report(fixture: &Fixture, demands: AuditOptions) -> Report {
    let files = files_in(&fixture.receipts()).unwrap();
    audit(&files, &Catalogue::builtin(), demands, || {}).unwrap()
}

fn receipt(response: &reqwest::Response) -> Option<String> {
    Some(response.headers().get("x-meridian-residency-receipt")?.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn every_attempt_has_a_receipt_at_both_ends_with_any_outcome() {
    let mut fixture = Fixture::new().await;
    let anywhere = fixture.send("anywhere", "anywhere", SECRET).await;
    assert_eq!(receipt(&anywhere), None, "an unrestricted deployment has no receipt");
    let locked = fixture.send("locked", "locked", SECRET).await;
    let mut demands = AuditOptions::default();
    demands.receipts.insert(receipt(&locked).expect("a response of a locked deployment names its receipt"));
    fixture.send("no-model", SECRET, "x").await;

    // Rejected by the only allowed region, so the response is an error.
    fixture.regions[EUROPE].script.send_replace(Script::RejectsNotReady);
    let refused = fixture.send("refused", "locked", "x").await;
    assert_eq!(refused.status(), 503);
    demands.receipts.insert(receipt(&refused).expect("a refusal by a region names its receipt"));
    // Retried in another region.
    fixture.regions[AMERICA].script.send_replace(Script::RejectsNotReady);
    fixture.send("sent-on", "anywhere", "x").await;
    // Cancelled by its client.
    fixture.regions[EUROPE].script.send_replace(Script::Waits);
    let waiting = tokio::spawn(fixture.request("given-up", "locked", "x").send());
    let in_flight = "meridian_ingress_requests_in_flight";
    let europe = format!("http://{}", fixture.regions[EUROPE].address);
    fixture
        .wait_until("it has arrived", async || {
            Scrape::of(&fixture.client, &europe).await.get(in_flight) == 1.0
        })
        .await;
    waiting.abort();
    line(&fixture, "given-up").await;
    // The gateway stops and another process continues its chain.
    fixture.restart_edge().await;
    // A region that is gone; the gateway may or may not know yet.
    let america = fixture.regions.get_mut(AMERICA).unwrap().running.take().unwrap();
    america.stop().await;
    fixture.regions[EUROPE].script.send_replace(Script::Responds);
    fixture.send("after", "anywhere", "x").await;
    fixture.stop().await;

    let found = report(&fixture, demands);
    assert!(found.holds && found.both_ends, "{found:#?}");
    // anywhere, locked, refused, sent-on twice (of which Europe rejected one as well) or thrice, given-up, after.
    assert_eq!(found.confirmed + found.never_arrived, found.attempts, "{found:#?}");
    assert_eq!((found.confirmed, found.missing), (found.arrivals, 0), "{found:#?}");
    assert!((7..=9).contains(&found.attempts), "{found:#?}");
    assert_eq!(found.chains.len(), 4, "the edge has one over its restart: {found:#?}");

    for file in files_in(&fixture.receipts()).unwrap() {
        let text = fs::read_to_string(&file).unwrap();
        assert!(!text.contains(SECRET) && !text.contains("\"test\""), "{}: {text}", file.display());
    }
    // A missing line at either end is found.
    for dir in [0, 1, 2] {
        let files = files_in(&fixture.receipts()[dir..=dir]).unwrap();
        let with_receipts = |file: &&std::path::PathBuf| {
            let text = fs::read_to_string(file).unwrap();
            text.contains("\"attempt\":1") && text.contains("\"kind\":\"closed\"")
        };
        let file = files.iter().find(with_receipts).expect("a file with receipts");
        let text = fs::read_to_string(file).unwrap();
        let answered = |line: &str| line.contains("\"end\":\"ok\"") || line.contains("\"outcome\":\"ok\"");
        let left_out = text.lines().position(answered).expect("at least one request was served");
        let kept = text.lines().enumerate().filter(|(place, _)| *place != left_out);
        let kept: String = kept.map(|(_, line)| format!("{line}\n")).collect();
        fs::write(file, kept).unwrap();
        let found = report(&fixture, AuditOptions::default());
        fs::write(file, text).unwrap();
        assert!(found.counts.contains_key(&Kind::BrokenChain), "{found:#?}");
        let ends = [Kind::ArrivalWithoutAttempt, Kind::AttemptWithoutArrival];
        assert!(ends.iter().any(|kind| found.counts.contains_key(kind)), "{found:#?}");
    }
}

#[tokio::test]
async fn with_required_receipts_locked_requests_are_rejected_and_others_leave_a_gap() {
    let mut fixture = Fixture::with(|config| {
        let receipts = config.receipts.as_mut().unwrap();
        receipts.required = true;
        // Each batch creates a file, which fails in a missing directory.
        receipts.file_bytes = 1;
    })
    .await;
    assert_eq!(fixture.send("before", "locked", "x").await.status(), 200);
    let written = "meridian_receipts_written_total";
    fixture.wait_until("it is written", async || fixture.scrape().await.get(written) == 1.0).await;
    let (dir, away) = (fixture.dir.path().join("receipts"), fixture.dir.path().join("away"));
    fs::rename(&dir, &away).unwrap();
    let failing = "meridian_receipts_failing";
    assert_eq!(
        fixture.send("lost", "anywhere", "x").await.status(),
        200,
        "an unrestricted deployment has no receipt"
    );
    fixture
        .wait_until("the disk failure is noticed", async || fixture.scrape().await.get(failing) == 1.0)
        .await;
    let refused = fixture.send("refused", "locked", "x").await;
    assert_eq!(refused.status(), 503);
    assert_eq!(refused.headers()["x-meridian-error"], "receipt_unavailable");
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(fixture.send("lost-too", "anywhere", "x").await.status(), 200);
    fs::rename(&away, &dir).unwrap();
    fixture.wait_until("the disk is back", async || fixture.scrape().await.get(failing) == 0.0).await;
    assert_eq!(fixture.send("after", "locked", "x").await.status(), 200);
    let missing = fixture.scrape().await.sum("meridian_receipts_missing_total", "disk");
    fixture.stop().await;

    let found = report(&fixture, AuditOptions::default());
    assert_eq!((found.missing as f64, found.attempts + found.missing), (missing, 4), "{found:#?}");
    assert!((1..=2).contains(&found.missing), "{found:#?}");
    let kinds: Vec<_> = found.counts.keys().collect();
    assert_eq!(
        kinds,
        [&Kind::ArrivalWithoutAttempt, &Kind::Gap],
        "the receipts of the other end show the missing one"
    );
    assert_eq!(found.counts[&Kind::ArrivalWithoutAttempt], found.missing);
}
