//! Bodies that are expensive to parse block no other client, and count against the rate limit.

use super::fixture::{BODY, Edge, Fixture, post, read_until_closed, send_and_read};
use super::gzip::packed_by;
use flate2::Compression;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

/// Returns a body of `bytes` whose keys are written in escapes, so that each must be decoded.
fn escaped_keys(bytes: usize) -> String {
    let key = r#""\u006d\u006f\u0064\u0065\u006b":1,"#;
    format!("{{{}\"model\":\"anywhere\",\"input\":\"x\"}}", key.repeat(bytes / key.len()))
}

/// Sends a body, compressed or not; returns the time of its response, and its status.
async fn hostile(edge: &Edge, body: &[u8], packed: bool) -> (Duration, u16) {
    let begun = Instant::now();
    let fields =
        if packed { "connection: close\r\ncontent-encoding: gzip\r\n" } else { "connection: close\r\n" };
    let head = post(fields, "").replace("content-length: 0", &format!("content-length: {}", body.len()));
    let mut stream = edge.connect().await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    (begun.elapsed(), read_until_closed(&mut stream).await.status)
}

/// The gateway and its clients run on one thread, so blocking it blocks all of them.
#[tokio::test]
async fn a_client_is_served_while_expensive_bodies_are_parsed() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let dear = escaped_keys(31 << 20);
    let bomb = packed_by(Compression::best(), dear.as_bytes());
    for (body, packed) in [(dear.as_bytes(), false), (&bomb, true)] {
        // A connection for each round, because the last request of a round is cancelled.
        let mut good = edge.connect().await;
        assert_eq!(send_and_read(&mut good).await.status, 200);
        let attack = async {
            let mut hostile: Vec<_> = (0..3).map(|_| Box::pin(hostile(&edge, body, packed))).collect();
            let mut statuses = Vec::new();
            for one in &mut hostile {
                statuses.push(one.await.1);
            }
            statuses
        };
        let (mut longest, begun) = (Duration::ZERO, Instant::now());
        let beside = async {
            loop {
                let begun = Instant::now();
                assert_eq!(send_and_read(&mut good).await.status, 200);
                longest = longest.max(begun.elapsed());
            }
        };
        let statuses = tokio::select! {
            statuses = attack => statuses,
            () = beside => unreachable!(),
        };
        let expected = if packed { 413 } else { 200 };
        assert_eq!(statuses, [expected; 3], "packed: {packed}");
        // Three in a row: a single one that blocked the thread would take a third of the time. On a busy machine
        // everything takes longer.
        let bound = Duration::from_millis(300).max(begun.elapsed() / 8);
        assert!(
            longest < bound,
            "packed: {packed}: the other client waited {longest:?} of {:?}",
            begun.elapsed()
        );
    }
}

#[tokio::test]
async fn bytes_processed_before_a_rejection_count_against_the_rate_limit() {
    let fixture = Fixture::new().await;
    let limits = "limits = { tokens_per_minute = 1000000 }\n";
    std::fs::write(
        fixture.dir.path().join("tenants.toml"),
        format!("[[tenant]]\nname = 'test'\nkey_file = 'key'\n{limits}"),
    )
    .unwrap();
    let edge = fixture.edge("").await;
    // Invalid JSON at the end, which is found after all of it was read: 8 MiB, half a million tokens by the minimum
    // estimate.
    let wrong = format!("{}x", escaped_keys(8 << 20));
    let packed = packed_by(Compression::fast(), wrong.as_bytes());
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(hostile(&edge, &packed, true).await.1);
    }
    assert!(statuses.starts_with(&[400, 400]) && statuses.contains(&429), "{statuses:?}");
    let response = send_and_read(&mut edge.connect().await).await;
    assert_eq!((response.status, response.code()), (429, "rate_limit_exceeded"), "{response:?}");
    assert!(response.body.contains("tokens a minute"), "{response:?}");
    assert_eq!(fixture.region.requests(), 0, "{BODY}");
}
