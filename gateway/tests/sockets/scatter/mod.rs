//! One request with very many inputs, split over three regions that respond like replicas: one correct response, for
//! any failure.

mod fixture;
mod rejected;
mod replica;

use fixture::{AMERICA, EUROPE, Fixture, JAPAN, Script, WIDTH};
use gateway_core::scatter::INPUTS_MAX;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns `count` different texts.
fn texts(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("text number {number}, with \"quotes\", [brackets] and a \\")).collect()
}

/// Returns the response of one replica without limits.
fn unsplit_response(path: &str, body: &Value) -> Value {
    let response = replica::response(path, body.to_string().as_bytes(), usize::MAX, WIDTH);
    assert_eq!(response.status, 200, "{}", String::from_utf8_lossy(&response.body));
    serde_json::from_slice(&response.body).unwrap()
}

fn embeddings(inputs: usize) -> Value {
    json!({"model": "anywhere", "input": texts(inputs)})
}

// The limits in the core, which does not depend on the replica crate, equal the replica's.
const _: () = assert!(
    4 * gateway_core::scatter::split::SUB_REQUEST_TOKENS_MAX <= replica_api::limits::MAX_REQUEST_TOKENS
);

/// Invariant 3, Order and identity.
#[tokio::test]
async fn every_dialect_gets_the_response_of_one_replica() {
    let fixture = Fixture::healthy().await;
    let texts = texts(3_000);
    let documents: Vec<Value> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| if n % 3 == 0 { json!({"text": text, "index": n}) } else { json!(text) })
        .collect();
    let tokens: Vec<Vec<usize>> = (0..3_000).map(|n| (n..n + 20).collect()).collect();
    let pairs: Vec<Value> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| if n % 2 == 0 { json!([text]) } else { json!([text, "b"]) })
        .collect();
    for (path, body) in [
        ("/v1/embeddings", json!({"input": texts, "user": "u"})),
        ("/v1/embeddings", json!({"input": texts, "encoding_format": "base64"})),
        ("/v1/embeddings", json!({"input": tokens})),
        ("/embed", json!({"inputs": texts, "truncate": true})),
        ("/predict", json!({"inputs": pairs})),
        ("/similarity", json!({"inputs": {"source_sentence": "a", "sentences": texts}})),
        ("/tokenize", json!({"inputs": texts})),
        ("/decode", json!({"ids": tokens})),
        ("/classify", json!({"input": texts})),
        ("/score", json!({"text_1": "q", "text_2": texts})),
        ("/rerank", json!({"query": "q", "texts": texts, "return_text": true})),
        ("/v2/rerank", json!({"query": "q", "documents": documents, "return_documents": true})),
        ("/v2/rerank", json!({"query": "q", "documents": documents, "top_n": 700})),
    ] {
        let mut body = body;
        body["model"] = json!("anywhere");
        let before: u64 = fixture.requests().iter().sum();
        let response = fixture.send(path, &body, &[]).await;
        assert_eq!(
            response.status,
            200,
            "{path}: {}",
            String::from_utf8_lossy(response.body.as_ref().unwrap())
        );
        let (answered, expected) = (response.json(), unsplit_response(path, &body));
        assert!(
            answered == expected,
            "{path}: {:.300} is not {:.300}",
            answered.to_string(),
            expected.to_string()
        );
        let pieces = fixture.requests().iter().sum::<u64>() - before;
        assert!(pieces >= 3_000 / 512, "{path} was sent in {pieces} pieces");
        assert_eq!(response.header("x-meridian-attempts"), pieces.to_string());
        assert_eq!(response.header("x-meridian-parts"), pieces.to_string(), "no sub-request was retried");
        let mut regions: Vec<_> = response.header("x-meridian-region").split(',').collect();
        assert_eq!(regions[0], AMERICA, "the nearest has the first piece");
        regions.sort_unstable();
        assert_eq!(regions, [AMERICA, EUROPE, JAPAN], "{path}");
        for part in ["gateway;dur=", "network;dur="] {
            assert!(response.header("server-timing").contains(part), "{}", response.header("server-timing"));
        }
        if let Some(usage) = answered.pointer("/usage/total_tokens") {
            assert_eq!(response.header("x-meridian-tokens"), usage.to_string());
        }
    }
}

#[tokio::test]
async fn small_requests_are_not_split() {
    let fixture = Fixture::healthy().await;
    let response = fixture.send("/v1/embeddings", &embeddings(255), &[]).await;
    assert_eq!((response.status, fixture.requests()), (200, [1, 0, 0]));
    // Many short inputs: computing them takes no longer than the round trip.
    let short = json!({"model": "anywhere", "input": vec!["x"; 500]});
    assert_eq!(
        (fixture.send("/v1/embeddings", &short, &[]).await.status, fixture.requests()),
        (200, [2, 0, 0])
    );
    let response = fixture.send("/v1/embeddings", &embeddings(600), &[]).await;
    assert_eq!(response.status, 200);
    assert!(fixture.requests().iter().sum::<u64>() > 3, "a large request is split: {:?}", fixture.requests());
}

#[tokio::test]
async fn the_explanation_of_a_split_request_has_its_decision_and_the_attempts_of_its_parts() {
    let fixture = Fixture::healthy().await;
    let response = fixture.send("/v1/embeddings", &embeddings(3_000), &[("x-request-id", "split")]).await;
    assert_eq!(response.status, 200);
    let explained = fixture.explain("split").await;
    let parts: usize = response.header("x-meridian-parts").parse().unwrap();
    assert!(parts > 1 && explained["attempts"].as_array().unwrap().len() == parts, "{explained:#}");
    let ranked: Vec<_> =
        explained["regions"].as_array().unwrap().iter().map(|region| &region["rank"]).collect();
    assert_eq!(ranked, [1, 2, 3], "{explained:#}");
    assert_eq!(explained["regions"][0]["region"], AMERICA);
    assert_eq!((&explained["origin"], &explained["admission_pool"]), (&json!(AMERICA), &json!(AMERICA)));
}

#[tokio::test]
async fn a_region_that_dies_during_the_request_causes_only_retries() {
    for victim in 0..3 {
        let mut scripts = [Script::Responds(Duration::from_millis(5)); 3];
        scripts[victim] = Script::KilledAfter(2);
        let fixture = Fixture::with(scripts).await;
        let body = embeddings(20_000);
        let response = fixture.send("/v1/embeddings", &body, &[]).await;
        assert_eq!(response.status, 200, "{}", response.json());
        assert!(
            response.json() == unsplit_response("/v1/embeddings", &body),
            "the response is correct, victim {victim}"
        );
        let attempts: u64 = response.header("x-meridian-attempts").parse().unwrap();
        assert!(attempts > 20_000 / 512, "{attempts}");
        assert!(fixture.requests()[victim] >= 3, "{:?}", fixture.requests());
    }
}

/// The purpose of splitting. Replicas compute 5,000 inputs a second, one of them or three; the round trip to Japan and
/// the last parts reduce the gain below three times.
#[tokio::test]
async fn three_regions_take_less_than_half_the_time_of_one() {
    let fixture = Fixture::with([Script::Computes(Duration::from_micros(200)); 3]).await;
    let mut body = embeddings(6_000);
    let begun = Instant::now();
    let three = fixture.send("/v1/embeddings", &body, &[]).await;
    let over_three = begun.elapsed();
    body["model"] = json!("locked");
    let begun = Instant::now();
    let one = fixture.send("/v1/embeddings", &body, &[]).await;
    let over_one = begun.elapsed();
    assert_eq!((three.status, one.status), (200, 200));
    assert_eq!(three.json()["data"], one.json()["data"]);
    println!("6,000 inputs: {over_one:?} in one region, {over_three:?} in three");
    assert!(over_three * 2 < over_one, "{over_three:?} and {over_one:?}");
}

#[tokio::test]
async fn a_rejected_part_rejects_the_request_and_names_its_input() {
    let fixture = Fixture::healthy().await;
    let mut inputs = texts(3_000);
    inputs[2_345] = String::new();
    let response = fixture.send("/v1/embeddings", &json!({"model": "anywhere", "input": inputs}), &[]).await;
    let error = response.json();
    assert_eq!((response.status, &error["error"]["code"]), (400, &json!("empty_input")), "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("`input[2345]`"), "{error}");
    assert!(response.header("x-meridian-attempts").parse::<u64>().unwrap() >= 1);
    let dialect = fixture
        .send("/predict", &json!({"model": "anywhere", "inputs": vec![json!(["a", 1]); 3_000]}), &[])
        .await;
    let error = dialect.json().to_string();
    assert!(dialect.status == 422 && error.contains("error_type") && error.contains("[1]`"), "{error}");
}

#[tokio::test]
async fn a_disconnect_cancels_all_parts() {
    let fixture = Fixture::with([Script::Waits; 3]).await;
    {
        let body = embeddings(3_000);
        let request = fixture.send("/v1/embeddings", &body, &[]);
        tokio::pin!(request);
        let all_wait = async {
            for region in fixture.regions.values() {
                region.wait_for_in_flight(|in_flight| in_flight >= 2).await;
            }
        };
        tokio::select! {
            () = all_wait => {}
            _ = &mut request => panic!("no region has responded"),
        }
    }
    for region in fixture.regions.values() {
        region.wait_for_in_flight(|in_flight| in_flight == 0).await;
    }
    assert_eq!(fixture.requests(), [2, 2, 2], "two sub-requests for each region, and no retry");
}

/// Four requests are split at a time. The fifth is sent unsplit, and one that must be split waits.
#[tokio::test]
async fn the_limit_of_concurrent_split_requests_holds_at_it_and_one_past_it() {
    let fixture = Arc::new(Fixture::healthy().await);
    let pieces = fixture.send("/v1/embeddings", &embeddings(600), &[]).await;
    let pieces: u64 = pieces.header("x-meridian-attempts").parse().unwrap();
    assert!((2..6).contains(&pieces), "{pieces} sub-requests, which fit into one region");
    fixture.regions.values().for_each(|region| region.set_script(Script::Waits));
    let wait_for_in_flight = async |expected_count: u64| {
        let begun = Instant::now();
        while fixture.regions.values().map(|region| region.in_flight()).sum::<u64>() != expected_count {
            assert!(begun.elapsed() < Duration::from_secs(20), "never {expected_count} in flight");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let mut requests = tokio::task::JoinSet::new();
    let mut send = || {
        let fixture = fixture.clone();
        requests.spawn(async move { fixture.send("/v1/embeddings", &embeddings(600), &[]).await });
    };
    for at_once in 1..=4 {
        send();
        wait_for_in_flight(at_once * pieces).await;
    }
    send();
    wait_for_in_flight(4 * pieces + 1).await;
    let before = fixture.requests();
    let waits = fixture.send("/v1/embeddings", &embeddings(3_000), &[("x-meridian-timeout-ms", "300")]).await;
    assert_eq!((waits.status, waits.header("x-meridian-error")), (504, "deadline_exceeded"));
    assert_eq!(fixture.requests(), before, "it waits for a slot");
}

#[tokio::test]
async fn the_limit_of_inputs_holds_at_it_and_one_past_it() {
    let fixture = Fixture::with([Script::RespondsWithWidth(1); 3]).await;
    let send = async |inputs: usize| {
        let body = json!({"model": "anywhere", "input": vec!["x"; inputs]});
        fixture.send("/v1/embeddings", &body, &[]).await
    };
    let most = send(INPUTS_MAX).await;
    assert_eq!((most.status, most.json()["data"].as_array().unwrap().len()), (200, INPUTS_MAX));
    let before = fixture.requests();
    let more = send(INPUTS_MAX + 1).await;
    let error = more.json();
    assert_eq!((more.status, &error["error"]["code"]), (400, &json!("too_many_inputs")), "{error}");
    assert_eq!(error["error"]["param"], "input");
    for part in ["100001", "100000", "2 requests"] {
        assert!(error["error"]["message"].as_str().unwrap().contains(part), "{error}");
    }
    assert_eq!(fixture.requests(), before, "no region was used");
}

/// Invariant 1, Residency: no part leaves the allowed regions, for any capacity elsewhere and any failure.
#[tokio::test]
async fn no_part_is_sent_to_a_region_that_its_request_excludes() {
    let fixture = Fixture::healthy().await;
    let mut body = embeddings(5_000);
    body["model"] = json!("locked");
    let response = fixture.send("/v1/embeddings", &body, &[]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, EUROPE));
    assert!(response.json() == unsplit_response("/v1/embeddings", &body));
    let [america, europe, japan] = fixture.requests();
    assert!(america == 0 && japan == 0 && europe >= 10, "{:?}", fixture.requests());
    let narrowed =
        fixture.send("/v1/embeddings", &embeddings(5_000), &[("x-meridian-residency", "eu,jp")]).await;
    assert_eq!((narrowed.status, fixture.requests()[0]), (200, 0));

    let fixture = Fixture::with([
        Script::Responds(Duration::ZERO),
        Script::KilledAfter(1),
        Script::Responds(Duration::ZERO),
    ])
    .await;
    let response = fixture.send("/v1/embeddings", &body, &[("x-meridian-timeout-ms", "4000")]).await;
    assert_eq!(
        (response.status, response.header("x-meridian-error")),
        (503, "no_capacity_in_allowed_regions")
    );
    assert!(matches!(fixture.requests(), [0, europe, 0] if europe > 1), "{:?}", fixture.requests());
}

#[tokio::test]
async fn the_response_of_a_split_request_has_a_receipt_of_each_region() {
    let fixture = Fixture::healthy().await;
    let response = fixture.send("/v1/embeddings", &embeddings(3_000), &[]).await;
    assert_eq!(
        response.header("x-meridian-residency-receipt"),
        "",
        "an unrestricted deployment has no receipt"
    );
    let narrowed = [("x-meridian-residency", "eu,jp")];
    let response = fixture.send("/v1/embeddings", &embeddings(5_000), &narrowed).await;
    let regions: Vec<_> = response.header("x-meridian-region").split(',').collect();
    let receipts: Vec<_> = response.header("x-meridian-residency-receipt").split(',').collect();
    assert_eq!((response.status, regions.len(), receipts.len()), (200, 2, 2), "{regions:?} {receipts:?}");
    for (region, receipt) in regions.into_iter().zip(receipts) {
        let sent = fixture.regions_in_receipts(receipt).await;
        assert!(sent.iter().all(|sent| sent == region), "{receipt} of {region}: {sent:?}");
    }
}

#[tokio::test]
async fn rate_limits_are_charged_once_and_settled_by_the_sum() {
    let fixture = Fixture::healthy().await;
    let body = embeddings(3_000);
    let response = fixture.send_as("n", "/v1/embeddings", &body, &[]).await;
    assert_eq!(response.status, 200);
    let tokens: u64 = response.json()["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(response.header("x-meridian-tokens"), tokens.to_string());
    assert_eq!(response.header("x-ratelimit-limit-requests"), "2");
    // Two requests a second, and this was one. Its cost is settled by now, and a minute's quota has hardly refilled.
    let next = fixture.send_as("n", "/v1/embeddings", &json!({"model": "anywhere", "input": "x"}), &[]).await;
    assert_eq!(next.status, 200);
    let left: u64 = next.header("x-ratelimit-remaining-tokens").parse().unwrap();
    assert!((999_000 - tokens..1_040_000 - tokens).contains(&left), "{left} after {tokens}");
}

#[tokio::test]
async fn an_invalid_response_is_not_merged() {
    let fixture = Fixture::with([Script::OmitsOneRow; 3]).await;
    let response = fixture.send("/v1/embeddings", &embeddings(3_000), &[]).await;
    let error = response.json();
    assert_eq!((response.status, &error["error"]["code"]), (500, &json!("internal")), "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("one element for each input"), "{error}");
}

#[tokio::test]
async fn the_deadline_applies_to_all_parts() {
    let fixture =
        Fixture::with([Script::Responds(Duration::ZERO), Script::Responds(Duration::ZERO), Script::Waits])
            .await;
    let response =
        fixture.send("/v1/embeddings", &embeddings(3_000), &[("x-meridian-timeout-ms", "700")]).await;
    assert_eq!((response.status, response.header("x-meridian-error")), (504, "deadline_exceeded"));
}

/// Some 100 MB, more than the buffer limit.
const LARGE: usize = 3_000;

#[tokio::test]
async fn a_response_larger_than_the_buffer_is_streamed() {
    let fixture = Fixture::with([Script::RespondsWithWidth(LARGE); 3]).await;
    let response = fixture.send("/v1/embeddings", &embeddings(LARGE), &[]).await;
    assert_eq!((response.status, response.header("content-length")), (200, ""));
    let body = response.body.as_ref().unwrap();
    assert!(body.len() > 64 << 20, "{}", body.len());
    let expected =
        replica::response("/v1/embeddings", embeddings(LARGE).to_string().as_bytes(), usize::MAX, LARGE);
    assert!(*body == expected.body, "byte for byte");

    // Nine parts of twelve, and then no region is left.
    let fixture = Fixture::with([Script::RespondsWithWidthUntilKilled(LARGE, 3); 3]).await;
    let response = fixture.send("/v1/embeddings", &embeddings(LARGE), &[]).await;
    assert_eq!(response.status, 200);
    assert!(response.body.is_err(), "a truncated response is recognizable as such");
}
