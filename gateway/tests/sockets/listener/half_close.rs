//! A client that closes its write side after its request still reads the response; the request of one that disconnects
//! is cancelled.

use super::fixture::{BODY, Fixture, Mode, TIMEOUT, certify, post, read_response, read_until_closed};
use super::tls;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn a_client_that_closed_its_write_side_gets_its_response() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let models = "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n".to_owned();
    for request in [post("", BODY), models, post("", BODY).replace("HTTP/1.1", "HTTP/1.0")] {
        let mut stream = edge.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let response = read_until_closed(&mut stream).await;
        assert_eq!(response.status, 200, "{request:?}: {response:?}");
        // The list of models may be written before the half-close is noticed.
        if request.starts_with("POST") {
            assert_eq!(response.header("connection"), "close", "{request:?}: {response:?}");
        }
    }
    // One that takes longer than the first probe of the client.
    fixture.region.mode.send_replace(Mode::Waits);
    let before = fixture.region.requests();
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    fixture.region.wait_for_requests(before + 1).await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(*fixture.region.cancelled.borrow(), 0, "its client still waits");
    fixture.region.go_on.send_replace(true);
    let mut response = read_response(&mut stream).await;
    while response.status == 100 {
        response = read_response(&mut stream).await;
    }
    assert_eq!((response.status, response.json()["bytes"].as_u64()), (200, Some(35)), "{response:?}");
}

#[tokio::test]
async fn a_request_is_cancelled_when_its_client_is_gone() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    fixture.region.mode.send_replace(Mode::Waits);
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    fixture.region.wait_for_requests(1).await;
    drop(stream);
    let mut cancelled = fixture.region.cancelled.subscribe();
    tokio::time::timeout(TIMEOUT, cancelled.wait_for(|count| *count == 1))
        .await
        .expect("it is found out")
        .unwrap();
}

#[tokio::test]
async fn so_does_one_over_tls() {
    let fixture = Fixture::new().await;
    let certificate = certify(fixture.dir.path());
    let edge = fixture.edge(tls::TLS).await;
    let mut stream = tls::connect(&edge, &certificate, &[b"http/1.1"]).await.unwrap();
    stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 200);
}
