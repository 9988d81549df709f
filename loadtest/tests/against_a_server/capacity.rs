//! Capacity test against a server of known capacity.

use std::sync::Arc;
use std::time::Duration;

use crate::server::{respond, rows, serve, to};
use loadtest::find_capacity::{CapacitySearchOptions, find_capacity};
use loadtest::{Options, RawOptions};
use tokio::sync::Semaphore;

fn search_options(raw: RawOptions) -> Result<CapacitySearchOptions, Vec<String>> {
    CapacitySearchOptions::check(Options::check(raw).expect("the options are valid"))
}

/// A server that processes requests sequentially in 5 ms each has a capacity of slightly less than 200 requests/s.
#[tokio::test(flavor = "multi_thread")]
async fn the_highest_rate_that_meets_the_objective_is_found() {
    let turn = Arc::new(Semaphore::new(1));
    let address = serve(move |_| {
        let turn = Arc::clone(&turn);
        async move {
            let _mine = turn.acquire().await.expect("the semaphore stays open");
            tokio::time::sleep(Duration::from_millis(5)).await;
            respond(200, "a/b", rows(&[&[0.6, 0.8]]))
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
    let report = find_capacity(
        search_options(raw).expect("a rate and an objective"),
        |trial| lines.push(trial.line()),
        |_| {},
    );
    let report = report.await.expect("the server listens");
    let held = report.held_per_s.expect("40 requests/s are a fifth of the capacity");
    // In 400 ms a queue of 60 ms builds up only at a rate a seventh above the capacity.
    assert!((60.0..=260.0).contains(&held), "{held}: {lines:#?}");
    assert!(report.failed_per_s.is_some_and(|failed| failed > held), "{report:?}");
    assert!(report.sentence().starts_with("p90=60ms holds at"), "{}", report.sentence());
    assert_eq!(lines.len(), report.trials.len());
}

#[tokio::test]
async fn a_search_requires_an_objective_and_a_single_initial_rate() {
    let check = |raw: RawOptions, expected: &[&str]| {
        let problems = search_options(raw).expect_err("invalid options");
        assert_eq!(problems.len(), expected.len(), "{problems:?}");
        for (problem, part) in problems.iter().zip(expected) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    };
    let to = || to("127.0.0.1:1".parse().expect("an address"));
    check(to(), &["--slo"]);
    let with_slo = || RawOptions { slo: Some("p99=1s".to_owned()), ..to() };
    check(RawOptions { callers: Some(3), ..with_slo() }, &["--rate"]);
    check(RawOptions { rate: "1 to 9".to_owned(), callers: None, ..to() }, &["--slo"]);
    check(RawOptions { rate: "1 for 1s, 9 for 1s".to_owned(), ..to() }, &["--slo", "--rate"]);
}
