//! Traces of jobs and of batches of files.

use super::collector::{Collector, ReceivedSpan, waterfall};
use super::{CANARIES, CLIENT, KEY, only};
use crate::local_fleet::LocalFleet;
use crate::{AMERICA, ASHBURN, EUROPE, FRANKFURT};
use axum::Router;
use axum::routing::post;
use serde_json::{Value, json};
use std::path::Path;
use tokio::net::TcpListener;

/// Starts a fleet whose traces without a caller are sampled with this sampler.
async fn fleet(collector: &Collector, sampler: &str, regions: &[&str]) -> LocalFleet {
    let endpoint = collector.url();
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_TRACES_SAMPLER", sampler)];
    let environment = environment.map(|(name, value)| (name, Path::new(value)));
    let count = regions.len().to_string();
    let arguments = ["--regions", count.as_str(), "--key", "canary-of-the-key"];
    let fleet = LocalFleet::start_with(&arguments, &environment);
    for region in regions {
        fleet.wait_for_health(region, "healthy").await;
    }
    fleet
}

fn embedding(model: &str) -> Value {
    json!({"model": model, "input": ["canary-of-the-input"]})
}

/// Submits a job, and returns its identifier.
async fn submit(fleet: &LocalFleet, body: &Value, headers: &[(&str, &str)]) -> String {
    let submitted = fleet.post_to("/v1/async/embeddings", body.to_string(), headers).await;
    assert_eq!(submitted.status, 202, "{}", submitted.body);
    submitted.body["id"].as_str().expect("an identifier").to_owned()
}

/// Waits until the root with this identifier was exported and the condition holds; returns the spans of its trace with the root.
async fn trace_of(
    fleet: &LocalFleet,
    collector: &Collector,
    id: &str,
    is_complete: impl Fn(&[ReceivedSpan]) -> bool,
) -> (ReceivedSpan, Vec<ReceivedSpan>) {
    let mut found = None;
    fleet
        .wait_until("the root of the trace is exported", async || {
            let all = collector.spans();
            let is_root = |span: &&ReceivedSpan| {
                ["job", "file batch"].contains(&span.name.as_str()) && span.text("meridian.job.id") == id
            };
            let root = all.iter().find(is_root).cloned();
            found = root.map(|root| {
                let spans = collector.trace(&root.trace);
                (root, spans)
            });
            found.as_ref().is_some_and(|(_, spans)| is_complete(spans))
        })
        .await;
    let (root, spans) = found.expect("a trace");
    println!("{}", waterfall(&spans));
    (root, spans)
}

fn of<'s>(spans: &'s [ReceivedSpan], name: &str) -> Vec<&'s ReceivedSpan> {
    spans.iter().filter(|span| span.name == name).collect()
}

/// Checks that an attempt has the spans of its request down to the replica.
fn check_attempt(spans: &[ReceivedSpan], attempt: &ReceivedSpan) {
    assert_eq!(
        (attempt.service.as_str(), attempt.text("meridian.attempt.end")),
        ("meridian-spoke", "succeeded")
    );
    let request = only(spans, &attempt.id, "job request");
    let to_replica = only(spans, &request.id, "attempt");
    let replica = only(spans, &to_replica.id, "POST /v1/embeddings");
    assert_eq!(replica.service, "meridian-replica");
    assert!(attempt.start <= request.start && request.start <= to_replica.start);
}

#[tokio::test]
async fn a_job_has_a_trace_from_its_submission_to_its_webhook() {
    let collector = Collector::start().await;
    let fleet = fleet(&collector, "parentbased_always_off", &[AMERICA]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let webhook = format!("http://{}/", listener.local_addr().expect("its address"));
    let target = Router::new().route("/", post(async || "received"));
    let target = tokio::spawn(async move { axum::serve(listener, target).await.expect("it serves") });
    let traceparent = format!("00-{}-{}-01", CLIENT.0, CLIENT.1);
    let headers = [
        KEY,
        ("traceparent", traceparent.as_str()),
        ("x-meridian-webhook-url", webhook.as_str()),
        ("baggage", "secret=canary-of-the-baggage"),
        ("tracestate", "canary=canary-of-the-state"),
        ("cookie", "session=canary-of-the-cookie"),
    ];
    let id = submit(&fleet, &embedding("minilm"), &headers).await;
    let is_complete = |spans: &[ReceivedSpan]| {
        spans.iter().any(|span| span.service == "meridian-replica") && !of(spans, "webhook").is_empty()
    };
    let (root, spans) = trace_of(&fleet, &collector, &id, is_complete).await;
    assert_eq!((root.parent.as_str(), root.service.as_str()), ("", "meridian-spoke"));
    for (attribute, value) in [
        ("meridian.trace.kept", "sampled"),
        ("meridian.outcome", "succeeded"),
        ("meridian.attempts", "1"),
        ("gen_ai.request.model", "minilm"),
        ("gen_ai.operation.name", "embeddings"),
        ("cloud.region", AMERICA),
    ] {
        assert_eq!(root.text(attribute), value, "{attribute}");
    }
    // The submission is in the trace of the client, and both link to each other.
    let is_submission =
        |span: &&ReceivedSpan| span.service == "meridian-spoke" && span.text("meridian.job.id") == id;
    let of_client = collector.trace(CLIENT.0);
    let submission = of_client.iter().find(is_submission).expect("the request at the spoke");
    assert_eq!(submission.name, "POST /v1/async/embeddings");
    assert_eq!(submission.links, [(root.trace.clone(), root.id.clone())]);
    let to_submission = [(CLIENT.0.to_owned(), submission.id.clone())];
    assert_eq!(root.links, to_submission);
    assert_ne!(root.trace, CLIENT.0);
    let accept = only(&spans, &root.id, "accept");
    assert_eq!(accept.links, to_submission);
    let attempt = only(&spans, &root.id, "job attempt");
    check_attempt(&spans, attempt);
    let queue = only(&spans, &root.id, "queue");
    assert_eq!((queue.start, queue.end), (root.start, attempt.start));
    let webhook = only(&spans, &root.id, "webhook");
    assert_eq!((webhook.text("meridian.attempt.end"), webhook.is_error), ("delivered", false));
    let bytes = collector.bytes();
    for canary in CANARIES {
        assert!(!bytes.windows(canary.len()).any(|part| part == canary.as_bytes()), "{canary} was exported");
    }
    target.abort();
}

#[tokio::test]
async fn a_batch_is_one_trace_with_its_chunks_and_failed_jobs_are_kept_without_being_sampled() {
    let collector = Collector::start().await;
    let fleet = fleet(&collector, "parentbased_always_off", &[AMERICA, EUROPE]).await;
    // An ordinary job, whose trace is not exported.
    let ordinary = submit(&fleet, &embedding("minilm"), &[KEY, ASHBURN]).await;
    let rejected =
        submit(&fleet, &json!({"model": "minilm", "input": ["x"], "dimensions": 7_000}), &[KEY, ASHBURN])
            .await;
    let (root, spans) =
        trace_of(&fleet, &collector, &rejected, |spans| !of(spans, "job attempt").is_empty()).await;
    assert_eq!((root.text("meridian.trace.kept"), root.text("meridian.outcome")), ("error", "failed"));
    assert!(root.is_error);
    let attempt = only(&spans, &root.id, "job attempt");
    assert_eq!((attempt.is_error, attempt.text("error.type")), (true, "rejected"));
    assert!(only(&spans, &attempt.id, "job request").is_error);

    // A job that is locked to Europe leaves spans in processes of Europe only.
    let flag = |number: u8| format!("00-{number:032x}-{}-01", CLIENT.1);
    let locked_flag = flag(1);
    let locked =
        submit(&fleet, &embedding("minilm-eu"), &[KEY, ASHBURN, ("traceparent", &locked_flag)]).await;
    let has_replica = |spans: &[ReceivedSpan]| spans.iter().any(|span| span.service == "meridian-replica");
    let (root, spans) = trace_of(&fleet, &collector, &locked, has_replica).await;
    assert_eq!((root.text("meridian.residency"), root.text("cloud.region")), ("eu", EUROPE));
    assert!(spans.iter().all(|span| span.process_region == EUROPE), "{spans:?}");

    let lines: String = (0..3)
        .map(|number| {
            let line = json!({
                "custom_id": format!("line-{number}"),
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": "minilm", "input": "canary-of-the-input"},
            });
            format!("{line}\n")
        })
        .collect();
    let batch = create_batch(&fleet, lines, &flag(2)).await;
    let (root, spans) = trace_of(&fleet, &collector, &batch, has_replica).await;
    assert_eq!((root.name.as_str(), root.text("meridian.outcome")), ("file batch", "completed"));
    assert_eq!(root.links.len(), 1);
    assert_eq!(root.links[0].0, flag(2)[3..35]);
    let attempt = only(&spans, &root.id, "job attempt");
    assert_eq!((attempt.text("meridian.job.chunk"), attempt.text("meridian.inputs")), ("0", "3"));
    check_attempt(&spans, attempt);

    let exported = collector.spans().into_iter().any(|span| span.text("meridian.job.id") == ordinary);
    assert!(!exported, "it succeeded and was not sampled");
}

/// Uploads a file and creates a batch of it; returns its identifier when it is completed.
async fn create_batch(fleet: &LocalFleet, lines: String, traceparent: &str) -> String {
    let boundary = "boundary";
    let part = |name: &str, rest: &str| {
        format!("--{boundary}\r\ncontent-disposition: form-data; name=\"{name}\"{rest}\r\n")
    };
    let form = [
        part("purpose", "\r\n\r\nbatch"),
        part("file", &format!("; filename=\"f.jsonl\"\r\n\r\n{lines}")),
        format!("--{boundary}--\r\n"),
    ]
    .concat();
    let kind = format!("multipart/form-data; boundary={boundary}");
    let headers = [KEY, FRANKFURT, ("traceparent", traceparent), ("content-type", kind.as_str())];
    let file = fleet.post_to("/v1/files", form, &headers).await;
    assert_eq!(file.status, 200, "{}", file.body);
    let batch = json!({
        "input_file_id": file.body["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    });
    let batch = fleet.post_to("/v1/batches", batch.to_string(), &headers[..3]).await;
    assert_eq!(batch.status, 200, "{}", batch.body);
    batch.body["id"].as_str().expect("an identifier").to_owned()
}
