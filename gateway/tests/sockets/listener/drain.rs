//! Graceful shutdown of a gateway: it is announced, no request in flight is lost, and the next process may already run.

use super::fixture::{
    BODY, Edge, Fixture, Mode, TIMEOUT, post, read_response, read_until_closed, send_and_read, wait_until,
};
use super::http2::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Waits for its end; returns the time.
async fn ended(edge: &mut Edge) -> Duration {
    let begun = Instant::now();
    tokio::time::timeout(TIMEOUT, &mut edge.running).await.expect("the edge ends").unwrap();
    begun.elapsed()
}

#[tokio::test]
async fn sixteen_requests_in_flight_are_finished_and_the_gateway_ends_with_the_last() {
    let fixture = Fixture::new().await;
    let mut edge = fixture.edge("[timeouts]\nlame_duck = '0s'\n").await;
    let mut clients = Vec::new();
    for _ in 0..16 {
        let mut stream = edge.connect().await;
        assert_eq!(send_and_read(&mut stream).await.header("connection"), "keep-alive");
        clients.push(stream);
    }
    let mut idle = edge.connect().await;
    fixture.region.mode.send_replace(Mode::Waits);
    for stream in &mut clients {
        stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    }
    fixture.region.wait_for_requests(32).await;
    edge.stop();
    assert_eq!(read_until_closed(&mut idle).await.status, 0, "an idle connection is closed immediately");
    assert!(!edge.running.is_finished());
    fixture.region.go_on.send_replace(true);
    for stream in &mut clients {
        let response = read_until_closed(stream).await;
        assert_eq!((response.status, response.json()["bytes"].as_u64()), (200, Some(35)), "{response:?}");
        assert_eq!(response.header("connection"), "close", "so that the connection is not reused");
    }
    let took = ended(&mut edge).await;
    assert!(took <= Duration::from_millis(100), "{took:?} after the last response");
    assert!(TcpStream::connect(edge.address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn a_lame_duck_announces_the_shutdown_and_serves_new_requests() {
    let fixture = Fixture::new().await;
    let mut edge = fixture.edge("[timeouts]\nlame_duck = '700ms'\n").await;
    assert_eq!(edge.operate("/readyz").await.0, 200);
    let (mut open, http2) = (edge.connect().await, Client::plain(&edge).await);
    assert_eq!(send_and_read(&mut open).await.header("connection"), "keep-alive");
    assert_eq!(http2.post(BODY).await.unwrap().head.status(), 200);
    let begun = Instant::now();
    edge.stop();
    while edge.operate("/readyz").await.0 != 503 {
        assert!(begun.elapsed() < Duration::from_millis(700), "readiness is withdrawn first");
    }
    let response = send_and_read(&mut open).await;
    assert_eq!((response.status, response.header("connection")), (200, "close"), "an open connection");
    let response = send_and_read(&mut edge.connect().await).await;
    assert_eq!((response.status, response.header("connection")), (200, "close"), "a new one");
    let late = Client::plain(&edge).await;
    assert_eq!(late.post(BODY).await.unwrap().head.status(), 200, "over HTTP/2 as well");
    // GOAWAY: the client opens no more streams, and its connection ends cleanly.
    let Client { send, ended: gone } = http2;
    drop(send);
    tokio::time::timeout(TIMEOUT, gone).await.expect("GOAWAY").unwrap().unwrap();
    tokio::time::timeout(TIMEOUT, &mut edge.running).await.expect("the edge ends").unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(700), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn http_2_requests_in_flight_are_finished_behind_a_goaway() {
    let fixture = Fixture::new().await;
    let mut edge = fixture.edge("[timeouts]\nlame_duck = '0s'\n").await;
    let client = Client::plain(&edge).await;
    fixture.region.mode.send_replace(Mode::Waits);
    let mut responses = Vec::new();
    for _ in 0..16 {
        let (response, mut stream) = client.begin(super::http2::post(), false).await.unwrap();
        stream.send_data(BODY.into(), true).unwrap();
        responses.push(response);
    }
    fixture.region.wait_for_requests(16).await;
    edge.stop();
    wait_until("the port is closed", || std::net::TcpStream::connect(edge.address).is_err()).await;
    fixture.region.go_on.send_replace(true);
    for response in responses {
        let (head, mut body) = response.await.unwrap().into_parts();
        assert_eq!((head.status.as_u16(), body.data().await.unwrap().unwrap().len()), (200, 12));
    }
    let took = ended(&mut edge).await;
    assert!(took <= Duration::from_millis(100), "{took:?} after the last response");
    client.ended.await.unwrap().unwrap();
}

#[tokio::test]
async fn requests_longer_than_the_drain_timeout_are_aborted() {
    let fixture = Fixture::new().await;
    let mut edge = fixture.edge("[timeouts]\nlame_duck = '0s'\ndrain = '300ms'\n").await;
    fixture.region.mode.send_replace(Mode::Waits);
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    fixture.region.wait_for_requests(1).await;
    edge.stop();
    let took = ended(&mut edge).await;
    assert!((Duration::from_millis(300)..Duration::from_secs(2)).contains(&took), "{took:?}");
    assert_eq!(read_until_closed(&mut stream).await.status, 0);
    wait_until("the request is cancelled at the region", || *fixture.region.cancelled.borrow() == 1).await;
}

#[tokio::test]
async fn clients_that_do_not_read_do_not_delay_the_shutdown() {
    let fixture = Fixture::new().await;
    let mut edge = fixture.edge("[timeouts]\nlame_duck = '0s'\nwrite = '300ms'\n").await;
    fixture.region.mode.send_replace(Mode::Responds(64 << 20));
    let mut unread = edge.connect().await;
    unread.write_all(post("", BODY).as_bytes()).await.unwrap();
    let client = Client::plain(&edge).await;
    let (response, mut stream) = client.begin(super::http2::post(), false).await.unwrap();
    stream.send_data(BODY.into(), true).unwrap();
    let unread_too = response.await.unwrap();
    fixture.region.wait_for_requests(2).await;
    edge.stop();
    // The drain of 30 s is longer than the timeout of the test.
    ended(&mut edge).await;
    drop((unread, unread_too));
}

/// Sends requests in a loop, each on the current connection, or on a new one after connection: close.
async fn send_on_kept_connections(
    edge: std::net::SocketAddr,
    stopped: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
) {
    let mut stream = None;
    while !stopped.load(Ordering::SeqCst) {
        let mut open = match stream.take() {
            Some(open) => open,
            None => TcpStream::connect(edge).await.expect("a connection is never refused"),
        };
        open.write_all(post("", BODY).as_bytes()).await.expect("a request is never lost");
        let response = read_response(&mut open).await;
        assert_eq!(response.status, 200, "{response:?}");
        served.fetch_add(1, Ordering::SeqCst);
        if response.header("connection") == "keep-alive" {
            stream = Some(open);
        }
    }
}

/// Sends requests in a loop, each on a new connection.
async fn send_on_new_connections(
    edge: std::net::SocketAddr,
    stopped: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
) {
    while !stopped.load(Ordering::SeqCst) {
        let mut stream = TcpStream::connect(edge).await.expect("a connection is never refused");
        stream.write_all(post("connection: close\r\n", BODY).as_bytes()).await.expect("the request is sent");
        let response = read_until_closed(&mut stream).await;
        assert_eq!(response.status, 200, "{response:?}");
        served.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_next_process_that_does_not_become_ready_changes_nothing() {
    let fixture = Fixture::new().await;
    let config = "handover = 'handover'\n[timeouts]\nlame_duck = '0s'\n";
    let mut running = fixture.edge(config).await;
    for _ in 0..3 {
        drop(tokio::net::UnixStream::connect(fixture.dir.path().join("handover")).await.unwrap());
    }
    let response = send_and_read(&mut running.connect().await).await;
    assert_eq!(
        (response.status, response.header("connection")),
        (200, "keep-alive"),
        "it continues to serve"
    );
    let next = fixture.edge_after(config, Some(&running)).await;
    ended(&mut running).await;
    assert_eq!(send_and_read(&mut next.connect().await).await.status, 200, "a takeover is still possible");
}

#[tokio::test]
async fn the_next_process_takes_over_and_no_request_is_refused() {
    let fixture = Fixture::new().await;
    let config = "handover = 'handover'\n[timeouts]\nlame_duck = '500ms'\n";
    let mut running = fixture.edge(config).await;
    let (stopped, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..4 {
        clients.spawn(send_on_kept_connections(running.address, stopped.clone(), served.clone()));
        clients.spawn(send_on_new_connections(running.address, stopped.clone(), served.clone()));
    }
    // Twice, because the second process must be able to hand over the sockets that it received.
    for _ in 0..2 {
        let before = served.load(Ordering::SeqCst);
        wait_until("the running process serves", || served.load(Ordering::SeqCst) > before + 50).await;
        let next = fixture.edge_after(config, Some(&running)).await;
        assert_eq!(next.address, running.address);
        ended(&mut running).await;
        assert_eq!(next.operate("/readyz").await.0, 200, "operators see the next one");
        let before = served.load(Ordering::SeqCst);
        wait_until("the next process serves", || served.load(Ordering::SeqCst) > before + 50).await;
        running = next;
    }
    stopped.store(true, Ordering::SeqCst);
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
}
