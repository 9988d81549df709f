//! `/metrics` of a gateway: formats, labels and exemplars; and the usage that it reports.

use super::fixture::{AMERICA, EUROPE, Fixture, JAPAN};
use super::region::Script::Responds;
use std::collections::BTreeSet;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

async fn fixture() -> Fixture {
    Fixture::with([(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)]).await
}

async fn scrape(fixture: &Fixture, accept: &str) -> (String, String) {
    let request = fixture.client.get(format!("{}/metrics", fixture.operations)).header("accept", accept);
    let response = request.send().await.unwrap();
    let content_type = response.headers()["content-type"].to_str().unwrap().to_owned();
    (content_type, response.text().await.unwrap())
}

/// Returns the names and labels of all samples.
fn series(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

#[tokio::test]
async fn text_of_clients_creates_no_series() {
    let fixture = fixture().await;
    let known = "anywhere";
    assert_eq!(fixture.send(known, &[]).await.unwrap().status(), 200);
    // Each outcome has a series from its first request on, so one of each kind is sent before the comparison.
    let hostile = async |n: usize| {
        let text = format!("evil{n}\\\"}} 1");
        let header = format!("evil{n}");
        let _ = fixture.any("POST", "/v1/embeddings", &format!(r#"{{"model":"evil{n}","input":"x"}}"#)).await;
        let _ = fixture.send(&text, &[("x-request-id", &header)]).await.unwrap();
        let _ = fixture.send(known, &[("x-meridian-residency", &header)]).await.unwrap();
        let _ = fixture.send(known, &[("x-meridian-priority", &header)]).await.unwrap();
        let _ = fixture.send(known, &[("traceparent", &header)]).await.unwrap();
        let _ = fixture.any("POST", &format!("/evil{n}"), "{}").await;
        let _ = fixture.any("POST", &format!("/deployments/evil{n}/embed"), r#"{"inputs":"x"}"#).await;
        let _ = fixture.any("GET", &format!("/v1/models/evil{n}"), "").await;
        let _ = fixture.any(&format!("EVIL{n}"), "/v1/embeddings", "").await;
        let key = fixture.client.post(&fixture.url).bearer_auth(&header).body("{}").send().await;
        assert_eq!(key.unwrap().status(), 401);
    };
    hostile(0).await;
    let before = series(&scrape(&fixture, "*/*").await.1);
    for n in 1..20 {
        hostile(n).await;
    }
    let (_, text) = scrape(&fixture, "*/*").await;
    let more: Vec<_> = series(&text).difference(&before).cloned().collect();
    assert!(more.is_empty(), "{more:#?}");
    assert!(!text.to_lowercase().contains("evil"), "{text}");
}

#[tokio::test]
async fn open_metrics_has_the_trace_of_a_request_by_deployment() {
    let fixture = fixture().await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    // This one is not sampled, so no collector has it.
    let unsampled = "5bf92f3577b34da6a3ce929d0e0e4736";
    let other = format!("00-{unsampled}-00f067aa0ba902b7-00");
    assert_eq!(fixture.send("anywhere", &[("traceparent", &other)]).await.unwrap().status(), 200);
    assert_eq!(fixture.send("anywhere", &[("traceparent", &parent)]).await.unwrap().status(), 200);
    let exemplar = format!(" # {{trace_id=\"{trace}\"}} ");
    let has = |text: &str, bucket: &str| {
        text.lines().any(|line| line.starts_with(bucket) && line.contains(&exemplar))
    };
    let buckets = [
        "meridian_gateway_deployment_request_seconds_bucket{deployment=\"anywhere\"",
        "meridian_gateway_attempt_seconds_bucket{region=\"",
    ];
    // A request is counted after its response was sent.
    let text = loop {
        let (content_type, text) = scrape(&fixture, OPEN_METRICS).await;
        assert_eq!(content_type, "application/openmetrics-text; version=1.0.0; charset=utf-8");
        assert!(text.ends_with("\n# EOF\n"), "{text}");
        if buckets.iter().all(|bucket| has(&text, bucket)) {
            break text;
        }
    };
    assert!(!text.contains(unsampled), "{text}");
    let families: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let names: BTreeSet<_> = families.iter().map(|family| family.split(' ').next().unwrap()).collect();
    assert_eq!(names.len(), families.len(), "a family occurs once");
    assert!(families.contains(&"meridian_gateway_requests counter"), "{families:#?}");
    // A gauge has the name that the family of this counter would have.
    assert!(families.contains(&"meridian_gateway_region_connections_total unknown"), "{families:#?}");
    let (content_type, text) = scrape(&fixture, "text/plain").await;
    assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
    assert!(!text.contains(trace) && !text.contains("# EOF"), "{text}");
    let result = "meridian_gateway_deployment_requests_total{deployment=\"anywhere\",result=\"ok\"} 2";
    assert!(text.lines().any(|line| line == result), "{text}");
}

#[tokio::test]
async fn a_gateway_that_stops_reports_the_usage_of_its_tenants_and_leaves_it_on_disk() {
    let fixture = fixture().await;
    for _ in 0..3 {
        assert_eq!(fixture.send("anywhere", &[]).await.unwrap().status(), 200);
    }
    assert_eq!(fixture.send("unknown", &[]).await.unwrap().status(), 404);
    let (dir, mut usage) = fixture.stop();
    let reports = usage.wait_for(|reports| !reports.is_empty()).await.unwrap().clone();
    let rows: Vec<_> = reports.iter().flat_map(|report| &report.rows).collect();
    let [row] = rows[..] else { panic!("{rows:?}") };
    assert_eq!(
        (row.tenant.as_str(), row.deployment.as_str(), row.region.as_str()),
        ("test", "anywhere", AMERICA)
    );
    assert_eq!((row.counts.requests, row.counts.inputs), (3, 3));
    let names =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files: Vec<_> =
        names.filter(|name| name.starts_with("routes.usage-") && !name.ends_with(".lock")).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let text = std::fs::read_to_string(dir.path().join(file)).unwrap();
    assert!(text.contains(r#""requests":3"#), "{text}");
}
