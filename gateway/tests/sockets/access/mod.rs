//! Authentication and limits at the gateway, and its error responses: over real sockets, before a scripted region.

mod fixture;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fixture::{Fixture, SPEED, TIMEOUT, header};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

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
priorities = ['bulk']

[[tenant]]
name = 'lookups'
key_env = 'LOOKUPS'
priorities = ['interactive']
";

#[tokio::test]
async fn a_rate_limit_rejection_has_the_headers_of_openai() {
    let fixture = Fixture::start(TENANTS).await;
    let body = json!({"model": "m", "input": "x"}).to_string();
    for left in ["1", "0"] {
        let response = fixture.post("LIMITED", &[], body.clone()).await;
        assert_eq!(
            (response.status().as_u16(), header(&response, "x-ratelimit-remaining-requests")),
            (200, left)
        );
    }
    let refused = fixture.post("LIMITED", &[], body).await;
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

/// The client declares a body and sends none of it, so the response cannot depend on it.
#[tokio::test]
async fn a_request_above_the_rate_limit_is_rejected_before_its_body_is_read() {
    let fixture = Fixture::start(TENANTS).await;
    let check = async |length: usize, status: u16, words: &[&str]| {
        let (answered, text) = fixture.head_only("LIMITED", "", length).await;
        assert_eq!(answered, status, "{text}");
        for word in words {
            assert!(text.contains(word), "{word} in {text}");
        }
    };
    // Sixteen bytes a token at most, and a thousand tokens a minute.
    check(16 * 1001, 400, &["too_many_tokens", "a retry cannot succeed", "at most 1000 tokens"]).await;
    let body = json!({"model": "m", "input": "x"}).to_string();
    for _ in 0..2 {
        assert_eq!(
            fixture.post("LIMITED", &[], body.clone()).await.status(),
            200,
            "the rejected request consumed no tokens"
        );
    }
    check(body.len(), 429, &["rate_limit_exceeded", "x-ratelimit-remaining-requests: 0"]).await;
    assert_eq!(fixture.region.requests(), 2);
}

/// A rejected client usually retries soon, and keeps its connection for that.
#[tokio::test]
async fn a_rejection_before_the_body_keeps_the_connection() {
    let fixture = Fixture::start(TENANTS).await;
    let body = json!({"model": "m", "input": "x"}).to_string();
    let mut connection = fixture.connect().await;
    for expected in [200, 200, 429, 429, 429] {
        assert_eq!(connection.post("LIMITED", &body).await, expected);
    }
}

#[tokio::test]
async fn more_inputs_than_the_burst_are_rejected_with_the_limit() {
    let fixture = Fixture::start(TENANTS).await;
    let body = |inputs: usize| json!({"model": "m", "input": vec!["x"; inputs]}).to_string();
    let refused = fixture.post("LIMITED", &[], body(4)).await;
    assert_eq!((refused.status().as_u16(), header(&refused, "x-meridian-error")), (400, "too_many_inputs"));
    assert_eq!(header(&refused, "x-ratelimit-remaining-requests"), "2", "it was given back");
    assert_eq!(fixture.post("LIMITED", &[], body(3)).await.status(), 200);
}

#[tokio::test]
async fn the_region_receives_the_priority_that_the_tenant_may_use() {
    let fixture = Fixture::start(TENANTS).await;
    let check =
        async |key: &str, requested: Option<&str>, inputs: usize, expected: Result<(&str, &str), &str>| {
            let body = json!({"model": "m", "input": vec!["x"; inputs]}).to_string();
            let headers: Vec<_> =
                requested.map(|priority| ("x-meridian-priority", priority)).into_iter().collect();
            let response = fixture.post(key, &headers, body).await;
            let reported = header(&response, "x-meridian-priority").to_owned();
            let actual = match response.status().as_u16() {
                200 => Ok((fixture.region.priority(), reported)),
                _ => Err(header(&response, "x-meridian-error").to_owned()),
            };
            let actual = actual
                .as_ref()
                .map(|(priority, reported)| (priority.as_str(), reported.as_str()))
                .map_err(String::as_str);
            assert_eq!(actual, expected, "{key} requests {requested:?} with {inputs} inputs");
        };
    check("BOTH", Some("interactive"), 101, Ok(("interactive", ""))).await;
    check("BOTH", Some("bulk"), 1, Ok(("bulk", ""))).await;
    check("BOTH", None, 100, Ok(("interactive", ""))).await;
    check("BOTH", None, 101, Ok(("bulk", ""))).await;
    check("BACKFILL", Some("interactive"), 1, Ok(("bulk", "bulk"))).await;
    check("BACKFILL", None, 1, Ok(("bulk", ""))).await;
    check("LOOKUPS", None, 101, Ok(("interactive", ""))).await;
    check("LOOKUPS", Some("bulk"), 1, Err("priority_not_permitted")).await;
    check("BOTH", Some("fast"), 1, Err("invalid_header")).await;
}

fn token(header: &Value, claims: &Value, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(header), part(claims));
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(sign(signed.as_bytes())))
}

#[tokio::test]
async fn a_token_authenticates_the_tenant_that_its_issuer_names() {
    const SECRET: &str = "thirty-two bytes of test secret..";
    let tenants = "[[tenant]]\nname = 'keys'\nkey_env = 'KEYS'\n\
                   [[tenant]]\nname = 'signed'\nissuer = 'https://a/'\npriorities = ['bulk']\n\
                   [[tenant]]\nname = 'shared'\nissuer = 'b'\n\
                   [[issuer]]\nname = 'https://a/'\naudience = 'm'\nkeys_file = 'jwks.json'\n\
                   [[issuer]]\nname = 'b'\naudience = 'm'\nsecret_file = 'secret'\ntenant_claim = 'org'\n";
    let ed = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let ed = Ed25519KeyPair::from_pkcs8(ed.as_ref()).unwrap();
    let x = URL_SAFE_NO_PAD.encode(ed.public_key().as_ref());
    let jwks = json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "1", "x": x}]}).to_string();
    let files = [("jwks.json", jwks), ("secret", SECRET.to_owned())];
    let fixture = Fixture::with_files(tenants, &files).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = |iss: &str, tenant: &str, exp: u64| json!({"iss": iss, "aud": "m", "tenant": tenant, "org": tenant, "exp": exp});
    let by_ed = |message: &[u8]| ed.sign(message).as_ref().to_vec();
    let by = |secret: &[u8], message: &[u8]| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message).as_ref().to_vec()
    };
    let (eddsa, hs256) = (json!({"alg": "EdDSA", "kid": "1"}), json!({"alg": "HS256"}));
    let body = json!({"model": "m", "input": "x"}).to_string();
    let check = async |token: String, expected: Result<&str, &str>| {
        let response = fixture.post(&token, &[], body.clone()).await;
        let (status, code) = (response.status().as_u16(), header(&response, "x-meridian-error").to_owned());
        let challenge = header(&response, "www-authenticate").to_owned();
        let text = response.text().await.unwrap();
        match expected {
            Ok(priority) => {
                assert_eq!((status, fixture.region.priority()), (200, priority.to_owned()), "{text}")
            }
            Err(word) => {
                assert_eq!((status, code.as_str()), (401, "invalid_token"), "{text}");
                assert!(challenge.contains("invalid_token") && text.contains(word), "{word} in {text}");
                assert!(!text.contains(&token[..20]), "a token is not repeated");
            }
        }
    };
    let good = token(&eddsa, &claims("https://a/", "signed", now + 60), by_ed);
    check(good.clone(), Ok("bulk")).await;
    check(good.clone(), Ok("bulk")).await; // the second time without arithmetic
    check(token(&hs256, &claims("b", "shared", now + 60), |m| by(SECRET.as_bytes(), m)), Ok("interactive"))
        .await;
    check(token(&eddsa, &claims("https://a/", "signed", now - 31), by_ed), Err("expired")).await;
    check(token(&eddsa, &claims("https://a/", "shared", now + 60), by_ed), Err("names no tenant")).await;
    check(token(&eddsa, &claims("https://a/", "keys", now + 60), by_ed), Err("names no tenant")).await;
    check(token(&eddsa, &claims("https://c/", "signed", now + 60), by_ed), Err("issuer")).await;
    check(
        token(&json!({"alg": "EdDSA", "kid": "2"}), &claims("https://a/", "signed", now + 60), by_ed),
        Err("no key"),
    )
    .await;
    check(
        token(&json!({"alg": "none"}), &claims("https://a/", "signed", now + 60), |_| Vec::new()),
        Err("'alg'"),
    )
    .await;
    // A public key must not be accepted as a secret, and one issuer's secret must not verify tokens of another.
    let public = ed.public_key().as_ref();
    check(token(&hs256, &claims("https://a/", "signed", now + 60), |m| by(public, m)), Err("no key")).await;
    check(
        token(&hs256, &claims("https://a/", "signed", now + 60), |m| by(SECRET.as_bytes(), m)),
        Err("no key"),
    )
    .await;
    let (signed, signature) = good.rsplit_once('.').unwrap();
    let other = if signature.starts_with('A') { 'B' } else { 'A' };
    check(format!("{signed}.{other}{}", &signature[1..]), Err("signature")).await;
    let unauthorized = fixture.post("no.such", &[], body.clone()).await;
    assert_eq!(header(&unauthorized, "x-meridian-error"), "invalid_api_key");
    assert_eq!(fixture.post("KEYS", &[], body.clone()).await.status(), 200);
}

const TWO: &str = "\
[[tenant]]
name = 'aggressor'
key_env = 'AGGRESSOR'

[[tenant]]
name = 'neighbour'
key_env = 'NEIGHBOUR'

[[tenant]]
name = 'held'
key_env = 'HELD'
limits = { requests_per_second = 50 }
";

/// Returns a request of about this number of tokens.
fn of_tokens(tokens: u64) -> String {
    json!({"model": "m", "input": "word".repeat(tokens as usize)}).to_string()
}

/// Waits until `attempt` returns a value.
async fn wait_for<T>(expected: &str, mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    let repeated = async {
        loop {
            if let Some(value) = attempt().await {
                return value;
            }
        }
    };
    let reached = tokio::time::timeout(TIMEOUT, repeated).await;
    reached.unwrap_or_else(|_| panic!("not within {TIMEOUT:?}: {expected}"))
}

/// A queue of the aggressor's requests while the engine is frozen: rejections on the head, and their errors.
#[tokio::test]
async fn under_overload_a_tenant_above_its_share_is_rejected_before_its_body_is_read() {
    let fixture = Arc::new(Fixture::start(TWO).await);
    fixture.region.frozen.send_replace(true);
    // Four seconds of interactive work, in forty requests.
    let mut held = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let fixture = fixture.clone();
        held.spawn(
            async move { fixture.post("AGGRESSOR", &[], of_tokens(SPEED / 10)).await.status().as_u16() },
        );
    }
    let interactive = "x-meridian-priority: interactive\r\n";
    // The reports show the queue, and the aggressor, the only tenant so far, is rejected for lack of capacity.
    let refused = wait_for("the aggressor is rejected", async || {
        let before = fixture.region.waiting();
        let quick = tokio::time::timeout(
            Duration::from_millis(100),
            fixture.head_only("AGGRESSOR", interactive, 100),
        );
        match quick.await {
            Ok(response) if before >= 4 * SPEED => Some(response),
            Ok(response) => panic!("refused with {before} tokens before it: {response:?}"),
            // It waits for the body: it was admitted.
            Err(_) => None,
        }
    })
    .await;
    assert!(refused.0 == 503 && refused.1.contains("saturated"), "{refused:?}");
    let wait_ms: u64 =
        refused.1.split("retry-after-ms: ").nth(1).unwrap().split('\r').next().unwrap().parse().unwrap();
    assert!((2_900..=3_300).contains(&wait_ms), "{wait_ms}: of four seconds one may stay");
    // It can be explained, although its body was never read.
    let identified = format!("{interactive}x-request-id: shed\r\n");
    assert_eq!(fixture.head_only("AGGRESSOR", &identified, 100).await.0, 503);
    let explained = fixture.explain("shed").await;
    assert_eq!((&explained["regions"][0]["rank"], &explained["attempts"]), (&json!(1), &json!([])));
    assert_eq!(explained["regions"][0]["region"], explained["admission_pool"]);
    assert!(explained["rejection"]["retry_after_ms"].is_number(), "{explained:#}");
    // Bulk is rejected together with interactive requests.
    let bulk = fixture.head_only("NEIGHBOUR", "x-meridian-priority: bulk\r\n", 100).await;
    assert!(bulk.0 == 503 && bulk.1.contains("bulk requests are rejected"), "{bulk:?}");
    // The neighbour is admitted, and from then on the aggressor's errors name its share.
    let neighbour = fixture.clone();
    let admitted =
        tokio::spawn(async move { neighbour.post("NEIGHBOUR", &[], of_tokens(10)).await.status().as_u16() });
    let refused = wait_for("the aggressor is rejected for its share", async || {
        let refused = fixture.head_only("AGGRESSOR", interactive, 100).await;
        (refused.0 != 503).then_some(refused)
    })
    .await;
    assert!(refused.0 == 429 && refused.1.contains("more in flight than its share"), "{refused:?}");
    // A request with a short deadline is rejected for that, before shares are compared.
    let hasty = format!("{interactive}x-meridian-timeout-ms: 1000\r\n");
    let hasty = fixture.head_only("NEIGHBOUR", &hasty, 100).await;
    assert!(hasty.0 == 503 && hasty.1.contains("longer than the timeout of this one"), "{hasty:?}");
    assert!(!admitted.is_finished());
    fixture.region.frozen.send_replace(false);
    assert_eq!(admitted.await.unwrap(), 200);
    while let Some(status) = held.join_next().await {
        assert_eq!(status.unwrap(), 200, "every admitted request is served");
    }
    // When the queue is empty, all tenants are admitted again.
    wait_for("the aggressor is admitted again", async || {
        let status = fixture.post("AGGRESSOR", &[], of_tokens(10)).await.status();
        (status == 200).then_some(())
    })
    .await;
}

/// Sends requests at a fixed rate for a while, independent of responses; returns the times of the successful ones, and
/// the number of others.
async fn sends(
    fixture: &Arc<Fixture>,
    bearer: &'static str,
    per_second: u32,
    lasts: Duration,
) -> (Vec<Duration>, usize) {
    let began = Instant::now();
    let mut in_flight = tokio::task::JoinSet::new();
    for number in 0..(lasts.as_secs_f64() * f64::from(per_second)) as u32 {
        let due = began + number * Duration::from_secs(1) / per_second;
        tokio::time::sleep_until(due.into()).await;
        let fixture = fixture.clone();
        in_flight.spawn(async move {
            let response = fixture.post(bearer, &[], of_tokens(20)).await;
            (response.status().as_u16(), due.elapsed())
        });
    }
    let (mut took, mut refused) = (Vec::new(), 0);
    while let Some(done) = in_flight.join_next().await {
        match done.unwrap() {
            (200, time) => took.push(time),
            _ => refused += 1,
        }
    }
    took.sort_unstable();
    (took, refused)
}

/// Numbers of responses to a client that sends in closed loops.
struct Responses {
    admitted: AtomicUsize,
    rejected: watch::Sender<usize>,
}

/// Sends the same over a number of connections in closed loops, until it is aborted.
async fn send_in_closed_loops(
    fixture: Arc<Fixture>,
    bearer: &'static str,
    per_second: u32,
    responses: Arc<Responses>,
) {
    const CONNECTIONS: usize = 20;
    let begun = Instant::now();
    let mut connections = tokio::task::JoinSet::new();
    for first in 0..CONNECTIONS {
        let mut connection = fixture.connect().await;
        let responses = responses.clone();
        connections.spawn(async move {
            let body = of_tokens(20);
            for number in (first..).step_by(CONNECTIONS) {
                let due = begun + number as u32 * Duration::from_secs(1) / per_second;
                tokio::time::sleep_until(due.into()).await;
                match connection.post(bearer, &body).await {
                    200 => drop(responses.admitted.fetch_add(1, Ordering::SeqCst)),
                    _ => responses.rejected.send_modify(|rejected| *rejected += 1),
                }
            }
        });
    }
    connections.join_all().await;
}

/// Prints the figures; the times depend on this machine and its load, so only load-independent properties are asserted.
/// The simulation in `gateway_core::shed` asserts the same bounds to a tenth.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aggressor_at_twenty_times_its_limit_harms_only_itself() {
    const LIMIT: usize = 50;
    const LASTS: Duration = Duration::from_secs(4);
    let fixture = Arc::new(Fixture::start(TWO).await);
    sends(&fixture, "NEIGHBOUR", 100, LASTS / 4).await;
    let (alone, _) = sends(&fixture, "NEIGHBOUR", 100, LASTS).await;
    let responses = Arc::new(Responses { admitted: AtomicUsize::new(0), rejected: watch::Sender::new(0) });
    let begun = Instant::now();
    let mut aggressor = tokio::task::JoinSet::new();
    aggressor.spawn(send_in_closed_loops(fixture.clone(), "HELD", 20 * LIMIT as u32, responses.clone()));
    // Before, it uses the burst that its limit allows.
    let mut rejected = responses.rejected.subscribe();
    let first = tokio::time::timeout(TIMEOUT, rejected.wait_for(|rejected| *rejected > 0)).await;
    drop(first.expect("it is above its limit").unwrap());
    let (contended, lost) = sends(&fixture, "NEIGHBOUR", 100, LASTS).await;
    aggressor.shutdown().await;
    let admitted = responses.admitted.load(Ordering::SeqCst);
    let at = |times: &[Duration], part: usize| times[times.len() * part / 100].as_secs_f64() * 1e3;
    println!(
        "neighbour, ms: uncontended p50 {:.1} p99 {:.1}, with the aggressor p50 {:.1} p99 {:.1}; aggressor: {admitted} admitted, {} rejected",
        at(&alone, 50),
        at(&alone, 99),
        at(&contended, 50),
        at(&contended, 99),
        *responses.rejected.borrow(),
    );
    assert_eq!((lost, contended.len()), (0, 400));
    let admitted_max = LIMIT as f64 * (begun.elapsed().as_secs_f64() + 1.0) + 10.0;
    assert!(admitted as f64 <= admitted_max, "{admitted}: the rate limit, and one burst");
}
