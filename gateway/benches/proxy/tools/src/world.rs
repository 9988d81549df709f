//! Upstream of the proxies: sends the same response of 8 KB after a fixed delay, at almost no CPU cost; and a mock hub.
//!
//! ```text
//! world upstream LISTEN DELAY_MS [REGION [stale | stalls PERMILLE MS]]   replica and, for Meridian, a region's ingress
//! world hub LISTEN REGION=ADDRESS…                                       hub with one route table of these regions
//! ```
//!
//! One thread per connection and one write per response: the cheapest design for a few dozen connections, and
//! a thread can sleep with microsecond precision, which a timer wheel cannot. An upstream responds to
//! `/v1/embeddings` with an embedding that every peer's parser accepts, and to status requests of each
//! gateway (reports, status, health) in its format. With `stale` it closes a connection without a response at
//! the second request for an embedding, to simulate the keep-alive race. With `stalls` it delays PERMILLE of
//! a thousand embeddings by MS, drawn by a generator with a fixed seed.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Size of a response body in bytes.
const RESPONSE_BYTES: usize = 8_192;
/// Name of the deployment in the requests of the load generator.
const MODEL: &str = "bench";
/// Long-poll timeout of the hub.
const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of a request in bytes.
const REQUEST_BYTES_MAX: usize = 1 << 20;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["upstream", listen, delay_ms, region @ ..] => {
            let delay = Duration::from_millis(delay_ms.parse().map_err(io::Error::other)?);
            let stale = region.get(1) == Some(&"stale");
            let stalls = Arc::new(match region {
                [_, "stalls", permille, ms] => InjectedDelay::parse(permille, ms)?,
                _ => InjectedDelay::default(),
            });
            let region = region.first().copied().unwrap_or("aws/us-east-1").to_owned();
            let response = response();
            serve(listen, move |stream| upstream(stream, || delay + stalls.next(), &region, stale, &response))
        }
        ["hub", listen, regions @ ..] => {
            let table = table(regions);
            serve(listen, move |stream| hub(stream, &table))
        }
        _ => {
            eprintln!(
                "world wants: upstream LISTEN DELAY_MS [REGION [stale | stalls PERMILLE MS]], or: hub LISTEN REGION=ADDRESS..."
            );
            std::process::exit(2);
        }
    }
}

fn serve(
    listen: &str,
    each: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + Clone + 'static,
) -> io::Result<()> {
    let socket = TcpListener::bind(listen)?;
    loop {
        let (stream, _) = socket.accept()?;
        stream.set_nodelay(true)?;
        let each = each.clone();
        // The proxy handles a broken connection.
        thread::Builder::new().stack_size(128 << 10).spawn(move || each(stream).ok())?;
    }
}

/// Extra delay of some responses.
#[derive(Default)]
struct InjectedDelay {
    permille: u64,
    delay: Duration,
    draws: AtomicU64,
}

impl InjectedDelay {
    fn parse(permille: &str, ms: &str) -> io::Result<InjectedDelay> {
        let (permille, ms) =
            (permille.parse().map_err(io::Error::other)?, ms.parse().map_err(io::Error::other)?);
        Ok(InjectedDelay { permille, delay: Duration::from_millis(ms), draws: AtomicU64::new(0) })
    }

    /// Draws the next delay with SplitMix64 of the number of draws.
    fn next(&self) -> Duration {
        let number = self.draws.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (bits ^ (bits >> 31)) % 1000 < self.permille { self.delay } else { Duration::ZERO }
    }
}

/// Request with its head in lower case, and its body.
struct Request<'a> {
    head: &'a str,
    body: &'a [u8],
}

impl Request<'_> {
    fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }
}

/// Reads one request into `buffer`; `None` if the client closed the connection or the request is too large.
fn read<'a>(stream: &mut TcpStream, buffer: &'a mut Vec<u8>) -> io::Result<Option<Request<'a>>> {
    buffer.clear();
    let mut chunk = [0; 16 << 10];
    let head_end = loop {
        if let Some(end) = find(buffer, b"\r\n\r\n") {
            break end + 4;
        }
        let read = stream.read(&mut chunk)?;
        if read == 0 {
            return Ok(None);
        }
        buffer.extend_from_slice(&chunk[..read]);
    };
    buffer[..head_end].make_ascii_lowercase();
    let head = std::str::from_utf8(&buffer[..head_end]).map_err(io::Error::other)?;
    let length: Option<usize> = head
        .split("\r\ncontent-length: ")
        .nth(1)
        .and_then(|rest| rest.split("\r\n").next()?.trim().parse().ok());
    let chunked = head.contains("\r\ntransfer-encoding: chunked");
    let complete = |buffer: &[u8]| match length {
        Some(length) => buffer.len() >= head_end + length,
        // An exchange of reports has no end.
        None => {
            !chunked
                || buffer[..head_end].starts_with(b"post /spoke/v1/exchange ")
                || buffer[head_end..].ends_with(b"0\r\n\r\n")
        }
    };
    while !complete(buffer) {
        let read = stream.read(&mut chunk)?;
        if read == 0 || buffer.len() > REQUEST_BYTES_MAX {
            return Ok(None);
        }
        buffer.extend_from_slice(&chunk[..read]);
    }
    let (head, body) = buffer.split_at(head_end);
    Ok(Some(Request { head: std::str::from_utf8(head).map_err(io::Error::other)?, body }))
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

fn upstream(
    mut stream: TcpStream,
    delay: impl Fn() -> Duration,
    region: &str,
    stale: bool,
    response: &[u8],
) -> io::Result<()> {
    let mut buffer = Vec::new();
    let mut served = 0;
    while let Some(request) = read(&mut stream, &mut buffer)? {
        match request.path() {
            "/v1/embeddings" => {
                if stale && served > 0 {
                    return Ok(());
                }
                served += 1;
                let delay = delay();
                if !delay.is_zero() {
                    thread::sleep(delay);
                }
                stream.write_all(response)?;
            }
            "/spoke/v1/exchange" => {
                let body = request.body.to_vec();
                return exchange(stream, body, region);
            }
            "/status" => write_json(&mut stream, STATUS)?,
            "/v1/models" => write_json(&mut stream, MODELS)?,
            _ => write_json(
                &mut stream,
                "{\"status\":\"ok\",\"model_path\":\"bench\",\"is_generation\":false}",
            )?,
        }
    }
    Ok(())
}

fn hub(mut stream: TcpStream, table: &str) -> io::Result<()> {
    let mut buffer = Vec::new();
    while let Some(request) = read(&mut stream, &mut buffer)? {
        if request.path().contains("after=") {
            thread::sleep(LONG_POLL_TIMEOUT);
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n")?;
        } else {
            write_json(&mut stream, table)?;
        }
    }
    Ok(())
}

fn write_json(stream: &mut TcpStream, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes())
}

/// Returns an embedding of the response size, with the headers of a replica.
fn response() -> Vec<u8> {
    let mut vector = String::new();
    let body = |vector: &str| {
        format!(
            "{{\"object\":\"list\",\"data\":[{{\"object\":\"embedding\",\"index\":0,\"embedding\":[{vector}]}}],\
             \"model\":\"{MODEL}\",\"usage\":{{\"prompt_tokens\":60,\"total_tokens\":60}}}}"
        )
    };
    let room = RESPONSE_BYTES - body("").len();
    while vector.len() + 12 < room {
        let comma = if vector.is_empty() { "" } else { "," };
        vector += &format!("{comma}0.{:08}", vector.len() * 7919 % 99_999_999);
    }
    let body = body(&vector);
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-meridian-tokens: 60\r\n\
         server-timing: queue;dur=0.100, tokenize;dur=0.200, engine;dur=3.000, region;dur=3.500\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Responds to each message of a gateway with a complete report.
fn exchange(mut stream: TcpStream, mut received: Vec<u8>, region: &str) -> io::Result<()> {
    stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
    let mut chunk = [0; 4 << 10];
    loop {
        while let Some(end) = find(&received, b"\n\r\n") {
            let report = report(region, number_after(&received[..end], b"\"sequence\":"));
            stream.write_all(format!("{:x}\r\n{report}\n\r\n", report.len() + 1).as_bytes())?;
            received.drain(..end + 3);
        }
        let read = stream.read(&mut chunk)?;
        if read == 0 || received.len() > REQUEST_BYTES_MAX {
            return Ok(());
        }
        received.extend_from_slice(&chunk[..read]);
    }
}

fn report(region: &str, sequence: u64) -> String {
    format!(
        "{{\"version\":1,\"region\":\"{region}\",\"instance\":\"a\",\"boot_id\":1,\"sequence\":{sequence},\"draining\":false,\
         \"deployments\":[{{\"name\":\"{MODEL}\",\"ready\":1,\"pending_tokens\":0,\"tokens_per_second\":0.0}}]}}"
    )
}

/// Status report of a replica.
const STATUS: &str = "{\"version\":1,\"names\":[\"bench\"],\"model\":\"bench\",\"state\":\"ready\",\"pending_tokens\":0,\
                      \"pending_inputs\":0,\"requests_total\":0,\"tokens_per_second\":0.0}";
const MODELS: &str = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":0,\
                      \"owned_by\":\"bench\"}]}";

/// Returns a route table with one deployment. Its residency allows two jurisdictions, so that the policy is evaluated.
fn table(regions: &[&str]) -> String {
    let rows: Vec<String> = regions
        .iter()
        .filter_map(|region| region.split_once('='))
        .map(|(id, address)| {
            format!("{{\"id\":\"{id}\",\"instances\":[{{\"name\":\"a\",\"endpoint\":\"{address}\"}}],\"deployments\":[\"{MODEL}\"]}}")
        })
        .collect();
    format!(
        "{{\"version\":1,\"epoch\":1,\"generation\":1,\"regions\":[{}],\"deployments\":[{{\"name\":\"{MODEL}\",\
         \"task\":\"embed\",\"model\":\"pypi://m\",\"engine\":{{\"kind\":\"cpu\",\"precision\":\"f32\"}},\
         \"residency\":\"us,eu\",\"regions\":[]}}]}}",
        rows.join(",")
    )
}

fn number_after(body: &[u8], name: &[u8]) -> u64 {
    let Some(at) = find(body, name) else { return 0 };
    let digits = body[at + name.len()..].iter().skip_while(|byte| **byte == b' ');
    digits
        .take_while(|byte| byte.is_ascii_digit())
        .fold(0, |number, byte| number * 10 + u64::from(byte - b'0'))
}
