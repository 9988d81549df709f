//! HTTP/1.1 compared with HTTP/2 between gateway and region: cost of a request, number of connections, and behaviour
//! when the link is cut silently.
//!
//! `cargo bench -p gateway --bench hop`; `-- 2` gives every row two rounds of a second each instead of three, after two
//! seconds of the same load.
//!
//! Gateway, ingresses and replicas are in this process, over loopback and with mutual TLS 1.3, and so are the clients;
//! everything else is the same for both versions. So the CPU time is that of all of them, and the difference between
//! two rows is that of the protocol; rounds are interleaved. A replica responds with 8 KB.

#![expect(clippy::unwrap_used, reason = "the bench creates all of its inputs")]

#[path = "../tests/sockets/address.rs"]
mod address;
#[path = "../tests/sockets/hop/authority.rs"]
mod authority;
#[path = "../tests/sockets/hop/fixture.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod fixture;

use authority::Authority;
use fixture::{AMERICA, EUROPE, Fixture, NetworkKind, PeerTls, SECRET};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

const ROUND: Duration = Duration::from_secs(1);
/// Time before a round in which all clients connect and the connections to regions open; limited concurrent handshakes
/// take long for a thousand clients.
const WARM_UP: Duration = Duration::from_secs(2);
/// Number of clients, each with one request at a time, and response time of a replica.
const LOADS: [(usize, Duration); 4] =
    [(1, Duration::ZERO), (16, Duration::ZERO), (64, Duration::ZERO), (1000, Duration::from_millis(500))];
const CUT_CALLERS: usize = 64;
const CUT_RESPONSE_TIME: Duration = Duration::from_millis(20);

fn main() {
    let rounds = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(3);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        println!("| callers | a replica takes | hop | requests/s | CPU µs a request | connections to the region | refused |");
        println!("|---:|---:|---|---:|---:|---:|---:|");
        for (callers, takes) in LOADS {
            let fixtures = [start(NetworkKind::Direct, takes, 1).await, start(NetworkKind::Direct, takes, 2).await];
            let mut rows: [Vec<Row>; 2] = Default::default();
            for _ in 0..rounds {
                for (fixture, rows) in fixtures.iter().zip(&mut rows) {
                    rows.push(load(fixture, callers).await);
                }
            }
            for (version, mut rows) in (1..).zip(rows) {
                rows.sort_by(|one, other| one.cpu_us.total_cmp(&other.cpu_us));
                let Row { per_second, cpu_us, connections, refused } = rows[rows.len() / 2];
                println!("| {callers} | {takes:?} | HTTP/{version} | {per_second:.0} | {cpu_us:.1} | {connections} | {refused} |");
            }
        }
        println!("\nthe link to the nearest region is cut without a word for 2 s, {CUT_CALLERS} callers, a replica takes {CUT_RESPONSE_TIME:?}");
        println!("| protocol | served | failed | longest ms | served by the other region |\n|---|---:|---:|---:|---:|");
        for version in [1, 2] {
            let fixture = start(NetworkKind::Observed, CUT_RESPONSE_TIME, version).await;
            let cut = cut(&fixture).await;
            let longest = cut.iter().map(|result| result.took).max().unwrap_or_default().as_secs_f64() * 1e3;
            let failed = cut.iter().filter(|result| !result.ok).count();
            let other_region = cut.iter().filter(|result| result.other_region).count();
            println!("| HTTP/{version} | {} | {failed} | {longest:.0} | {other_region} |", cut.len() - failed);
        }
    });
}

async fn start(link: NetworkKind, takes: Duration, version: u8) -> Fixture {
    let authority = Authority::new();
    let hop = PeerTls::tls(&authority);
    let fixture =
        Fixture::start_with(link, takes, PeerTls { http: version, ..hop }, [(AMERICA, hop), (EUROPE, hop)])
            .await;
    fixture.wait_until_healthy(AMERICA).await;
    fixture.wait_until_healthy(EUROPE).await;
    fixture
}

struct Row {
    per_second: f64,
    cpu_us: f64,
    connections: u64,
    /// Requests with an error response.
    refused: usize,
}

/// Observations of one client.
struct RequestResult {
    began: Instant,
    took: Duration,
    ok: bool,
    other_region: bool,
}

async fn load(fixture: &Fixture, callers: usize) -> Row {
    let finished = watch::Sender::new(false);
    let tasks = call(fixture, callers, &finished);
    tokio::time::sleep(WARM_UP).await;
    let (began, before) = (Instant::now(), cpu());
    tokio::time::sleep(ROUND - Duration::from_millis(50)).await;
    let connections = gauge(&fixture.region_metrics(AMERICA).await, "meridian_ingress_connections ");
    tokio::time::sleep(Duration::from_millis(50)).await;
    let (took, used) = (began.elapsed(), cpu() - before);
    finished.send_replace(true);
    let result = join(tasks).await;
    let ended = |result: &&RequestResult| (began..began + took).contains(&(result.began + result.took));
    let (answered, refused) = result.iter().filter(ended).partition::<Vec<_>, _>(|result| result.ok);
    let per_second = answered.len() as f64 / took.as_secs_f64();
    let cpu_us = used.as_secs_f64() / answered.len() as f64 * 1e6;
    Row { per_second, cpu_us, connections, refused: refused.len() }
}

async fn cut(fixture: &Fixture) -> Vec<RequestResult> {
    let finished = watch::Sender::new(false);
    let tasks = call(fixture, CUT_CALLERS, &finished);
    for cut in [false, true, false] {
        fixture.cut(AMERICA, cut);
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    finished.send_replace(true);
    join(tasks).await
}

async fn join(tasks: Vec<tokio::task::JoinHandle<Vec<RequestResult>>>) -> Vec<RequestResult> {
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    all
}

/// Runs clients that send the next request as soon as they have a response, until the round is over.
fn call(
    fixture: &Fixture,
    callers: usize,
    finished: &watch::Sender<bool>,
) -> Vec<tokio::task::JoinHandle<Vec<RequestResult>>> {
    let body = json!({"model": "anywhere", "input": SECRET}).to_string();
    let address = fixture.url.trim_start_matches("http://").to_owned();
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer k\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let request: Arc<[u8]> = request.into_bytes().into();
    let caller = |_| {
        let (request, address, finished) = (request.clone(), address.clone(), finished.subscribe());
        tokio::spawn(async move {
            let mut stream = TcpStream::connect(&address).await.unwrap();
            let (mut result, mut buffer) = (Vec::new(), Vec::new());
            while !*finished.borrow() {
                let began = Instant::now();
                stream.write_all(&request).await.unwrap();
                let (status, region) = read_response(&mut stream, &mut buffer).await;
                let (took, ok, other_region) = (began.elapsed(), status == 200, region != AMERICA);
                result.push(RequestResult { began, took, ok, other_region });
            }
            result
        })
    };
    (0..callers).map(caller).collect()
}

/// Reads one response to its end; returns its status and region.
async fn read_response(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> (u16, String) {
    buffer.clear();
    loop {
        assert_ne!(stream.read_buf(buffer).await.unwrap(), 0, "the gateway keeps the connection open");
        let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = std::str::from_utf8(&buffer[..end]).unwrap().to_lowercase();
        let field = |name: &str| {
            head.split(name).nth(1).and_then(|rest| rest.split("\r\n").next()).unwrap_or_default()
        };
        let length: usize = field("content-length: ").parse().unwrap();
        while buffer.len() < end + 4 + length {
            assert_ne!(stream.read_buf(buffer).await.unwrap(), 0, "the gateway keeps the connection open");
        }
        return (head.split(' ').nth(1).unwrap().parse().unwrap(), field("x-meridian-region: ").to_owned());
    }
}

fn gauge(metrics: &str, name: &str) -> u64 {
    metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
}

/// Returns the CPU time of this process, as the kernel counts it in hundredths of a second.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}
