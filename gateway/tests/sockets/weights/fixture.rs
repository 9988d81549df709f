//! A gateway between two regions, and a hub with the table and plan of the test.

use crate::address::free_address;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use gateway::config::EdgeConfig;
use scheduler_api::plan::{DemandReportV1, DemandV1};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

pub(crate) const NEAR: &str = "aws/us-east-1";
pub(crate) const FAR: &str = "aws/eu-central-1";
/// Round-trip time of the far region. Of two equally near regions a slow one is skipped, and on a busy machine either
/// is slow now and then.
const ROUND_TRIP_TIME: Duration = Duration::from_millis(60);
/// Longer than any expected step takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// State of the hub, and its last report of demand.
pub(crate) struct Hub {
    pub(crate) table: watch::Sender<Value>,
    /// Response to a gateway's demand report; `None` is 204.
    pub(crate) plan: Mutex<Option<Value>>,
    pub(crate) demand: Mutex<Option<DemandV1>>,
    pub(crate) demand_reports: watch::Sender<u64>,
}

/// Returns the plan row of one class.
pub(crate) fn row(deployment: &str, residency: Value, shares: &[(&str, u16)]) -> Value {
    let share = |(region, permille): &(&str, u16)| json!({"region": region, "permille": permille, "reason": "nearer_full"});
    json!({"deployment": deployment, "residency": residency, "origin": NEAR,
           "shares": shares.iter().map(share).collect::<Vec<_>>()})
}

/// Returns the plan of the gateway in the near region.
pub(crate) fn plan(generation: u64, rows: &[Value]) -> Value {
    json!({"version": 1, "epoch": 1, "generation": generation, "gateway": NEAR, "rows": rows})
}

/// Returns a table in which these regions drain.
pub(crate) fn table(generation: u64, regions: [SocketAddr; 2], draining: &[&str]) -> Value {
    let at = |id: &str, at: SocketAddr| json!({"id": id, "instances": [{"name": "a", "endpoint": at.to_string()}], "deployments": ["m", "m-us"], "draining": draining.contains(&id)});
    let deployment = |name: &str, residency: Value| {
        json!({"name": name, "task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"},
               "residency": residency, "regions": []})
    };
    json!({"version": 1, "epoch": 1, "generation": generation, "regions": [at(NEAR, regions[0]), at(FAR, regions[1])],
           "deployments": [deployment("m", Value::Null), deployment("m-us", json!("us"))]})
}

async fn serve(router: axum::Router) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}

/// Starts a healthy, idle region that responds at once.
pub(crate) async fn region(id: &'static str) -> SocketAddr {
    serve(region_router(id)).await
}

/// Returns the service of a healthy, idle region that responds at once.
pub(crate) fn region_router(id: &'static str) -> axum::Router {
    let report = move |sequence: u64| async move {
        let load = |name: &str| json!({"name": name, "ready": 1, "pending_tokens": 0, "interactive_tokens": 0, "tokens_per_second": 1e4});
        if id == FAR {
            tokio::time::sleep(ROUND_TRIP_TIME).await;
        }
        json!({"version": 1, "region": id, "instance": "a", "boot_id": 1, "sequence": sequence, "draining": false,
               "deployments": [load("m"), load("m-us")]})
        .to_string()
    };
    let exchange = move |body: axum::body::Body| async move { crate::reports::respond(body, report) };
    axum::Router::new().route(scheduler_api::paths::EXCHANGE, post(exchange)).fallback(async || "{}")
}

impl Hub {
    pub(crate) async fn start(table: Value) -> (Arc<Hub>, SocketAddr) {
        let hub = Arc::new(Hub {
            table: watch::Sender::new(table),
            plan: Mutex::default(),
            demand: Mutex::default(),
            demand_reports: watch::Sender::new(0),
        });
        let router = axum::Router::new()
            .route(scheduler_api::paths::ROUTES, get(Hub::routes))
            .route(scheduler_api::paths::DEMAND, post(Hub::demand))
            .with_state(hub.clone());
        (hub, serve(router).await)
    }

    async fn routes(State(hub): State<Arc<Hub>>, query: axum::extract::RawQuery) -> Response {
        let query = query.0.unwrap_or_default();
        let after = query.split('&').find_map(|pair| pair.strip_prefix("after=1."));
        let after: Option<u64> = after.map(|number| number.parse().unwrap());
        let newer = |table: &Value| after.is_none_or(|after| table["generation"].as_u64() > Some(after));
        let mut table = hub.table.subscribe();
        let table = table.wait_for(newer).await.unwrap().clone();
        axum::Json(table).into_response()
    }

    async fn demand(State(hub): State<Arc<Hub>>, body: Bytes) -> Response {
        let report: DemandReportV1 = serde_json::from_slice(&body).unwrap();
        {
            let mut known = hub.demand.lock().unwrap();
            let Ok(demand) = report.restore(known.as_ref()) else {
                return StatusCode::CONFLICT.into_response();
            };
            *known = Some(demand);
        }
        let plan = hub.plan.lock().unwrap().clone();
        hub.demand_reports.send_modify(|demand_reports| *demand_reports += 1);
        plan.map_or(StatusCode::NO_CONTENT.into_response(), |plan| axum::Json(plan).into_response())
    }

    /// Sets the plan.
    pub(crate) fn set_plan(&self, plan: Value) {
        *self.plan.lock().unwrap() = Some(plan);
    }

    /// Waits for two more reports of the gateway: then it has received the plan.
    pub(crate) async fn wait_until_reported(&self) {
        let now = *self.demand_reports.borrow();
        let reported = self
            .demand_reports
            .subscribe()
            .wait_for(|demand_reports| *demand_reports >= now + 2)
            .await
            .map(drop);
        reported.unwrap();
    }
}

/// Gateway in the near region.
pub(crate) struct Edge {
    url: String,
    operations: SocketAddr,
    client: reqwest::Client,
    _stop: oneshot::Sender<()>,
}

impl Edge {
    /// Starts a gateway that keeps its snapshots in `dir`.
    pub(crate) async fn start(dir: &Path, hub: SocketAddr) -> Edge {
        std::fs::write(dir.join("tenants.toml"), "[[tenant]]\nname = 't'\nkey_env = 'KEY'\n").unwrap();
        let operations = free_address();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{NEAR}'\nhub = 'http://{hub}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'\n\
             # Slow regions are not retried on a busy machine: the first region of a request is counted.\n\
             hedge = false"
        );
        let environment = BTreeMap::from([("KEY".to_owned(), "KEY".to_owned())]);
        let config =
            EdgeConfig::parse(&text, dir, &environment).map_err(|problems| format!("{problems:#?}")).unwrap();
        let (ready, bound) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(async move {
            let shutdown = async { drop(stopped.await) };
            gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap()).await.unwrap();
        });
        let url = format!("http://{}/v1/embeddings", bound.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Edge { url, operations, client, _stop: stop }
    }

    /// Returns the region that responds, or the error code.
    pub(crate) async fn serving_region(&self, model: &str, headers: &[(&str, &str)]) -> String {
        let body = json!({"model": model, "input": "a question of a few words"}).to_string();
        let mut request = self.client.post(&self.url).bearer_auth("KEY").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        let header =
            |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        header("x-meridian-region").or_else(|| header("x-meridian-error")).unwrap_or_default()
    }

    /// Returns the number of `count` requests that are sent to the far region.
    pub(crate) async fn count_far(&self, count: u32, model: &str) -> u32 {
        let mut far = 0;
        for _ in 0..count {
            let region = self.serving_region(model, &[]).await;
            assert!([NEAR, FAR].contains(&region.as_str()), "{region}");
            far += u32::from(region == FAR);
        }
        far
    }

    /// Returns the response of the operations port at a path.
    pub(crate) async fn operators(&self, path: &str) -> Value {
        let url = format!("http://{}{path}", self.operations);
        self.client.get(url).send().await.unwrap().json().await.unwrap()
    }

    pub(crate) async fn scraped(&self, sample: &str) -> u64 {
        let url = format!("http://{}/metrics", self.operations);
        let text = self.client.get(url).send().await.unwrap().text().await.unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {sample}")).parse().unwrap()
    }

    pub(crate) async fn wait_until(&self, description: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let routes = self.operators("/routes").await;
            if holds(&routes) {
                return routes;
            }
            assert!(begun.elapsed() < TIMEOUT, "timed out waiting until {description}: {routes}");
            tokio::task::yield_now().await;
        }
    }

    /// Waits until it has this plan and sees this number of healthy regions.
    pub(crate) async fn wait_for_plan(&self, plan: &str, healthy: usize) {
        let is_healthy = |routes: &Value| {
            let regions = routes["regions"].as_array().into_iter().flatten();
            regions.filter(|region| region["health"] == "healthy").count() >= healthy
        };
        self.wait_until("it is ready", |routes| routes["plan"].as_str() == Some(plan) && is_healthy(routes))
            .await;
    }
}
