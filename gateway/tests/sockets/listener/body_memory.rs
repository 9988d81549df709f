//! Memory of request bodies: reserved for arrived bytes, limited per tenant and per connection, and released when a
//! body stalls.

use super::fixture::{
    BODY, Edge, Fixture, post, read_response, read_until_closed, send_and_read, wait_until,
};
use super::http2::{Client, post as post_http2};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const BODY_BYTES_MAX: usize = 32 << 20;

async fn metric(edge: &Edge, name: &str) -> u64 {
    let metrics = edge.operate("/metrics").await.1;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

/// Sends the head of a request with `declared` bytes as the tenant with this key, and the first `sent` bytes.
async fn begins(edge: &Edge, key: &str, declared: usize, sent: usize) -> TcpStream {
    let mut stream = edge.connect().await;
    let head = post("", "").replace("Bearer k", &format!("Bearer {key}"));
    let head = head.replace("content-length: 0", &format!("content-length: {declared}"));
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&BODY.as_bytes().repeat(1 + sent / BODY.len())[..sent]).await.unwrap();
    stream
}

#[tokio::test]
async fn declared_bodies_that_do_not_arrive_reserve_no_memory() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut held = Vec::new();
    for _ in 0..32 {
        held.push(begins(&edge, "k", BODY_BYTES_MAX, 1).await);
    }
    let in_flight = async || metric(&edge, "meridian_gateway_requests_in_flight").await;
    let begun = Instant::now();
    while in_flight().await < 32 {
        assert!(begun.elapsed() < Duration::from_secs(20), "they are read");
    }
    for _ in 0..10 {
        assert_eq!(
            send_and_read(&mut edge.connect().await).await.status,
            200,
            "while 32 requests declare 32 MiB each"
        );
    }
    let taken = metric(&edge, "meridian_gateway_bodies_bytes").await;
    assert!(taken <= 32 * (16 << 10), "{taken} bytes for 32 received bytes");
}

#[tokio::test]
async fn a_tenant_that_fills_its_memory_is_rejected_and_others_are_not() {
    let fixture = Fixture::new().await;
    std::fs::write(fixture.dir.path().join("other"), "o").unwrap();
    let tenants =
        "[[tenant]]\nname = 'test'\nkey_file = 'key'\n[[tenant]]\nname = 'other'\nkey_file = 'other'\n";
    std::fs::write(fixture.dir.path().join("tenants.toml"), tenants).unwrap();
    let limits = "[bodies]\nbytes_max = 100663296\nbytes_per_tenant_max = 33554432\n";
    let edge = fixture.edge(limits).await;
    // Almost the limit of a tenant, and the rest never arrives.
    let _first = begins(&edge, "o", BODY_BYTES_MAX, BODY_BYTES_MAX - 1000).await;
    let begun = Instant::now();
    while metric(&edge, "meridian_gateway_bodies_tenant_bytes").await < BODY_BYTES_MAX as u64 {
        assert!(begun.elapsed() < Duration::from_secs(20), "its memory is reserved");
    }
    let mut second = edge.connect().await;
    second.write_all(post("", BODY).replace("Bearer k", "Bearer o").as_bytes()).await.unwrap();
    let response = read_response(&mut second).await;
    assert_eq!((response.status, response.code()), (429, "overloaded"), "{response:?}");
    assert!(response.body.contains("bytes_per_tenant_max"), "{response:?}");
    assert_eq!(send_and_read(&mut edge.connect().await).await.status, 200, "another tenant is served");
}

#[tokio::test]
async fn a_connection_is_limited_to_its_share_of_the_memory() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[bodies]\nbytes_per_connection_max = 33554432\n").await;
    let client = Client::plain(&edge).await;
    let piece = bytes::Bytes::from(vec![b'x'; 128 << 10]);
    let (mut responses, mut bodies) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let (response, body) = client.begin(post_http2(), false).await.unwrap();
        responses.push(response);
        bodies.push(body);
    }
    // 12 MiB each: the third or fourth exceeds the limit.
    for mut body in bodies {
        let piece = piece.clone();
        tokio::spawn(async move {
            for _ in 0..96 {
                body.reserve_capacity(piece.len());
                while body.capacity() < piece.len() {
                    if !matches!(
                        std::future::poll_fn(|context| body.poll_capacity(context)).await,
                        Some(Ok(_))
                    ) {
                        return;
                    }
                }
                if body.send_data(piece.clone(), false).is_err() {
                    return;
                }
            }
            std::future::pending::<()>().await;
        });
    }
    let first = futures_util::future::select_all(responses);
    let (response, ..) = tokio::time::timeout(Duration::from_secs(20), first).await.expect("one is refused");
    let response = response.unwrap();
    let code = response.headers()["x-meridian-error"].to_str().unwrap();
    assert_eq!((response.status().as_u16(), code), (429, "overloaded"));
    assert_eq!(send_and_read(&mut edge.connect().await).await.status, 200, "another connection is served");
}

#[tokio::test]
async fn a_body_that_stalls_or_trickles_is_aborted_long_before_its_total_timeout() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[bodies]\nstall = '400ms'\nbytes_per_second_min = 1000\n").await;
    let begun = Instant::now();
    let mut stops = begins(&edge, "k", 1000, 10).await;
    let response = read_until_closed(&mut stops).await;
    assert_eq!((response.status, response.code()), (408, "body_timeout"), "{response:?}");
    assert!(response.body.contains("0.4 s"), "{response:?}");
    // One byte at a time, each before the stall timeout.
    let (mut reads, mut writes) = begins(&edge, "k", 1000, 1).await.into_split();
    let trickling = tokio::spawn(async move {
        while writes.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let response = read_until_closed(&mut reads).await;
    assert_eq!((response.status, response.code()), (408, "body_timeout"), "{response:?}");
    assert!(response.body.contains("1000 bytes a second"), "{response:?}");
    trickling.abort();
    assert!(begun.elapsed() < Duration::from_secs(20), "each is rejected before a minute");
    // A slow body that makes progress is served.
    let request = post("", BODY);
    let (head, body) = request.split_at(request.len() - BODY.len());
    let mut slow = edge.connect().await;
    slow.write_all(head.as_bytes()).await.unwrap();
    for piece in body.as_bytes().chunks(12) {
        tokio::time::sleep(Duration::from_millis(60)).await;
        slow.write_all(piece).await.unwrap();
    }
    assert_eq!(read_response(&mut slow).await.status, 200);
    wait_until("requests reach the region", || fixture.region.requests() == 1).await;
}
