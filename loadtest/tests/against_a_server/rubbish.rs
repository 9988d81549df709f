//! An answer that is not one is a failure in the report, whatever its status says.

use std::future::pending;
use std::net::SocketAddr;

use crate::server::{Arrived, answer, options, rows, serve, to};
use loadtest::answer::Rubbish;
use loadtest::exchange::Failure;
use loadtest::{Options, RawOptions, run};
use replica_core::wire::error::ErrorCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Ten requests with two inputs each; all of them are to fail for this one reason.
async fn check(address: SocketAddr, expected: Failure) {
    let mut options = options(address, "1000", "10ms");
    options.tasks[0].workload.inputs = 2;
    let report = run(options, |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    let failures: Vec<_> = total.failures().map(|(cause, tally)| (cause, tally.count)).collect();
    assert_eq!(failures, [(expected, 10)], "{}", report.table());
    assert!(report.table().contains(&format!("failed: 10 × {expected}")), "{}", report.table());
}

#[tokio::test]
async fn rubbish_with_status_200_is_a_failure() {
    let good = rows(&[&[0.6, 0.8], &[1.0, 0.0]]);
    for (body, expected) in [
        (rows(&[&[0.6, 0.8]]), Rubbish::WrongCount),
        (rows(&[&[0.6, 0.8], &[1.0]]), Rubbish::WrongDimensions),
        (good.replace("\"index\":1", "\"index\":0"), Rubbish::WrongOrder),
        (rows(&[&[0.6, f32::NAN], &[1.0, 0.0]]), Rubbish::NotFinite),
        (good.replace("1.0", "NaN"), Rubbish::NotJson),
        (good[..good.len() / 2].to_owned(), Rubbish::NotJson),
        ("{\"object\":\"list\"}".to_owned(), Rubbish::WrongShape),
    ] {
        let address = serve(move |_| std::future::ready(answer(200, "a/b", body.clone()))).await;
        check(address, Failure::Rubbish(expected)).await;
    }
}

#[tokio::test]
async fn an_answer_of_another_length_than_those_before_it_is_a_failure() {
    let address = serve(|arrived| {
        let row: &[f32] = if arrived.number == 0 { &[0.6, 0.8] } else { &[1.0] };
        std::future::ready(answer(200, "a/b", rows(&[row])))
    })
    .await;
    let report = run(options(address, "100", "50ms"), |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    let wrong = Failure::Rubbish(Rubbish::WrongDimensions);
    assert_eq!((total.ok(), total.outcomes[&Err(wrong)].count), (1, 4), "{}", report.table());
}

#[tokio::test]
async fn what_is_not_http_is_a_failure() {
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
    check(address, Failure::Rubbish(Rubbish::NotHttp)).await;
}

/// Rows that look well and are of another model.
#[tokio::test]
async fn rows_other_than_the_expected_ones_are_a_failure() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("expected.jsonl");
    let line = |text: &str, row: &str| format!("{{\"text\":\"{text}\",\"embedding\":{row}}}\n");
    std::fs::write(&file, line("a", "[0.6,0.8]") + &line("b", "[1.0,0.0]")).expect("a file");
    let address = serve(|arrived: Arrived| {
        let row: &[f32] = if arrived.body["input"][0] == "a" { &[0.61, 0.79] } else { &[0.0, 1.0] };
        std::future::ready(answer(200, "a/b", rows(&[row])))
    })
    .await;
    let raw = RawOptions {
        expect: Some(file),
        rate: "100".to_owned(),
        duration: Some("100ms".to_owned()),
        ..to(address)
    };
    let options = Options::check(raw).expect("these are good options");
    let report = run(options, |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    let wrong = Failure::Rubbish(Rubbish::Unexpected);
    assert_eq!((total.ok(), total.outcomes[&Err(wrong)].count), (5, 5), "{}", report.table());
}

#[tokio::test]
async fn a_rerank_without_a_score_for_each_document_is_a_failure() {
    for (body, expected) in [
        (r#"{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.1}]}"#, None),
        (r#"{"results":[{"index":1,"relevance_score":0.9}]}"#, Some(Rubbish::WrongCount)),
        (
            r#"{"results":[{"index":1,"relevance_score":null},{"index":0,"relevance_score":0.1}]}"#,
            Some(Rubbish::NotFinite),
        ),
    ] {
        let address = serve(move |arrived: Arrived| {
            assert_eq!(
                (&*arrived.path, arrived.body["documents"].as_array().map(Vec::len)),
                ("/v1/rerank", Some(2))
            );
            std::future::ready(answer(200, "a/b", body))
        })
        .await;
        let raw = RawOptions {
            workload: "rerank".to_owned(),
            documents: Some(2),
            rate: "100".to_owned(),
            duration: Some("50ms".to_owned()),
            ..to(address)
        };
        let options = Options::check(raw).expect("these are good options");
        let report = run(options, |_| {}, pending()).await.expect("the server listens");
        let failures: Vec<_> = report.record.total().failures().map(|(cause, _)| cause).collect();
        assert_eq!(
            failures,
            expected.map(Failure::Rubbish).into_iter().collect::<Vec<_>>(),
            "{}",
            report.table()
        );
    }
}

#[tokio::test]
async fn a_refusal_is_counted_by_its_status_and_code() {
    let address = serve(|_| std::future::ready(answer(404, "a/b", "{}"))).await;
    check(address, Failure::Refused { status: 404, code: None }).await;

    let address = serve(|_| {
        let mut refusal = answer(503, "a/b", "{}");
        refusal.headers_mut().insert("x-meridian-error", "not_ready".try_into().expect("a word"));
        std::future::ready(refusal)
    })
    .await;
    check(address, Failure::Refused { status: 503, code: Some(ErrorCode::NotReady) }).await;
}

#[tokio::test]
async fn a_connection_that_ends_within_the_answer_is_broken_off() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                if connection.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                    let cut_short = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"data\":[";
                    connection.write_all(cut_short).await.expect("the client is still there");
                }
            });
        }
    });
    check(address, Failure::BrokenOff).await;
}
