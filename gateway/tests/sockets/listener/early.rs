//! Responses before the end of the request body: a client that is still sending reads them.

use super::fixture::{BODY, Fixture, TIMEOUT, post, read_response, read_until_closed, send_and_read};
use super::http2::{Client, request};
use http::Method;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// The client sends its body after the response may have arrived, without a reset.
#[tokio::test]
async fn over_http_2_a_body_may_arrive_after_its_rejection() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let client = Client::plain(&edge).await;
    // With a length that is read to its end, one that is not, and none.
    for (declared, pieces) in [(Some(4000), 4), (Some(400_000), 4), (None, 4)] {
        let length = declared.unwrap_or(40_000);
        let declared = declared.map(|length: usize| length.to_string());
        let fields: Vec<_> = declared.iter().map(|length| ("content-length", length.as_str())).collect();
        let mut wrong = request(Method::POST, "/v1/embeddings", &fields);
        wrong.headers_mut().insert("authorization", "Bearer wrong".parse().unwrap());
        let (response, mut body) = client.begin(wrong, false).await.unwrap();
        for number in 1..=pieces {
            tokio::time::sleep(Duration::from_millis(60)).await;
            body.send_data(vec![b'x'; length / pieces].into(), number == pieces)
                .unwrap_or_else(|error| panic!("{length} bytes, piece {number}: {error}"));
        }
        let reset = std::future::poll_fn(|context| body.poll_reset(context));
        assert!(tokio::time::timeout(Duration::from_millis(100), reset).await.is_err(), "{length} bytes");
        let response = tokio::time::timeout(TIMEOUT, response).await.expect("an answer").unwrap();
        assert_eq!(response.status(), 401, "{length} bytes");
    }
    assert_eq!(client.post(BODY).await.unwrap().head.status(), 200);
}

/// Bytes that an HTTP/1.1 client is still sending must not reset the connection before it reads the response.
#[tokio::test]
async fn over_http_1_a_client_that_is_still_sending_reads_the_rejection() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let junk = "x".repeat(300_000);
    let wrong = post("", &junk).replace("Bearer k", "Bearer wrong");
    let chunked = post("", "").replace("content-length: 0", "transfer-encoding: chunked");
    for (description, request, status) in [
        ("a wrong key", wrong, 401),
        ("wrong chunks", format!("{chunked}zz\r\n{junk}"), 400),
        ("a lone LF", format!("{chunked}5;x\n{junk}"), 400),
        ("a body that is too large", post("", "").replace("length: 0", "length: 99999999") + &junk, 413),
    ] {
        let (mut reads, mut writes) = edge.connect().await.into_split();
        let sending = tokio::spawn(async move {
            for piece in request.as_bytes().chunks(20_000) {
                writes.write_all(piece).await?;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            writes.shutdown().await
        });
        tokio::time::sleep(Duration::from_millis(120)).await;
        let response = read_until_closed(&mut reads).await;
        assert_eq!(response.status, status, "{description}: {response:?}");
        assert!(!response.body.contains("broken:"), "{description}: {response:?}");
        sending.abort();
    }
    assert_eq!(send_and_read(&mut edge.connect().await).await.status, 200);
    // A client with a small body keeps its connection.
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).replace("Bearer k", "Bearer wrong").as_bytes()).await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 401);
    assert_eq!(send_and_read(&mut stream).await.status, 200);
}

/// With the most widely used client, where it is installed.
#[tokio::test]
async fn curl_reads_a_rejection_over_http_2() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let body = fixture.dir.path().join("body");
    for bytes in [100, 60_000, 3_000_000] {
        std::fs::write(&body, "x".repeat(bytes)).unwrap();
        let mut curl = tokio::process::Command::new("curl");
        curl.args(["-sS", "--http2-prior-knowledge", "-o", "-", "-w", "%{http_code}"])
            .args(["-H", "authorization: Bearer wrong", "-H", "expect:", "--data-binary"])
            .arg(format!("@{}", body.display()))
            .arg(format!("http://{}/v1/embeddings", edge.address));
        let Ok(ended) = curl.output().await else { return };
        let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.success(), "{bytes} bytes: {stderr}");
        assert!(String::from_utf8_lossy(&ended.stdout).ends_with("401"), "{bytes} bytes: {ended:?}");
    }
}
