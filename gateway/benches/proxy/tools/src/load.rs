//! Load generator: a closed loop, a fixed rate, or idle connections.
//!
//! ```text
//! load closed ADDRESS CALLERS SECONDS WARM_UP [HEADER…]         each sends the next request after a response
//! load rate   ADDRESS CALLERS SECONDS WARM_UP RATE [HEADER…]    a fixed number of requests per second, open loop
//! load idle   ADDRESS CONNECTIONS [HEADER…]                     one request each; kept open until stdin ends
//! load drain  ADDRESS CALLERS SECONDS [HEADER…]                 each stops at `connection: close`, or if refused
//! ```
//!
//! Prints one JSON object. A caller ("each" above) is a thread with a blocking socket: cheap enough for some
//! dozens, and with exact timing. A request fails after [`TIMEOUT`], with an I/O error, or with a status
//! other than 2xx. The caller reconnects after a timeout or an I/O error.
//!
//! At a fixed rate each caller has its own schedule. The latency of a request starts when it is sent if its
//! caller was idle at the scheduled time, and otherwise at the scheduled time. A slow response therefore also
//! counts for the requests queued behind it (no coordinated omission), and the timer resolution of the
//! machine is not counted.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Request timeout.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Size of a request body in bytes.
const BODY_BYTES: usize = 300;
/// Delay after a failed connection attempt. A client that retries in a tight loop would measure itself.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["closed", address, callers, seconds, warm_up, headers @ ..] => {
            run(Load::new(address, callers, seconds, warm_up, None, headers)?)
        }
        ["rate", address, callers, seconds, warm_up, rate, headers @ ..] => {
            run(Load::new(address, callers, seconds, warm_up, Some(rate.parse()?), headers)?)
        }
        ["drain", address, callers, seconds, headers @ ..] => {
            drain(Load::new(address, callers, seconds, "0", None, headers)?)
        }
        ["idle", address, connections, headers @ ..] => hold(address, connections.parse()?, headers)?,
        _ => {
            eprintln!(
                "load wants: closed ADDRESS CALLERS SECONDS WARM_UP, or rate … RATE, or idle ADDRESS CONNECTIONS"
            );
            std::process::exit(2);
        }
    }
    Ok(())
}

struct Load {
    address: SocketAddr,
    callers: u32,
    time: Duration,
    warm_up: Duration,
    /// Interval between two requests of one caller.
    interval: Option<Duration>,
    request: Vec<u8>,
}

impl Load {
    fn new(
        address: &str,
        callers: &str,
        seconds: &str,
        warm_up: &str,
        rate: Option<f64>,
        headers: &[&str],
    ) -> Result<Load, Box<dyn std::error::Error>> {
        let callers: u32 = callers.parse()?;
        Ok(Load {
            address: address.parse()?,
            callers,
            time: Duration::from_secs_f64(seconds.parse()?),
            warm_up: Duration::from_secs_f64(warm_up.parse()?),
            interval: rate.map(|rate| Duration::from_secs_f64(f64::from(callers) / rate)),
            request: request(address, headers),
        })
    }
}

fn request(address: &str, headers: &[&str]) -> Vec<u8> {
    let (before, after) = ("{\"model\":\"bench\",\"input\":\"", "\"}");
    let text = "a passage of plain words ".repeat(BODY_BYTES / 25 + 1);
    let body = format!("{before}{}{after}", &text[..BODY_BYTES - before.len() - after.len()]);
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{headers}\
         content-length: {BODY_BYTES}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Results of one caller.
#[derive(Default)]
struct CallerResult {
    micros: Vec<u32>,
    failed: u64,
    /// Number of requests, including the warm-up.
    sent: u64,
    /// Maximum latency, including failed requests.
    longest: Duration,
}

fn run(load: Load) {
    let load = Arc::new(load);
    let begun = Instant::now();
    let callers: Vec<_> = (0..load.callers)
        .map(|number| {
            let load = load.clone();
            thread::Builder::new()
                .stack_size(256 << 10)
                .spawn(move || call(&load, number, begun))
                .expect("a thread")
        })
        .collect();
    let mut all = CallerResult::default();
    for caller in callers {
        let result = caller.join().expect("a caller does not panic");
        all.micros.extend(result.micros);
        all.failed += result.failed;
        all.sent += result.sent;
        all.longest = all.longest.max(result.longest);
    }
    all.micros.sort_unstable();
    let at = |share: f64| {
        let place = ((all.micros.len() as f64 * share) as usize).min(all.micros.len().saturating_sub(1));
        all.micros.get(place).map_or(0.0, |micros| f64::from(*micros) / 1e3)
    };
    let over = |limit: u32| all.micros.iter().filter(|micros| **micros > limit).count();
    println!(
        "{{\"sent\":{},\"completed\":{},\"failed\":{},\"per_second\":{:.1},\"p50_ms\":{:.3},\"p95_ms\":{:.3},\"p99_ms\":{:.3},\"max_ms\":{:.3},\
         \"over_200_ms\":{},\"over_500_ms\":{}}}",
        all.sent,
        all.micros.len(),
        all.failed,
        all.micros.len() as f64 / load.time.as_secs_f64(),
        at(0.5),
        at(0.95),
        at(0.99),
        all.longest.as_secs_f64() * 1e3,
        over(200_000),
        over(500_000),
    );
}

fn call(load: &Load, number: u32, begun: Instant) -> CallerResult {
    let counts_from = begun + load.warm_up;
    let end = counts_from + load.time;
    let mut result = CallerResult::default();
    let mut caller = Caller { address: load.address, stream: None, buffer: vec![0; 64 << 10] };
    let mut due =
        begun + load.interval.unwrap_or_default().mul_f64(f64::from(number) / f64::from(load.callers));
    loop {
        let mut sent = Instant::now();
        if let Some(interval) = load.interval {
            if sent < due {
                thread::sleep(due - sent);
                sent = Instant::now();
            } else {
                sent = due;
            }
            due += interval;
        }
        if sent >= end {
            return result;
        }
        let response = caller.send(&load.request);
        let took = sent.elapsed();
        result.sent += 1;
        if response.is_err() {
            caller.stream = None;
        }
        if sent < counts_from {
            continue;
        }
        result.longest = result.longest.max(took);
        match response {
            Ok(status) if (200..300).contains(&status) => {
                result.micros.push(u32::try_from(took.as_micros()).unwrap_or(u32::MAX));
            }
            Ok(_) | Err(_) => result.failed += 1,
        }
    }
}

struct Caller {
    address: SocketAddr,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Caller {
    /// Sends one request and returns the status.
    fn send(&mut self, request: &[u8]) -> io::Result<u16> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => connect(self.address)?,
        };
        stream.write_all(request)?;
        let (status, keep) = read_response(&mut stream, &mut self.buffer)?;
        if keep {
            self.stream = Some(stream);
        }
        Ok(status)
    }
}

fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream =
        TcpStream::connect_timeout(&address, TIMEOUT).inspect_err(|_| thread::sleep(REFUSED_PAUSE))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Reads one response; returns its status and whether the connection can be reused.
fn read_response(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<(u16, bool)> {
    let mut filled = 0;
    let mut ends: Option<(usize, BodyEnd)> = None;
    let mut keep = true;
    let mut status = 0;
    loop {
        if filled == buffer.len() {
            buffer.resize(filled * 2, 0);
        }
        let read = match stream.read(&mut buffer[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => read,
        };
        filled += read;
        if ends.is_none()
            && let Some(head) = buffer[..filled].windows(4).position(|window| window == b"\r\n\r\n")
        {
            let text = String::from_utf8_lossy(&buffer[..head + 2]).to_ascii_lowercase();
            status = text
                .split(' ')
                .nth(1)
                .and_then(|code| code.parse().ok())
                .ok_or(io::ErrorKind::InvalidData)?;
            keep = !text.contains("\r\nconnection: close");
            let length = text.split("\r\ncontent-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
            let end = match length.and_then(|length| length.trim().parse::<usize>().ok()) {
                Some(length) => BodyEnd::At(head + 4 + length),
                None if text.contains("\r\ntransfer-encoding: chunked") => BodyEnd::Chunked,
                None => return Err(io::Error::other("a response without a length")),
            };
            ends = Some((head + 4, end));
        }
        match ends {
            Some((_, BodyEnd::At(end))) if filled >= end => return Ok((status, keep)),
            Some((head, BodyEnd::Chunked)) if buffer[head..filled].ends_with(b"0\r\n\r\n") => {
                return Ok((status, keep));
            }
            _ => {}
        }
    }
}

#[derive(Clone, Copy)]
enum BodyEnd {
    At(usize),
    Chunked,
}

/// Outcome of the connection of a caller in `drain`.
enum ConnectionEnd {
    /// A response had `connection: close`, or the connection was closed while idle.
    Closed,
    /// The connection was refused.
    Refused,
    /// A request failed: no response, or a status other than 200.
    Lost,
    /// The connection was open until the end of the run.
    Stayed,
}

fn drain(load: Load) {
    let load = Arc::new(load);
    let end = Instant::now() + load.time;
    let callers: Vec<_> = (0..load.callers)
        .map(|_| {
            let load = load.clone();
            thread::Builder::new()
                .stack_size(256 << 10)
                .spawn(move || run_until_closed(&load, end))
                .expect("a thread")
        })
        .collect();
    let (mut completed, mut closed, mut refused, mut lost, mut last) = (0, 0, 0, 0, UNIX_EPOCH);
    for caller in callers {
        let (count, last_response, end) = caller.join().expect("a caller does not panic");
        completed += count;
        last = last.max(last_response);
        match end {
            ConnectionEnd::Closed => closed += 1,
            ConnectionEnd::Refused => refused += 1,
            ConnectionEnd::Lost => lost += 1,
            ConnectionEnd::Stayed => {}
        }
    }
    let last = last.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    println!(
        "{{\"completed\":{completed},\"closed\":{closed},\"refused\":{refused},\"lost\":{lost},\"last_response\":{last:.3}}}"
    );
}

fn run_until_closed(load: &Load, end: Instant) -> (u64, SystemTime, ConnectionEnd) {
    let (mut completed, mut last) = (0, UNIX_EPOCH);
    let mut buffer = vec![0; 64 << 10];
    let Ok(mut stream) = connect(load.address) else { return (completed, last, ConnectionEnd::Refused) };
    while Instant::now() < end {
        // A connection that is closed while idle loses no request.
        let idle = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
        if stream.set_nonblocking(false).is_err() || matches!(idle, Ok(0)) {
            return (completed, last, ConnectionEnd::Closed);
        }
        let response = stream.write_all(&load.request).and_then(|()| read_response(&mut stream, &mut buffer));
        match response {
            Ok((200, keep)) => {
                (completed, last) = (completed + 1, SystemTime::now());
                if !keep {
                    return (completed, last, ConnectionEnd::Closed);
                }
            }
            Ok(_) | Err(_) => return (completed, last, ConnectionEnd::Lost),
        }
    }
    (completed, last, ConnectionEnd::Stayed)
}

fn hold(address: &str, connections: usize, headers: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let (request, parsed) = (request(address, headers), address.parse()?);
    let mut held = Vec::with_capacity(connections);
    for _ in 0..connections {
        let mut caller = Caller { address: parsed, stream: None, buffer: vec![0; 64 << 10] };
        let status = caller.send(&request)?;
        if status != 200 {
            return Err(format!("status {status}").into());
        }
        held.extend(caller.stream);
    }
    println!("{{\"held\":{}}}", held.len());
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
