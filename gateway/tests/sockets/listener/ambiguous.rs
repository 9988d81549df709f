//! Ambiguous requests: repeated headers, and chunks in pieces.

use super::fixture::{BODY, Fixture, post, read_response, send_and_read};
use super::http2::{Client, request};
use http::Method;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn a_repeated_authentication_or_framing_header_is_rejected() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut stream = edge.connect().await;
    let client = Client::plain(&edge).await;
    for (name, first, second) in [
        ("authorization", "Bearer k", "Bearer other"),
        ("authorization", "Bearer other", "Bearer k"),
        ("authorization", "Bearer k", "Bearer k"),
        ("api-key", "k", "other"),
        ("x-api-key", "k", "other"),
        ("content-type", "application/json", "text/plain"),
        ("idempotency-key", "a", "b"),
    ] {
        let twice = format!("{name}: {first}\r\n{name}: {second}\r\n");
        let request_1 = post(&twice, BODY);
        // The request has an authorization header already.
        let request_1 = match name {
            "authorization" => request_1.replacen("authorization: Bearer k\r\n", "", 1),
            _ => request_1,
        };
        stream.write_all(request_1.as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        assert_eq!((response.status, response.code()), (400, "invalid_header"), "{twice:?}: {response:?}");
        assert!(response.body.contains(name), "{response:?}");

        let fields: &[_] = match name {
            "authorization" => &[(name, second)],
            _ => &[(name, first), (name, second)],
        };
        // Every request of the fixture has one already.
        let response =
            client.request(request(Method::POST, "/v1/embeddings", fields), BODY.into()).await.unwrap();
        assert_eq!(response.head.status().as_u16(), 400, "{twice:?}");
    }
    assert_eq!(fixture.region.requests(), 0);
    assert_eq!(send_and_read(&mut stream).await.status, 200, "the connection stays open");
}

#[tokio::test]
async fn malformed_chunks_are_rejected_for_every_segmentation() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let head = "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ntransfer-encoding: chunked\r\n\r\n";
    let (start, end) = BODY.split_at(5);
    let wrong = format!("5;x\n\r\n{start}\r\n1e\r\n{end}\r\n0\r\n\r\n");
    for cut in 0..6 {
        let mut stream = edge.connect().await;
        stream.write_all(format!("{head}{}", &wrong[..cut]).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        stream.write_all(&wrong.as_bytes()[cut..]).await.unwrap();
        let response = super::fixture::read_until_closed(&mut stream).await;
        assert_eq!(
            (response.status, response.code()),
            (400, "malformed_request"),
            "cut at {cut}: {response:?}"
        );
    }
    assert_eq!(fixture.region.requests(), 0);
    // Valid chunks, in pieces, and followed by another request.
    let right = format!("5;x=y\r\n{start}\r\n1e\r\n{end}\r\n0\r\nx-trailer: y\r\n\r\n");
    let all = format!("{head}{right}{}", post("", BODY));
    let mut stream = edge.connect().await;
    for piece in all.as_bytes().chunks(7) {
        stream.write_all(piece).await.unwrap();
        tokio::task::yield_now().await;
    }
    for _ in 0..2 {
        assert_eq!(read_response(&mut stream).await.json()["bytes"], 35);
    }
}
