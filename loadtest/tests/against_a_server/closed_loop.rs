//! Closed loop and open loop, and the visibility of a server stall in each.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::server::{respond, rows, serve, to};
use loadtest::record::Group;
use loadtest::{Options, RawOptions, Report, run};

const STALL: Duration = Duration::from_secs(2);

/// Requests before the stall.
const BEFORE: u64 = 50;

/// Server that responds immediately, except for one stall of [`STALL`], such as a garbage collection.
async fn stalls_once() -> SocketAddr {
    let until: Mutex<Option<Instant>> = Mutex::new(None);
    serve(move |arrived| {
        let mut until = until.lock().expect("no panic while the lock is held");
        if arrived.number == BEFORE {
            *until = Some(Instant::now() + STALL);
        }
        let until = *until;
        async move {
            if let Some(until) = until {
                tokio::time::sleep_until(until.into()).await;
            }
            respond(200, "aws/us-east-1", rows(&[&[0.6, 0.8]]))
        }
    })
    .await
}

async fn load(raw: RawOptions) -> Report {
    let options = Options::check(raw).expect("the options are valid");
    run(options, |_| {}, pending()).await.expect("the server listens")
}

fn quantile(group: &Group, quantile: f64) -> Duration {
    group.latencies().quantile(quantile).expect("there were responses")
}

/// The same server with the same stall and duration. At a constant rate, the latencies show the stall of two seconds;
/// the closed-loop caller sent one request during it, so 999 of 1000 of its requests are fast.
#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_visible_at_a_constant_rate_and_hidden_in_a_closed_loop() {
    let duration = Some("4s".to_owned());
    let open = RawOptions { rate: "200".to_owned(), duration: duration.clone(), ..to(stalls_once().await) };
    let closed = RawOptions { callers: Some(1), duration, ..to(stalls_once().await) };
    let (open, closed) = (load(open).await, load(closed).await);
    for (name, report) in [("constant rate", &open), ("closed loop", &closed)] {
        let total = report.record.total();
        let [p50, p999, max] = [0.5, 0.999, 1.0].map(|q| quantile(&total, q));
        println!("{name}: {} requests, p50 {p50:?}, p99.9 {p999:?}, max {max:?}", total.requests());
    }
    let (open, closed) = (open.record.total(), closed.record.total());
    assert_eq!((open.requests(), open.failed(), closed.failed()), (800, 0, 0));
    assert!(quantile(&open, 0.999) > STALL.mul_f64(0.9), "the stall is in p99.9");
    // At 200 requests/s about 400 of 800 arrive during the stall, and half of those wait for more than half of it.
    assert!(quantile(&open, 0.85) > STALL / 3, "not only in the tail: {:?}", quantile(&open, 0.85));
    assert!(closed.requests() > 1000, "{} requests in two seconds without a stall", closed.requests());
    assert!(quantile(&closed, 1.0) >= STALL, "it was there");
    assert!(quantile(&closed, 0.999) < STALL / 10, "and a closed loop does not show it");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_callers_limits_the_requests_in_flight() {
    let address = serve(|_| pending()).await;
    let options =
        Options::check(RawOptions { callers: Some(7), duration: Some("1h".to_owned()), ..to(address) });
    let mut options = options.expect("the options are valid");
    options.timeout = Duration::from_millis(100);
    let (sender, mut observer) = tokio::sync::watch::channel(0);
    let stop = async move { drop(observer.wait_for(|timeouts| *timeouts >= 7).await) };
    let mut most = 0;
    let report = run(
        options,
        |snapshot| {
            most = most.max(snapshot.in_flight);
            sender.send_replace(snapshot.failed);
        },
        stop,
    );
    let report = report.await.expect("the server listens");
    assert!(report.stopped_early && most <= 7, "{most}");
    assert!(report.record.total().failed() >= 7, "{}", report.table());
}

/// The dual profile: a backfill of bulk priority does not delay the schedule of the queries, and each has its own rows.
#[tokio::test(flavor = "multi_thread")]
async fn tasks_run_concurrently_and_are_reported_separately() {
    let address = serve(|arrived| {
        let inputs = arrived.body["input"].as_array().map_or(0, Vec::len);
        let priority = if inputs > 1 { "bulk" } else { "interactive" };
        assert_eq!(arrived.headers["x-meridian-priority"], priority);
        std::future::ready(respond(200, "aws/us-east-1", rows(&vec![&[0.25_f32; 384][..]; inputs])))
    })
    .await;
    let tasks = ["queries at 100", "bulk of 64 with 2 callers"].map(str::to_owned).to_vec();
    let report = load(RawOptions { tasks, duration: Some("500ms".to_owned()), ..to(address) }).await;
    assert_eq!(report.failed(), 0, "{}", report.table());
    let [queries, bulk] = report.record.tasks() else { panic!("{}", report.table()) };
    assert_eq!(queries.total().ok(), 50);
    assert!(bulk.total().ok() >= 2, "{}", report.table());
    let table = report.table();
    assert!(table.contains("\nqueries ") && table.contains("\nbulk "), "{table}");
}

/// A trace is replayed with its start times and sizes.
#[tokio::test(flavor = "multi_thread")]
async fn a_trace_is_replayed_with_its_times_and_sizes() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("trace.csv");
    std::fs::write(&file, "at_s,tokens,inputs\n0,12,1\n0.1,40,3\n0.2,9,2\n").expect("a file");
    let address = serve(|arrived| {
        let inputs = arrived.body["input"].as_array().map_or(0, Vec::len);
        std::future::ready(respond(200, "a/b", rows(&vec![&[0.5_f32][..]; inputs])))
    })
    .await;
    let report = load(RawOptions { trace: Some(file), ..to(address) }).await;
    assert_eq!((report.record.total().ok(), report.failed()), (3, 0), "{}", report.table());
    assert!(report.elapsed >= Duration::from_millis(200));
}
