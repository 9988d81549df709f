//! A hub with one region, a scripted region, a gateway before them, and clients at the byte level.

use crate::address::free_address;
use crate::hub;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::response::Response;
use gateway::config::EdgeConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

const REGION: &str = "aws/us-east-1";
/// Longer than any expected step takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
/// A request that is served.
pub(crate) const BODY: &str = r#"{"model": "anywhere", "input": "x"}"#;

/// Behaviour of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Responds with the number of received bytes.
    CountsBytes,
    /// Responds the same after `go_on`.
    Waits,
    /// Responds with this number of bytes.
    Responds(usize),
}

/// Region, shared with its server.
pub(crate) struct Region {
    pub(crate) mode: watch::Sender<Mode>,
    pub(crate) go_on: watch::Sender<bool>,
    /// Received requests, and those of them that were cancelled.
    pub(crate) requests: AtomicU64,
    pub(crate) cancelled: watch::Sender<u64>,
}

/// Counts a request as cancelled unless it is marked as finished.
struct CancellationGuard(Arc<Region>, bool);

impl Drop for CancellationGuard {
    fn drop(&mut self) {
        if !self.1 {
            self.0.cancelled.send_modify(|count| *count += 1);
        }
    }
}

impl Region {
    async fn start() -> (Arc<Region>, SocketAddr) {
        let region = Arc::new(Region {
            mode: watch::Sender::new(Mode::CountsBytes),
            go_on: watch::Sender::new(false),
            requests: AtomicU64::new(0),
            cancelled: watch::Sender::new(0),
        });
        let router = axum::Router::new()
            .route(scheduler_api::paths::EXCHANGE, axum::routing::post(exchange))
            .fallback(serve)
            .layer(DefaultBodyLimit::disable())
            .with_state(region.clone());
        (region, hub::serve(router).await)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// Waits until this number of requests has arrived.
    pub(crate) async fn wait_for_requests(&self, count: u64) {
        wait_until("the requests have arrived", || self.requests() >= count).await;
    }
}

async fn exchange(body: Body) -> Body {
    crate::reports::respond(body, async |sequence| {
        let report = json!({
            "version": 1, "region": REGION, "instance": "a", "boot_id": 1, "sequence": sequence, "draining": false,
            "deployments": [{"name": "anywhere", "ready": 1, "pending_tokens": 0, "tokens_per_second": 0.0}],
        });
        report.to_string()
    })
}

async fn serve(State(region): State<Arc<Region>>, body: Bytes) -> Response {
    region.requests.fetch_add(1, Ordering::SeqCst);
    let mut in_flight = CancellationGuard(region.clone(), false);
    let mode = *region.mode.borrow();
    let response = match mode {
        Mode::CountsBytes => json!({"bytes": body.len()}).to_string(),
        Mode::Waits => {
            region.go_on.subscribe().wait_for(|go_on| *go_on).await.unwrap();
            json!({"bytes": body.len()}).to_string()
        }
        Mode::Responds(bytes) => json!({"data": "x".repeat(bytes - 11)}).to_string(),
    };
    in_flight.1 = true;
    Response::builder().header("content-type", "application/json").body(Body::from(response)).unwrap()
}

/// The hub, the region, and the directory of files.
pub(crate) struct Fixture {
    pub(crate) region: Arc<Region>,
    /// Value of `hub` in the configuration.
    pub(crate) hub: String,
    pub(crate) dir: tempfile::TempDir,
}

/// Running gateway.
pub(crate) struct Edge {
    pub(crate) address: SocketAddr,
    pub(crate) operations: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    /// Ends with the gateway.
    pub(crate) running: JoinHandle<()>,
}

impl Fixture {
    pub(crate) async fn new() -> Fixture {
        let (region, address) = Region::start().await;
        let regions = [
            json!({"id": REGION, "instances": [{"name": "a", "endpoint": address.to_string()}], "deployments": ["anywhere"]}),
        ];
        let hub = hub::hub(1, 1, &regions, &[hub::deployment("anywhere", Value::Null)]).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "k").unwrap();
        let tenants = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n";
        std::fs::write(dir.path().join("tenants.toml"), tenants).unwrap();
        Fixture { region, hub: format!("'http://{hub}'"), dir }
    }

    /// Returns the configuration, with `more` added.
    pub(crate) fn config(&self, more: &str) -> Result<EdgeConfig, Vec<String>> {
        let operations = free_address();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{REGION}'\nhub = {}\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'\n{more}",
            self.hub
        );
        let parsed = EdgeConfig::parse(&text, self.dir.path(), &BTreeMap::new());
        parsed.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    /// Starts a gateway and waits until it sees the region healthy.
    pub(crate) async fn edge(&self, more: &str) -> Edge {
        self.edge_after(more, None).await
    }

    /// Starts a gateway that takes over the sockets of `running`, and waits until it sees the region healthy.
    pub(crate) async fn edge_after(&self, more: &str, running: Option<&Edge>) -> Edge {
        let mut config = self.config(more).map_err(|problems| format!("{problems:#?}")).unwrap();
        config.take_over = running.is_some();
        let operations = running.map_or(config.operations, |running| running.operations);
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, address) = oneshot::channel();
        let running = tokio::spawn(async move {
            let shutdown = async { drop(stopped.await) };
            let run = gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap());
            run.await.unwrap();
        });
        let address = address.await.unwrap();
        let edge = Edge { address, operations, stop: Some(stop), running };
        let begun = Instant::now();
        while !edge.operate("/routes").await.1.contains("\"health\":\"healthy\"") {
            assert!(begun.elapsed() < TIMEOUT, "the region does not become healthy");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        edge
    }

    /// Starts a gateway with short timeouts.
    pub(crate) async fn quick_edge(&self) -> Edge {
        self.edge("[timeouts]\nidle = '400ms'\nhead = '300ms'\nbody = '500ms'\nlame_duck = '0s'\n").await
    }
}

impl Edge {
    /// Stops it.
    pub(crate) fn stop(&mut self) {
        self.stop.take().expect("it is stopped once").send(()).unwrap();
    }

    /// Returns status and body of an operator request.
    pub(crate) async fn operate(&self, path: &str) -> (u16, String) {
        let Ok(mut stream) = TcpStream::connect(self.operations).await else {
            return (0, String::new());
        };
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let response = read_until_closed(&mut stream).await;
        (response.status, response.body)
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends bytes on a connection of their own and returns everything received up to its end.
    pub(crate) async fn send_bytes(&self, bytes: &[u8]) -> ClientResponse {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        read_until_closed(&mut stream).await
    }
}

/// HTTP/1 response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl ClientResponse {
    fn parse(text: &str) -> ClientResponse {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        ClientResponse { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        let lines = self.head.split("\r\n").filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(found, _)| *found == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn code(&self) -> &str {
        self.header("x-meridian-error")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }
}

/// Reads everything until the connection ends; it must end.
pub(crate) async fn read_until_closed(stream: &mut (impl AsyncRead + Unpin)) -> ClientResponse {
    let mut text = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut text)).await;
    let outcome = read.unwrap_or_else(|_| panic!("the connection does not end: {}", text.escape_ascii()));
    if let Err(error) = outcome {
        text.extend_from_slice(format!("\r\nbroken: {error}").as_bytes());
    }
    ClientResponse::parse(&String::from_utf8_lossy(&text))
}

/// Reads one response with a content-length; the connection continues.
pub(crate) async fn read_response(stream: &mut (impl AsyncRead + Unpin)) -> ClientResponse {
    let read = async {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(error) => panic!("{error} after {}", head.escape_ascii()),
            }
        }
        let mut response = ClientResponse::parse(&String::from_utf8_lossy(&head));
        let mut body = vec![0; response.header("content-length").parse().unwrap_or(0)];
        stream.read_exact(&mut body).await.unwrap();
        response.body = String::from_utf8(body).unwrap();
        response
    };
    tokio::time::timeout(TIMEOUT, read).await.expect("a response in time")
}

/// Returns a POST that is served, with further fields (each with its line end).
pub(crate) fn post(fields: &str, body: &str) -> String {
    format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n{fields}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Sends a request that is served and returns its response.
pub(crate) async fn send_and_read(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> ClientResponse {
    stream.write_all(post("", BODY).as_bytes()).await.unwrap();
    read_response(stream).await
}

/// Waits for a condition.
pub(crate) async fn wait_until(description: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "timed out waiting until {description}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Writes a certificate for `localhost` and its key; returns the certificate.
pub(crate) fn certify(dir: &Path) -> rustls::pki_types::CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(dir.join("gateway.crt"), made.cert.pem()).unwrap();
    std::fs::write(dir.join("gateway.key"), made.signing_key.serialize_pem()).unwrap();
    made.cert.der().clone()
}
