//! Open loop against stalling servers: latencies, limit of requests in flight, timeouts and shutdown.

use std::collections::BTreeSet;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::server::{CapturedRequest, options, respond, rows, serve};
use loadtest::exchange::RequestFailure;
use loadtest::record::ServingRegions;
use loadtest::{RunError, run};
use tokio::sync::watch;

fn valid_response() -> axum::response::Response {
    respond(200, "aws/us-east-1", rows(&[&[0.6, 0.8]]))
}

/// From the 51st request on, the server responds only after 150 more have arrived. At 500 requests/s this takes 300
/// ms, so the latency of the 51st request is 300 ms, and that of the following ones accordingly less. A closed loop
/// would never send them, and the gate would never open.
#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_visible_in_every_request_of_its_time() {
    let (gate, open) = watch::channel(false);
    let address = serve(move |arrived: CapturedRequest| {
        let (gate, mut open) = (gate.clone(), open.clone());
        async move {
            match arrived.number {
                0..50 => {}
                50..200 => drop(open.wait_for(|open| *open).await.expect("the gate outlives the request")),
                _ => drop(gate.send_replace(true)),
            }
            valid_response()
        }
    })
    .await;

    let report = run(options(address, "500", "1s"), |_| {}, pending()).await.expect("the server listens");

    let total = report.record.total();
    assert_eq!((total.requests(), report.failed()), (500, 0), "{}", report.table());
    // Requests may arrive slightly out of order; a tolerance of 10 % covers that and rounding.
    let max = total.latencies().max().expect("500 responses");
    assert!(max >= Duration::from_millis(270), "the 51st request waited 300 ms:\n{}", report.table());
    // The 50 slowest of 500 requests started in the first 100 ms of the stall and waited for at least 200 ms.
    let p90 = total.latencies().quantile(0.9).expect("500 responses");
    assert!(p90 >= Duration::from_millis(180), "later requests waited too:\n{}", report.table());
}

/// Sends this many requests to a server that responds only after the intended start of the last one.
async fn check_limit(requests: u64, in_flight_max: usize, not_sent: u64) {
    let (gate, open) = watch::channel(false);
    let address = serve(move |_| {
        let mut open = open.clone();
        async move {
            drop(open.wait_for(|open| *open).await.expect("the gate outlives the request"));
            valid_response()
        }
    })
    .await;
    let mut options = options(address, &(50 * requests).to_string(), "20ms");
    options.in_flight_max = in_flight_max;

    let mut most_in_flight = 0;
    let open_after_the_last_start = |snapshot: &loadtest::RunSnapshot| {
        most_in_flight = most_in_flight.max(snapshot.in_flight);
        gate.send_replace(snapshot.in_flight + snapshot.not_sent + snapshot.ok == requests);
    };
    let report = run(options, open_after_the_last_start, pending()).await.expect("the server listens");

    let total = report.record.total();
    assert_eq!((total.requests(), report.failed()), (requests, not_sent), "{}", report.table());
    assert_eq!(total.outcomes.get(&Err(RequestFailure::NotSent)).map_or(0, |tally| tally.count), not_sent);
    assert_eq!(most_in_flight, requests - not_sent);
    assert_eq!(report.table().contains(&format!("while {in_flight_max} others")), not_sent > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_beyond_the_limit_in_flight_is_reported_as_failed() {
    check_limit(20, 20, 0).await;
    check_limit(20, 19, 1).await;
    check_limit(20, 4, 16).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_a_thousand_requests_are_in_flight() {
    check_limit(1500, 1500, 0).await;
    check_limit(1500, 1499, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_response_fails_at_its_timeout() {
    let address = serve(|_| pending()).await;
    let mut options = options(address, "100", "30ms");
    options.timeout = Duration::from_millis(80);

    let report = run(options, |_| {}, pending()).await.expect("the server listens");

    let total = report.record.total();
    let timeouts = &total.outcomes[&Err(RequestFailure::Timeout)];
    assert_eq!((timeouts.count, total.requests()), (3, 3), "{}", report.table());
    assert!(timeouts.latencies.quantile(0.0).expect("three of them") >= Duration::from_millis(80));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_run_starts_no_request_and_loses_none() {
    let (sender, mut observer) = watch::channel(0);
    let address = serve(move |arrived: CapturedRequest| {
        sender.send_replace(arrived.number + 1);
        async { valid_response() }
    })
    .await;

    let mut watching = observer.clone();
    let shutdown = async move { drop(watching.wait_for(|sender| *sender >= 5).await) };
    let report = run(options(address, "200", "1h"), |_| {}, shutdown).await.expect("the server listens");

    assert!(report.stopped_early && report.table().contains("stopped early"), "{}", report.table());
    assert_eq!(
        report.record.total().ok(),
        *observer.borrow_and_update(),
        "every request that arrived is in the report"
    );
    assert_eq!(report.failed(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_match_the_options_and_reuse_connections() {
    let all: Arc<Mutex<Vec<CapturedRequest>>> = Arc::default();
    let keep = Arc::clone(&all);
    let address = serve(move |arrived: CapturedRequest| {
        let region = if arrived.number < 40 { "aws/us-east-1" } else { "gcp/europe-west4" };
        let inputs = arrived.body["input"].as_array().map_or(0, Vec::len);
        keep.lock().expect("no test thread panics here").push(arrived);
        let mut response = respond(200, region, rows(&vec![&[0.6_f32, 0.8][..]; inputs]));
        response.headers_mut().insert("x-meridian-attempts", "2".try_into().expect("a digit"));
        async { response }
    })
    .await;
    let mut options = options(address, "200", "500ms");
    options.tasks[0].workload.inputs = 3;

    let report = run(options, |_| {}, pending()).await.expect("the server listens");

    let counts: Vec<_> = report
        .record
        .regions()
        .iter()
        .map(|(served, region)| (served.to_string(), region.ok(), region.retried))
        .collect();
    assert_eq!(counts, [("aws/us-east-1".to_owned(), 40, 40), ("gcp/europe-west4".to_owned(), 60, 60)]);
    assert!(!report.record.regions().contains_key(&ServingRegions::Unknown));
    let all = all.lock().expect("no test thread panics here");
    for arrived in all.iter() {
        assert_eq!(arrived.path, "/v1/embeddings");
        assert_eq!(arrived.headers["authorization"], "Bearer local");
        assert_eq!(arrived.headers["content-type"], "application/json");
        assert_eq!(arrived.headers["x-meridian-priority"], "interactive");
        assert_eq!(arrived.headers["x-meridian-client-geo"], "50.11,8.68");
        assert_eq!(arrived.body["model"], "m");
        assert_eq!(arrived.body["input"].as_array().map(Vec::len), Some(3));
    }
    let texts: BTreeSet<_> = all.iter().map(|arrived| arrived.body["input"].to_string()).collect();
    assert_eq!(texts.len(), 100, "each request has different texts");
    let connections: BTreeSet<SocketAddr> = all.iter().map(|arrived| arrived.from).collect();
    assert!(connections.len() < 50, "{} connections for 100 requests one after the other", connections.len());
}

#[tokio::test]
async fn a_run_without_a_server_does_not_start() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound listener has an address");
    drop(listener);
    match run(options(address, "1", "1h"), |_| {}, pending()).await {
        Err(error @ RunError::Unreachable { .. }) => {
            assert!(error.to_string().contains(&address.to_string()), "{error}");
        }
        other => panic!("{other:?}"),
    }
}
