//! The client against servers that do as they are told: what it gives back, and what it does about trouble.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod protocols;
mod server;

use std::time::{Duration, Instant};

use loadtest::client::split::RequestLimits;
use loadtest::client::{
    ClientError, EmbedOptions, Embedded, Failure, Preference, Progress, RequestName, ScoreOptions, Wrong,
};
use serde_json::{Value, json};

use crate::server::{Does, Server, client, embeddings};

fn texts(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("text {number}")).collect()
}

/// Ten texts a request, and little patience.
fn brisk() -> Preference {
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
) -> Result<Embedded, ClientError> {
    let options = EmbedOptions { model: "m".to_owned(), ..EmbedOptions::default() };
    client.embed(&texts(count), &options, preference, &mut |_| {}).await
}

/// The vector of each text is its number and one, and all are there in order.
fn in_order(embedded: &Embedded, count: usize) {
    assert_eq!(embedded.dimensions, 2);
    let expected: Vec<f32> = (0..count).flat_map(|number| [number as f32, 1.0]).collect();
    assert_eq!(embedded.values, expected);
}

#[tokio::test]
async fn vectors_come_in_the_order_of_the_texts_and_progress_is_told() {
    let server = Server::start(|_, _| Does::Answer).await;
    let options = EmbedOptions { model: "m".to_owned(), ..EmbedOptions::default() };
    let mut heard = Vec::new();
    let mut listen = |progress: Progress| heard.push(progress);
    let embedded = server.client().embed(&texts(995), &options, &brisk(), &mut listen).await.unwrap();
    in_order(&embedded, 995);
    assert_eq!((embedded.model.as_str(), embedded.total_tokens), ("m", 995));
    assert_eq!((embedded.run.requests.len(), server.asked()), (100, 100));
    assert!(embedded.run.requests.iter().all(|request| request.attempts == 1));
    assert!(embedded.run.requests[0].headers.get("content-length").is_some());
    let last = Progress { requests_done: 100, requests: 100, inputs_done: 995, inputs: 995 };
    assert_eq!((heard.len(), heard.last()), (100, Some(&last)));
}

#[tokio::test]
async fn scores_labels_and_answers_come_in_order_too() {
    let server = Server::start(|_, _| Does::Answer).await;
    let (client, options, texts) = (server.client(), ScoreOptions::default(), texts(25));
    let (ranks, run) = client.rerank("q", &texts, &options, &brisk(), &mut |_| {}).await.unwrap();
    assert_eq!(run.requests.len(), 3);
    assert!(ranks.iter().all(|rank| rank.score == rank.index as f64), "each score is its text's");
    assert_eq!((ranks.len(), ranks[0].index), (25, 9), "as the server ranked them");
    let (classes, _) = client.classify(&texts, &options, &brisk(), &mut |_| {}).await.unwrap();
    let labels: Vec<&str> = classes.iter().map(|labels| labels[0].label.as_str()).collect();
    assert_eq!(labels, texts);
    let bodies: Vec<String> = (0..5).map(|number| json!({ "n": number }).to_string()).collect();
    let (answers, _) =
        client.batch(http::Method::POST, "/echo", &bodies, &brisk(), &mut |_| {}).await.unwrap();
    for (number, answer) in answers.iter().enumerate() {
        let answer: Value = serde_json::from_slice(answer).unwrap();
        assert_eq!(answer["echo"]["n"], number);
    }
}

#[tokio::test]
async fn what_passes_is_tried_again() {
    for trouble in [Does::Refuse(503, None), Does::Refuse(429, Some(0)), Does::BreakOff] {
        let server =
            Server::start(move |number, _| if number < 5 { trouble.clone() } else { Does::Answer }).await;
        let embedded = embed(&server.client(), 200, &brisk()).await.unwrap();
        in_order(&embedded, 200);
        let attempts: u32 = embedded.run.requests.iter().map(|request| request.attempts).sum();
        assert_eq!((attempts, server.asked()), (25, 25));
    }
}

#[tokio::test]
async fn a_busy_server_gets_to_everything_in_the_end() {
    // It takes one of four, so that most are refused more often than anything else may fail.
    let busy = |number: usize| if number % 4 == 3 { Does::Answer } else { Does::Refuse(503, Some(0)) };
    let server = Server::start(move |number, _| busy(number)).await;
    let mut preference = brisk();
    preference.retry_share = 3.0;
    let embedded = embed(&server.client(), 500, &preference).await.unwrap();
    in_order(&embedded, 500);
    assert!(embedded.run.requests.iter().any(|request| request.attempts > 6), "else it proves nothing");
}

#[tokio::test]
async fn a_wish_to_wait_is_granted() {
    let server =
        Server::start(|number, _| if number == 0 { Does::Refuse(503, Some(1)) } else { Does::Answer }).await;
    let start = Instant::now();
    in_order(&embed(&server.client(), 5, &brisk()).await.unwrap(), 5);
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test]
async fn what_does_not_pass_is_an_error_that_names_the_request() {
    let refuses = |status| {
        move |_: usize, body: &Value| {
            if body["input"][0] == "text 20" { Does::Refuse(status, None) } else { Does::Answer }
        }
    };
    let server = Server::start(refuses(400)).await;
    let error = embed(&server.client(), 50, &brisk()).await.unwrap_err();
    let failure =
        Failure::Refused { status: 400, message: "{\"error\":\"no\"}".to_owned(), retry_after: None };
    let endpoint = format!("{}/", server.url);
    let request = RequestName { number: 2, inputs: 20..30, endpoint, attempts: 1 };
    assert_eq!(error, ClientError::Failed { request, failure });
    let server = Server::start(refuses(500)).await;
    let mut preference = brisk();
    preference.retries.retries_max = 2;
    let error = embed(&server.client(), 50, &preference).await.unwrap_err();
    assert!(matches!(&error, ClientError::Failed { request, .. } if request.attempts == 3), "{error}");
    assert!(error.to_string().contains("inputs 20..30"), "{error}");
}

#[tokio::test]
async fn rubbish_is_never_a_result() {
    let good = |texts: &Value| embeddings(texts.as_array().unwrap(), |_| vec![1.0, 2.0]).to_string();
    type Spoils = fn(String) -> String;
    let spoils: [(Spoils, Wrong); 6] = [
        (|answer| answer.replacen("\"index\":3", "\"index\":4", 1), Wrong::Index(4)),
        (|answer| answer.replacen("[1.0,2.0]", "[1.0]", 1), Wrong::Dimensions { wanted: 2, got: 1 }),
        (|answer| answer.replacen("[1.0,2.0]", "[1.0,null]", 1), Wrong::NotFinite),
        (
            |answer| answer.replacen("{\"embedding\":[1.0,2.0],\"index\":0}", "", 1).replace(",]", "]"),
            Wrong::Count { wanted: 10, got: 9 },
        ),
        (|answer| answer[..answer.len() - 1].to_owned(), Wrong::NotJson),
        (|_| "<html>".to_owned(), Wrong::NotJson),
    ];
    for (spoil, expected) in spoils {
        let server = Server::start(move |_, body| {
            let answer = good(&body["input"]);
            Does::Say(if body["input"][0] == "text 10" { spoil(answer) } else { answer })
        })
        .await;
        let mut preference = brisk();
        // One after the other, so that the rows before it have said how long rows are.
        preference.in_flight_max = 1;
        match embed(&server.client(), 30, &preference).await {
            Err(ClientError::Wrong { request, wrong }) => {
                assert_eq!((request.number, wrong, server.asked()), (1, expected, 2));
            }
            other => panic!("{expected:?}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_late_request_is_raced_within_the_budget() {
    // After a hundred answers two hedges are paid for. The one after the first that hangs is its hedge.
    let hangs = |number| matches!(number, 100 | 102);
    let server = Server::start(move |number, _| if hangs(number) { Does::Hang } else { Does::Answer }).await;
    let mut preference = brisk();
    preference.in_flight_max = 1;
    preference.hedge_after = Some(Duration::from_millis(20));
    let embedded = embed(&server.client(), 1100, &preference).await.unwrap();
    in_order(&embedded, 1100);
    let hedged: Vec<usize> = (0..110).filter(|at| embedded.run.requests[*at].attempts == 2).collect();
    assert_eq!(server.asked(), 112, "{hedged:?}");
    assert_eq!(server.hung(), 0, "the losers were taken back");
}

#[tokio::test]
async fn without_a_budget_nothing_is_raced_and_time_runs_out() {
    let server = Server::start(|_, _| Does::Hang).await;
    let mut preference = brisk();
    preference.hedge_after = Some(Duration::from_millis(1));
    preference.total_timeout = Some(Duration::from_millis(100));
    let error = embed(&server.client(), 5, &preference).await.unwrap_err();
    assert!(matches!(error, ClientError::OutOfTime { done: 0, requests: 1, .. }), "{error}");
    assert_eq!(server.asked(), 1);
}

#[tokio::test]
async fn an_attempt_that_takes_too_long_is_made_again() {
    let server = Server::start(|number, _| if number == 0 { Does::Hang } else { Does::Answer }).await;
    let mut preference = brisk();
    preference.attempt_timeout = Duration::from_millis(100);
    let embedded = embed(&server.client(), 5, &preference).await.unwrap();
    assert_eq!(embedded.run.requests[0].attempts, 2);
}

#[tokio::test]
async fn who_drops_the_future_takes_everything_back() {
    let server = Server::start(|_, _| Does::Hang).await;
    let client = server.client();
    let preference = brisk();
    let mut operation = Box::pin(embed(&client, 300, &preference));
    while server.hung() < 30 {
        tokio::select! {
            biased;
            ended = &mut operation => panic!("{ended:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    drop(operation);
    while server.hung() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_endpoint_that_is_gone_is_stood_in_for() {
    let gone = Server::start(|_, _| Does::Answer).await;
    let (bad, spare) =
        (Server::start(|_, _| Does::Refuse(500, None)).await, Server::start(|_, _| Does::Answer).await);
    gone.stop().await;
    let client = client(&[(&gone, 1.0), (&bad, 1.0), (&spare, 0.0)]);
    let mut preference = brisk();
    preference.in_flight_max = 4;
    let embedded = embed(&client, 200, &preference).await.unwrap();
    in_order(&embedded, 200);
    assert!(bad.asked() <= 5 && spare.asked() == 20, "{} and {}", bad.asked(), spare.asked());
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused_before_anything_is_sent() {
    let server = Server::start(|_, _| Does::Answer).await;
    let wrong = Preference { in_flight_max: 0, retry_share: -1.0, ..brisk() };
    match embed(&server.client(), 5, &wrong).await {
        Err(ClientError::Invalid(problems)) => assert_eq!(problems.len(), 2, "{problems:?}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(embed(&server.client(), 0, &brisk()).await, Err(ClientError::Invalid(_))));
    assert_eq!(server.asked(), 0);
}
