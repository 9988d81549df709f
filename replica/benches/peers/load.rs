//! Load in a closed loop: so many callers, each of whom asks again as soon as he has his answer.
//!
//! `meridian load` is open loop, for what a server does at a given rate. A comparison of two servers asks another
//! question: how much does each answer when so many callers keep it busy, and how long does a lone caller wait? Both
//! servers get the same bytes from the same generator, which is made to cost little beside them: requests are put
//! together beforehand, and of an answer only its status and its length are read.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// The largest answer: one vector as JSON is some 10 kB.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A share of the time at the start that does not count: connections, and what a server does for the first time.
const WARM_UP: f64 = 0.2;

/// `ADDRESS PATH BODIES CALLERS SECONDS`: BODIES is a file of one JSON body a line, sent round robin.
pub(crate) fn main(given: &[&str]) -> Result<(), String> {
    let [address, path, bodies, callers, seconds] = given else {
        return Err("load wants ADDRESS PATH BODIES CALLERS SECONDS".to_owned());
    };
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let address: SocketAddr = address.parse().map_err(|error| told(&error))?;
    let callers: usize = callers.parse().map_err(|error| told(&error))?;
    let time = Duration::from_secs_f64(seconds.parse().map_err(|error| told(&error))?);
    let bodies = std::fs::read_to_string(bodies).map_err(|error| told(&error))?;
    let requests: Arc<[Vec<u8>]> = bodies.lines().map(|body| request(address, path, body)).collect();
    if requests.is_empty() || callers == 0 {
        return Err("load wants at least one body and one caller".to_owned());
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| told(&error))?;
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
    let (from, until) = (begin + time.mul_f64(WARM_UP), begin + time);
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        tasks.spawn(caller(address, Arc::clone(&requests), Arc::clone(&next), from, until));
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
        "per_second": latencies.len() as f64 / (until - from).as_secs_f64(),
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
    }))
}

/// Asks until the time is over; the latencies of the answers that came between `from` and then.
async fn caller(
    address: SocketAddr,
    requests: Arc<[Vec<u8>]>,
    next: Arc<AtomicUsize>,
    from: Instant,
    until: Instant,
) -> io::Result<Vec<Duration>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut latencies, mut answer) = (Vec::new(), Vec::new());
    while Instant::now() < until {
        let asked = Instant::now();
        let request = &requests[next.fetch_add(1, Ordering::Relaxed) % requests.len()];
        stream.write_all(request).await?;
        read_answer(&mut stream, &mut answer).await?;
        let now = Instant::now();
        if now >= from && now < until {
            latencies.push(now - asked);
        }
    }
    Ok(latencies)
}

/// Reads one answer to its end, by its content-length.
async fn read_answer(stream: &mut TcpStream, answer: &mut Vec<u8>) -> io::Result<()> {
    answer.clear();
    let mut end = None;
    while end.is_none_or(|end| answer.len() < end) {
        if answer.len() > ANSWER_BYTES_MAX {
            return Err(io::Error::other(format!("an answer of more than {ANSWER_BYTES_MAX} bytes")));
        }
        if stream.read_buf(answer).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        if end.is_none() {
            end = end_of(answer)?;
        }
    }
    Ok(())
}

/// Where the answer ends, once its head is here.
fn end_of(answer: &[u8]) -> io::Result<Option<usize>> {
    let Some(head) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let text = String::from_utf8_lossy(&answer[..head]).to_ascii_lowercase();
    if !text.starts_with("http/1.1 200") {
        let body = String::from_utf8_lossy(&answer[head..]).into_owned();
        return Err(io::Error::other(format!("{}{body}", text.lines().next().unwrap_or_default())));
    }
    let length =
        text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    let length = length.ok_or_else(|| io::Error::other("an answer without content-length"))?;
    Ok(Some(head + 4 + length))
}
