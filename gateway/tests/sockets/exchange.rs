//! The exchange of reports between a gateway and spokes: bytes when nothing changes, stalled connections, forged messages,
//! the time until a change has effect, and the end of a stream.

use crate::overflow::fixture::ingress_of;
use crate::weights::fixture::{Edge, FAR, Hub, NEAR, plan, region, row, table};
use scheduler_api::report::EXCHANGE_PERIOD;
use serde_json::{Value, json};
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

/// Longer than any expected step takes.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum bytes of an idle request and response above TCP, in plaintext. Two TLS records add 44 bytes, and two segments and
/// two acknowledgements 208: with five exchanges a second, 2 kB/s are 400 bytes for each.
const IDLE_BYTES_MAX: u64 = 400 - 208 - 44;
/// Time without reports after which a region is down.
const DOWN_AFTER: Duration = Duration::from_secs(3);

/// Relay that counts bytes and may stop forwarding on its connections without closing them.
#[derive(Default)]
struct Relay {
    bytes: AtomicU64,
    /// Responses of the spoke to a message of the gateway.
    responses: AtomicU64,
    /// Number of connections that are stalled: those with a lower number.
    stalled: watch::Sender<u64>,
    connections: AtomicU64,
    /// Number of the last connection that carried bytes from the spoke.
    last_used: AtomicU64,
}

impl Relay {
    async fn start(target: SocketAddr) -> (Arc<Relay>, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (relay, address) = (Arc::<Relay>::default(), socket.local_addr().unwrap());
        let shared = relay.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = socket.accept().await {
                let number = shared.connections.fetch_add(1, Ordering::SeqCst);
                let far = TcpStream::connect(target).await.unwrap();
                far.set_nodelay(true).unwrap();
                near.set_nodelay(true).unwrap();
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                tokio::spawn(shared.clone().copy(number, false, near_read, far_write));
                tokio::spawn(shared.clone().copy(number, true, far_read, near_write));
            }
        });
        (relay, address)
    }

    async fn copy(
        self: Arc<Relay>,
        number: u64,
        is_from_spoke: bool,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            self.stalled.subscribe().wait_for(|stalled| *stalled <= number).await.unwrap();
            self.bytes.fetch_add(read as u64, Ordering::SeqCst);
            if is_from_spoke {
                // Each is a line of JSON. A line that two reads have parts of is not counted.
                let responses = buffer[..read].windows(2).filter(|two| *two == b"}\n").count();
                self.responses.fetch_add(responses as u64, Ordering::SeqCst);
                self.last_used.store(number, Ordering::SeqCst);
            }
            if to.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the spoke has responded this many times. Returns the responses and the bytes until then.
    async fn after_responses(&self, count: u64) -> (u64, u64) {
        let begun = Instant::now();
        loop {
            let responses = self.responses.load(Ordering::SeqCst);
            if responses >= count {
                return (responses, self.bytes.load(Ordering::SeqCst));
            }
            assert!(begun.elapsed() < TIMEOUT, "{responses} responses: the exchange has stopped");
            tokio::time::sleep(EXCHANGE_PERIOD / 20).await;
        }
    }

    /// Stalls all connections that are open; new ones are forwarded.
    fn stall(&self) -> u64 {
        let open = self.connections.load(Ordering::SeqCst);
        self.stalled.send_replace(open);
        open
    }
}

/// Scripted spoke of the far region.
#[derive(Default)]
struct ScriptedSpoke {
    draining: AtomicBool,
    forged: AtomicBool,
    reports: AtomicU64,
}

impl ScriptedSpoke {
    async fn start() -> (Arc<ScriptedSpoke>, SocketAddr) {
        let spoke = Arc::<ScriptedSpoke>::default();
        let shared = spoke.clone();
        let exchange = move |body: axum::body::Body| {
            let spoke = shared.clone();
            async move {
                crate::reports::respond(body, move |sequence| {
                    let report = spoke.report(sequence).to_string();
                    async move { report }
                })
            }
        };
        let router = axum::Router::new().route(scheduler_api::paths::EXCHANGE, axum::routing::post(exchange));
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(axum::serve(socket, router.fallback(async || "{}")).into_future());
        (spoke, address)
    }

    fn report(&self, sequence: u64) -> Value {
        self.reports.fetch_add(1, Ordering::SeqCst);
        let region = if self.forged.load(Ordering::SeqCst) { NEAR } else { FAR };
        let load =
            |name: &str| json!({"name": name, "ready": 1, "pending_tokens": 0, "tokens_per_second": 1e4});
        json!({"version": 1, "region": region, "instance": "a", "boot_id": 1, "sequence": sequence,
               "draining": self.draining.load(Ordering::SeqCst), "deployments": [load("m"), load("m-us")]})
    }
}

/// Returns whether the gateway considers the far region healthy.
fn is_far_healthy(routes: &Value) -> bool {
    let regions = routes["regions"].as_array().into_iter().flatten();
    regions
        .filter(|region| region["region"] == FAR || region["id"] == FAR)
        .any(|region| region["health"] == "healthy")
}

/// Returns whether the gateway knows that an instance drains.
fn is_draining(routes: &Value) -> bool {
    routes.to_string().contains("\"draining\":true")
}

/// Starts a gateway whose far region is at this address, and waits until it is healthy.
async fn edge(dir: &std::path::Path, far: SocketAddr) -> Edge {
    let (_, hub) = Hub::start(table(1, [region(NEAR).await, far], &[])).await;
    let edge = Edge::start(dir, hub).await;
    edge.wait_until("the far region is healthy", is_far_healthy).await;
    edge
}

#[tokio::test]
async fn an_idle_pair_exchanges_less_than_two_kilobytes_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let (_stop, stopped) = oneshot::channel::<()>();
    let spoke = ingress_of(FAR, async { drop(stopped.await) }).await;
    let (relay, address) = Relay::start(spoke).await;
    let _edge = edge_of_empty_region(dir.path(), address).await;
    // The first responses are complete.
    let (first, before) = relay.after_responses(5).await;
    let (last, after) = relay.after_responses(first + 25).await;
    let bytes = (after - before) / (last - first);
    println!("{bytes} bytes for each exchange");
    assert!(bytes <= IDLE_BYTES_MAX, "{bytes} bytes for each exchange");
}

/// Starts a gateway whose far region has a spoke without replicas.
async fn edge_of_empty_region(dir: &std::path::Path, far: SocketAddr) -> Edge {
    let (_, hub) = Hub::start(table(1, [region(NEAR).await, far], &[])).await;
    Edge::start(dir, hub).await
}

#[tokio::test]
async fn a_stalled_stream_is_replaced_before_its_region_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let (_spoke, address) = ScriptedSpoke::start().await;
    let (relay, address) = Relay::start(address).await;
    let edge = edge(dir.path(), address).await;
    let (open, begun) = (relay.stall(), Instant::now());
    while relay.last_used.load(Ordering::SeqCst) < open {
        assert!(begun.elapsed() < DOWN_AFTER, "the stream is not replaced");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("replaced after {:?}", begun.elapsed());
    edge.wait_until("the far region is healthy", is_far_healthy).await;
    assert!(begun.elapsed() < DOWN_AFTER, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn forged_reports_are_rejected_and_the_next_complete_one_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let (spoke, address) = ScriptedSpoke::start().await;
    let edge = edge(dir.path(), address).await;
    let rejected = "meridian_gateway_reports_rejected_total{reason=\"other_region\"}";
    assert_eq!(edge.scraped(rejected).await, 0);
    spoke.forged.store(true, Ordering::SeqCst);
    edge.wait_until("forged reports are no reports", |routes| !is_far_healthy(routes)).await;
    assert!(edge.scraped(rejected).await >= 2, "each is counted");
    spoke.forged.store(false, Ordering::SeqCst);
    edge.wait_until("the far region is healthy again", is_far_healthy).await;
}

#[tokio::test]
async fn a_region_that_stops_gets_requests_only_if_no_other_one_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let (spoke, far) = ScriptedSpoke::start().await;
    let (hub, at) = Hub::start(table(1, [region(NEAR).await, far], &[])).await;
    let edge = Edge::start(dir.path(), at).await;
    hub.set_plan(plan(1, &[row("m", Value::Null, &[(FAR, 1000)])]));
    edge.wait_for_plan("1.1", 2).await;
    assert_eq!(edge.count_far(20, "m").await, 20, "the plan's region");
    spoke.draining.store(true, Ordering::SeqCst);
    edge.wait_until("the drain is known", is_draining).await;
    assert_eq!(edge.count_far(20, "m").await, 0, "whatever the plan");
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    hub.table.send_replace(table(2, [closed, far], &[]));
    let near_is_down = |routes: &Value| {
        let mut regions = routes["regions"].as_array().into_iter().flatten();
        regions.any(|region| region["region"] == NEAR && region["health"] == "down")
    };
    edge.wait_until("the other region is down", near_is_down).await;
    assert_eq!(edge.count_far(20, "m").await, 20, "it still accepts requests");
}

#[tokio::test]
async fn a_change_has_effect_with_the_next_report() {
    let dir = tempfile::tempdir().unwrap();
    let (spoke, address) = ScriptedSpoke::start().await;
    let edge = edge(dir.path(), address).await;
    spoke.draining.store(true, Ordering::SeqCst);
    let before = spoke.reports.load(Ordering::SeqCst);
    edge.wait_until("the drain is known", is_draining).await;
    let reports = spoke.reports.load(Ordering::SeqCst) - before;
    // One that was being written, the one with the change, and one while the test looked.
    assert!(reports <= 3, "{reports} reports");
}

#[tokio::test]
async fn a_stream_ends_cleanly_when_its_spoke_has_drained_and_after_an_invalid_message() {
    for ends_by_drain in [true, false] {
        let (stop, stopped) = oneshot::channel::<()>();
        let spoke = ingress_of(FAR, async { drop(stopped.await) }).await;
        let mut stream = BufReader::new(TcpStream::connect(spoke).await.unwrap());
        let head = "POST /spoke/v1/exchange HTTP/1.1\r\nhost: region\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut send = async |message: &str| {
            let chunk = format!("{:x}\r\n{message}\n\r\n", message.len() + 1);
            stream.write_all(chunk.as_bytes()).await.unwrap();
            let mut line = String::new();
            while !(line.starts_with('{') || line.starts_with("0\r\n")) {
                line.clear();
                assert_ne!(stream.read_line(&mut line).await.unwrap(), 0);
            }
            line
        };
        let first = send(r#"{"version":1,"gateway":"test","sequence":1}"#).await;
        assert!(first.contains(FAR), "{first}");
        let known = r#"{"sequence":2,"known":{"boot_id":1,"number":0}}"#;
        let second = send(known).await;
        assert!(!second.contains(FAR) && second.contains("\"sequence\":2"), "{second}");
        assert_eq!(send(r#"{"sequence":3}"#).await.matches("state").count(), 0, "nothing has changed");
        let rest = match ends_by_drain {
            true => {
                drop(stop);
                let mut rest = String::new();
                let read = stream.read_to_string(&mut rest);
                tokio::time::timeout(TIMEOUT, read).await.unwrap().unwrap();
                rest
            }
            false => send(r#"{"sequence":"four"}"#).await,
        };
        assert!(rest.contains("0\r\n"), "{rest}");
    }
}
