//! Bodies at the size limit, above it, deeply nested, and malformed.

use super::fixture::{BODY, Fixture, Mode, post, read_response};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Documented limit.
const BODY_BYTES_MAX: usize = 32 << 20;

fn of_size(bytes: usize) -> String {
    BODY.replace("\"x\"", &format!("\"{}\"", "x".repeat(bytes - BODY.len() + 1)))
}

#[tokio::test]
async fn a_body_of_32_mib_is_accepted_and_one_byte_more_rejected() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut stream = edge.connect().await;
    stream.write_all(post("", &of_size(BODY_BYTES_MAX)).as_bytes()).await.unwrap();
    assert_eq!(read_response(&mut stream).await.json()["bytes"], BODY_BYTES_MAX);
    let response = edge.send_bytes(post("", &of_size(BODY_BYTES_MAX + 1)).as_bytes()).await;
    assert_eq!((response.status, response.code()), (413, "body_too_large"), "{response:?}");
    // Without a declared length, the bytes are counted.
    let body = of_size(BODY_BYTES_MAX + 1);
    let head = post("", "").replace("content-length: 0", "transfer-encoding: chunked");
    let response = edge.send_bytes(format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).as_bytes()).await;
    assert_eq!((response.status, response.code()), (413, "body_too_large"), "{response:?}");
}

#[tokio::test]
async fn a_response_of_64_mib_is_forwarded_completely() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    fixture.region.mode.send_replace(Mode::Responds(64 << 20));
    let mut stream = edge.connect().await;
    stream.write_all(post("connection: close\r\n", BODY).as_bytes()).await.unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    let begin = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    assert_eq!(all.len() - begin, 64 << 20);
}

#[tokio::test]
async fn an_invalid_body_is_a_400_that_keeps_the_connection() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut stream = edge.connect().await;
    let deep =
        format!("{{\"model\": \"anywhere\", \"input\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let unclosed = "{\"a\":".repeat(10_000);
    let cases = [
        (deep.as_str(), "invalid_json"),
        (&unclosed, "invalid_json"),
        (r#"{"model": 7, "input": "x"}"#, "invalid_value"),
        (r#"{"model": null, "input": "x"}"#, "invalid_value"),
        (r#"{"model": ["anywhere"], "input": "x"}"#, "invalid_value"),
        (r#"{"model": "anywhere", "model": "anywhere", "input": "x"}"#, "invalid_value"),
        (r#"{"model": "anywhere\ud800", "input": "x"}"#, "invalid_json"),
        ("\u{feff}{}", "invalid_json"),
        ("", "invalid_json"),
        ("null", "invalid_json"),
    ];
    for (body, code) in cases {
        stream.write_all(post("", body).as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        let shown: String = body.chars().take(60).collect();
        assert_eq!((response.status, response.code()), (400, code), "{shown}: {response:?}");
        assert_eq!(response.json()["error"]["code"], json!(code));
        assert_eq!(response.header("connection"), "keep-alive");
    }
    assert_eq!(fixture.region.requests(), 0);
}
