//! Traces through all processes, and their logs and metrics, received by a collector that reads the published protobuf definitions of OTLP.

mod collector;
mod jobs;

use crate::local_fleet::LocalFleet;
use crate::{AMERICA, ASHBURN, EUROPE};
use collector::{Collector, ReceivedSpan};
use std::path::Path;

/// Text of the client that must not be exported. Its request identifier is.
const CANARIES: [&str; 6] = [
    "canary-of-the-input",
    "canary-of-the-key",
    "canary-of-the-baggage",
    "canary-of-the-state",
    "canary-of-the-cookie",
    "canary-of-the-path",
];

/// Trace and span of the client.
const CLIENT: (&str, &str) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");

fn fleet(collector: &Collector) -> LocalFleet {
    let endpoint = collector.url();
    let environment = [
        ("MERIDIAN_LOG", "info,access=debug,replica=debug"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1000"),
    ];
    let environment = environment.map(|(name, value)| (name, Path::new(value)));
    LocalFleet::start_with(&["--regions", "2", "--key", "canary-of-the-key"], &environment)
}

/// Header with the key of the fleet.
const KEY: (&str, &str) = ("authorization", "Bearer canary-of-the-key");

/// Returns the only span with this name and parent.
fn only<'s>(spans: &'s [ReceivedSpan], parent: &str, name: &str) -> &'s ReceivedSpan {
    let found: Vec<_> = spans.iter().filter(|span| span.parent == parent && span.name == name).collect();
    assert_eq!(found.len(), 1, "{name} below {parent}:\n{}", collector::waterfall(spans));
    found[0]
}

/// Checks the spans of an attempt at a region, through its spoke and its replica.
fn check_attempt(spans: &[ReceivedSpan], attempt: &ReceivedSpan, region: &str) {
    let request = "POST /v1/embeddings";
    assert_eq!((attempt.service.as_str(), attempt.text("cloud.region")), ("meridian-gateway", region));
    assert_eq!(attempt.text("server.address"), "127.0.0.1");
    let spoke = only(spans, &attempt.id, request);
    assert_eq!((spoke.service.as_str(), spoke.text("gen_ai.request.model")), ("meridian-spoke", "minilm"));
    for stage in ["receive", "select replica"] {
        only(spans, &spoke.id, stage);
    }
    let to_replica = only(spans, &spoke.id, "attempt");
    assert_eq!(to_replica.text("http.response.status_code"), "200");
    let replica = only(spans, &to_replica.id, request);
    assert_eq!(replica.service, "meridian-replica");
    assert_eq!(replica.text("gen_ai.operation.name"), "embeddings");
    for stage in ["parse", "tokenize", "queue", "engine", "write"] {
        only(spans, &replica.id, stage);
    }
    for (outer, inner) in [(attempt, spoke), (spoke, to_replica), (to_replica, replica)] {
        // A spoke ends its span when it has written the response, which the gateway may have read by then.
        assert!(outer.start <= inner.start, "{}", collector::waterfall(spans));
    }
}

/// Waits for the log lines of a request, and checks that they name its spans and that every role exports its log.
async fn check_logs(fleet: &LocalFleet, collector: &Collector, spans: &[&ReceivedSpan]) {
    let mut logs = Vec::new();
    fleet
        .wait_until("all roles have exported their logs", async || {
            logs = collector.logs();
            let has = |role: &str| logs.iter().any(|log| log.service == format!("meridian-{role}"));
            ["gateway", "hub", "spoke", "replica"].iter().all(|role| has(role))
                && spans.iter().all(|span| logs.iter().any(|log| log.span == span.id))
        })
        .await;
    for span in spans {
        let lines: Vec<_> = logs.iter().filter(|log| log.span == span.id).collect();
        let [line] = lines.as_slice() else { panic!("one line for each request: {lines:?}") };
        assert_eq!((&line.service, &line.trace), (&span.service, &span.trace));
        assert!(!line.attributes.contains_key("trace_id") && !line.attributes.contains_key("span_id"));
    }
    let line = logs.iter().find(|log| log.span == spans[0].id).expect("that of the gateway");
    assert_eq!(
        (line.scope.as_str(), line.body.as_str(), line.severity.as_str()),
        ("access", "access", "INFO")
    );
    assert_eq!(line.attributes["status"], "200");
    let metrics = fleet.metrics().await;
    for name in ["meridian_gateway_log_records_exported_total ", "meridian_gateway_log_queue_max_bytes "] {
        let value = metrics.lines().find_map(|line| line.strip_prefix(name));
        assert!(value.is_some_and(|value| value != "0"), "{name} in {metrics}");
    }
}

/// Waits until each role has exported its metrics with its build, and a counter of the requests that it has served.
async fn check_metrics(fleet: &LocalFleet, collector: &Collector) {
    let counters = [
        ("gateway", "meridian_gateway_requests_total"),
        ("hub", "meridian_hub_requests_total"),
        ("spoke", "meridian_ingress_requests_total"),
        ("replica", "meridian_replica_requests_total"),
    ];
    fleet
        .wait_until("all roles have exported their metrics", async || {
            let metrics = collector.metrics();
            counters.iter().all(|(role, counter)| {
                let service = format!("meridian-{role}");
                let of_role = || metrics.iter().filter(|metric| metric.service == service);
                let has_build = of_role().any(|metric| {
                    metric.name == "meridian_build_info" && metric.attributes.contains_key("version")
                });
                has_build && of_role().any(|metric| metric.name == *counter && metric.value >= 1.0)
            })
        })
        .await;
}

#[tokio::test]
async fn a_trace_has_the_spans_of_every_process_a_request_passed_through() {
    let collector = Collector::start().await;
    let fleet = fleet(&collector);
    fleet.wait_for_health(AMERICA, "healthy").await;
    let traceparent = format!("00-{}-{}-01", CLIENT.0, CLIENT.1);
    let headers = [
        KEY,
        ASHBURN,
        ("traceparent", traceparent.as_str()),
        ("tracestate", "canary=canary-of-the-state"),
        ("baggage", "secret=canary-of-the-baggage"),
        ("cookie", "session=canary-of-the-cookie"),
    ];
    let response = fleet.embed("minilm", "canary-of-the-input", &headers).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, AMERICA), "{}", response.body);
    // A rejected request, with a key and a path that are text of the client.
    let rejected =
        [("authorization", "Bearer canary-of-the-key-of-another"), ("traceparent", traceparent.as_str())];
    assert_eq!(fleet.embed("minilm", "canary-of-the-input", &rejected).await.status, 401);
    assert_eq!(fleet.post_to("/canary-of-the-path", "", &rejected[1..]).await.status, 404);

    let request = "POST /v1/embeddings";
    let of_replica = |span: &ReceivedSpan| span.service == "meridian-replica" && span.name == request;
    let mut spans = Vec::new();
    fleet
        .wait_until("gateway, spoke and replica have exported", async || {
            spans = collector.trace(CLIENT.0);
            let roots = spans.iter().filter(|span| span.parent == CLIENT.1).count();
            roots == 3
                && spans.iter().any(of_replica)
                && spans.iter().any(|span| span.service == "meridian-spoke")
        })
        .await;
    println!("{}", collector::waterfall(&spans));
    let served =
        |span: &&ReceivedSpan| span.parent == CLIENT.1 && span.text("http.response.status_code") == "200";
    let gateway = spans.iter().find(served).unwrap();
    assert_eq!((gateway.service.as_str(), gateway.name.as_str()), ("meridian-gateway", request));
    for (attribute, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/v1/embeddings"),
        ("gen_ai.request.model", "minilm"),
        ("cloud.region", AMERICA),
        ("meridian.request.id", response.header("x-request-id")),
        ("gen_ai.usage.input_tokens", response.header("x-meridian-tokens")),
        ("meridian.trace.kept", "sampled"),
    ] {
        assert_eq!(gateway.text(attribute), value, "{attribute}");
    }
    for stage in ["admission", "route", "respond"] {
        only(&spans, &gateway.id, stage);
    }
    check_attempt(&spans, only(&spans, &gateway.id, "attempt"), AMERICA);

    let replica = spans.iter().find(|span| of_replica(span)).unwrap();
    let engine = only(&spans, &replica.id, "engine");
    let batch = collector.spans().into_iter().find(|span| span.name == "batch").expect("a batch");
    assert_eq!(batch.links, [(CLIENT.0.to_owned(), replica.id.clone())]);
    assert_eq!(engine.links, [(batch.trace.clone(), batch.id.clone())]);
    assert_ne!(batch.trace, CLIENT.0, "a batch has inputs of several requests");
    let steps = collector.trace(&batch.trace);
    let [pack, forward, pool] = ["pack", "forward", "pool"].map(|step| only(&steps, &batch.id, step));
    assert_eq!(
        [pack.start, pack.end, forward.end, pool.end],
        [batch.start, forward.start, pool.start, batch.end]
    );

    check_logs(&fleet, &collector, &[gateway, replica]).await;
    check_metrics(&fleet, &collector).await;

    let statuses = |span: &ReceivedSpan| span.text("http.response.status_code").to_owned();
    let mut found: Vec<_> = spans.iter().filter(|span| span.parent == CLIENT.1).map(statuses).collect();
    found.sort();
    assert_eq!(found, ["200", "401", "404"]);
    let bytes = collector.bytes();
    for canary in CANARIES {
        let is_exported = bytes.windows(canary.len()).any(|part| part == canary.as_bytes());
        assert!(!is_exported, "{canary} was exported");
    }
    let exported = response.header("x-request-id").as_bytes();
    assert!(bytes.windows(exported.len()).any(|part| part == exported), "the search finds what is exported");
}

#[tokio::test]
async fn the_trace_of_a_failed_over_request_is_exported_although_it_was_not_sampled() {
    let collector = Collector::start().await;
    let fleet = fleet(&collector);
    for region in [AMERICA, EUROPE] {
        fleet.wait_for_health(region, "healthy").await;
    }
    assert_eq!(fleet.embed("minilm", "an ordinary request", &[KEY, ASHBURN]).await.status, 200);
    fleet.signal("-STOP", &["spoke", AMERICA]);
    let response =
        fleet.embed("minilm", "fails over", &[KEY, ASHBURN, ("x-request-id", "failed-over")]).await;
    fleet.signal("-CONT", &["spoke", AMERICA]);
    assert_eq!((response.status, response.header("x-meridian-region")), (200, EUROPE), "{}", response.body);
    assert_eq!(response.header("x-meridian-attempts"), "2");

    let mut spans = Vec::new();
    fleet
        .wait_until("all processes have exported their part", async || {
            let all = collector.spans();
            let own = all.iter().find(|span| {
                span.service == "meridian-gateway" && span.text("meridian.request.id") == "failed-over"
            });
            spans = own.map(|own| collector.trace(&own.trace)).unwrap_or_default();
            let has = |service: &str| spans.iter().any(|span| span.service == service);
            has("meridian-spoke") && has("meridian-replica")
        })
        .await;
    println!("{}", collector::waterfall(&spans));
    let gateway = only(&spans, "", "POST /v1/embeddings");
    assert_eq!(gateway.text("meridian.trace.kept"), "failed_over");
    let attempts: Vec<_> =
        spans.iter().filter(|span| span.parent == gateway.id && span.name == "attempt").collect();
    let [first, second] = attempts.as_slice() else { panic!("{}", collector::waterfall(&spans)) };
    assert_eq!((first.text("cloud.region"), first.is_error), (AMERICA, true));
    assert_eq!(second.text("http.request.resend_count"), "1");
    check_attempt(&spans, second, EUROPE);
    let is_sampled =
        |span: &ReceivedSpan| span.trace != gateway.trace && span.text("meridian.trace.kept") == "sampled";
    assert!(!collector.spans().iter().any(is_sampled), "no request was sampled");
}
