//! Parts that a region rejects because of load: they are sent to another region, or retried later, and the request
//! succeeds.

use super::scene::{EUROPE, Scene, Script};
use super::{embeddings, whole};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/embeddings";
const SOON: Duration = Duration::from_millis(20);

#[tokio::test]
async fn a_part_that_one_region_rejects_is_sent_to_another() {
    let healthy = Script::Answers(Duration::from_millis(5));
    let scene = Scene::with([Script::TurnsAway(u64::MAX, Duration::from_secs(30)), healthy, healthy]).await;
    let body = embeddings(6_000);
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!(answer.status, 200, "{}", answer.json());
    assert!(answer.json() == whole(PATH, &body));
    let [america, europe, japan] = scene.requests();
    assert_eq!(america, 2, "what was under way there when it said so, and no more");
    assert!(europe > 2 && japan > 2, "{europe} {japan}");
    assert_eq!(answer.header("x-meridian-attempts"), (america + europe + japan).to_string());
}

#[tokio::test]
async fn a_part_that_all_regions_reject_is_retried_later() {
    let scene = Scene::with([Script::TurnsAway(2, SOON); 3]).await;
    let body = embeddings(6_000);
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!(answer.status, 200, "{}", answer.json());
    assert!(answer.json() == whole(PATH, &body));
}

#[tokio::test]
async fn a_retry_after_beyond_the_deadline_fails_at_once() {
    let scene = Scene::with([Script::TurnsAway(u64::MAX, Duration::from_secs(30)); 3]).await;
    let begun = Instant::now();
    let answer = scene.ask(PATH, &embeddings(6_000), &[("x-meridian-timeout-ms", "20000")]).await;
    assert_eq!((answer.status, answer.header("x-meridian-error")), (429, "overloaded"));
    assert_eq!(answer.header("retry-after"), "1", "with the region's own word");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// At the limit and one past it: Europe is the only allowed region, and computes one waiting part at a time.
#[tokio::test]
async fn the_retries_of_a_part_are_limited() {
    let scene = Scene::with([Script::TurnsAway(u64::MAX, SOON); 3]).await;
    let mut body = embeddings(3_000);
    body["model"] = "locked".into();
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!((answer.status, answer.header("x-meridian-error")), (429, "overloaded"));
    // Two are in flight, so when the first is rejected for the ninth time the other may have been as well.
    let tries = scene.requests()[1];
    assert!((9..=18).contains(&tries), "{tries}");

    let scene = Scene::with([Script::TurnsAway(8, SOON); 3]).await;
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!((answer.status, answer.header("x-meridian-region")), (200, EUROPE));
    assert!(answer.json() == whole(PATH, &body));
}
