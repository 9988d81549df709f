//! The plan over HTTP: what regions can do and gateways are asked for goes in, shares and floors come out, through a real
//! hub and its store.

use super::world::{self, AMERICA, EUROPE, Hub, Lease, TOKEN, until};
use scheduler::config::HubConfig;
use scheduler_core::wire::plan::{GatewayWeights, WeightsV1};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

const JAPAN: &str = "oci/ap-tokyo-1";

/// A hub whose leases outlast a test: nobody keeps them alive here.
fn config(data: &Path) -> HubConfig {
    HubConfig { lease_ttl: Duration::from_secs(600), ..world::config(data) }
}

/// What one region says it can do: two replicas for both deployments, of which it could start eight.
fn capacity(tokens_per_second: u64) -> Value {
    let count = |name: &str| json!({"name": name, "ready": 2, "max": 8});
    let deployments = [count("minilm"), count("minilm-eu")];
    json!([{"ready": 2, "tokens_per_second": tokens_per_second, "deployments": deployments}])
}

async fn register(hub: &Hub, region: &str, port: u16, tokens_per_second: u64) -> Lease {
    let message = json!({"version": 1, "region": region, "endpoint": format!("10.0.0.1:{port}"), "boot_id": port,
                         "deployments": ["minilm", "minilm-eu"], "capacity": capacity(tokens_per_second)});
    let (status, _, body) = hub.post("/v1/spokes", message.to_string()).await;
    assert_eq!(status, 200, "{body}");
    Lease::of(region, port.into(), &body)
}

fn demand(tokens_per_second: u64) -> Value {
    let class = |name: &str, residency: Value, tokens: u64| json!({"deployment": name, "residency": residency, "origin": AMERICA, "tokens_per_second": tokens});
    let classes = [class("minilm", Value::Null, tokens_per_second), class("minilm-eu", json!("eu"), 10)];
    json!({"version": 1, "gateway": AMERICA, "boot_id": 1, "classes": classes})
}

/// A gateway in America that takes what is newer than what it has.
#[derive(Default)]
struct Gateway {
    weights: Option<GatewayWeights>,
    taken: Vec<String>,
}

impl Gateway {
    /// Says what it is asked for, and takes the answer.
    async fn asks(&mut self, hub: &Hub, tokens_per_second: u64) {
        let path = match &self.weights {
            Some(weights) => format!("/v1/demand?after={}", weights.generation),
            None => "/v1/demand".to_owned(),
        };
        let (status, _, body) = hub.post(&path, demand(tokens_per_second).to_string()).await;
        if status == 204 {
            return;
        }
        assert_eq!(status, 200, "{body}");
        let wire: WeightsV1 = serde_json::from_value(body).unwrap();
        let weights = GatewayWeights::try_from(wire).unwrap();
        assert!(self.weights.as_ref().is_none_or(|before| before.generation < weights.generation));
        self.taken.push(weights.generation.to_string());
        self.weights = Some(weights);
    }

    /// The shares of a deployment, by region.
    fn shares(&self, name: &str) -> BTreeMap<String, u16> {
        let rows = self.weights.iter().flat_map(|weights| &weights.rows);
        let rows = rows.filter(|((class, _), _)| class.deployment.as_str() == name);
        rows.flat_map(|(_, shares)| shares).map(|share| (share.region.to_string(), share.permille)).collect()
    }

    /// Asks until the shares are these, give or take what the few tokens of the other class take.
    async fn until(&mut self, hub: &Hub, tokens_per_second: u64, name: &str, shares: &[(&str, u16)]) {
        until(&format!("{name} is divided as {shares:?}"), async || {
            self.asks(hub, tokens_per_second).await;
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
async fn what_is_asked_for_is_divided_by_what_regions_can_do() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let lease = register(&hub, AMERICA, 1, 4000).await;
    register(&hub, EUROPE, 2, 4000).await;
    let mut gateway = Gateway::default();
    gateway.until(&hub, 100, "minilm", &[(AMERICA, 1000)]).await;
    gateway.until(&hub, 100, "minilm-eu", &[(EUROPE, 1000)]).await;

    // Three quarters of 4000 each: twice as much is divided evenly, and goes there by steps of a tenth.
    gateway.until(&hub, 5980, "minilm", &[(AMERICA, 500), (EUROPE, 500)]).await;
    assert!(gateway.taken.len() >= 5, "by steps: {:?}", gateway.taken);

    // 5980 have to be borne by either of two, with 1500 a replica; and a little more in Europe.
    let mut floors = Value::Null;
    until("the region is told its floors", async || {
        let message =
            json!({"version": 1, "deployments": ["minilm", "minilm-eu"], "capacity": capacity(4000)});
        let (_, _, body) = hub.post(&lease.keep_alive_path(), message.to_string()).await;
        floors = body["floors"].clone();
        floors == json!([{"name": "minilm", "replicas": 4}])
    })
    .await;

    // A spoke whose lease has ended can do nothing.
    assert_eq!(hub.leave(&lease).await, 204);
    gateway.until(&hub, 100, "minilm", &[(EUROPE, 1000)]).await;
    hub.stop().await;
}

#[tokio::test]
async fn a_plan_survives_its_hub_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    register(&hub, AMERICA, 1, 4000).await;
    register(&hub, EUROPE, 2, 4000).await;
    let mut gateway = Gateway::default();
    gateway.until(&hub, 6000, "minilm", &[(AMERICA, 500), (EUROPE, 500)]).await;
    let before = gateway.weights.clone().unwrap().generation;
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    let mut newcomer = Gateway::default();
    newcomer.asks(&hub, 6000).await;
    let found = newcomer.weights.as_ref().unwrap();
    assert!(found.generation >= before, "what stood in the store is given out at once");
    assert_eq!(newcomer.shares("minilm").len(), 2);
    // And what comes is newer than what anybody has.
    gateway.until(&hub, 100, "minilm", &[(AMERICA, 1000)]).await;
    assert!(gateway.weights.unwrap().generation > before);
    hub.stop().await;
}

#[tokio::test]
async fn a_drained_region_is_told_of_and_left_by_steps_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    register(&hub, AMERICA, 1, 4000).await;
    register(&hub, EUROPE, 2, 4000).await;
    register(&hub, JAPAN, 3, 4000).await;
    let mut gateway = Gateway::default();
    gateway.until(&hub, 100, "minilm-eu", &[(EUROPE, 1000)]).await;
    let drains = |region: &str| format!("{}/v1/drains/{region}", hub.url);
    let draining = |table: &regions::RouteTable, region: &str| table.regions[region].draining;

    for region in [AMERICA, EUROPE] {
        assert_eq!(hub.client.put(drains(region)).bearer_auth(TOKEN).send().await.unwrap().status(), 200);
    }
    hub.until_routes("both are told of", |table| draining(table, AMERICA) && draining(table, EUROPE)).await;
    let taken = gateway.taken.len();
    gateway.until(&hub, 100, "minilm", &[(JAPAN, 1000)]).await;
    assert!(gateway.taken.len() >= taken + 9, "by steps: {:?}", gateway.taken);
    assert_eq!(gateway.shares("minilm-eu"), [(EUROPE.to_owned(), 1000)].into(), "it may go nowhere else");

    // It is an intent, and stands until it is undone.
    hub.stop().await;
    let hub = Hub::start(config(dir.path())).await;
    hub.until_routes("they still drain", |table| draining(table, AMERICA)).await;
    for (region, _) in [(AMERICA, 1), (EUROPE, 2)] {
        let undo = hub.client.delete(format!("{}/v1/drains/{region}", hub.url)).bearer_auth(TOKEN);
        let undo = undo.send().await.unwrap();
        assert_eq!(undo.status(), 204);
    }
    hub.until_routes("and no longer", |table| !draining(table, AMERICA) && !draining(table, EUROPE)).await;
    gateway.until(&hub, 100, "minilm", &[(AMERICA, 1000)]).await;
    hub.stop().await;
}

#[tokio::test]
async fn a_demand_or_a_drain_that_cannot_be_right_is_refused_by_its_field() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let check = async |pointer: &str, value: Value, param: &str, word: &str| {
        let mut message = demand(1);
        *message.pointer_mut(pointer).unwrap() = value;
        let (status, code, body) = hub.post("/v1/demand", message.to_string()).await;
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
        let asked = hub.client.put(format!("{}/v1/drains/{region}", hub.url)).bearer_auth(TOKEN);
        let answer = asked.send().await.unwrap();
        let status = answer.status().as_u16();
        let body: Value = answer.json().await.unwrap();
        assert_eq!((status, &body["error"]["param"]), (400, &json!("region")), "{body}");
        body["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(drain("gcp/europe-west44").await.contains("perhaps gcp/europe-west4"));
    assert!(drain("gcp/europe%20west4").await.contains("cloud/name"));
    assert!(hub.routes().await.regions.is_empty());
    hub.stop().await;
}
