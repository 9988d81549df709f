//! Responses that are there before the request's body is: a client that still sends it reads them all the same.

use super::http2::{Client, request};
use super::scene::{BODY, PATIENCE, Scene, ask, one, post, rest};
use http::Method;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// Sends its body after the response may have come, and meets no reset.
#[tokio::test]
async fn over_http_2_a_body_may_come_after_its_refusal() {
    let scene = Scene::new().await;
    let edge = scene.edge("").await;
    let client = Client::plain(&edge).await;
    // With a length that is waited for, one that is not, and none.
    for (declared, pieces) in [(Some(4000), 4), (Some(400_000), 4), (None, 4)] {
        let length = declared.unwrap_or(40_000);
        let declared = declared.map(|length: usize| length.to_string());
        let fields: Vec<_> = declared.iter().map(|length| ("content-length", length.as_str())).collect();
        let mut wrong = request(Method::POST, "/v1/embeddings", &fields);
        wrong.headers_mut().insert("authorization", "Bearer wrong".parse().unwrap());
        let (answer, mut body) = client.begin(wrong, false).await.unwrap();
        for number in 1..=pieces {
            tokio::time::sleep(Duration::from_millis(60)).await;
            body.send_data(vec![b'x'; length / pieces].into(), number == pieces)
                .unwrap_or_else(|error| panic!("{length} bytes, piece {number}: {error}"));
        }
        let reset = std::future::poll_fn(|context| body.poll_reset(context));
        assert!(tokio::time::timeout(Duration::from_millis(100), reset).await.is_err(), "{length} bytes");
        let answer = tokio::time::timeout(PATIENCE, answer).await.expect("an answer").unwrap();
        assert_eq!(answer.status(), 401, "{length} bytes");
    }
    assert_eq!(client.post(BODY).await.unwrap().head.status(), 200);
}

/// What a client of HTTP/1.1 still sends must not reset the connection under the response.
#[tokio::test]
async fn over_http_1_a_refusal_is_read_by_a_client_that_goes_on_sending() {
    let scene = Scene::new().await;
    let edge = scene.edge("").await;
    let junk = "x".repeat(300_000);
    let wrong = post("", &junk).replace("Bearer k", "Bearer wrong");
    let chunked = post("", "").replace("content-length: 0", "transfer-encoding: chunked");
    for (what, request, status) in [
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
        let answer = rest(&mut reads).await;
        assert_eq!(answer.status, status, "{what}: {answer:?}");
        assert!(!answer.body.contains("broken:"), "{what}: {answer:?}");
        sending.abort();
    }
    assert_eq!(ask(&mut edge.connect().await).await.status, 200);
    // One whose body is small keeps its connection.
    let mut stream = edge.connect().await;
    stream.write_all(post("", BODY).replace("Bearer k", "Bearer wrong").as_bytes()).await.unwrap();
    assert_eq!(one(&mut stream).await.status, 401);
    assert_eq!(ask(&mut stream).await.status, 200);
}

/// With the client that most people have, where it is installed.
#[tokio::test]
async fn curl_reads_a_refusal_over_http_2() {
    let scene = Scene::new().await;
    let edge = scene.edge("").await;
    let body = scene.dir.path().join("body");
    for bytes in [100, 60_000, 3_000_000] {
        std::fs::write(&body, "x".repeat(bytes)).unwrap();
        let mut curl = tokio::process::Command::new("curl");
        curl.args(["-sS", "--http2-prior-knowledge", "-o", "-", "-w", "%{http_code}"])
            .args(["-H", "authorization: Bearer wrong", "-H", "expect:", "--data-binary"])
            .arg(format!("@{}", body.display()))
            .arg(format!("http://{}/v1/embeddings", edge.address));
        let Ok(ended) = curl.output().await else { return };
        let told = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.success(), "{bytes} bytes: {told}");
        assert!(String::from_utf8_lossy(&ended.stdout).ends_with("401"), "{bytes} bytes: {ended:?}");
    }
}
