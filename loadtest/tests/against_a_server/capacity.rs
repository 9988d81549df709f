//! How much a server takes is found by asking it.

use std::sync::Arc;
use std::time::Duration;

use crate::server::{answer, rows, serve, to};
use loadtest::find::{Wanted, find};
use loadtest::{Options, RawOptions};
use tokio::sync::Semaphore;

fn wanted(raw: RawOptions) -> Result<Wanted, Vec<String>> {
    Wanted::check(Options::check(raw).expect("these are good options"))
}

/// A server that answers one request after the other, each in 5 ms, does 200 a second, and a little less for what is lost
/// between two of them.
#[tokio::test(flavor = "multi_thread")]
async fn the_highest_rate_that_keeps_a_promise_is_found() {
    let turn = Arc::new(Semaphore::new(1));
    let address = serve(move |_| {
        let turn = Arc::clone(&turn);
        async move {
            let _mine = turn.acquire().await.expect("nobody closes it");
            tokio::time::sleep(Duration::from_millis(5)).await;
            answer(200, "a/b", rows(&[&[0.6, 0.8]]))
        }
    })
    .await;
    let raw = RawOptions {
        rate: "40".to_owned(),
        duration: Some("400ms".to_owned()),
        slo: Some("p90=60ms".to_owned()),
        ..to(address)
    };
    let mut lines = Vec::new();
    let found = find(wanted(raw).expect("a rate and a promise"), |tried| lines.push(tried.line()), |_| {});
    let found = found.await.expect("the server listens");
    let held = found.held_per_s.expect("40 a second are a fifth of what it does");
    // In 400 ms a queue of 60 ms builds up only when a rate is a seventh above what the server does.
    assert!((60.0..=260.0).contains(&held), "{held}: {lines:#?}");
    assert!(found.failed_per_s.is_some_and(|failed| failed > held), "{found:?}");
    assert!(found.sentence().starts_with("p90=60ms holds at"), "{}", found.sentence());
    assert_eq!(lines.len(), found.tried.len());
}

#[tokio::test]
async fn a_search_needs_a_promise_and_one_rate_to_begin_with() {
    let check = |raw: RawOptions, expected: &[&str]| {
        let problems = wanted(raw).expect_err("not to be searched");
        assert_eq!(problems.len(), expected.len(), "{problems:?}");
        for (problem, part) in problems.iter().zip(expected) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    };
    let to = || to("127.0.0.1:1".parse().expect("an address"));
    check(to(), &["--slo"]);
    let promised = || RawOptions { slo: Some("p99=1s".to_owned()), ..to() };
    check(RawOptions { callers: Some(3), ..promised() }, &["--rate"]);
    check(RawOptions { rate: "1 to 9".to_owned(), callers: None, ..to() }, &["--slo"]);
    check(RawOptions { rate: "1 for 1s, 9 for 1s".to_owned(), ..to() }, &["--slo", "--rate"]);
}
