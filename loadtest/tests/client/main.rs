//! Client against scripted servers: results, retries, hedging, cancellation and errors.

#![expect(clippy::unwrap_used, reason = "an unexpected result fails the test")]

mod jobs;
mod protocols;
mod server;

use std::time::{Duration, Instant};

use loadtest::client::split::RequestLimits;
use loadtest::client::{
    ClientError, DecodeError, EmbedOptions, EmbeddedVectors, FailedRequest, HttpAttemptError,
    OperationProgress, Preference, ScoreOptions,
};
use serde_json::{Value, json};

use crate::server::{Reaction, Server, client, embeddings};

fn texts(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("text {number}")).collect()
}

/// Ten texts per request and a short backoff.
fn fast_retries() -> Preference {
    let mut preference = Preference {
        request: RequestLimits { texts: 10, ..Preference::default().request },
        ..Preference::default()
    };
    preference.retries.backoff_first = Duration::from_millis(2);
    preference
}

async fn embed(
    client: &loadtest::client::Client,
    count: usize,
    preference: &Preference,
) -> Result<EmbeddedVectors, ClientError> {
    let options = EmbedOptions { model: "m".to_owned(), ..EmbedOptions::default() };
    client.embed(&texts(count), &options, preference, &mut |_| {}).await
}

/// Checks that all vectors are present and in order; the vector of a text is its number and 1.
fn in_order(embedded: &EmbeddedVectors, count: usize) {
    assert_eq!(embedded.dimensions, 2);
    let expected: Vec<f32> = (0..count).flat_map(|number| [number as f32, 1.0]).collect();
    assert_eq!(embedded.values, expected);
}

#[tokio::test]
async fn vectors_are_in_the_order_of_the_texts_and_progress_is_reported() {
    let server = Server::start(|_, _| Reaction::Respond).await;
    let options = EmbedOptions { model: "m".to_owned(), ..EmbedOptions::default() };
    let mut reported = Vec::new();
    let mut listener = |progress: OperationProgress| reported.push(progress);
    let embedded =
        server.client().embed(&texts(995), &options, &fast_retries(), &mut listener).await.unwrap();
    in_order(&embedded, 995);
    assert_eq!((embedded.model.as_str(), embedded.total_tokens), ("m", 995));
    assert_eq!((embedded.run.requests.len(), server.request_count()), (100, 100));
    assert!(embedded.run.requests.iter().all(|request| request.attempts == 1));
    assert!(embedded.run.requests[0].headers.get("content-length").is_some());
    let last = OperationProgress { requests_done: 100, requests: 100, inputs_done: 995, inputs: 995 };
    assert_eq!((reported.len(), reported.last()), (100, Some(&last)));
}

#[tokio::test]
async fn scores_labels_and_bodies_are_in_order() {
    let server = Server::start(|_, _| Reaction::Respond).await;
    let (client, options, texts) = (server.client(), ScoreOptions::default(), texts(25));
    let (ranks, run) = client.rerank("q", &texts, &options, &fast_retries(), &mut |_| {}).await.unwrap();
    assert_eq!(run.requests.len(), 3);
    assert!(ranks.iter().all(|rank| rank.score == rank.index as f64), "each score is its text's");
    assert_eq!((ranks.len(), ranks[0].index), (25, 9), "in the server's order");
    let (classes, _) = client.classify(&texts, &options, &fast_retries(), &mut |_| {}).await.unwrap();
    let labels: Vec<&str> = classes.iter().map(|labels| labels[0].label.as_str()).collect();
    assert_eq!(labels, texts);
    let bodies: Vec<String> = (0..5).map(|number| json!({ "n": number }).to_string()).collect();
    let (responses, _) =
        client.batch(http::Method::POST, "/echo", &bodies, &fast_retries(), &mut |_| {}).await.unwrap();
    for (number, response) in responses.iter().enumerate() {
        let response: Value = serde_json::from_slice(response).unwrap();
        assert_eq!(response["echo"]["n"], number);
    }
}

#[tokio::test]
async fn transient_failures_are_retried() {
    for trouble in [Reaction::Reject(503, None), Reaction::Reject(429, Some(0)), Reaction::CloseConnection] {
        let server =
            Server::start(move |number, _| if number < 5 { trouble.clone() } else { Reaction::Respond })
                .await;
        let embedded = embed(&server.client(), 200, &fast_retries()).await.unwrap();
        in_order(&embedded, 200);
        let attempts: u32 = embedded.run.requests.iter().map(|request| request.attempts).sum();
        assert_eq!((attempts, server.request_count()), (25, 25));
    }
}

#[tokio::test]
async fn all_requests_to_an_overloaded_server_complete() {
    // The server accepts one request in four, so most requests are rejected more often than the retry limit.
    let busy =
        |number: usize| if number % 4 == 3 { Reaction::Respond } else { Reaction::Reject(503, Some(0)) };
    let server = Server::start(move |number, _| busy(number)).await;
    let mut preference = fast_retries();
    preference.retry_share = 3.0;
    let embedded = embed(&server.client(), 500, &preference).await.unwrap();
    in_order(&embedded, 500);
    assert!(embedded.run.requests.iter().any(|request| request.attempts > 6), "the precondition of the test");
}

#[tokio::test]
async fn retry_after_is_honoured() {
    let server = Server::start(
        |number, _| if number == 0 { Reaction::Reject(503, Some(1)) } else { Reaction::Respond },
    )
    .await;
    let start = Instant::now();
    in_order(&embed(&server.client(), 5, &fast_retries()).await.unwrap(), 5);
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_permanent_failure_is_an_error_that_names_the_request() {
    let refuses = |status| {
        move |_: usize, body: &Value| {
            if body["input"][0] == "text 20" { Reaction::Reject(status, None) } else { Reaction::Respond }
        }
    };
    let server = Server::start(refuses(400)).await;
    let error = embed(&server.client(), 50, &fast_retries()).await.unwrap_err();
    let failure = HttpAttemptError::ErrorStatus {
        status: 400,
        message: "{\"error\":\"no\"}".to_owned(),
        retry_after: None,
    };
    let endpoint = format!("{}/", server.url);
    let request = FailedRequest { number: 2, inputs: 20..30, endpoint, attempts: 1 };
    assert_eq!(error, ClientError::Failed { request, failure });
    let server = Server::start(refuses(500)).await;
    let mut preference = fast_retries();
    preference.retries.retries_max = 2;
    let error = embed(&server.client(), 50, &preference).await.unwrap_err();
    assert!(matches!(&error, ClientError::Failed { request, .. } if request.attempts == 3), "{error}");
    assert!(error.to_string().contains("inputs 20..30"), "{error}");
}

#[tokio::test]
async fn an_invalid_response_is_an_error() {
    let valid_response =
        |texts: &Value| embeddings(texts.as_array().unwrap(), |_| vec![1.0, 2.0]).to_string();
    type Corruption = fn(String) -> String;
    let spoils: [(Corruption, DecodeError); 6] = [
        (|response| response.replacen("\"index\":3", "\"index\":4", 1), DecodeError::Index(4)),
        (
            |response| response.replacen("[1.0,2.0]", "[1.0]", 1),
            DecodeError::Dimensions { expected: 2, got: 1 },
        ),
        (|response| response.replacen("[1.0,2.0]", "[1.0,null]", 1), DecodeError::NotFinite),
        (
            |response| response.replacen("{\"embedding\":[1.0,2.0],\"index\":0}", "", 1).replace(",]", "]"),
            DecodeError::Count { expected: 10, got: 9 },
        ),
        (|response| response[..response.len() - 1].to_owned(), DecodeError::NotJson),
        (|_| "<html>".to_owned(), DecodeError::NotJson),
    ];
    for (spoil, expected) in spoils {
        let server = Server::start(move |_, body| {
            let response = valid_response(&body["input"]);
            Reaction::RespondWith(if body["input"][0] == "text 10" { spoil(response) } else { response })
        })
        .await;
        let mut preference = fast_retries();
        // Sequentially, so that the length of the rows is known from the first request.
        preference.in_flight_max = 1;
        match embed(&server.client(), 30, &preference).await {
            Err(ClientError::InvalidResponse { request, error }) => {
                assert_eq!((request.number, error, server.request_count()), (1, expected, 2));
            }
            other => panic!("{expected:?}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_late_request_is_hedged_within_the_budget() {
    // A hundred responses pay for two hedges. The request after the first hanging one is its hedge.
    let hangs = |number| matches!(number, 100 | 102);
    let server =
        Server::start(move |number, _| if hangs(number) { Reaction::Hang } else { Reaction::Respond }).await;
    let mut preference = fast_retries();
    preference.in_flight_max = 1;
    preference.hedge_after = Some(Duration::from_millis(20));
    let embedded = embed(&server.client(), 1100, &preference).await.unwrap();
    in_order(&embedded, 1100);
    let hedged: Vec<usize> = (0..110).filter(|at| embedded.run.requests[*at].attempts == 2).collect();
    assert_eq!(server.request_count(), 112, "{hedged:?}");
    assert_eq!(server.hanging_count(), 0, "the losers were aborted");
}

#[tokio::test]
async fn without_a_budget_no_request_is_hedged_and_the_timeout_applies() {
    let server = Server::start(|_, _| Reaction::Hang).await;
    let mut preference = fast_retries();
    preference.hedge_after = Some(Duration::from_millis(1));
    preference.total_timeout = Some(Duration::from_millis(100));
    let error = embed(&server.client(), 5, &preference).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { done: 0, requests: 1, .. }), "{error}");
    assert_eq!(server.request_count(), 1);
}

#[tokio::test]
async fn an_attempt_that_times_out_is_retried() {
    let server =
        Server::start(|number, _| if number == 0 { Reaction::Hang } else { Reaction::Respond }).await;
    let mut preference = fast_retries();
    preference.attempt_timeout = Duration::from_millis(100);
    let embedded = embed(&server.client(), 5, &preference).await.unwrap();
    assert_eq!(embedded.run.requests[0].attempts, 2);
}

#[tokio::test]
async fn dropping_the_future_aborts_all_requests() {
    let server = Server::start(|_, _| Reaction::Hang).await;
    let client = server.client();
    let preference = fast_retries();
    let mut operation = Box::pin(embed(&client, 300, &preference));
    while server.hanging_count() < 30 {
        tokio::select! {
            biased;
            ended = &mut operation => panic!("{ended:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    drop(operation);
    while server.hanging_count() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn other_endpoints_replace_an_unreachable_one() {
    let gone = Server::start(|_, _| Reaction::Respond).await;
    let (bad, spare) = (
        Server::start(|_, _| Reaction::Reject(500, None)).await,
        Server::start(|_, _| Reaction::Respond).await,
    );
    gone.stop().await;
    let client = client(&[(&gone, 1.0), (&bad, 1.0), (&spare, 0.0)]);
    let mut preference = fast_retries();
    preference.in_flight_max = 4;
    let embedded = embed(&client, 200, &preference).await.unwrap();
    in_order(&embedded, 200);
    assert!(
        bad.request_count() <= 5 && spare.request_count() == 20,
        "{} and {}",
        bad.request_count(),
        spare.request_count()
    );
}

#[tokio::test]
async fn operations_of_a_client_alternate_between_endpoints_and_share_ejections() {
    let gone = Server::start(|_, _| Reaction::Respond).await;
    let (one, other) =
        (Server::start(|_, _| Reaction::Respond).await, Server::start(|_, _| Reaction::Respond).await);
    gone.stop().await;
    let client = client(&[(&gone, 1.0), (&one, 1.0), (&other, 1.0)]);
    let mut retried = 0;
    for _ in 0..20 {
        let embedded = embed(&client, 1, &fast_retries()).await.unwrap();
        retried += u32::from(embedded.run.requests[0].attempts > 1);
    }
    assert_eq!(retried, 1, "only the first operation tries the unreachable endpoint within its ejection");
    let counts = [one.request_count(), other.request_count()];
    assert!(counts.iter().all(|count| (9..=11).contains(count)), "{counts:?}");
}

#[tokio::test]
async fn a_dropped_operation_does_not_count_as_load_of_its_endpoint() {
    let hangs = Server::start(|number, _| if number == 0 { Reaction::Hang } else { Reaction::Respond }).await;
    let other = Server::start(|_, _| Reaction::Respond).await;
    let client = client(&[(&hangs, 1.0), (&other, 1.0)]);
    let preference = fast_retries();
    let mut operation = Box::pin(embed(&client, 1, &preference));
    while hangs.hanging_count() == 0 {
        tokio::select! {
            biased;
            ended = &mut operation => panic!("{ended:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    embed(&client, 10, &preference).await.unwrap();
    embed(&client, 10, &preference).await.unwrap();
    assert_eq!(
        (hangs.request_count(), other.request_count()),
        (1, 2),
        "an endpoint with a request in flight"
    );
    drop(operation);
    for _ in 0..4 {
        embed(&client, 10, &preference).await.unwrap();
    }
    assert_eq!((hangs.request_count(), other.request_count()), (3, 4));
}

#[tokio::test]
async fn invalid_arguments_are_rejected_before_anything_is_sent() {
    let server = Server::start(|_, _| Reaction::Respond).await;
    let error = Preference { in_flight_max: 0, retry_share: -1.0, ..fast_retries() };
    match embed(&server.client(), 5, &error).await {
        Err(ClientError::Invalid(problems)) => assert_eq!(problems.len(), 2, "{problems:?}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(embed(&server.client(), 0, &fast_retries()).await, Err(ClientError::Invalid(_))));
    assert_eq!(server.request_count(), 0);
}
