//! An answer that is not one is a failure in the report, whatever its status says.

use std::future::pending;
use std::net::SocketAddr;

use crate::server::{answer, options, rows, serve};
use loadtest::answer::Rubbish;
use loadtest::client::Failure;
use loadtest::run;
use replica_core::wire::error::ErrorCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Ten requests with two inputs each; all of them are to fail for this one reason.
async fn check(address: SocketAddr, expected: Failure) {
    let mut options = options(address, "1000", "10ms");
    options.inputs = 2;
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
