//! A gateway between a scripted hub and scripted regions: the client's response, its region, and its attempts.

mod client_faults;
mod clients;
mod contained;
mod faults;
mod fixture;
mod http2;
mod locks;
mod metrics;
mod region;

use clients::{Client, ClientProtocol, RegionProtocol};
use faults::{Fault, FaultFixture};
use fixture::{AMERICA, EUROPE, Fixture, JAPAN, TLS};
use region::{LARGE, Script, Script::*};
use regions::residency::ResidencyPolicy;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Checks the response for `model`, with America, the nearest, following a script, and the number of requests of each
/// region.
async fn check(america: Script, model: &str, status: u16, region: &str, attempts: u32, requests: [u64; 3]) {
    for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
        check_over(region_protocol, america, model, status, region, attempts, requests).await;
    }
}

async fn check_over(
    region_protocol: RegionProtocol,
    america: Script,
    model: &str,
    status: u16,
    region: &str,
    attempts: u32,
    requests: [u64; 3],
) {
    let fixture =
        Fixture::start(region_protocol.config(), [(AMERICA, america), (EUROPE, Responds), (JAPAN, Responds)])
            .await;
    let response = fixture.send(model, &[]).await.unwrap();
    let header = |name| response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let seen = (response.status().as_u16(), header("x-meridian-region"));
    assert_eq!(seen, (status, region.to_owned()), "{region_protocol:?}, {america:?}, {model}");
    let ends = america == ClosesConnection && region_protocol == RegionProtocol::Http1;
    let replayed = replayed(ends, attempts, &header("x-meridian-attempts"));
    let [first, second, third] = requests;
    assert_eq!(
        fixture.requests(),
        [first + replayed, second, third],
        "{region_protocol:?}, {america:?}, {model}"
    );
}

/// Returns the number of replays of a request that took at least `at_least` attempts and reported `reported`: at most one,
/// and only if a connection `ends` without a byte. A pooled connection may have been idle for too long; whether there
/// is one depends on whether a report has just used it.
fn replayed(ends: bool, at_least: u32, reported: &str) -> u64 {
    let more = reported.parse::<u32>().unwrap().checked_sub(at_least).unwrap();
    assert!(more <= u32::from(ends), "{reported} attempts instead of {at_least}");
    more.into()
}

#[tokio::test]
async fn a_tenant_sees_only_its_own_deployments_regions_and_limits() {
    let fixture = Fixture::with([(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)]).await;
    let send = async |model: &str, input: &str, headers: &[(&str, &str)]| {
        let body = json!({"model": model, "input": input}).to_string();
        let mut request = fixture.client.post(&fixture.url).bearer_auth("n").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    };
    let header = |response: &reqwest::Response, name: &str| {
        response.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    };
    let models =
        fixture.client.get(fixture.url.replace("embeddings", "models")).bearer_auth("n").send().await;
    let models: Value = models.unwrap().json().await.unwrap();
    assert_eq!(models["data"].as_array().unwrap().len(), 1, "{models}");
    assert_eq!(send("locked", "x", &[]).await.status(), 404);
    let widened = send("anywhere", "x", &[("x-meridian-residency", "us")]).await;
    assert_eq!(widened.status(), 403, "a header does not widen the tenant's residency policy");
    assert_eq!(fixture.requests(), [0, 0, 0]);

    let first = send("anywhere", &"word ".repeat(400), &[]).await;
    assert_eq!((first.status().as_u16(), header(&first, "x-meridian-region")), (200, EUROPE.to_owned()));
    assert_eq!(header(&first, "x-ratelimit-limit-tokens"), "1000");
    assert_eq!(
        header(&first, "x-ratelimit-remaining-tokens"),
        "500",
        "the estimated tokens: four bytes a token"
    );
    let refused = send("anywhere", &"word ".repeat(800), &[]).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(header(&refused, "x-meridian-error"), "rate_limit_exceeded");
    let wait_ms: u64 = header(&refused, "retry-after-ms").parse().unwrap();
    // It was charged 500 and used 100, as the region reported; a tenth of a minute refills them.
    assert!((1..=6_000).contains(&wait_ms), "{wait_ms}");
    let refused: Value = refused.json().await.unwrap();
    assert!(refused["error"]["message"].as_str().unwrap().contains("1000 tokens a minute"), "{refused}");
    assert_eq!(fixture.requests(), [0, 1, 0]);
    // A tenant without limits gets no rate limit headers.
    let free = fixture.send("anywhere", &[]).await.unwrap();
    assert_eq!(header(&free, "x-ratelimit-limit-tokens"), "");
}

#[tokio::test]
async fn a_request_is_cancelled_when_its_client_disconnects() {
    for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
        check_cancelled(region_protocol).await;
    }
}

async fn check_cancelled(region_protocol: RegionProtocol) {
    let fixture =
        Fixture::start(region_protocol.config(), [(AMERICA, Waits), (EUROPE, Responds), (JAPAN, Responds)])
            .await;
    let region = &fixture.regions[AMERICA];
    {
        let request = fixture.send("anywhere", &[]);
        tokio::pin!(request);
        while region.requests() == 0 {
            let waited = tokio::time::timeout(Duration::from_millis(10), &mut request).await;
            assert!(waited.is_err(), "the region has not responded");
        }
        assert!(!*region.cancelled.borrow(), "the request was cancelled");
    }
    region.cancelled.subscribe().wait_for(|cancelled| *cancelled).await.unwrap();
    assert_eq!(fixture.requests(), [1, 0, 0], "no other region was used");
}

#[tokio::test]
async fn every_replica_path_accepts_the_deployment_in_the_body_or_in_the_path() {
    let fixture = Fixture::with([(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)]).await;
    let check = async |method: &str, path: &str, body: &str, expected: Result<&str, (u16, &str)>| {
        let (status, response) = fixture.any(method, path, body).await;
        match expected {
            Ok(sent_to) => {
                assert_eq!((status, &response["path"]), (200, &json!(sent_to)), "{method} {path} {body}")
            }
            Err((expected, word)) => {
                let text = response.to_string();
                assert!(status == expected && text.contains(word), "{method} {path} {body}: {status} {text}");
            }
        }
    };
    let named = r#"{"model": "anywhere", "input": "x"}"#;
    let nameless = r#"{"inputs": "x"}"#;
    check("POST", "/v2/rerank", named, Ok("/v2/rerank")).await;
    check("POST", "/embed", named, Ok("/embed")).await;
    check("POST", "/deployments/anywhere/embed", nameless, Ok("/embed")).await;
    check("POST", "/deployments/anywhere", nameless, Ok("/")).await;
    check("GET", "/deployments/anywhere/info", "", Ok("/info")).await;
    let invoke = r#"{"inputText": "x"}"#;
    check("POST", "/bedrock/model/anywhere/invoke", invoke, Ok("/bedrock/invoke")).await;
    check("POST", "/bedrock/model/nowhere/invoke", invoke, Err((404, "ResourceNotFoundException"))).await;
    check("POST", "/deployments/nowhere/embed", nameless, Err((404, "nowhere"))).await;
    // In the error format of the path: TEI uses 422 for unreadable input.
    check("POST", "/embed", nameless, Err((422, "\"error_type\":\"Tokenizer\""))).await;
    check("POST", "/embed", nameless, Err((422, "/deployments/NAME/embed"))).await;
    check("GET", "/info", "", Err((400, "anywhere, locked"))).await;
    check("POST", "/v1/embeddings", nameless, Err((400, "'model' is missing"))).await;
    check("POST", "/", nameless, Err((404, "POST /v1/rerank"))).await;
    assert_eq!(fixture.requests(), [6, 0, 0]);
    // The residency policy of the deployment in the path applies.
    check("POST", "/deployments/locked/embed", named, Ok("/embed")).await;
    assert_eq!(fixture.requests(), [6, 1, 0]);
}

#[tokio::test]
async fn each_failure_is_retried_in_the_next_region_or_returned() {
    check(Responds, "anywhere", 200, AMERICA, 1, [1, 0, 0]).await;
    check(RespondsLarge, "anywhere", 200, AMERICA, 1, [1, 0, 0]).await;
    check(RejectsNotReady, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
    check(RejectsOverloaded, "anywhere", 429, AMERICA, 1, [1, 0, 0]).await;
    check(ClosesConnection, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
    check(ClosesInTheHead, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
    check(ClosesInASmallBody, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
    check(ResetsInTheHead, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
    check(ResetsInASmallBody, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
}

/// Sends a request; returns the status, region and attempts of its response.
async fn send_and_summarize(fixture: &Fixture, headers: &[(&str, &str)]) -> (u16, String, String) {
    let response = fixture.send("anywhere", headers).await.unwrap();
    let header = |name| response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    (response.status().as_u16(), header("x-meridian-region"), header("x-meridian-attempts"))
}

fn from(region: &str, attempts: u32) -> (u16, String, String) {
    (200, region.to_owned(), attempts.to_string())
}

/// Sends a request and asserts that its response arrives within a bound. Every bound holds on a slow machine as well; a quiet one takes a hundredth of it.
async fn send_within_bound(fixture: &Fixture, bound: Duration) -> (u16, String, String) {
    let begun = Instant::now();
    let response = send_and_summarize(fixture, &[]).await;
    assert!(begun.elapsed() < bound, "{response:?} after {:?}", begun.elapsed());
    println!("{response:?} after {:?}", begun.elapsed());
    response
}

const HEALTHY: [(&str, Script); 3] = [(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)];

/// Response time of healthy regions, after enough requests to be significant and too few to earn a hedge.
const HEALTHY_RESPONSE_TIME: Duration = Duration::from_millis(2);

/// Returns whether a connection ends without a byte: that of a killed process, and one that a report used last when the
/// ingress closed.
fn ends(fault: Fault) -> bool {
    matches!(fault, Fault::IsKilled | Fault::RefusesConnections | Fault::DropsEverySyn)
}

/// Checks the first request that meets a fault: the response does not depend on the protocol.
async fn check_fault(client_protocol: ClientProtocol, region_protocol: RegionProtocol, fault: Fault) {
    let mut faulty =
        FaultFixture::healthy(client_protocol, region_protocol, "anywhere", HEALTHY_RESPONSE_TIME, ENOUGH)
            .await;
    let seen = faulty.send_first_request(fault, AMERICA, "anywhere", &[]).await;
    let (source, body) = ((seen.status, seen.region.clone()), seen.body.clone());
    let of = || format!("{client_protocol:?}, {region_protocol:?}, {fault:?}: {seen:?}");
    assert_eq!(source, (200, EUROPE.to_owned()), "{}", of());
    let never_arrived = matches!(fault, Fault::RefusesConnections | Fault::DropsEverySyn);
    // Over HTTP/2 the reports use the requests' connection, so its end may have been noticed before.
    let noticed_before = never_arrived && region_protocol == RegionProtocol::Http2 && seen.attempts == "1";
    if !noticed_before {
        replayed(ends(fault), 2, &seen.attempts);
    }
    assert!(body.is_some_and(|body| body.starts_with(b"{\"path\"")), "{}", of());
    assert!(seen.took < Duration::from_secs(3), "{}", of());
    let expected_requests = ENOUGH as u64 + u64::from(!never_arrived);
    assert_eq!(faulty.fixture.requests(), [expected_requests, 1, 0], "{}", of());
}

#[tokio::test]
async fn no_fault_of_one_region_is_visible_to_a_client() {
    for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
        let checks = Fault::ALL.map(|fault| check_fault(ClientProtocol::Http1, region_protocol, fault));
        futures_util::future::join_all(checks).await;
    }
}

#[tokio::test]
async fn no_fault_of_one_region_is_visible_to_a_client_over_tls_and_http_2() {
    for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
        let checks =
            Fault::ALL.map(|fault| check_fault(ClientProtocol::Http2OverTls, region_protocol, fault));
        futures_util::future::join_all(checks).await;
    }
}

/// Invariant 1, Residency: no failure of the only allowed region sends a byte to another.
async fn check_locked(client_protocol: ClientProtocol, region_protocol: RegionProtocol, fault: Fault) {
    let mut faulty =
        FaultFixture::healthy(client_protocol, region_protocol, "locked", HEALTHY_RESPONSE_TIME, ENOUGH)
            .await;
    let seen = faulty.send_first_request(fault, EUROPE, "locked", &[("x-meridian-timeout-ms", "4000")]).await;
    // Exceeding the first-byte timeout is no failure if no other region is allowed.
    let status = if fault == Fault::IsSlow { 200 } else { 503 };
    assert_eq!(seen.status, status, "{client_protocol:?}, {region_protocol:?}, {fault:?}: {seen:?}");
    // Over HTTP/2 the failure may be known before: then no attempt is made.
    if !(region_protocol == RegionProtocol::Http2 && seen.attempts == "0") {
        replayed(ends(fault), 1, &seen.attempts);
    }
    let [america, _, japan] = faulty.fixture.requests();
    assert_eq!((america, japan), (0, 0), "{client_protocol:?}, {region_protocol:?}, {fault:?}");
}

#[tokio::test]
async fn no_fault_sends_a_locked_request_to_another_region() {
    for (client_protocol, region_protocol) in [
        (ClientProtocol::Http1, RegionProtocol::Http1),
        (ClientProtocol::Http1, RegionProtocol::Http2),
        (ClientProtocol::Http2OverTls, RegionProtocol::Http1),
        (ClientProtocol::Http2OverTls, RegionProtocol::Http2),
    ] {
        futures_util::future::join_all(
            Fault::ALL.map(|fault| check_locked(client_protocol, region_protocol, fault)),
        )
        .await;
    }
}

#[tokio::test]
async fn over_http_2_a_begun_response_is_never_retried_and_ends_in_a_reset() {
    let scripts = [(AMERICA, ClosesInALargeBody), (EUROPE, Responds), (JAPAN, Responds)];
    let fixture = Fixture::start(TLS, scripts).await;
    let client = Client::of(&fixture, ClientProtocol::Http2OverTls).await;
    let seen = client.send("anywhere", &[]).await;
    assert_eq!((seen.status, seen.body), (200, None), "a truncated response is recognizable as such");
    assert_eq!(fixture.requests(), [1, 0, 0]);
    // The other streams of its connection continue.
    fixture.regions[AMERICA].script.send_replace(RespondsLarge);
    let seen = client.send("anywhere", &[]).await;
    assert_eq!((seen.status, seen.body.map(|body| body.len())), (200, Some(LARGE)));
}

#[tokio::test]
async fn a_stale_connection_causes_no_failure() {
    let fixture =
        Fixture::with([(AMERICA, ClosesOnTheSecondRequest), (EUROPE, Responds), (JAPAN, Responds)]).await;
    assert_eq!(send_and_summarize(&fixture, &[]).await, from(AMERICA, 1));
    assert_eq!(send_within_bound(&fixture, Duration::from_secs(1)).await, from(AMERICA, 2));
    assert_eq!(fixture.requests(), [3, 0, 0], "no other region was used");
}

/// Enough responses for latency estimates of a region, and too few to earn a hedge.
const ENOUGH: usize = 24;
/// Enough to earn a hedge.
const ENOUGH_TO_HEDGE: usize = 60;

#[tokio::test]
async fn a_region_that_reports_but_does_not_respond_is_ejected_after_its_usual_response_time() {
    let fixture = Fixture::with(HEALTHY).await;
    for _ in 0..ENOUGH {
        assert_eq!(send_and_summarize(&fixture, &[]).await.0, 200);
    }
    let region = &fixture.regions[AMERICA];
    region.script.send_replace(Waits);
    assert_eq!(send_within_bound(&fixture, Duration::from_secs(2)).await, from(EUROPE, 2));
    region.cancelled.subscribe().wait_for(|cancelled| *cancelled).await.unwrap();
    // The second consecutive timeout ejects it, and no further request meets it.
    assert_eq!(send_and_summarize(&fixture, &[]).await, from(EUROPE, 2));
    assert_eq!(send_within_bound(&fixture, Duration::from_secs(2)).await, from(EUROPE, 1));
    assert_ne!(circuit(&fixture, AMERICA).await, "closed");
    assert_eq!(circuit(&fixture, EUROPE).await, "closed");
}

/// Returns the circuit breaker state of a region, as its operations port shows it.
async fn circuit(fixture: &Fixture, region: &str) -> String {
    let routes = fixture.client.get(format!("{}/routes", fixture.operations)).send().await.unwrap();
    let routes: Value = routes.json().await.unwrap();
    let found = routes["regions"].as_array().unwrap().iter().find(|shown| shown["region"] == region).unwrap();
    found["circuit"]["state"].as_str().unwrap().to_owned()
}

/// Regression: a probe counted as finished before its response was evaluated, so an ejected region was probed again and
/// again, one request at a time, and never recovered.
#[tokio::test]
async fn a_region_that_responds_to_a_probe_recovers() {
    let fixture = Fixture::with(HEALTHY).await;
    for _ in 0..ENOUGH {
        assert_eq!(send_and_summarize(&fixture, &[]).await.0, 200);
    }
    let region = &fixture.regions[AMERICA];
    region.script.send_replace(Waits);
    while circuit(&fixture, AMERICA).await == "closed" {
        assert_eq!(send_and_summarize(&fixture, &[]).await.0, 200);
    }
    region.script.send_replace(Responds);
    let returns = async {
        while circuit(&fixture, AMERICA).await != "recovering" {
            assert_eq!(send_and_summarize(&fixture, &[]).await.0, 200);
        }
    };
    tokio::time::timeout(Duration::from_secs(20), returns).await.expect("one response is sufficient");
}

#[tokio::test]
async fn the_first_byte_timeout_includes_the_queue_of_a_region() {
    let fixture = Fixture::with(HEALTHY).await;
    for _ in 0..ENOUGH {
        assert_eq!(send_and_summarize(&fixture, &[]).await.0, 200);
    }
    let region = &fixture.regions[AMERICA];
    region.report_queue(600).await;
    region.script.send_replace(Takes(Duration::from_millis(400)));
    for _ in 0..3 {
        assert_eq!(send_and_summarize(&fixture, &[("x-meridian-priority", "bulk")]).await, from(AMERICA, 1));
    }
    assert_eq!(circuit(&fixture, AMERICA).await, "closed");
    region.script.send_replace(Waits);
    assert_eq!(send_and_summarize(&fixture, &[("x-meridian-priority", "bulk")]).await, from(EUROPE, 2));
}

#[tokio::test]
async fn a_region_that_was_always_slow_does_not_time_out() {
    let fixture =
        Fixture::with([(AMERICA, Takes(Duration::from_millis(400))), (EUROPE, Responds), (JAPAN, Responds)]);
    let fixture = fixture.await;
    for _ in 0..3 {
        assert_eq!(send_within_bound(&fixture, Duration::from_secs(4)).await, from(AMERICA, 1));
    }
    assert_eq!(fixture.requests(), [3, 0, 0]);
}

/// Invariant 1, Residency: neither a timeout nor a hedge sends a byte of a locked request to another region.
#[tokio::test]
async fn a_locked_request_waits_for_its_only_region_without_a_retry() {
    let fixture = Fixture::with(HEALTHY).await;
    for _ in 0..ENOUGH_TO_HEDGE {
        assert_eq!(fixture.send("locked", &[]).await.unwrap().status(), 200);
    }
    fixture.regions[EUROPE].script.send_replace(Takes(Duration::from_millis(400)));
    let response = fixture.send("locked", &[]).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-meridian-attempts"]),
        (200, &"1".parse().unwrap())
    );
    assert_eq!(fixture.requests(), [0, ENOUGH_TO_HEDGE as u64 + 1, 0]);
}

#[tokio::test]
async fn interactive_requests_are_hedged_and_bulk_is_not() {
    let fixture = Fixture::with(HEALTHY).await;
    for _ in 0..ENOUGH_TO_HEDGE {
        assert_eq!(send_and_summarize(&fixture, &[]).await, from(AMERICA, 1));
    }
    // Slower than almost all responses, and within the first-byte timeout.
    let region = &fixture.regions[AMERICA];
    region.script.send_replace(Takes(Duration::from_millis(60)));
    assert_eq!(send_and_summarize(&fixture, &[("x-meridian-priority", "bulk")]).await, from(AMERICA, 1));
    assert!(!*region.cancelled.borrow());
    assert_eq!(send_within_bound(&fixture, Duration::from_secs(1)).await, from(EUROPE, 2));
    region.cancelled.subscribe().wait_for(|cancelled| *cancelled).await.unwrap();
    assert_eq!(
        send_and_summarize(&fixture, &[]).await,
        from(AMERICA, 1),
        "one request in fifty is hedged, and the region is not ejected"
    );
}

#[tokio::test]
async fn hedging_can_be_disabled() {
    let fixture = Fixture::start("hedge = false", HEALTHY).await;
    for _ in 0..ENOUGH_TO_HEDGE {
        assert_eq!(send_and_summarize(&fixture, &[]).await, from(AMERICA, 1));
    }
    fixture.regions[AMERICA].script.send_replace(Takes(Duration::from_millis(60)));
    assert_eq!(send_and_summarize(&fixture, &[]).await, from(AMERICA, 1));
    assert_eq!(fixture.requests()[1..], [0, 0]);
}

#[tokio::test]
async fn waiting_requests_leave_a_region_that_becomes_unresponsive() {
    let begun = Instant::now();
    check(StopsResponding, "anywhere", 200, EUROPE, 2, [1, 1, 0]).await;
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_begun_response_is_never_retried() {
    for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
        let scripts = [(AMERICA, ClosesInALargeBody), (EUROPE, Responds), (JAPAN, Responds)];
        let fixture = Fixture::start(region_protocol.config(), scripts).await;
        let response = fixture.send("anywhere", &[]).await.unwrap();
        assert_eq!(response.status().as_u16(), 200);
        assert!(
            response.bytes().await.is_err(),
            "a truncated response is recognizable as such: {region_protocol:?}"
        );
        assert_eq!(fixture.requests(), [1, 0, 0], "{region_protocol:?}");
    }
}

/// Invariant 1, Residency: no failure of the only allowed region sends a byte to another.
#[tokio::test]
async fn no_truncated_response_sends_a_locked_request_to_another_region() {
    for europe in [ClosesConnection, ClosesInTheHead, ClosesInASmallBody] {
        let fixture = Fixture::with([(AMERICA, Responds), (EUROPE, europe), (JAPAN, Responds)]).await;
        let response = fixture.send("locked", &[("x-meridian-timeout-ms", "4000")]).await.unwrap();
        assert_eq!(response.status().as_u16(), 503, "{europe:?}");
        let attempts = response.headers()["x-meridian-attempts"].to_str().unwrap();
        let replayed = replayed(europe == ClosesConnection, 1, attempts);
        assert_eq!(fixture.requests(), [0, 1 + replayed, 0], "{europe:?}");
    }
}

#[tokio::test]
async fn a_residency_header_narrows_and_a_repeated_one_is_rejected() {
    let fixture = Fixture::with([(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)]).await;
    let narrowed = fixture.send("anywhere", &[("x-meridian-residency", "jp")]).await.unwrap();
    assert_eq!(narrowed.headers()["x-meridian-region"], JAPAN);
    let not_permitted = fixture.send("locked", &[("x-meridian-residency", "jp")]).await.unwrap();
    assert_eq!(not_permitted.headers()["x-meridian-error"], "region_not_permitted");
    assert!(
        not_permitted.text().await.unwrap().contains("x-meridian-residency"),
        "the message names the header"
    );
    let twice = [("x-meridian-residency", "jp"), ("x-meridian-residency", "us")];
    assert_eq!(
        fixture.send("anywhere", &twice).await.unwrap().headers()["x-meridian-error"],
        "invalid_header"
    );
    assert_eq!(fixture.requests(), [0, 0, 1]);
}

#[tokio::test]
async fn the_client_location_is_accepted_from_trusted_peers_only() {
    for (trusted, region) in [("127.0.0.1", JAPAN), ("192.0.2.1", AMERICA)] {
        let fixture =
            Fixture::with_trusted_peer(trusted, [(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)])
                .await;
        let response = fixture.send("anywhere", &[("x-meridian-client-geo", "34.69,135.50")]).await.unwrap();
        assert_eq!(response.headers()["x-meridian-region"], region, "{trusted} is trusted");
    }
}

#[tokio::test]
async fn a_deadline_returns_an_error() {
    let fixture = Fixture::with([(AMERICA, StopsResponding), (EUROPE, Responds), (JAPAN, Responds)]).await;
    let begun = Instant::now();
    let response = fixture.send("anywhere", &[("x-meridian-timeout-ms", "200")]).await.unwrap();
    assert_eq!(response.headers()["x-meridian-error"], "deadline_exceeded");
    assert!(begun.elapsed() < Duration::from_millis(600), "{:?}", begun.elapsed());
}

/// The policy of the scripted hub is the one that the tests assume.
#[test]
fn the_policy_of_the_scene_allows_only_europe() {
    let catalogue = regions::catalogue::Catalogue::builtin();
    let permitted = "eu".parse::<ResidencyPolicy>().unwrap().permitted(&catalogue);
    let allowed = |id: &str| permitted.contains(catalogue.index_of(&id.parse().unwrap()).unwrap());
    assert_eq!([AMERICA, EUROPE, JAPAN].map(allowed), [false, true, false]);
}
