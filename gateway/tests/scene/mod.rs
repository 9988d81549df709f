//! An edge, a hub that publishes one region, and that region: one replica that computes so many tokens a second, one
//! request after another, lookups first.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use gateway::config::EdgeConfig;
use scheduler_core::wire::report::ExchangeRequestV1;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const PLACE: &str = "aws/us-east-1";

/// The region.
#[derive(Default)]
pub(crate) struct Region {
    requests: AtomicU64,
    lane: Mutex<String>,
}

impl Region {
    /// How many it has seen.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// The lane of the last one.
    pub(crate) fn lane(&self) -> String {
        self.lane.lock().unwrap().clone()
    }

    fn report(&self, sequence: u64) -> Value {
        let load = json!({"name": "m", "ready": 1, "pending_tokens": 0, "tokens_per_second": 0.0});
        json!({"version": 1, "region": PLACE, "boot_id": 1, "sequence": sequence, "draining": false, "deployments": [load]})
    }
}

async fn exchange(State(region): State<Arc<Region>>, body: Bytes) -> impl IntoResponse {
    let question: ExchangeRequestV1 = serde_json::from_slice(&body).unwrap();
    axum::Json(region.report(question.sequence))
}

async fn compute(State(region): State<Arc<Region>>, headers: HeaderMap, _body: Bytes) -> impl IntoResponse {
    region.requests.fetch_add(1, Ordering::SeqCst);
    let lane = headers.get("x-meridian-lane").map_or("", |lane| lane.to_str().unwrap());
    *region.lane.lock().unwrap() = lane.to_owned();
    (StatusCode::OK, [("x-meridian-tokens", "1")], "{}")
}

/// All of them.
pub(crate) struct Scene {
    pub(crate) region: Arc<Region>,
    address: SocketAddr,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Scene {
    /// With these tenants; a variable of the environment that holds a key holds its own name.
    pub(crate) async fn start(tenants: &str) -> Scene {
        let region = Arc::new(Region::default());
        let door = axum::Router::new()
            .route("/spoke/v1/exchange", axum::routing::post(exchange))
            .fallback(compute)
            .with_state(region.clone());
        let hub = hub(serve(door).await).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tenants.toml"), tenants).unwrap();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{}'\nplace = '{PLACE}'\nhub = 'http://{hub}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'",
            free_address().await
        );
        let keys = tenants.lines().filter_map(|line| line.strip_prefix("key_env = '")?.strip_suffix('\''));
        let environment: BTreeMap<_, _> = keys.map(|key| (key.to_owned(), key.to_owned())).collect();
        let config = EdgeConfig::parse(&text, dir.path(), &environment);
        let config = config.map_err(|problems| problems.join("\n")).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, bound) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let shutdown = async { drop(stopped.await) };
            gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap()).await.unwrap();
        });
        let address = bound.await.unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let scene = Scene { region, address, client, _dir: dir, _stop: stop };
        scene.wait_until_it_serves(tenants).await;
        scene
    }

    async fn wait_until_it_serves(&self, tenants: &str) {
        let key =
            tenants.lines().find_map(|line| line.strip_prefix("key_env = '")?.strip_suffix('\'')).unwrap();
        let url = format!("http://{}/v1/models", self.address);
        while self.client.get(&url).bearer_auth(key).send().await.unwrap().status() != 200 {
            tokio::task::yield_now().await;
        }
    }

    /// Asks for embeddings.
    pub(crate) async fn post(
        &self,
        bearer: &str,
        headers: &[(&str, &str)],
        body: String,
    ) -> reqwest::Response {
        let url = format!("http://{}/v1/embeddings", self.address);
        let mut request = self.client.post(url).bearer_auth(bearer).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    }

    /// The status and all the text that answer the head of a request whose body never comes.
    pub(crate) async fn head_only(&self, bearer: &str, length: usize) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bearer}\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut text = String::new();
        let mut buffer = [0; 4096];
        // The whole answer, which is one JSON object after one head.
        while !text.ends_with("}}") {
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "closed after {text}");
            text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
        (text.split(' ').nth(1).unwrap().parse().unwrap(), text.to_lowercase())
    }
}

/// A header's value, or nothing.
pub(crate) fn header<'a>(answer: &'a reqwest::Response, name: &str) -> &'a str {
    answer.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

async fn hub(region: SocketAddr) -> SocketAddr {
    let regions = [json!({"id": PLACE, "endpoint": region.to_string(), "deployments": ["m"]})];
    let deployment = json!({"name": "m", "task": "embed", "model": "pypi://m",
        "engine": {"kind": "cpu", "precision": "f32"}, "residency": null, "regions": []});
    let table =
        json!({"version": 1, "epoch": 1, "generation": 1, "regions": regions, "deployments": [deployment]});
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    serve(axum::Router::new().route("/v1/routes", axum::routing::get(routes))).await
}

async fn serve(router: axum::Router) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}

async fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}
