//! A gateway without a tenants file accepts the tenants of the table, from one table to the next, and from its disk
//! without a hub.

use super::edge::{REGION, TIMEOUT, start_hub};
use crate::address::free_address;
use gateway::config::EdgeConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// SHA-256 of `acme-old` and `acme-new`.
const OLD: &str = "48bd6392ce02329046a218ab6e718a0e1a245627e202f47d063f6a66c566367b";
const NEW: &str = "6bba026a70f2c1131acaa1243400982036ab6341918452ac3f8c77d6fd1ca868";

/// Returns a table with one tenant, or none.
fn table(number: u64, tenant: Option<Value>) -> String {
    let deployment = json!({"name": "m", "task": "embed", "model": "pypi://m",
                            "engine": {"kind": "cpu", "precision": "f32"}, "residency": "eu", "regions": []});
    let mut table =
        json!({"version": 1, "epoch": 1, "generation": number, "regions": [], "deployments": [deployment]});
    if let Some(tenant) = tenant {
        table["tenants"] = json!([tenant]);
    }
    table.to_string()
}

fn acme(key: &str, deployments: Value, residency: Value) -> Option<Value> {
    Some(json!({"name": "acme", "key_sha256": [key], "deployments": deployments, "residency": residency,
                "weight": 1, "limits": {}}))
}

/// Running gateway.
struct Edge {
    clients: SocketAddr,
    operations: SocketAddr,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), gateway::edge::EdgeError>>,
    client: reqwest::Client,
}

impl Edge {
    async fn start(dir: &Path, hub: SocketAddr) -> Edge {
        let operations = free_address();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{REGION}'\nhub = 'http://{hub}'\nsnapshot = 'routes'\n\
             [timeouts]\nlame_duck = '0s'"
        );
        let config = EdgeConfig::parse(&text, dir, &BTreeMap::new());
        let config = config.map_err(|problems| format!("{problems:#?}")).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, listening) = oneshot::channel();
        let running = tokio::spawn(gateway::edge::run(config, async { drop(stopped.await) }, |address| {
            ready.send(address).unwrap();
        }));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Edge { clients: listening.await.unwrap(), operations, stop, running, client }
    }

    /// Returns the deployments visible to this key, or the status of the rejection.
    async fn models(&self, key: &str) -> Result<Vec<String>, u16> {
        let request = self.client.get(format!("http://{}/v1/models", self.clients)).bearer_auth(key);
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        if status != 200 {
            return Err(status);
        }
        let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        let models = body["data"].as_array().unwrap().iter();
        Ok(models.map(|model| model["id"].as_str().unwrap().to_owned()).collect())
    }

    async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIMEOUT, "timed out waiting until {description}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn refused(&self) -> u64 {
        let request = self.client.get(format!("http://{}/metrics", self.operations));
        let metrics = request.send().await.unwrap().text().await.unwrap();
        let line =
            metrics.lines().find_map(|line| line.strip_prefix("meridian_gateway_tables_refused_total "));
        line.unwrap().parse().unwrap()
    }

    async fn end(self) {
        drop(self.stop);
        self.running.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_gateway_accepts_exactly_the_tenants_of_the_table_with_and_without_a_hub() {
    let (hub, at, serving) = start_hub(table(1, None)).await;
    let dir = tempfile::tempdir().unwrap();
    let edge = Edge::start(dir.path(), at).await;
    let all = || Ok(vec!["m".to_owned()]);
    hub.wait_for_poll("the first table is acknowledged", |query| query.contains("after=1.1&")).await;
    assert_eq!(edge.models("acme-old").await, Err(401), "no tenants are configured");

    hub.text.send_replace(table(2, acme(OLD, Value::Null, Value::Null)));
    edge.wait_until("the key is accepted", async || edge.models("acme-old").await == all()).await;
    assert_eq!(edge.models("acme-new").await, Err(401));

    for poison in [acme("acme-new", Value::Null, Value::Null), acme(NEW, Value::Null, json!(""))] {
        let before = edge.refused().await;
        hub.text.send_replace(table(3, poison));
        edge.wait_until("the table is rejected and counted", async || edge.refused().await > before).await;
        assert_eq!(edge.models("acme-old").await, all(), "the last valid table stays in use");
    }

    hub.text.send_replace(table(4, acme(NEW, Value::Null, json!("us"))));
    edge.wait_until("the new key is accepted", async || edge.models("acme-new").await == all()).await;
    assert_eq!(edge.models("acme-old").await, Err(401), "the old key is rejected from the same table on");
    let request = edge.client.post(format!("http://{}/v1/embeddings", edge.clients)).bearer_auth("acme-new");
    let response = request.body(json!({"model": "m", "input": "x"}).to_string()).send().await.unwrap();
    assert_eq!(
        response.headers()["x-meridian-error"],
        "region_not_permitted",
        "no region is in both eu and us"
    );
    let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    let (message, param) = (body["error"]["message"].as_str().unwrap(), &body["error"]["param"]);
    assert!(message.contains("'acme'") && message.contains("'us'") && message.contains("'eu'"), "{message}");
    assert!(!message.contains("x-meridian-residency") && param.is_null(), "no header was sent: {body}");

    hub.text.send_replace(table(5, acme(NEW, json!(["other"]), json!("us"))));
    edge.wait_until("its deployments have changed", async || edge.models("acme-new").await == Ok(Vec::new()))
        .await;
    hub.text.send_replace(table(6, None));
    hub.wait_for_poll("the table without tenants is acknowledged", |query| query.contains("after=1.6&"))
        .await;
    assert_eq!(
        edge.models("acme-new").await,
        Ok(Vec::new()),
        "a table without tenants keeps the previous ones"
    );
    edge.end().await;
    serving.abort();

    let edge = Edge::start(dir.path(), at).await;
    assert_eq!(edge.models("acme-new").await, Ok(Vec::new()), "the tenants are in the snapshot");
    assert_eq!(edge.models("acme-old").await, Err(401));
    edge.end().await;
}
