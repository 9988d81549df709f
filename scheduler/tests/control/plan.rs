//! Tests of the traffic plan over HTTP, with a real hub and store: capacity of regions and demand of gateways in,
//! weights and floors out.

use super::world::{self, AMERICA, EUROPE, Hub, Lease, wait_until};
use scheduler::config::HubConfig;
use scheduler_api::paths;
use scheduler_api::plan::{DemandReportV1, DemandReporter, DemandV1, GatewayWeights, WeightsV1};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

const JAPAN: &str = "oci/ap-tokyo-1";

/// Returns a configuration whose leases outlast a test without keep-alives.
fn config(data: &Path) -> HubConfig {
    HubConfig { lease_ttl: Duration::from_secs(600), ..world::config(data) }
}

/// Returns the capacity of a region: two ready replicas of each deployment, and at most eight.
fn capacity(tokens_per_second: u64) -> Value {
    let count = |name: &str| json!({"name": name, "ready": 2, "max": 8});
    let deployments = [count("minilm"), count("minilm-eu")];
    json!([{"ready": 2, "tokens_per_second": tokens_per_second, "deployments": deployments}])
}

async fn register(hub: &Hub, region: &str, port: u16, tokens_per_second: u64) -> Lease {
    let message = json!({"version": 1, "region": region, "instance": port.to_string(), "endpoint": format!("10.0.0.1:{port}"), "boot_id": port,
                         "deployments": ["minilm", "minilm-eu"], "capacity": capacity(tokens_per_second)});
    let (status, _, body) = hub.post(paths::SPOKES, message.to_string()).await;
    assert_eq!(status, 200, "{body}");
    Lease::of(region, port.into(), &body)
}

fn demand(tokens_per_second: u64) -> Value {
    let class = |name: &str, residency: Value, tokens: u64| json!({"deployment": name, "residency": residency, "origin": AMERICA, "tokens_per_second": tokens});
    let classes = [class("minilm", Value::Null, tokens_per_second), class("minilm-eu", json!("eu"), 10)];
    json!({"version": 1, "gateway": AMERICA, "boot_id": 1, "classes": classes})
}

/// Gateway in America, which accepts newer weights.
#[derive(Default)]
struct Gateway {
    weights: Option<GatewayWeights>,
    accepted: Vec<String>,
}

impl Gateway {
    /// Reports its demand, and accepts the weights in the response.
    async fn report(&mut self, hub: &Hub, tokens_per_second: u64) {
        let path = match &self.weights {
            Some(weights) => format!("/v1/demand?after={}", weights.generation),
            None => paths::DEMAND.to_owned(),
        };
        let (status, _, body) = hub.post(&path, demand(tokens_per_second).to_string()).await;
        if status == 204 {
            return;
        }
        assert_eq!(status, 200, "{body}");
        let wire: WeightsV1 = serde_json::from_value(body).unwrap();
        let weights = GatewayWeights::try_from(wire).unwrap();
        assert!(self.weights.as_ref().is_none_or(|before| before.generation < weights.generation));
        self.accepted.push(weights.generation.to_string());
        self.weights = Some(weights);
    }

    /// Returns the shares of a deployment by region.
    fn shares(&self, name: &str) -> BTreeMap<String, u16> {
        let rows = self.weights.iter().flat_map(|weights| &weights.rows);
        let rows = rows.filter(|((class, _), _)| class.deployment.as_str() == name);
        rows.flat_map(|(_, shares)| shares).map(|share| (share.region.to_string(), share.permille)).collect()
    }

    /// Reports until the shares are these, within the effect of the other class's few tokens.
    async fn wait_until(&mut self, hub: &Hub, tokens_per_second: u64, name: &str, shares: &[(&str, u16)]) {
        wait_until(&format!("{name} is divided as {shares:?}"), async || {
            self.report(hub, tokens_per_second).await;
            let found = self.shares(name);
            let near = |(region, permille): &(&str, u16)| {
                found.get(*region).is_some_and(|found| found.abs_diff(*permille) <= 5)
            };
            found.len() == shares.len() && shares.iter().all(near)
        })
        .await;
    }
}

#[tokio::test]
async fn demand_is_divided_by_the_capacity_of_regions() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let lease = register(&hub, AMERICA, 1, 4000).await;
    register(&hub, EUROPE, 2, 4000).await;
    let mut gateway = Gateway::default();
    gateway.wait_until(&hub, 100, "minilm", &[(AMERICA, 1000)]).await;
    gateway.wait_until(&hub, 100, "minilm-eu", &[(EUROPE, 1000)]).await;

    // Three quarters of 4000 each: twice as much is divided evenly, in steps of a tenth.
    gateway.wait_until(&hub, 5980, "minilm", &[(AMERICA, 500), (EUROPE, 500)]).await;
    assert!(gateway.accepted.len() >= 5, "by steps: {:?}", gateway.accepted);

    // Either of the two must be able to serve 5980, with 1500 per replica; and a little more in Europe.
    let mut floors = Value::Null;
    wait_until("the region receives its floors", async || {
        let message =
            json!({"version": 1, "state": {"deployments": ["minilm", "minilm-eu"], "capacity": capacity(4000)}});
        let (_, _, body) = hub.post(&lease.keep_alive_path(), message.to_string()).await;
        floors = body["floors"].clone();
        floors == json!([{"name": "minilm", "replicas": 4}])
    })
    .await;

    // A spoke without a lease has no capacity.
    assert_eq!(hub.deregister(&lease).await, 204);
    gateway.wait_until(&hub, 100, "minilm", &[(EUROPE, 1000)]).await;
    hub.stop().await;
}

#[tokio::test]
async fn a_plan_survives_a_restart_of_the_hub() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    register(&hub, AMERICA, 1, 4000).await;
    register(&hub, EUROPE, 2, 4000).await;
    let mut gateway = Gateway::default();
    gateway.wait_until(&hub, 6000, "minilm", &[(AMERICA, 500), (EUROPE, 500)]).await;
    let before = gateway.weights.clone().unwrap().generation;
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    let mut newcomer = Gateway::default();
    newcomer.report(&hub, 6000).await;
    let found = newcomer.weights.as_ref().unwrap();
    assert!(found.generation >= before, "the stored plan is published at once");
    assert_eq!(newcomer.shares("minilm").len(), 2);
    // Later parts have higher generations.
    gateway.wait_until(&hub, 100, "minilm", &[(AMERICA, 1000)]).await;
    assert!(gateway.weights.unwrap().generation > before);
    hub.stop().await;
}

#[tokio::test]
async fn a_drained_region_is_published_loses_its_weights_in_steps_and_returns() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    register(&hub, AMERICA, 1, 4000).await;
    register(&hub, EUROPE, 2, 4000).await;
    register(&hub, JAPAN, 3, 4000).await;
    let mut gateway = Gateway::default();
    gateway.wait_until(&hub, 100, "minilm-eu", &[(EUROPE, 1000)]).await;
    let drains = |region: &str| format!("{}/v1/drains/{region}", hub.url);
    let draining = |table: &regions::RouteTable, region: &str| table.regions[region].draining;

    for region in [AMERICA, EUROPE] {
        assert_eq!(hub.client.put(drains(region)).send().await.unwrap().status(), 200);
    }
    hub.wait_for_routes("both are marked as draining", |table| {
        draining(table, AMERICA) && draining(table, EUROPE)
    })
    .await;
    let accepted = gateway.accepted.len();
    gateway.wait_until(&hub, 100, "minilm", &[(JAPAN, 1000)]).await;
    assert!(gateway.accepted.len() >= accepted + 9, "by steps: {:?}", gateway.accepted);
    assert_eq!(gateway.shares("minilm-eu"), [(EUROPE.to_owned(), 1000)].into(), "no other region is allowed");

    // A drain is stored, and lasts until it is cancelled.
    hub.stop().await;
    let hub = Hub::start(config(dir.path())).await;
    hub.wait_for_routes("they still drain", |table| draining(table, AMERICA)).await;
    for (region, _) in [(AMERICA, 1), (EUROPE, 2)] {
        let undo = hub.client.delete(format!("{}/v1/drains/{region}", hub.url));
        let undo = undo.send().await.unwrap();
        assert_eq!(undo.status(), 204);
    }
    hub.wait_for_routes("and no longer", |table| !draining(table, AMERICA) && !draining(table, EUROPE)).await;
    gateway.wait_until(&hub, 100, "minilm", &[(AMERICA, 1000)]).await;
    hub.stop().await;
}

#[tokio::test]
async fn invalid_demand_and_drains_are_rejected_by_field() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let check = async |pointer: &str, value: Value, param: &str, word: &str| {
        let mut message = demand(1);
        *message.pointer_mut(pointer).unwrap() = value;
        let (status, code, body) = hub.post(paths::DEMAND, message.to_string()).await;
        assert_eq!(
            (status, code.as_str(), &body["error"]["param"]),
            (400, "invalid_value", &json!(param)),
            "{body}"
        );
        assert!(body["error"]["message"].as_str().unwrap().contains(word), "{word} in {body}");
    };
    check("/gateway", json!("aws/us-esat-1"), "region", "aws/us-east-1").await;
    check("/gateway", json!("here"), "gateway", "cloud/name").await;
    check("/classes/0/deployment", json!("a b"), "classes[0].deployment", "a b").await;
    check("/classes/1/residency", json!(""), "classes[1].residency", "area is missing").await;
    check("/classes/1/origin", json!("x"), "classes[1].origin", "cloud/name").await;
    let drain = async |region: &str| {
        let request = hub.client.put(format!("{}/v1/drains/{region}", hub.url));
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let body: Value = response.json().await.unwrap();
        assert_eq!((status, &body["error"]["param"]), (400, &json!("region")), "{body}");
        body["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(drain("gcp/europe-west44").await.contains("did you mean gcp/europe-west4"));
    assert!(drain("gcp/europe%20west4").await.contains("cloud/name"));
    assert!(hub.routes().await.regions.is_empty());
    hub.stop().await;
}

#[tokio::test]
async fn demand_is_reported_as_changes_to_a_hub_that_has_the_last_one() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let wire = |tokens: u64| serde_json::from_value::<DemandV1>(demand(tokens)).unwrap();
    let mut reporter = DemandReporter::default();
    let post = async |report: &DemandReportV1| {
        let (status, code, _) = hub.post(paths::DEMAND, serde_json::to_string(report).unwrap()).await;
        (status, code)
    };
    let (complete, has_changes) = reporter.report(&wire(100));
    assert!(!has_changes);
    reporter.acknowledged(&wire(100));
    let (changes, has_changes) = reporter.report(&wire(200));
    assert!(has_changes);
    assert_eq!(
        post(&changes).await,
        (409, "unknown_base".to_owned()),
        "the hub has no demand of this gateway"
    );
    assert!(post(&complete).await.0 < 300);
    assert!(post(&changes).await.0 < 300);
    assert_eq!(post(&changes).await, (409, "unknown_base".to_owned()), "the hub has the changed one");
    reporter.acknowledged(&wire(200));
    assert!(post(&reporter.report(&wire(200)).0).await.0 < 300, "nothing has changed");
    hub.stop().await;
}

#[tokio::test]
async fn the_metrics_of_a_hub_show_its_term_its_table_and_its_requests() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    register(&hub, EUROPE, 7100, 1000).await;
    let table = hub.wait_for_routes("Europe is there", |table| !table.regions.is_empty()).await;
    assert!(hub.post("/v1/demand", demand(100).to_string()).await.0 < 300);
    assert_eq!(hub.get("/v2").await.0, 404);
    assert_eq!(hub.get("/v1/leases/x").await.0, 405);
    let metrics = async || {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let response = client.get(format!("{}/metrics", hub.url)).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], metrics::Format::Prometheus.content_type());
        response.text().await.unwrap()
    };
    let computed = |text: &str| !text.contains("meridian_hub_plan_seconds_count 0");
    wait_until("a plan is computed", async || computed(&metrics().await)).await;
    let text = metrics().await;
    for line in [
        "meridian_hub_leader 1",
        "meridian_hub_terms_total 1",
        "meridian_hub_spokes 1",
        &format!("meridian_hub_route_epoch {}", table.generation.epoch),
        "meridian_hub_route_regions 1",
        "meridian_hub_store_errors_total 0",
        "meridian_hub_polls 0",
        "meridian_hub_polls_max 1024",
        "meridian_hub_requests_total{path=\"/v1/spokes\",status=\"200\"} 1",
        "meridian_hub_requests_total{path=\"/v1/leases/{lease}\",status=\"405\"} 1",
        "meridian_hub_requests_total{path=\"other\",status=\"404\"} 1",
        "meridian_hub_panics_total{scope=\"request\"} 0",
    ] {
        assert!(text.lines().any(|given| given == line), "{line} in {text}");
    }
    // Its log and its metrics are not exported.
    let is_shown = |name: &String| {
        !name.starts_with("meridian_hub_log_") && !name.starts_with("meridian_hub_metric_export")
    };
    let declared: Vec<String> = scheduler::hub::metrics().names().filter(is_shown).collect();
    let shown = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    assert_eq!(shown.map(|(name, _)| name).collect::<Vec<_>>(), declared);
    hub.stop().await;
}

#[tokio::test]
async fn text_of_clients_creates_no_series() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let scrape =
        async || client.get(format!("{}/metrics", hub.url)).send().await.unwrap().text().await.unwrap();
    let samples = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    let hostile = async |n: usize| {
        let long = format!("evil{n}{}", "x".repeat(10_000));
        for name in [&format!("evil{n}"), &format!("evil{n}\"}} 1\\\nevil 1"), &format!("evil{n}äß😀"), &long]
        {
            let registration = json!({"version": 1, "region": EUROPE, "instance": name, "endpoint": "10.0.0.1:7100", "boot_id": n,
                                      "deployments": [name], "capacity": capacity(1)});
            hub.post(paths::SPOKES, registration.to_string()).await;
            let other_region = json!({"version": 1, "region": name, "instance": "a", "endpoint": "10.0.0.1:7100", "boot_id": n});
            hub.post(paths::SPOKES, other_region.to_string()).await;
            let report = json!({"version": 1, "gateway": AMERICA, "boot_id": n,
                                "classes": [{"deployment": name, "residency": name, "origin": AMERICA, "tokens_per_second": 1}]});
            hub.post(paths::DEMAND, report.to_string()).await;
            for path in [["v1", "leases"], ["v1", "keys"], ["v2", "evil"]] {
                let mut url = reqwest::Url::parse(&hub.url).unwrap();
                url.path_segments_mut().unwrap().extend(path).push(name);
                client.get(url).header("user-agent", name.replace('\n', " ").as_bytes()).send().await.ok();
            }
        }
        let method = reqwest::Method::from_bytes(format!("EVIL{n}").as_bytes()).unwrap();
        client.request(method, format!("{}{}", hub.url, paths::SPOKES)).send().await.ok();
    };
    hostile(0).await;
    let before = samples(&scrape().await);
    for n in 1..20 {
        hostile(n).await;
    }
    let text = scrape().await;
    assert!(!text.to_lowercase().contains("evil"), "{text}");
    // A limit that is reached in between has a status of its own.
    assert!(samples(&text) <= before + 4, "{text}");
    hub.stop().await;
}
