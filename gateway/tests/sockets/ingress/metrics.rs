//! `/metrics` of an ingress: exemplars, and labels whatever clients and replicas send.

use super::{Fixture, RESPONSE_TIME, Takes};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use telemetry::TracingConfig;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

/// Returns a configuration of traces with a collector that cannot be reached.
fn tracing() -> TracingConfig {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tenants.toml"), "[[tenant]]\nname = 't'\nkey_env = 'KEY'\n").unwrap();
    let text = "listen = '127.0.0.1:0'\noperations = '127.0.0.1:0'\nregion = 'aws/us-east-1'\nhub = 'http://127.0.0.1:1'\n\
                snapshot = 'routes'\ntenants = 'tenants.toml'\n\
                [tracing]\nendpoint = 'http://127.0.0.1:1'\ntimeout = '200ms'\nslow = '60s'\n";
    let environment = [("KEY".to_owned(), "k".to_owned())].into();
    let config = gateway::config::EdgeConfig::parse(text, dir.path(), &environment);
    config.map_err(|problems| format!("{problems:#?}")).unwrap().tracing.unwrap()
}

async fn scrape(fixture: &Fixture, accept: &str) -> String {
    let request = fixture.client.get(format!("{}/metrics", fixture.url)).header("accept", accept);
    request.send().await.unwrap().text().await.unwrap()
}

/// Scrapes until the text has this property.
async fn scrape_until(fixture: &Fixture, accept: &str, is_reached: impl Fn(&str) -> bool) -> String {
    let begun = Instant::now();
    loop {
        let text = scrape(fixture, accept).await;
        if is_reached(&text) {
            return text;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the names and labels of all samples.
fn series(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

#[tokio::test]
async fn open_metrics_has_the_trace_of_a_request_whose_spans_are_exported() {
    let fixture = Fixture::traced([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)], Some(tracing())).await;
    let [sampled, other] = ["4bf92f3577b34da6a3ce929d0e0e4736", "5bf92f3577b34da6a3ce929d0e0e4736"];
    for (trace, flag) in [(other, "00"), (sampled, "01")] {
        let request = fixture.client.post(format!("{}/v1/embeddings", fixture.url));
        let request = request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-{flag}"));
        let request = request.header("x-meridian-deployment", "m").body(r#"{"model":"m","input":"a"}"#);
        assert_eq!(request.send().await.unwrap().status(), 200);
    }
    let exemplar = format!(" # {{trace_id=\"{sampled}\"}} ");
    let is_bucket = |line: &str| {
        line.starts_with("meridian_ingress_request_seconds_bucket{le=\"") && line.contains(&exemplar)
    };
    // A request is counted after its response was sent.
    let text = scrape_until(&fixture, OPEN_METRICS, |text| text.lines().any(is_bucket)).await;
    assert!(!text.contains(other), "{text}");
    let text = scrape(&fixture, "text/plain").await;
    assert!(!text.contains(sampled) && text.contains("meridian_ingress_request_seconds_count 2\n"), "{text}");
}

#[tokio::test]
async fn text_of_clients_creates_no_series() {
    let fixture = Fixture::with([Takes(Duration::ZERO), Takes(Duration::ZERO)]).await;
    assert_eq!(fixture.send().await.unwrap().status(), 200);
    let hostile = async |n: usize| {
        let long = format!("evil{n}{}", "x".repeat(10_000));
        for name in [&format!("evil{n}"), &format!("evil{n}\"}} 1\\"), &format!("evil{n}äß😀"), &long] {
            for header in [
                "x-meridian-deployment",
                "x-meridian-tenant",
                "x-meridian-priority",
                "x-meridian-residency",
                "x-meridian-model-revision",
                "x-request-id",
                "traceparent",
            ] {
                let request = fixture.client.post(format!("{}/v1/embeddings", fixture.url));
                let named = header == "x-meridian-deployment";
                let request = if named { request } else { request.header("x-meridian-deployment", "m") };
                let request = request.header(header, name.as_bytes());
                let request = request.body(format!(r#"{{"model":"evil{n}","input":"a"}}"#));
                // Read to its end, so that no outcome depends on when the client closes the connection.
                if let Ok(response) = request.send().await {
                    response.bytes().await.ok();
                }
            }
            let mut url = reqwest::Url::parse(&fixture.url).unwrap();
            url.path_segments_mut().unwrap().push(&format!("{name}\n"));
            fixture.client.post(url).send().await.ok();
        }
        let method = reqwest::Method::from_bytes(format!("EVIL{n}").as_bytes()).unwrap();
        fixture.client.request(method, format!("{}/v1/embeddings", fixture.url)).send().await.ok();
    };
    // Each outcome has a series from its first request on, so one of each kind is sent before the comparison.
    hostile(0).await;
    let before = series(&scrape(&fixture, "*/*").await);
    for n in 1..10 {
        hostile(n).await;
    }
    let text = scrape(&fixture, "*/*").await;
    let more: Vec<_> = series(&text).difference(&before).cloned().collect();
    assert!(more.is_empty(), "{more:#?}");
    assert!(!text.to_lowercase().contains("evil"), "{text}");
}

#[tokio::test]
async fn names_of_replicas_are_rejected_or_share_a_row_past_the_limit() {
    let fixture = Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await;
    let own = "m".to_owned();
    let ready = |count: u8| {
        let line = format!("meridian_ingress_replicas_ready{{deployment=\"m\"}} {count}\n");
        move |text: &str| text.contains(&line)
    };
    let long = "x".repeat(10_000);
    for name in ["evil\"} 1", "evil\nmeridian_evil 1", "evil\\", "eviläß😀", &format!("evil{long}"), ""] {
        fixture.replicas[0].names.send_replace(vec![own.clone(), name.to_owned()]);
        let text = scrape_until(&fixture, "*/*", ready(1)).await;
        assert!(!text.contains("evil") && !text.contains("(other)"), "{text}");
        fixture.replicas[0].names.send_replace(vec![own.clone()]);
        scrape_until(&fixture, "*/*", ready(2)).await;
    }
    // Valid names, which no route table has.
    let names = (0..500).map(|number| format!("n{number:063}")).chain([own.clone()]);
    fixture.replicas[0].names.send_replace(names.collect());
    let text = scrape_until(&fixture, "*/*", |text| text.contains("(other)")).await;
    for metric in ["replicas_ready", "pending_tokens", "tokens_per_second", "granted_tokens"] {
        let prefix = format!("meridian_ingress_{metric}{{deployment=\"");
        let rows = text.lines().filter(|line| line.starts_with(&prefix)).count();
        assert_eq!(rows, 201, "{metric}: 200 deployments and one row for the others");
    }
    assert!(ready(2)(&text), "{text}");
    assert!(text.contains("meridian_ingress_replicas_ready{deployment=\"(other)\"} 301\n"), "{text}");
    fixture.replicas[0].names.send_replace(vec![own]);
    scrape_until(&fixture, "*/*", |text| !text.contains("(other)") && !text.contains("n000")).await;
}
