//! Invalid responses are failures in the report, even with status 200.

use std::future::pending;
use std::net::SocketAddr;

use crate::server::{CapturedRequest, options, respond, rows, serve, to};
use loadtest::exchange::RequestFailure;
use loadtest::response::ResponseDefect;
use loadtest::{Options, RawOptions, run};
use replica_api::error::ErrorCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Sends ten requests with two inputs each; all must fail with this cause.
async fn check(address: SocketAddr, expected: RequestFailure) {
    let mut options = options(address, "1000", "10ms");
    options.tasks[0].workload.inputs = 2;
    let report = run(options, |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    let failures: Vec<_> = total.failures().map(|(cause, tally)| (cause, tally.count)).collect();
    assert_eq!(failures, [(expected, 10)], "{}", report.table());
    assert!(report.table().contains(&format!("failed: 10 × {expected}")), "{}", report.table());
}

#[tokio::test]
async fn an_invalid_body_with_status_200_is_a_failure() {
    let valid_response = rows(&[&[0.6, 0.8], &[1.0, 0.0]]);
    for (body, expected) in [
        (rows(&[&[0.6, 0.8]]), ResponseDefect::WrongCount),
        (rows(&[&[0.6, 0.8], &[1.0]]), ResponseDefect::WrongDimensions),
        (valid_response.replace("\"index\":1", "\"index\":0"), ResponseDefect::WrongOrder),
        (rows(&[&[0.6, f32::NAN], &[1.0, 0.0]]), ResponseDefect::NotFinite),
        (valid_response.replace("1.0", "NaN"), ResponseDefect::NotJson),
        (valid_response[..valid_response.len() / 2].to_owned(), ResponseDefect::NotJson),
        ("{\"object\":\"list\"}".to_owned(), ResponseDefect::WrongShape),
    ] {
        let address = serve(move |_| std::future::ready(respond(200, "a/b", body.clone()))).await;
        check(address, RequestFailure::InvalidResponse(expected)).await;
    }
}

#[tokio::test]
async fn a_row_of_another_length_than_earlier_ones_is_a_failure() {
    let address = serve(|arrived| {
        let row: &[f32] = if arrived.number == 0 { &[0.6, 0.8] } else { &[1.0] };
        std::future::ready(respond(200, "a/b", rows(&[row])))
    })
    .await;
    let report = run(options(address, "100", "50ms"), |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    let wrong = RequestFailure::InvalidResponse(ResponseDefect::WrongDimensions);
    assert_eq!((total.ok(), total.outcomes[&Err(wrong)].count), (1, 4), "{}", report.table());
}

#[tokio::test]
async fn invalid_http_is_a_failure() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                if connection.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                    let greeting = b"SSH-2.0-OpenSSH_9.2\r\n";
                    connection.write_all(greeting).await.expect("the client is still there");
                }
            });
        }
    });
    check(address, RequestFailure::InvalidResponse(ResponseDefect::NotHttp)).await;
}

/// Valid rows of another model.
#[tokio::test]
async fn unexpected_vectors_are_a_failure() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("expected.jsonl");
    let line = |text: &str, row: &str| format!("{{\"text\":\"{text}\",\"embedding\":{row}}}\n");
    std::fs::write(&file, line("a", "[0.6,0.8]") + &line("b", "[1.0,0.0]")).expect("a file");
    let address = serve(|arrived: CapturedRequest| {
        let row: &[f32] = if arrived.body["input"][0] == "a" { &[0.61, 0.79] } else { &[0.0, 1.0] };
        std::future::ready(respond(200, "a/b", rows(&[row])))
    })
    .await;
    let raw = RawOptions {
        expect: Some(file),
        rate: "100".to_owned(),
        duration: Some("100ms".to_owned()),
        ..to(address)
    };
    let options = Options::check(raw).expect("the options are valid");
    let report = run(options, |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    let wrong = RequestFailure::InvalidResponse(ResponseDefect::Unexpected);
    assert_eq!((total.ok(), total.outcomes[&Err(wrong)].count), (5, 5), "{}", report.table());
}

#[tokio::test]
async fn a_rerank_without_a_score_for_each_document_is_a_failure() {
    for (body, expected) in [
        (r#"{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.1}]}"#, None),
        (r#"{"results":[{"index":1,"relevance_score":0.9}]}"#, Some(ResponseDefect::WrongCount)),
        (
            r#"{"results":[{"index":1,"relevance_score":null},{"index":0,"relevance_score":0.1}]}"#,
            Some(ResponseDefect::NotFinite),
        ),
    ] {
        let address = serve(move |arrived: CapturedRequest| {
            assert_eq!(
                (&*arrived.path, arrived.body["documents"].as_array().map(Vec::len)),
                ("/v1/rerank", Some(2))
            );
            std::future::ready(respond(200, "a/b", body))
        })
        .await;
        let raw = RawOptions {
            workload: "rerank".to_owned(),
            documents: Some(2),
            rate: "100".to_owned(),
            duration: Some("50ms".to_owned()),
            ..to(address)
        };
        let options = Options::check(raw).expect("the options are valid");
        let report = run(options, |_| {}, pending()).await.expect("the server listens");
        let failures: Vec<_> = report.record.total().failures().map(|(cause, _)| cause).collect();
        assert_eq!(
            failures,
            expected.map(RequestFailure::InvalidResponse).into_iter().collect::<Vec<_>>(),
            "{}",
            report.table()
        );
    }
}

#[tokio::test]
async fn an_error_response_is_counted_by_status_and_code() {
    let address = serve(|_| std::future::ready(respond(404, "a/b", "{}"))).await;
    check(address, RequestFailure::ErrorStatus { status: 404, code: None }).await;

    let address = serve(|_| {
        let mut rejection = respond(503, "a/b", "{}");
        rejection.headers_mut().insert("x-meridian-error", "not_ready".try_into().expect("a word"));
        std::future::ready(rejection)
    })
    .await;
    check(address, RequestFailure::ErrorStatus { status: 503, code: Some(ErrorCode::NotReady) }).await;
}

#[tokio::test]
async fn a_connection_closed_within_the_response_is_a_failure() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                if connection.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                    let truncated = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"data\":[";
                    connection.write_all(truncated).await.expect("the client is still there");
                }
            });
        }
    });
    check(address, RequestFailure::ConnectionClosed).await;
}
