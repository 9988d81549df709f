//! Who is let in at the edge, how far, and what whoever is not is told: over real sockets, before a scripted region.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod scene;

use scene::{Scene, header};
use serde_json::json;

const TENANTS: &str = "\
[[tenant]]
name = 'both'
key_env = 'BOTH'

[[tenant]]
name = 'limited'
key_env = 'LIMITED'
limits = { requests_per_second = 2, inputs_per_second = 3, tokens_per_minute = 1000 }

[[tenant]]
name = 'backfill'
key_env = 'BACKFILL'
lanes = ['bulk']

[[tenant]]
name = 'lookups'
key_env = 'LOOKUPS'
lanes = ['interactive']
";

#[tokio::test]
async fn a_refusal_by_a_limit_tells_what_is_left_as_openai_does() {
    let scene = Scene::start(TENANTS).await;
    let body = json!({"model": "m", "input": "x"}).to_string();
    for left in ["1", "0"] {
        let answer = scene.post("LIMITED", &[], body.clone()).await;
        assert_eq!(
            (answer.status().as_u16(), header(&answer, "x-ratelimit-remaining-requests")),
            (200, left)
        );
    }
    let refused = scene.post("LIMITED", &[], body).await;
    assert_eq!(
        (refused.status().as_u16(), header(&refused, "x-meridian-error")),
        (429, "rate_limit_exceeded")
    );
    assert_eq!(header(&refused, "x-ratelimit-limit-requests"), "2");
    assert_eq!(header(&refused, "x-ratelimit-remaining-requests"), "0");
    assert_eq!(header(&refused, "x-ratelimit-limit-tokens"), "1000");
    assert!(header(&refused, "x-ratelimit-remaining-tokens").parse::<u64>().unwrap() > 900);
    let wait_ms: u64 = header(&refused, "retry-after-ms").parse().unwrap();
    assert!((1..=500).contains(&wait_ms), "{wait_ms}");
}

/// The client declares a body and sends none of it: who answers has not read it.
#[tokio::test]
async fn what_cannot_be_paid_for_is_refused_before_its_body_is_read() {
    let scene = Scene::start(TENANTS).await;
    let check = async |length: usize, status: u16, words: &[&str]| {
        let (answered, text) = scene.head_only("LIMITED", length).await;
        assert_eq!(answered, status, "{text}");
        for word in words {
            assert!(text.contains(word), "{word} in {text}");
        }
    };
    // Sixteen bytes a token at the most, and a thousand tokens a minute.
    check(16 * 1001, 400, &["too_many_tokens", "waiting does not help", "no more than 1000 tokens"]).await;
    let body = json!({"model": "m", "input": "x"}).to_string();
    for _ in 0..2 {
        assert_eq!(scene.post("LIMITED", &[], body.clone()).await.status(), 200, "the refusal took nothing");
    }
    check(body.len(), 429, &["rate_limit_exceeded", "x-ratelimit-remaining-requests: 0"]).await;
    assert_eq!(scene.region.requests(), 2);
}

#[tokio::test]
async fn more_inputs_than_may_ever_pass_at_once_are_refused_with_the_number_that_may() {
    let scene = Scene::start(TENANTS).await;
    let body = |inputs: usize| json!({"model": "m", "input": vec!["x"; inputs]}).to_string();
    let refused = scene.post("LIMITED", &[], body(4)).await;
    assert_eq!((refused.status().as_u16(), header(&refused, "x-meridian-error")), (400, "too_many_inputs"));
    assert_eq!(header(&refused, "x-ratelimit-remaining-requests"), "2", "it was given back");
    assert_eq!(scene.post("LIMITED", &[], body(3)).await.status(), 200);
}

#[tokio::test]
async fn the_lane_that_the_tenant_may_use_is_the_one_that_the_region_is_told() {
    let scene = Scene::start(TENANTS).await;
    let check =
        async |key: &str, asked: Option<&str>, inputs: usize, expected: Result<(&str, &str), &str>| {
            let body = json!({"model": "m", "input": vec!["x"; inputs]}).to_string();
            let headers: Vec<_> = asked.map(|lane| ("x-meridian-lane", lane)).into_iter().collect();
            let answer = scene.post(key, &headers, body).await;
            let told = header(&answer, "x-meridian-lane").to_owned();
            let seen = match answer.status().as_u16() {
                200 => Ok((scene.region.lane(), told)),
                _ => Err(header(&answer, "x-meridian-error").to_owned()),
            };
            let seen =
                seen.as_ref().map(|(lane, told)| (lane.as_str(), told.as_str())).map_err(String::as_str);
            assert_eq!(seen, expected, "{key} asks for {asked:?} with {inputs}");
        };
    check("BOTH", Some("interactive"), 101, Ok(("interactive", ""))).await;
    check("BOTH", Some("bulk"), 1, Ok(("bulk", ""))).await;
    check("BOTH", None, 100, Ok(("interactive", ""))).await;
    check("BOTH", None, 101, Ok(("bulk", ""))).await;
    check("BACKFILL", Some("interactive"), 1, Ok(("bulk", "bulk"))).await;
    check("BACKFILL", None, 1, Ok(("bulk", ""))).await;
    check("LOOKUPS", None, 101, Ok(("interactive", ""))).await;
    check("LOOKUPS", Some("bulk"), 1, Err("lane_not_permitted")).await;
    check("BOTH", Some("fast"), 1, Err("invalid_header")).await;
}
