//! Records of a finished request: its access line, its metrics, and its receipts.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

#[path = "../sockets/address.rs"]
mod address;
mod fixture;
#[path = "../sockets/hub.rs"]
mod hub;
mod log_filter;
mod policy;
mod receipts;
mod required;

use fixture::{AMERICA, EUROPE, Fixture, JAPAN, Scrape, Script, access_lines, logged};
use gateway::edge::ExplanationsConfig;
use gateway_core::explanation_archive::ArchiveRules;
use serde_json::{Value, json};
use std::time::Duration;

/// Text in client input that must not appear in any record.
const SECRET: &str = "text-that-must-not-be-logged";

/// Returns the only access line of this request.
async fn line(fixture: &Fixture, id: &str) -> Value {
    fixture.wait_until("a request is logged", async || !access_lines(id).is_empty()).await;
    let mut lines = access_lines(id);
    assert_eq!(lines.len(), 1, "{id} is logged once: {lines:#?}");
    lines.remove(0)
}

#[track_caller]
fn has(line: &Value, expected: Value) {
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&line[field], value, "{field} of {line:#}");
    }
}

#[tokio::test]
async fn every_request_is_logged_once_and_counted_once_with_any_outcome() {
    let fixture = Fixture::new().await;
    fixture.send("served", "anywhere", SECRET).await;
    fixture.send("no-model", SECRET, "x").await;
    let unauthorized = fixture.client.post(format!("{}/v1/embeddings", fixture.url)).bearer_auth(SECRET);
    unauthorized.header("x-request-id", "no-key").body(SECRET).send().await.unwrap();
    let locked_out =
        fixture.request("residency_violation", "locked", "x").header("x-meridian-residency", "us");
    locked_out.send().await.unwrap();
    let url = format!("{}/{SECRET}?{SECRET}", fixture.url);
    fixture.client.get(url).header("x-request-id", "no-path").send().await.unwrap();
    let models = fixture.client.get(format!("{}/v1/models", fixture.url)).bearer_auth("k");
    models.header("x-request-id", "models").send().await.unwrap();

    let line_of = async |id| line(&fixture, id).await;
    let served = line_of("served").await;
    has(
        &served,
        json!({"protocol": "http/1.1", "endpoint": "/v1/embeddings", "tenant": "test", "deployment": "anywhere",
               "priority": "interactive", "outcome": "ok", "status": 200, "region": AMERICA, "attempts": 1, "inputs": 1,
               "tokens": 7, "queue_ms": 1.0, "tokenize_ms": 2.0, "engine_ms": 3.0, "bytes_out": 11}),
    );
    assert!(served["trail"].as_str().unwrap().starts_with("aws/us-east-1:first:ok:"), "{served}");
    let bytes_in = json!({"model": "anywhere", "input": SECRET}).to_string().len();
    assert_eq!(served["bytes_in"], bytes_in);
    let ms = |field: &str| served[field].as_f64().unwrap_or_else(|| panic!("{field} of {served}"));
    let parts = ["gateway_ms", "network_ms", "sending_ms"].map(ms).iter().sum::<f64>();
    assert!(parts > 0.0 && parts <= ms("total_ms"), "{served:#}");
    has(
        &line_of("no-model").await,
        json!({"outcome": "model_not_found", "status": 404, "attempts": 0, "tenant": "test", "deployment": null}),
    );
    has(&line_of("no-key").await, json!({"outcome": "invalid_api_key", "status": 401, "tenant": null}));
    has(
        &line_of("residency_violation").await,
        json!({"outcome": "region_not_permitted", "status": 403, "attempts": 0}),
    );
    has(&line_of("no-path").await, json!({"outcome": "not_found", "status": 404, "endpoint": "other"}));
    has(&line_of("models").await, json!({"outcome": "ok", "status": 200, "endpoint": "/v1/models"}));

    let scrape = fixture.scrape().await;
    let check =
        |series: &str, expected: f64| assert_eq!(scrape.get(series), expected, "{series}\n{}", scrape.text);
    let requests = |endpoint: &str, outcome: &str| {
        format!("meridian_gateway_requests_total{{endpoint=\"{endpoint}\",outcome=\"{outcome}\"}}")
    };
    check(&requests("/v1/embeddings", "ok"), 1.0);
    check(&requests("/v1/embeddings", "model_not_found"), 1.0);
    check(&requests("/v1/embeddings", "invalid_api_key"), 1.0);
    check(&requests("/v1/embeddings", "region_not_permitted"), 1.0);
    check(&requests("other", "not_found"), 1.0);
    check(&requests("/v1/models", "ok"), 1.0);
    assert_eq!(scrape.sum("meridian_gateway_requests_total", ""), 6.0);
    assert_eq!(scrape.sum("meridian_gateway_protocol_requests_total", "http/1.1"), 6.0);
    check("meridian_gateway_request_seconds_count{priority=\"interactive\"}", 1.0);
    check("meridian_gateway_request_seconds_count{priority=\"unknown\"}", 5.0);
    check("meridian_gateway_stage_seconds_count{stage=\"engine\"}", 1.0);
    check("meridian_gateway_stage_seconds_sum{stage=\"engine\"}", 0.003);
    check("meridian_gateway_tenant_requests_total{tenant=\"test\",outcome=\"ok\"}", 2.0);
    check("meridian_gateway_tenant_requests_total{tenant=\"test\",outcome=\"client_error\"}", 2.0);
    check("meridian_gateway_tenant_tokens_total{tenant=\"test\"}", 7.0);
    check("meridian_gateway_tenant_inputs_total{tenant=\"test\"}", 1.0);
    check(&format!("meridian_gateway_region_requests_total{{region=\"{AMERICA}\",outcome=\"ok\"}}"), 1.0);
    let first =
        format!("meridian_gateway_attempts_total{{region=\"{AMERICA}\",cause=\"first\",outcome=\"ok\"}}");
    check(&first, 1.0);
    check("meridian_gateway_requests_in_flight", 0.0);
    check("meridian_gateway_route_epoch", 3.0);
    check("meridian_gateway_route_generation", 14.0);
    check("meridian_gateway_retry_budget", 10.0);
    check(&format!("meridian_gateway_region_health{{region=\"{JAPAN}\",state=\"healthy\"}}"), 1.0);
    assert!(scrape.get("meridian_gateway_connections") >= 1.0, "{}", scrape.text);
    check("meridian_gateway_bodies_bytes", 0.0);
    check(&format!("meridian_gateway_region_circuit{{region=\"{EUROPE}\",state=\"closed\"}}"), 1.0);
    check(&format!("meridian_gateway_region_circuit{{region=\"{EUROPE}\",state=\"ejected\"}}"), 0.0);
    check(&format!("meridian_gateway_region_in_flight{{region=\"{AMERICA}\"}}"), 0.0);
    assert!(scrape.get(&format!("meridian_gateway_region_in_flight_max{{region=\"{AMERICA}\"}}")) > 0.0);

    let ingress = Scrape::of(&fixture.client, &format!("http://{}", fixture.regions[AMERICA].address)).await;
    let served = "meridian_ingress_requests_total{endpoint=\"/v1/embeddings\",outcome=\"ok\"}";
    assert_eq!(ingress.get(served), 1.0, "{}", ingress.text);
    assert_eq!(ingress.get("meridian_ingress_request_bytes_total"), bytes_in as f64);
    assert_eq!(ingress.get("meridian_ingress_replicas_ready{deployment=\"locked\"}"), 1.0);
    assert!(ingress.get("meridian_ingress_exchanges_total") >= 1.0);

    for (description, text) in
        [("the log", logged()), ("metrics", scrape.text), ("the region's", ingress.text)]
    {
        assert!(!text.contains(SECRET), "{description} contains client input");
    }
}

#[tokio::test]
async fn disconnects_and_retries_are_recorded() {
    let fixture = Fixture::new().await;
    fixture.regions[AMERICA].script.send_replace(Script::RejectsNotReady);
    fixture.send("elsewhere", "anywhere", "x").await;
    let elsewhere = line(&fixture, "elsewhere").await;
    has(&elsewhere, json!({"outcome": "ok", "status": 200, "region": EUROPE, "attempts": 2}));
    let trail: Vec<_> = elsewhere["trail"].as_str().unwrap().split(' ').map(str::to_owned).collect();
    assert!(trail[0].starts_with("aws/us-east-1:first:server_error:"), "{trail:?}");
    assert!(trail[1].starts_with("gcp/europe-west4:retry:ok:"), "{trail:?}");

    fixture.regions[EUROPE].script.send_replace(Script::Waits);
    let waiting = tokio::spawn(fixture.request("hung-up", "locked", "x").send());
    let in_flight = "meridian_gateway_requests_in_flight";
    fixture
        .wait_until("the request is in flight", async || fixture.scrape().await.get(in_flight) == 1.0)
        .await;
    waiting.abort();
    let hung_up = line(&fixture, "hung-up").await;
    has(&hung_up, json!({"outcome": "client_disconnected", "status": null, "attempts": 1, "region": null}));
    assert!(hung_up["trail"].as_str().unwrap().starts_with("gcp/europe-west4:first:cancelled:"), "{hung_up}");

    let scrape = fixture.scrape().await;
    assert_eq!(scrape.get(in_flight), 0.0);
    assert_eq!(scrape.sum("meridian_gateway_attempts_total", "cause=\"retry\""), 1.0, "{}", scrape.text);
    assert_eq!(
        scrape.sum("meridian_gateway_attempts_total", "outcome=\"cancelled\""),
        1.0,
        "{}",
        scrape.text
    );
    assert_eq!(scrape.sum("meridian_gateway_requests_total", "client_disconnected"), 1.0, "{}", scrape.text);
    let europe = format!("http://{}", fixture.regions[EUROPE].address);
    fixture
        .wait_until("the region has noticed the disconnect", async || {
            let scrape = Scrape::of(&fixture.client, &europe).await;
            scrape.sum("meridian_ingress_requests_total", "client_disconnected") == 1.0
        })
        .await;
}

#[tokio::test]
async fn a_finished_request_can_be_explained() {
    let fixture = Fixture::new().await;
    let explain = async |id: &str| {
        let url = format!("{}/explain/{id}", fixture.operations);
        let response = fixture.client.get(url).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let (status, unknown) = explain("unknown").await;
    assert!(status == 404 && unknown["error"].as_str().unwrap().contains("4096"), "{unknown}");

    fixture.send("a/b?c", "locked", SECRET).await;
    line(&fixture, "a/b?c").await;
    fixture.wait_until("it is kept", async || explain("a/b%3Fc").await.0 == 200).await;
    let (_, locked) = explain("a/b%3Fc").await;
    has(
        &locked,
        json!({"id": "a/b?c", "outcome": "ok", "status": 200, "tenant": "test", "deployment": "locked",
               "residency": "eu", "generation": "3.14", "region": EUROPE, "tokens": 7}),
    );
    let regions = locked["regions"].as_array().unwrap();
    has(&regions[0], json!({"region": EUROPE, "rank": 1, "health": "healthy"}));
    assert!(regions[0]["rtt_ms"].as_f64().unwrap() > 0.0, "{locked:#}");
    let rejected = json!([{"region": AMERICA, "rejected": "forbidden by residency"},
                          {"region": JAPAN, "rejected": "forbidden by residency"}]);
    assert_eq!(json!(regions[1..]), rejected);
    // Neither a trace nor an explanation on disk needs the time of the routing decision.
    has(&locked, json!({"admission_pool": EUROPE, "spillover": null, "routing": null}));
    assert_eq!(locked["attempts"].as_array().unwrap().len(), 1);
    has(
        &locked["attempts"][0],
        json!({"attempt": 1, "region": EUROPE, "cause": "first", "end": "ok", "status": 200}),
    );
    assert!(!locked.to_string().contains(SECRET), "{locked}");

    fixture.send("refused", SECRET, "x").await;
    fixture.wait_until("it is kept", async || explain("refused").await.0 == 200).await;
    let (_, refused) = explain("refused").await;
    has(&refused, json!({"outcome": "model_not_found", "deployment": null, "regions": null, "attempts": []}));
}

#[tokio::test]
async fn an_explanation_on_disk_has_the_time_of_the_routing_decision() {
    let dir = tempfile::tempdir().unwrap();
    let rules =
        ArchiveRules { bytes_max: 32 << 20, hours: 1, slow: Duration::from_secs(60), sample_ratio: 1.0 };
    let explanations = ExplanationsConfig { dir: dir.path().to_owned(), rules };
    let fixture = Fixture::with(|config| config.explanations = Some(explanations)).await;
    fixture.send("kept", "anywhere", "x").await;
    let found = async || {
        let response = fixture.client.get(format!("{}/requests", fixture.operations)).send().await.unwrap();
        response.json::<Value>().await.unwrap()
    };
    fixture.wait_until("it is on disk", async || found().await["requests"][0]["id"] == "kept").await;
    let mut files = std::fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().path());
    let file = files.find(|file| file.extension().is_some_and(|it| it == "jsonl")).unwrap();
    let line: Value = serde_json::from_str(std::fs::read_to_string(file).unwrap().trim()).unwrap();
    assert!(line["routing"]["took_ms"].is_number(), "{line:#}");
}

#[tokio::test]
async fn an_invalid_search_is_rejected_with_its_parameter_and_the_valid_values() {
    let fixture = Fixture::with(|_| {}).await;
    for (field, value, valid) in [
        ("outcome", "bogus", "client_disconnected"),
        ("since_ms", "yesterday", "from 0 to 18446744073709551615"),
        ("limit", "many", "from 1 to 1000"),
    ] {
        let url = format!("{}/requests?{field}={value}", fixture.operations);
        let rejected = fixture.client.get(url).send().await.unwrap();
        assert_eq!(rejected.status(), 400, "{field}");
        let error = rejected.json::<Value>().await.unwrap()["error"].as_str().unwrap().to_owned();
        for part in [field, value, valid] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
