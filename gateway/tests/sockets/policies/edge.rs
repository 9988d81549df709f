//! A gateway reports its table, and keeps the last valid one for any response of a hub.

use crate::address::free_address;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use gateway::config::EdgeConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) const REGION: &str = "aws/us-east-1";
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// Hub that publishes one text until the test replaces it, and records the polls.
#[derive(Clone)]
pub(crate) struct Hub {
    pub(crate) text: watch::Sender<String>,
    polls: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    async fn routes(State(hub): State<Hub>, RawQuery(query): RawQuery) -> Response {
        let query = query.unwrap_or_default();
        hub.polls.lock().unwrap().push(query.clone());
        let text = hub.text.borrow().clone();
        let number = serde_json::from_str::<Value>(&text).ok().and_then(|table| table["generation"].as_u64());
        // An invalid table is returned to every poll; a valid one to gateways that have another.
        if number.is_some_and(|number| query.contains(&format!("after=1.{number}&"))) {
            let mut changed = hub.text.subscribe();
            tokio::time::timeout(TIMEOUT, changed.changed()).await.ok();
            return StatusCode::NO_CONTENT.into_response();
        }
        text.into_response()
    }

    /// Waits for a poll that satisfies `holds`.
    pub(crate) async fn wait_for_poll(&self, description: &str, holds: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let found = self.polls.lock().unwrap().iter().find(|query| holds(query)).cloned();
            if let Some(found) = found {
                return found;
            }
            assert!(begun.elapsed() < TIMEOUT, "{description}: {:?}", self.polls.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Starts a hub that publishes this text first; returns its address and task.
pub(crate) async fn start_hub(text: String) -> (Hub, SocketAddr, JoinHandle<()>) {
    let hub = Hub { text: watch::Sender::new(text), polls: Arc::default() };
    let router = axum::Router::new()
        .route(scheduler_api::paths::ROUTES, axum::routing::get(Hub::routes))
        .with_state(hub.clone());
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let serving = tokio::spawn(async move { axum::serve(socket, router).await.unwrap() });
    (hub, address, serving)
}

fn table(number: u64, residency: Value, widening: Value) -> Value {
    let deployment = json!({"name": "m", "task": "embed", "model": "pypi://m",
                            "engine": {"kind": "cpu", "precision": "f32"}, "residency": residency, "regions": []});
    json!({"version": 1, "epoch": 1, "generation": number, "regions": [], "deployments": [deployment], "widening": widening})
}

#[tokio::test]
async fn a_gateway_reports_its_table_and_rejects_invalid_ones() {
    let first = table(1, json!("eu"), json!([]));
    let (hub, address, _serving) = start_hub(first.to_string()).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tenants.toml"), "[[tenant]]\nname = 'a'\nkey_file = 'key'\n").unwrap();
    std::fs::write(dir.path().join("key"), "k").unwrap();
    let operations = free_address();
    let text = format!(
        "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{REGION}'\nhub = 'http://{address}'\n\
         snapshot = 'routes'\ntenants = 'tenants.toml'"
    );
    let config = EdgeConfig::parse(&text, dir.path(), &BTreeMap::new())
        .map_err(|problems| format!("{problems:#?}"))
        .unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(gateway::edge::run(config, async { drop(stopped.await) }, |_| {}));

    let query = hub.wait_for_poll("the first is acknowledged", |query| query.contains("after=1.1&")).await;
    let reader = query.split("reader=").nth(1).expect("the poll names its reader").to_owned();
    assert!(reader.starts_with(&format!("gateway/{REGION}/")), "{reader}");

    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let get = async |path: &str| {
        client.get(format!("http://{operations}{path}")).send().await.unwrap().text().await.unwrap()
    };
    let runs = async || {
        let routes: Value = serde_json::from_str(&get("/routes").await).unwrap();
        (
            routes["generation"].as_str().unwrap().to_owned(),
            routes["deployments"][0]["residency"].as_str().unwrap().to_owned(),
        )
    };
    let refused = async || {
        let metrics = get("/metrics").await;
        let line =
            metrics.lines().find_map(|line| line.strip_prefix("meridian_gateway_tables_refused_total "));
        line.expect("it is counted").parse::<u64>().unwrap()
    };
    let mut lost = table(2, Value::Null, json!([]));
    lost["deployments"][0].as_object_mut().unwrap().remove("residency");
    for poison in [
        table(2, json!(""), json!([])).to_string(),
        table(2, json!(7), json!([])).to_string(),
        table(2, json!("eu"), json!([{"name": "m", "to": "", "since": "1.2"}])).to_string(),
        table(2, json!(format!("eu,{}", "aws/us-east-1,".repeat(400))), json!([])).to_string(),
        lost.to_string(),
        "{".to_owned(),
        format!("[{}", "1,".repeat(1 << 20)),
    ] {
        let before = refused().await;
        hub.text.send_replace(poison.clone());
        let begun = Instant::now();
        while refused().await == before {
            assert!(begun.elapsed() < TIMEOUT, "{:.200} is not refused", poison);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(runs().await, ("1.1".to_owned(), "eu".to_owned()), "{poison:.200}");
    }

    // An announcement is acknowledged, and has no effect on routing yet.
    let announced = table(3, json!("eu"), json!([{"name": "m", "to": "anywhere", "since": "1.3"}]));
    hub.text.send_replace(announced.to_string());
    let query =
        hub.wait_for_poll("the announcement is acknowledged", |query| query.contains("after=1.3&")).await;
    assert!(query.ends_with(&reader), "{query}");
    assert_eq!(runs().await, ("1.3".to_owned(), "eu".to_owned()));
    drop(stop);
    running.await.unwrap().unwrap();
}
