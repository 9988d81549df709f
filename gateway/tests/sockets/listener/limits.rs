//! Reached limits are counted by name (invariant 6, Bounded).

use super::fixture::{BODY, Edge, Fixture, Mode, TIMEOUT, post, read_until_closed, send_and_read};
use super::http2::Client;
use std::collections::BTreeMap;
use std::time::Instant;
use tokio::io::AsyncWriteExt;

/// Returns the counters of limits by series name.
async fn counted(edge: &Edge) -> BTreeMap<String, u64> {
    let text = edge.operate("/metrics").await.1;
    let of_limits = ["connections_closed_total", "floods_total", "bodies_rejected_total"];
    let line = |line: &str| {
        let (name, value) = line.strip_prefix("meridian_gateway_")?.rsplit_once(' ')?;
        of_limits
            .iter()
            .any(|limit| name.starts_with(limit))
            .then(|| (name.to_owned(), value.parse().unwrap()))
    };
    text.lines().filter_map(line).collect()
}

/// Waits until clients have no open connection.
async fn wait_until_no_connection(edge: &Edge) {
    let begun = Instant::now();
    while !edge.operate("/metrics").await.1.lines().any(|line| line == "meridian_gateway_connections 0") {
        assert!(begun.elapsed() < TIMEOUT, "a connection stays open");
    }
}

/// Waits until only `name` was incremented since `before`, by one.
async fn counts(edge: &Edge, before: BTreeMap<String, u64>, name: &str) {
    assert!(before.contains_key(name), "{name}: {before:#?}");
    let mut expected = before;
    *expected.get_mut(name).unwrap() += 1;
    let begun = Instant::now();
    loop {
        let counted = counted(edge).await;
        if counted == expected {
            return;
        }
        assert!(begun.elapsed() < TIMEOUT, "{name}: {counted:#?} is not {expected:#?}");
    }
}

#[tokio::test]
async fn rejections_before_a_complete_request_are_counted_by_reason() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[timeouts]\nhead = '300ms'\nbody = '300ms'\n").await;
    let chunked = post("", "").replace("content-length: 0", "transfer-encoding: chunked");
    let large = format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "x".repeat(70_000));
    for (bytes, name) in [
        (
            "GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".to_owned(),
            "connections_closed_total{reason=\"head_malformed\"}",
        ),
        (large, "connections_closed_total{reason=\"head_too_large\"}"),
        ("GET / HTTP/1.1\r\nhost: ".to_owned(), "connections_closed_total{reason=\"head_timeout\"}"),
        (format!("{chunked}5\r\nabc"), "bodies_rejected_total{reason=\"too_slow\"}"),
        (format!("{chunked}zz\r\n"), "bodies_rejected_total{reason=\"malformed\"}"),
        (post("content-encoding: gzip\r\n", "not gzip"), "bodies_rejected_total{reason=\"malformed\"}"),
        (
            post("", "").replace("content-length: 0", "content-length: 99999999"),
            "bodies_rejected_total{reason=\"too_large\"}",
        ),
    ] {
        let before = counted(&edge).await;
        let mut stream = edge.connect().await;
        stream.write_all(bytes.as_bytes()).await.unwrap();
        counts(&edge, before, name).await;
    }
    let served = send_and_read(&mut edge.connect().await).await;
    assert_eq!(served.status, 200);
}

#[tokio::test]
async fn idle_and_evicted_connections_are_counted() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[timeouts]\nidle = '500ms'\n").await;
    for http2 in [false, true] {
        let before = counted(&edge).await;
        if http2 {
            let client = Client::plain(&edge).await;
            assert_eq!(client.post(BODY).await.unwrap().head.status(), 200);
            counts(&edge, before, "connections_closed_total{reason=\"idle\"}").await;
        } else {
            let mut stream = edge.connect().await;
            assert_eq!(send_and_read(&mut stream).await.status, 200);
            counts(&edge, before, "connections_closed_total{reason=\"idle\"}").await;
            assert_eq!(read_until_closed(&mut stream).await.status, 0);
        }
    }
    // One is busy and one idle when a third connects.
    let edge = fixture.edge("connections_max = 2\n").await;
    let mut idle = edge.connect().await;
    assert_eq!(send_and_read(&mut idle).await.status, 200);
    fixture.region.mode.send_replace(Mode::Waits);
    let before = counted(&edge).await;
    let requests = fixture.region.requests();
    let mut busy = edge.connect().await;
    busy.write_all(post("", BODY).as_bytes()).await.unwrap();
    fixture.region.wait_for_requests(requests + 1).await;
    let mut next = edge.connect().await;
    next.write_all(post("", BODY).as_bytes()).await.unwrap();
    fixture.region.wait_for_requests(requests + 2).await;
    assert_eq!(read_until_closed(&mut idle).await.status, 0);
    counts(&edge, before, "connections_closed_total{reason=\"connection_limit\"}").await;
    fixture.region.go_on.send_replace(true);
}

#[tokio::test]
async fn stalled_bodies_and_evicted_half_open_connections_are_counted() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("connections_max = 2\n[bodies]\nstall = '200ms'\n").await;
    let before = counted(&edge).await;
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).split_at(110).0.as_bytes()).await.unwrap();
    counts(&edge, before, "bodies_rejected_total{reason=\"stalled\"}").await;
    assert_eq!(read_until_closed(&mut stream).await.status, 408);
    // The gateway reads on for a moment, and releases the slot when its client has closed as well.
    drop(stream);
    wait_until_no_connection(&edge).await;
    let before = counted(&edge).await;
    let (mut first, _second) = (edge.connect().await, edge.connect().await);
    first.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    assert_eq!(send_and_read(&mut edge.connect().await).await.status, 200);
    counts(&edge, before, "connections_closed_total{reason=\"half_open\"}").await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_counted_once() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[timeouts]\nwrite = '200ms'\n").await;
    let before = counted(&edge).await;
    let models = "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n".repeat(50);
    let held_on = super::bounds::asks_and_never_reads(&edge, models.as_bytes()).await;
    counts(&edge, before, "connections_closed_total{reason=\"write_timeout\"}").await;
    drop(held_on);
}
