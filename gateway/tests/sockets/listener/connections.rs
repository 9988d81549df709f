//! Connection limits: an address that sends partial requests evicts no connection that was served.

use super::fixture::{Edge, Fixture, TIMEOUT, read_until_closed, send_and_read};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

/// Connects from another address of this machine.
async fn from(address: [u8; 4], edge: &Edge) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((address, 0).into()).unwrap();
    socket.connect(edge.address).await.unwrap()
}

const HALF_A_HEAD: &[u8] = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n";

/// Sends partial heads from these addresses, beyond the connection limit; good clients are served meanwhile and
/// afterwards.
async fn attack(edge: &Edge, attackers: u8, good: &mut [TcpStream]) {
    let mut held = Vec::new();
    for number in 0..300 {
        let mut stream = from([127, 0, 1, number as u8 % attackers], edge).await;
        // It may have been closed for the previous one.
        stream.write_all(HALF_A_HEAD).await.ok();
        held.push(stream);
        if number % 50 == 49 {
            let begun = Instant::now();
            assert_eq!(
                send_and_read(&mut from([127, 0, 2, 1], edge).await).await.status,
                200,
                "a new client"
            );
            assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        }
    }
    for stream in good {
        assert_eq!(send_and_read(stream).await.status, 200, "a connection that was idle");
    }
}

#[tokio::test]
async fn partial_heads_of_one_address_or_of_many_evict_no_connection_that_was_served() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("connections_max = 100\n").await;
    let mut good = Vec::new();
    for number in 0..40 {
        let mut stream = from([127, 0, 3, number], &edge).await;
        assert_eq!(send_and_read(&mut stream).await.status, 200);
        good.push(stream);
    }
    for attackers in [1, 100] {
        attack(&edge, attackers, &mut good).await;
    }
}

#[tokio::test]
async fn connections_per_address_are_limited_except_for_trusted_ones() {
    let fixture = Fixture::new().await;
    let limits =
        "connections_per_address_max = 4\nhalf_open_per_address_max = 2\ntrusted_peers = ['127.0.0.9']\n";
    let edge = fixture.edge(limits).await;
    let mut served = Vec::new();
    for _ in 0..4 {
        let mut stream = from([127, 0, 0, 7], &edge).await;
        assert_eq!(send_and_read(&mut stream).await.status, 200);
        served.push(stream);
    }
    let mut fifth = from([127, 0, 0, 7], &edge).await;
    assert_eq!(read_until_closed(&mut fifth).await.status, 0, "closed without a response");
    for stream in &mut served {
        assert_eq!(send_and_read(stream).await.status, 200);
    }
    served.pop();
    let begun = Instant::now();
    // Its slot is free as soon as its end is noticed; and a half-open connection is evicted for the next one.
    while begun.elapsed() < TIMEOUT {
        let mut next = from([127, 0, 0, 7], &edge).await;
        next.write_all(HALF_A_HEAD).await.ok();
        if tokio::time::timeout(Duration::from_millis(100), read_until_closed(&mut next)).await.is_err() {
            break;
        }
    }
    assert!(begun.elapsed() < TIMEOUT, "the released slot is not used");

    let mut first = from([127, 0, 0, 8], &edge).await;
    let mut others = Vec::new();
    for _ in 0..2 {
        others.push(from([127, 0, 0, 8], &edge).await);
    }
    assert_eq!(
        read_until_closed(&mut first).await.status,
        0,
        "the oldest of three connections without a request"
    );
    for stream in &mut others {
        assert_eq!(send_and_read(stream).await.status, 200);
    }
    let mut trusted = Vec::new();
    for _ in 0..10 {
        trusted.push(from([127, 0, 0, 9], &edge).await);
    }
    for stream in &mut trusted {
        assert_eq!(send_and_read(stream).await.status, 200);
    }
}
