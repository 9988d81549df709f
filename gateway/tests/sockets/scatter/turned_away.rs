//! Pieces that a region turns away because it has too much to do: they go elsewhere, or wait, and the whole is answered as
//! if nothing had been.

use super::scene::{EUROPE, Scene, Script};
use super::{embeddings, whole};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/embeddings";
const SOON: Duration = Duration::from_millis(20);

#[tokio::test]
async fn a_piece_that_one_region_turns_away_goes_to_another() {
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
async fn a_piece_that_everybody_turns_away_waits_and_is_answered() {
    let scene = Scene::with([Script::TurnsAway(2, SOON); 3]).await;
    let body = embeddings(6_000);
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!(answer.status, 200, "{}", answer.json());
    assert!(answer.json() == whole(PATH, &body));
}

#[tokio::test]
async fn a_refusal_that_lasts_longer_than_there_is_time_is_told_at_once() {
    let scene = Scene::with([Script::TurnsAway(u64::MAX, Duration::from_secs(30)); 3]).await;
    let begun = Instant::now();
    let answer = scene.ask(PATH, &embeddings(6_000), &[("x-meridian-timeout-ms", "20000")]).await;
    assert_eq!((answer.status, answer.header("x-meridian-error")), (429, "overloaded"));
    assert_eq!(answer.header("retry-after"), "1", "with the region's own word");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// At its limit and one past it: Europe is the only region that may, and computes one piece at a time of those that wait.
#[tokio::test]
async fn a_piece_is_turned_away_so_often_and_no_more() {
    let scene = Scene::with([Script::TurnsAway(u64::MAX, SOON); 3]).await;
    let mut body = embeddings(3_000);
    body["model"] = "locked".into();
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!((answer.status, answer.header("x-meridian-error")), (429, "overloaded"));
    // Two are under way at once, so before the one has been turned away for the ninth time the other may have been as well.
    let tries = scene.requests()[1];
    assert!((9..=18).contains(&tries), "{tries}");

    let scene = Scene::with([Script::TurnsAway(8, SOON); 3]).await;
    let answer = scene.ask(PATH, &body, &[]).await;
    assert_eq!((answer.status, answer.header("x-meridian-region")), (200, EUROPE));
    assert!(answer.json() == whole(PATH, &body));
}
