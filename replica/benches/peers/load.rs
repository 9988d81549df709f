//! Closed-loop load generator: a number of clients, each of which sends its next request after its response.
//!
//! `meridian load` is an open loop, for the behaviour of a server at a given rate. A comparison of two servers needs a
//! closed loop: the throughput with this many busy clients, and the latency of a lone client. Both servers get the same
//! bytes from the same generator, which is designed to use little CPU: requests are built beforehand, and only the
//! status and the length of a response are parsed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Maximum size of a response: one vector as JSON is some 10 kB.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// Share of the time at the start that is not measured: connection setup and warm-up of the server.
const WARM_UP: f64 = 0.2;

/// `ADDRESS PATH BODIES CALLERS SECONDS`: BODIES is a file with one JSON body per line, sent round robin.
pub(crate) fn main(given: &[&str]) -> Result<(), String> {
    let [address, path, bodies, callers, seconds] = given else {
        return Err("load needs ADDRESS PATH BODIES CALLERS SECONDS".to_owned());
    };
    let to_message = |error: &dyn std::fmt::Display| error.to_string();
    let address: SocketAddr = address.parse().map_err(|error| to_message(&error))?;
    let callers: usize = callers.parse().map_err(|error| to_message(&error))?;
    let time = Duration::from_secs_f64(seconds.parse().map_err(|error| to_message(&error))?);
    let bodies = std::fs::read_to_string(bodies).map_err(|error| to_message(&error))?;
    let requests: Arc<[Vec<u8>]> = bodies.lines().map(|body| request(address, path, body)).collect();
    if requests.is_empty() || callers == 0 {
        return Err("load needs at least one body and one caller".to_owned());
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| to_message(&error))?;
    let report = runtime.block_on(run(address, requests, callers, time))?;
    println!("{report}");
    Ok(())
}

fn request(address: SocketAddr, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n\
         {body}"
    )
    .into_bytes()
}

async fn run(
    address: SocketAddr,
    requests: Arc<[Vec<u8>]>,
    callers: usize,
    time: Duration,
) -> Result<serde_json::Value, String> {
    let next = Arc::new(AtomicUsize::new(0));
    let begin = Instant::now();
    let (from, deadline) = (begin + time.mul_f64(WARM_UP), begin + time);
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        tasks.spawn(client(address, Arc::clone(&requests), Arc::clone(&next), from, deadline));
    }
    let mut latencies = Vec::new();
    while let Some(done) = tasks.join_next().await {
        let done = done.map_err(|error| error.to_string())?;
        latencies.extend(done.map_err(|error| format!("a request to {address} failed: {error}"))?);
    }
    latencies.sort_unstable();
    let at = |share: f64| {
        let index = ((latencies.len() as f64 * share) as usize).min(latencies.len().saturating_sub(1));
        latencies.get(index).map(|latency| latency.as_secs_f64() * 1e3)
    };
    Ok(json!({
        "answers": latencies.len(),
        "per_second": latencies.len() as f64 / (deadline - from).as_secs_f64(),
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
    }))
}

/// Sends requests until `deadline`; returns the latencies of the responses received after `from`.
async fn client(
    address: SocketAddr,
    requests: Arc<[Vec<u8>]>,
    next: Arc<AtomicUsize>,
    from: Instant,
    deadline: Instant,
) -> io::Result<Vec<Duration>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut latencies, mut response) = (Vec::new(), Vec::new());
    while Instant::now() < deadline {
        let sent = Instant::now();
        let request = &requests[next.fetch_add(1, Ordering::Relaxed) % requests.len()];
        stream.write_all(request).await?;
        read_response(&mut stream, &mut response).await?;
        let now = Instant::now();
        if now >= from && now < deadline {
            latencies.push(now - sent);
        }
    }
    Ok(latencies)
}

/// Reads one response to its end, by its content-length.
async fn read_response(stream: &mut TcpStream, response: &mut Vec<u8>) -> io::Result<()> {
    response.clear();
    let mut end = None;
    while end.is_none_or(|end| response.len() < end) {
        if response.len() > MAX_RESPONSE_BYTES {
            return Err(io::Error::other(format!("a response of more than {MAX_RESPONSE_BYTES} bytes")));
        }
        if stream.read_buf(response).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        if end.is_none() {
            end = end_of_response(response)?;
        }
    }
    Ok(())
}

/// Returns the end of the response, once its head is complete.
fn end_of_response(response: &[u8]) -> io::Result<Option<usize>> {
    let Some(head) = response.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let text = String::from_utf8_lossy(&response[..head]).to_ascii_lowercase();
    if !text.starts_with("http/1.1 200") {
        let body = String::from_utf8_lossy(&response[head..]).into_owned();
        return Err(io::Error::other(format!("{}{body}", text.lines().next().unwrap_or_default())));
    }
    let length =
        text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    let length = length.ok_or_else(|| io::Error::other("a response without content-length"))?;
    Ok(Some(head + 4 + length))
}
