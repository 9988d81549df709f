//! Report streams with a hostile or defective peer: of a spoke that many streams, slow readers, floods and broken messages
//! attack, and of a gateway with a spoke that rejects streams or sends more reports than were requested.

use crate::address::free_address;
use crate::hop::authority::{Authority, Subject};
use crate::weights::fixture::{Edge, FAR, Hub, NEAR, region, table};
use gateway::ingress::{self, IngressConfig, IngressSignals};
use identity::verify::ExpectedPeer;
use identity::{IdentityFiles, OwnName, ProcessIdentity, TlsClient, Transport};
use regions::catalogue::Catalogue;
use regions::spiffe::Role;
use scheduler_api::report::EXCHANGE_PERIOD;
use scheduler_api::report::stream::{REPORT_BYTES_MAX, REQUEST_BYTES_MAX};
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longer than any expected step takes.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time that a draining listener allows requests in flight, which a stream must not use up.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Streams that a spoke keeps open for one gateway.
const GATEWAY_STREAMS_MAX: usize = 8;
const FIRST: &str = r#"{"version":1,"gateway":"test","boot_id":1,"sequence":1}"#;

/// Spoke of the far region.
struct RunningSpoke {
    address: SocketAddr,
    operations: SocketAddr,
    stop: oneshot::Sender<()>,
    run: JoinHandle<()>,
}

impl RunningSpoke {
    /// Starts a spoke that would start replicas of this number of deployments, with names of maximum length.
    async fn start(deployments: usize, transport: Transport) -> RunningSpoke {
        let mut spoke = Spoke::new(FAR.parse().unwrap(), 1, Vec::new()).with_instance("a".parse().unwrap());
        for number in 0..deployments {
            spoke.set_start_time(&format!("{number:x>64}").parse().unwrap(), Some(Duration::from_secs(10)));
        }
        let operations = free_address();
        let config = IngressConfig {
            jobs: None,
            proxy_protocol_from: Vec::new(),
            resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
            listen: "127.0.0.1:0".parse().unwrap(),
            region: FAR.parse().unwrap(),
            signals: IngressSignals::default(),
            catalogue: Arc::new(Catalogue::builtin()),
            receipts: None,
            tracing: None,
            metrics: None,
            transport,
            operations: Some(operations),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, bound) = oneshot::channel();
        let run = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            let spoke = Arc::new(Mutex::new(spoke));
            ingress::run(config, spoke, stopped, |address| ready.send(address).unwrap()).await.unwrap();
        });
        RunningSpoke { address: bound.await.unwrap(), operations, stop, run }
    }

    async fn plaintext(deployments: usize) -> RunningSpoke {
        RunningSpoke::start(deployments, Transport::Loopback).await
    }

    async fn exchange(&self) -> Exchange<TcpStream> {
        Exchange::open(TcpStream::connect(self.address).await.unwrap()).await
    }

    /// Waits until a limit of the streams was reached, and returns how often.
    async fn wait_until_limited(&self, limit: &str) -> String {
        let reached = async {
            loop {
                let count = self.limited(limit).await;
                if count != "0" {
                    return count;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(TIMEOUT, reached).await.unwrap()
    }

    /// Returns how often a limit of the streams was reached.
    async fn limited(&self, limit: &str) -> String {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let url = format!("http://{}/metrics", self.operations);
        let sample = format!("meridian_ingress_report_stream_limits_total{{limit=\"{limit}\"}} ");
        let text = client.get(&url).send().await.unwrap().text().await.unwrap();
        text.lines().find_map(|line| line.strip_prefix(&sample)).unwrap_or("0").to_owned()
    }

    /// Drains the spoke, and returns how long that took.
    async fn drain(self) -> Duration {
        let begun = Instant::now();
        self.stop.send(()).unwrap();
        timeout(2 * DRAIN_TIMEOUT, self.run).await.unwrap().unwrap();
        begun.elapsed()
    }
}

/// Stream of reports as a test writes and reads it.
struct Exchange<S>(BufReader<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> Exchange<S> {
    /// Sends the head of a request.
    async fn open(stream: S) -> Exchange<S> {
        let mut exchange = Exchange(BufReader::new(stream));
        let head = "POST /spoke/v1/exchange HTTP/1.1\r\nhost: region\r\ntransfer-encoding: chunked\r\n\
                    connection: close\r\n\r\n";
        exchange.write(head).await;
        exchange
    }

    async fn write(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// Sends a piece of the body as one chunk.
    async fn piece(&mut self, piece: &str) {
        self.write(&chunk(piece)).await;
    }

    /// Returns the next line with JSON: a report or an error; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        let read = async {
            loop {
                let mut line = String::new();
                if !matches!(self.0.read_line(&mut line).await, Ok(1..)) || line == "0\r\n" {
                    return None;
                }
                if line.starts_with('{') {
                    return Some(line);
                }
            }
        };
        timeout(TIMEOUT, read).await.expect("the stream neither continues nor ends")
    }

    /// Sends another request, and expects a report.
    async fn continues(&mut self) {
        self.piece("{\"sequence\":2}\n").await;
        assert!(self.next().await.is_some_and(|report| report.contains("\"sequence\":2")));
    }
}

fn chunk(piece: &str) -> String {
    format!("{:x}\r\n{piece}\r\n", piece.len())
}

/// Loads the identity of a process that the authority has signed.
fn identity(authority: &Authority, dir: &Path, file: &str, uri: &str, role: Role) -> Arc<ProcessIdentity> {
    let [certificate, key, authorities] = authority.write(dir, file, &Subject::named(uri));
    let files = IdentityFiles { certificate, key, authorities, revoked: None };
    let region = if role == Role::Spoke { FAR } else { NEAR };
    let roles: &'static [Role] = if role == Role::Spoke { &[Role::Spoke] } else { &[Role::Gateway] };
    let own = OwnName { roles, region: Some(region.parse().unwrap()) };
    let loaded = ProcessIdentity::load(files, &own, Some(&Arc::new(Catalogue::builtin())));
    Arc::new(loaded.map_err(|wrong| wrong.join("\n")).unwrap())
}

#[tokio::test]
async fn a_gateway_keeps_its_newest_streams_and_takes_none_of_another() {
    let (authority, dir) = (Authority::new(), tempfile::tempdir().unwrap());
    let catalogue = Catalogue::builtin();
    let of_region = |role: Role, id: &str| {
        let within = catalogue.get(&id.parse().unwrap()).unwrap().narrowest();
        format!("spiffe://m/{role}/{id}/in/{}", within.as_str())
    };
    let (spoke, gateway) = (of_region(Role::Spoke, FAR), of_region(Role::Gateway, NEAR));
    let of_spoke = identity(&authority, dir.path(), "spoke", &spoke, Role::Spoke);
    let spoke = RunningSpoke::start(1, Transport::Tls(of_spoke)).await;
    // Two gateways of one region have the same name and different certificates.
    let client = |file: &str| {
        let identity = identity(&authority, dir.path(), file, &gateway, Role::Gateway);
        TlsClient::new(identity, &[b"http/1.1"]).unwrap()
    };
    let (shared, other) = (client("shared"), client("other"));
    let expected = ExpectedPeer { role: Role::Spoke, region: catalogue.index_of(&FAR.parse().unwrap()) };
    let open = async |client: &TlsClient, boot_id: usize| {
        let tcp = TcpStream::connect(spoke.address).await.unwrap();
        let mut stream = Exchange::open(client.connect(expected, tcp).await.unwrap().stream).await;
        let first = format!("{{\"version\":1,\"gateway\":\"test\",\"boot_id\":{boot_id},\"sequence\":1}}\n");
        stream.piece(&first).await;
        assert!(stream.next().await.unwrap().contains(FAR));
        stream
    };
    // More gateways than one has streams: those of a region may have one certificate.
    let mut others = vec![open(&other, 0).await];
    for boot_id in 1..=GATEWAY_STREAMS_MAX + 1 {
        others.push(open(&shared, boot_id).await);
    }
    let mut streams = Vec::new();
    for _ in 0..2 * GATEWAY_STREAMS_MAX {
        streams.push(open(&shared, 0).await);
    }
    for (number, stream) in streams.iter_mut().enumerate() {
        if number < GATEWAY_STREAMS_MAX {
            assert_eq!(stream.next().await, None, "stream {number} is replaced");
        } else {
            stream.continues().await;
        }
    }
    spoke.wait_until_limited("gateway_streams").await;
    for stream in &mut others {
        stream.continues().await;
    }
}

#[tokio::test]
async fn a_replaced_stream_that_is_not_read_ends_at_once_and_is_counted_once() {
    let spoke = RunningSpoke::plaintext(MANY_DEPLOYMENTS).await;
    let _unread = unread_reports(&spoke).await;
    let mut newer = Vec::new();
    for _ in 0..GATEWAY_STREAMS_MAX {
        let mut exchange = spoke.exchange().await;
        exchange.piece(&format!("{FIRST}\n")).await;
        assert!(exchange.next().await.unwrap().contains(FAR));
        newer.push(exchange);
    }
    assert_eq!(spoke.wait_until_limited("gateway_streams").await, "1");
    for exchange in &mut newer {
        exchange.continues().await;
    }
    assert_eq!(spoke.wait_until_limited("gateway_streams").await, "1");
    assert_eq!(spoke.limited("write_time").await, "0");
}

#[tokio::test]
async fn a_stream_without_a_request_is_told_that_it_was_silent_or_that_the_spoke_is_draining() {
    let spoke = RunningSpoke::plaintext(1).await;
    let mut silent = spoke.exchange().await;
    silent.piece(&FIRST[..20]).await;
    let response = silent.next().await;
    assert!(response.as_ref().is_some_and(|error| error.contains("body_timeout")), "{response:?}");
    let mut open = spoke.exchange().await;
    open.piece(&FIRST[..20]).await;
    let drained = tokio::spawn(spoke.drain());
    let response = open.next().await;
    assert!(response.as_ref().is_some_and(|error| error.contains("draining")), "{response:?}");
    drained.await.unwrap();
}

#[tokio::test]
async fn a_flood_of_requests_is_responded_to_at_a_limited_rate_and_delays_no_drain() {
    let spoke = RunningSpoke::plaintext(1).await;
    let mut exchange = spoke.exchange().await;
    let flood = (2..2_000).map(|sequence| format!("{{\"sequence\":{sequence}}}\n"));
    let begun = Instant::now();
    exchange.piece(&(format!("{FIRST}\n") + &flood.collect::<String>())).await;
    let reports = 20;
    for sequence in 1..=reports {
        assert!(exchange.next().await.unwrap().contains(&format!("\"sequence\":{sequence}")));
    }
    // As many as a gateway has in flight come at once, and the others at half its interval.
    assert!(begun.elapsed() > EXCHANGE_PERIOD / 2 * 9, "{:?}", begun.elapsed());
    let drained = tokio::spawn(spoke.drain());
    while exchange.next().await.is_some() {}
    assert!(drained.await.unwrap() < DRAIN_TIMEOUT / 2);
}

/// Opens a stream that requests complete reports and does not read them.
async fn unread_reports(spoke: &RunningSpoke) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut exchange = Exchange::open(socket.connect(spoke.address).await.unwrap()).await;
    let requests = (2..10).map(|sequence| format!("{{\"sequence\":{sequence}}}\n"));
    exchange.piece(&(format!("{FIRST}\n") + &requests.collect::<String>())).await;
    let stream = exchange.0.into_inner();
    timeout(TIMEOUT, stream.readable()).await.unwrap().unwrap();
    stream
}

/// Deployments of which eight reports exceed what the sockets of a connection buffer.
const MANY_DEPLOYMENTS: usize = 6_000;

#[tokio::test]
async fn a_gateway_that_does_not_read_delays_no_drain() {
    let spoke = RunningSpoke::plaintext(MANY_DEPLOYMENTS).await;
    let _stream = unread_reports(&spoke).await;
    let took = spoke.drain().await;
    assert!(took < DRAIN_TIMEOUT / 2, "{took:?}");
}

#[tokio::test]
async fn a_gateway_that_does_not_read_is_disconnected() {
    let spoke = RunningSpoke::plaintext(MANY_DEPLOYMENTS).await;
    let _stream = unread_reports(&spoke).await;
    spoke.wait_until_limited("write_time").await;
}

#[tokio::test]
async fn broken_messages_are_rejected_and_affect_no_other_stream() {
    let spoke = RunningSpoke::plaintext(1).await;
    let mut other = spoke.exchange().await;
    other.piece(&format!("{FIRST}\n")).await;
    assert!(other.next().await.unwrap().contains(FAR));
    let (done, mut ended) = oneshot::channel();
    let others = tokio::spawn(async move {
        while ended.try_recv().is_err() {
            other.continues().await;
            tokio::time::sleep(EXCHANGE_PERIOD).await;
        }
    });
    let long = format!("{{\"version\":1,\"gateway\":\"{}", "g".repeat(REQUEST_BYTES_MAX));
    let half = &FIRST[..20];
    let attacks = [
        ("an endless line", vec![chunk(&long)], Some("body_too_large")),
        ("an empty line", vec![chunk("\n")], Some("invalid_json")),
        ("no message", vec!["0\r\n\r\n".to_owned()], Some("invalid_json")),
        ("half a message", vec![chunk(half), "0\r\n\r\n".to_owned()], Some("invalid_json")),
        ("half a message, and a disconnect", vec![chunk(half)], None),
        ("half a chunk, and a disconnect", vec![chunk(half)[..10].to_owned()], None),
    ];
    for (attack, parts, expected) in attacks {
        let mut exchange = spoke.exchange().await;
        for part in parts {
            // The spoke may close the connection before it has read everything.
            exchange.0.write_all(part.as_bytes()).await.ok();
            exchange.0.flush().await.ok();
        }
        if let Some(code) = expected {
            let response = exchange.next().await;
            assert!(response.as_ref().is_some_and(|error| error.contains(code)), "{attack}: {response:?}");
        }
    }
    let mut exchange = spoke.exchange().await;
    exchange.write("no length\r\n").await;
    assert_eq!(exchange.next().await, None, "a chunk without a length");
    // After a valid message, the stream ends.
    for part in ["\n".to_owned(), "{\"sequence\":2}{\"sequence\":3}\n".to_owned(), long] {
        let mut exchange = spoke.exchange().await;
        exchange.piece(&format!("{FIRST}\n")).await;
        assert!(exchange.next().await.unwrap().contains(FAR));
        exchange.0.write_all(chunk(&part).as_bytes()).await.ok();
        exchange.0.flush().await.ok();
        assert_eq!(exchange.next().await, None, "{part:.20}");
    }
    done.send(()).unwrap();
    others.await.expect("the other stream continues");
}

/// Behaviour of a scripted spoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    /// It responds to each request.
    Correct,
    /// It responds to each request twice.
    Twice,
    /// It rejects each stream.
    Rejects,
    /// It responds with a line without an end, until the gateway disconnects.
    Endless,
    /// It ends the response before the first report.
    Ends,
    /// It disconnects in the middle of a report.
    Disconnects,
}

/// Scripted spoke of the far region.
struct ScriptedSpoke {
    behaviour: watch::Sender<Behaviour>,
    counts: Arc<SpokeCounts>,
    address: SocketAddr,
}

/// Counts of a scripted spoke.
#[derive(Default)]
struct SpokeCounts {
    streams: AtomicU64,
    /// Maximum number of bytes that could be sent of a line without an end.
    longest_line: AtomicU64,
}

impl ScriptedSpoke {
    async fn start(behaviour: Behaviour) -> ScriptedSpoke {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (behaviour, address) = (watch::Sender::new(behaviour), socket.local_addr().unwrap());
        let (shared, counts) = (behaviour.clone(), Arc::<SpokeCounts>::default());
        let of_streams = counts.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                tokio::spawn(serve(BufReader::new(stream), shared.subscribe(), of_streams.clone()));
            }
        });
        ScriptedSpoke { behaviour, counts, address }
    }

    fn streams(&self) -> u64 {
        self.counts.streams.load(Ordering::SeqCst)
    }

    fn longest_line(&self) -> usize {
        self.counts.longest_line.load(Ordering::SeqCst) as usize
    }
}

async fn serve(
    mut stream: BufReader<TcpStream>,
    behaviour: watch::Receiver<Behaviour>,
    counts: Arc<SpokeCounts>,
) -> Option<()> {
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        stream.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
    }
    counts.streams.fetch_add(1, Ordering::SeqCst);
    let behaviour = *behaviour.borrow();
    if behaviour == Behaviour::Rejects {
        let response = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        return stream.write_all(response.as_bytes()).await.ok();
    }
    if behaviour == Behaviour::Endless {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.ok()?;
        let (piece, mut sent) = ("x".repeat(64 << 10), 0);
        loop {
            stream.write_all(chunk(&piece).as_bytes()).await.ok()?;
            sent += piece.len() as u64;
            counts.longest_line.fetch_max(sent, Ordering::SeqCst);
        }
    }
    let broken = match behaviour {
        Behaviour::Correct | Behaviour::Twice | Behaviour::Rejects | Behaviour::Endless => None,
        Behaviour::Ends => Some("0\r\n\r\n".to_owned()),
        Behaviour::Disconnects => Some(chunk("{\"version\":1,\"region\":")),
    };
    if let Some(broken) = broken {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.ok()?;
        stream.write_all(broken.as_bytes()).await.ok()?;
        return stream.flush().await.ok();
    }
    let load = |name: &str| json!({"name": name, "ready": 1, "pending_tokens": 0, "tokens_per_second": 1e4});
    crate::reports::serve(&mut stream, |sequence| {
        let report = json!({"version": 1, "region": FAR, "instance": "a", "boot_id": 1, "sequence": sequence,
                            "draining": false, "deployments": [load("m"), load("m-us")]});
        let twice =
            if behaviour == Behaviour::Twice { format!("{report}\n{report}") } else { report.to_string() };
        std::future::ready(twice.into_bytes())
    })
    .await
}

/// Starts a gateway whose far region has this spoke.
async fn edge(dir: &Path, spoke: &ScriptedSpoke) -> Edge {
    let (_, hub) = Hub::start(table(1, [region(NEAR).await, spoke.address], &[])).await;
    Edge::start(dir, hub).await
}

fn is_far_healthy(routes: &Value) -> bool {
    let regions = routes["regions"].as_array().into_iter().flatten();
    regions.filter(|region| region["region"] == FAR).any(|region| region["health"] == "healthy")
}

#[tokio::test]
async fn a_spoke_that_rejects_streams_is_tried_with_a_backoff_and_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let spoke = ScriptedSpoke::start(Behaviour::Rejects).await;
    let edge = edge(dir.path(), &spoke).await;
    edge.wait_until("a stream is rejected", |_| spoke.streams() > 0).await;
    let (before, begun) = (spoke.streams(), Instant::now());
    edge.wait_until("others are rejected", |_| spoke.streams() >= before + 6).await;
    // At one for each interval, as without a backoff, they would take 1.2 s.
    assert!(begun.elapsed() > EXCHANGE_PERIOD * 10, "{:?}", begun.elapsed());
    spoke.behaviour.send_replace(Behaviour::Correct);
    edge.wait_until("the far region is healthy", is_far_healthy).await;
}

#[tokio::test]
async fn more_reports_than_requests_end_their_stream() {
    let dir = tempfile::tempdir().unwrap();
    let spoke = ScriptedSpoke::start(Behaviour::Twice).await;
    let edge = edge(dir.path(), &spoke).await;
    edge.wait_until("streams are replaced", |_| spoke.streams() >= 3).await;
    let unrequested = edge.scraped("meridian_gateway_reports_rejected_total{reason=\"unrequested\"}").await;
    assert!((2..=spoke.streams()).contains(&unrequested), "{unrequested}: each ends its stream");
    spoke.behaviour.send_replace(Behaviour::Correct);
    edge.wait_until("the far region is healthy", is_far_healthy).await;
}

#[tokio::test]
async fn a_line_without_an_end_is_read_up_to_the_limit_of_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let spoke = ScriptedSpoke::start(Behaviour::Endless).await;
    let edge = edge(dir.path(), &spoke).await;
    edge.wait_until("a line exceeds the limit", |_| spoke.longest_line() > REPORT_BYTES_MAX).await;
    let before = spoke.streams();
    edge.wait_until("streams are replaced", |_| spoke.streams() >= before + 3).await;
    // Beyond the limit, the sockets of a connection buffer some megabytes.
    assert!(spoke.longest_line() < 8 * REPORT_BYTES_MAX, "{} bytes", spoke.longest_line());
    spoke.behaviour.send_replace(Behaviour::Correct);
    edge.wait_until("the far region is healthy", is_far_healthy).await;
}

#[tokio::test]
async fn broken_streams_are_replaced_and_the_region_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let spoke = ScriptedSpoke::start(Behaviour::Ends).await;
    let edge = edge(dir.path(), &spoke).await;
    for behaviour in [Behaviour::Ends, Behaviour::Disconnects] {
        spoke.behaviour.send_replace(behaviour);
        let before = spoke.streams();
        edge.wait_until("streams are replaced", |_| spoke.streams() >= before + 3).await;
    }
    spoke.behaviour.send_replace(Behaviour::Correct);
    edge.wait_until("the far region is healthy", is_far_healthy).await;
}
