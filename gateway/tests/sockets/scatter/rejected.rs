//! Parts that a region rejects because of load: they are sent to another region, or retried later, and the request
//! succeeds.

use super::fixture::{EUROPE, Fixture, Script};
use super::{embeddings, unsplit_response};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/embeddings";
const SOON: Duration = Duration::from_millis(20);

#[tokio::test]
async fn a_part_that_one_region_rejects_is_sent_to_another() {
    let healthy = Script::Responds(Duration::from_millis(5));
    let fixture = Fixture::with([Script::Rejects(u64::MAX, Duration::from_secs(30)), healthy, healthy]).await;
    let body = embeddings(6_000);
    let response = fixture.send(PATH, &body, &[]).await;
    assert_eq!(response.status, 200, "{}", response.json());
    assert!(response.json() == unsplit_response(PATH, &body));
    let [america, europe, japan] = fixture.requests();
    assert_eq!(america, 2, "only the sub-requests in flight at the rejection");
    assert!(europe > 2 && japan > 2, "{europe} {japan}");
    assert_eq!(response.header("x-meridian-attempts"), (america + europe + japan).to_string());
}

#[tokio::test]
async fn a_part_that_all_regions_reject_is_retried_later() {
    let fixture = Fixture::with([Script::Rejects(2, SOON); 3]).await;
    let body = embeddings(6_000);
    let response = fixture.send(PATH, &body, &[]).await;
    assert_eq!(response.status, 200, "{}", response.json());
    assert!(response.json() == unsplit_response(PATH, &body));
}

#[tokio::test]
async fn a_retry_after_beyond_the_deadline_fails_at_once() {
    let fixture = Fixture::with([Script::Rejects(u64::MAX, Duration::from_secs(30)); 3]).await;
    let begun = Instant::now();
    let response = fixture.send(PATH, &embeddings(6_000), &[("x-meridian-timeout-ms", "20000")]).await;
    assert_eq!((response.status, response.header("x-meridian-error")), (429, "overloaded"));
    assert_eq!(response.header("retry-after"), "1", "with the error code of the region");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// At the limit and one past it: Europe is the only allowed region, and computes one waiting part at a time.
#[tokio::test]
async fn the_retries_of_a_part_are_limited() {
    let fixture = Fixture::with([Script::Rejects(u64::MAX, SOON); 3]).await;
    let mut body = embeddings(3_000);
    body["model"] = "locked".into();
    let response = fixture.send(PATH, &body, &[]).await;
    assert_eq!((response.status, response.header("x-meridian-error")), (429, "overloaded"));
    // Two are in flight, so when the first is rejected for the ninth time the other may have been as well.
    let tries = fixture.requests()[1];
    assert!((9..=18).contains(&tries), "{tries}");

    let fixture = Fixture::with([Script::Rejects(8, SOON); 3]).await;
    let response = fixture.send(PATH, &body, &[]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, EUROPE));
    assert!(response.json() == unsplit_response(PATH, &body));
}
