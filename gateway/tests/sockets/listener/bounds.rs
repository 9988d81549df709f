//! Timeouts of each part of a request.

use super::fixture::{
    BODY, Edge, Fixture, Mode, TIMEOUT, post, read_response, read_until_closed, send_and_read,
};
use super::http2::Client;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

/// Sends `bytes` and then `drops`, one every 20 ms, until the peer closes.
async fn trickle(
    mut stream: TcpStream,
    bytes: &[u8],
    drops: &[u8],
) -> (super::fixture::ClientResponse, Duration) {
    let begun = Instant::now();
    stream.write_all(bytes).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let drops = drops.to_vec();
    let dripping = tokio::spawn(async move {
        for drop in drops.iter().cycle() {
            tokio::time::sleep(Duration::from_millis(20)).await;
            if write.write_all(&[*drop]).await.is_err() {
                return;
            }
        }
    });
    let response = read_until_closed(&mut read).await;
    dripping.abort();
    (response, begun.elapsed())
}

#[tokio::test]
async fn a_head_that_trickles_times_out() {
    let fixture = Fixture::new().await;
    let edge = fixture.quick_edge().await;
    let (response, took) = trickle(edge.connect().await, b"GET /v1/models HTTP/1.1\r\nhost: ", b"x").await;
    assert_eq!((response.status, response.code()), (408, "head_timeout"), "{response:?}");
    assert!((Duration::from_millis(300)..Duration::from_secs(3)).contains(&took), "{took:?}");
    // Field after field, and as the start of the HTTP/2 preface.
    let (response, _) = trickle(edge.connect().await, b"GET /v1/models HTTP/1.1\r\n", b"x: y\r\n").await;
    assert_eq!((response.status, response.code()), (408, "head_timeout"), "{response:?}");
    let mut stream = edge.connect().await;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM").await.unwrap();
    assert_eq!(read_until_closed(&mut stream).await.status, 408);
}

#[tokio::test]
async fn a_body_that_never_ends_or_never_starts_times_out() {
    let fixture = Fixture::new().await;
    let edge = fixture.quick_edge().await;
    let request = post("", BODY).replace("content-length: 35", "content-length: 1000000");
    let (response, took) = trickle(edge.connect().await, request.as_bytes(), b" ").await;
    assert_eq!((response.status, response.code()), (408, "body_timeout"), "{response:?}");
    assert!(took >= Duration::from_millis(500), "{took:?}");
    let head = post("", "").replace("content-length: 0", "transfer-encoding: chunked");
    let (response, _) = trickle(edge.connect().await, head.as_bytes(), b"1\r\n \r\n").await;
    assert_eq!((response.status, response.code()), (408, "body_timeout"), "{response:?}");
    assert_eq!(fixture.region.requests(), 0);
}

/// Sends requests until writes block, reads nothing, and keeps the connection.
pub(crate) async fn asks_and_never_reads(edge: &Edge, request: &[u8]) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(edge.address).await.unwrap();
    // If a write blocks for a second, both directions are full; if the connection has ended, that is fine too.
    while let Ok(Ok(())) = tokio::time::timeout(Duration::from_secs(1), stream.write_all(request)).await {}
    stream
}

/// Returns the metrics of client connections and of requests in flight.
async fn held(edge: &Edge) -> [Option<String>; 2] {
    let metrics = edge.operate("/metrics").await.1;
    let value =
        |name: &str| metrics.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
    [value("meridian_gateway_connections "), value("meridian_gateway_requests_in_flight ")]
}

#[tokio::test]
async fn requests_of_a_client_that_never_reads_time_out() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[timeouts]\nwrite = '400ms'\nidle = '2s'\n").await;
    fixture.region.mode.send_replace(Mode::Responds(2 << 20));
    // Small responses, large ones, and errors.
    let models = "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n".repeat(50);
    let nowhere = "GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n".repeat(50);
    let mut held_on = Vec::new();
    for request in [models, post("", BODY), nowhere] {
        held_on.push(asks_and_never_reads(&edge, request.as_bytes()).await);
    }
    let begun = Instant::now();
    let nothing = [Some("0".to_owned()), Some("0".to_owned())];
    loop {
        let held = held(&edge).await;
        if held == nothing {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "connections and requests in flight: {held:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(held_on);
    assert_eq!(send_and_read(&mut edge.connect().await).await.status, 200, "and others are served");
}

#[tokio::test]
async fn a_connection_without_a_request_is_closed_and_one_with_requests_is_not() {
    let fixture = Fixture::new().await;
    let edge = fixture.quick_edge().await;
    let begun = Instant::now();
    let (mut silent, mut busy) = (edge.connect().await, edge.connect().await);
    let closed = tokio::spawn(async move { read_until_closed(&mut silent).await.status });
    while !closed.is_finished() || begun.elapsed() < Duration::from_millis(800) {
        assert_eq!(send_and_read(&mut busy).await.status, 200);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(closed.await.unwrap(), 0, "without a word");
    assert_eq!(read_until_closed(&mut busy).await.status, 0, "this connection is closed when it is idle");
}

#[tokio::test]
async fn a_new_connection_evicts_the_longest_idle_one_and_never_a_busy_one() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("connections_max = 4\n").await;
    let (mut first, http2) = (edge.connect().await, Client::plain(&edge).await);
    assert_eq!(send_and_read(&mut first).await.status, 200);
    assert_eq!(http2.post(BODY).await.unwrap().head.status(), 200);
    let mut third = edge.connect().await;
    assert_eq!(send_and_read(&mut third).await.status, 200);
    let mut fourth = edge.connect().await;
    assert_eq!(send_and_read(&mut fourth).await.status, 200);
    assert_eq!(send_and_read(&mut first).await.status, 200, "the limit of kept connections");
    let mut fifth = edge.connect().await;
    assert_eq!(send_and_read(&mut fifth).await.status, 200);
    let mut sixth = edge.connect().await;
    assert_eq!(send_and_read(&mut sixth).await.status, 200);
    assert_eq!(read_until_closed(&mut third).await.status, 0, "the fifth or the sixth connection is kept");
    let Client { send, ended } = http2;
    tokio::time::timeout(TIMEOUT, ended)
        .await
        .expect("the other connection replaces the second")
        .unwrap()
        .unwrap();
    drop(send);
    // All are busy: the next one waits.
    fixture.region.mode.send_replace(Mode::Waits);
    let mut busy = vec![first, fourth, fifth, sixth];
    for stream in &mut busy {
        stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    }
    fixture.region.wait_for_requests(7 + 4).await;
    let mut waiting = edge.connect().await;
    waiting.write_all(post("", BODY).as_bytes()).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(200), waiting.readable()).await.is_err());
    fixture.region.go_on.send_replace(true);
    for stream in &mut busy {
        assert_eq!(read_response(stream).await.status, 200, "no busy connection is evicted");
    }
    assert_eq!(read_response(&mut waiting).await.status, 200);
}

#[tokio::test]
async fn an_http_2_body_that_never_ends_times_out_and_its_connection_continues() {
    let fixture = Fixture::new().await;
    let edge = fixture.quick_edge().await;
    let client = Client::plain(&edge).await;
    let (response, mut body) = client.begin(super::http2::post(), false).await.unwrap();
    body.send_data("{".into(), false).unwrap();
    let response = tokio::time::timeout(TIMEOUT, response).await.expect("an answer").unwrap();
    assert_eq!(response.status().as_u16(), 408);
    assert_eq!(client.post(BODY).await.unwrap().head.status(), 200);
}

#[tokio::test]
async fn a_client_that_disconnects_within_its_request_affects_no_other() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    for cut in [1, 20, 60, 90, 110] {
        let mut stream = edge.connect().await;
        stream.write_all(&post("", BODY).as_bytes()[..cut]).await.unwrap();
        drop(stream);
    }
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 200);
    assert_eq!(fixture.region.requests(), 1);
}
