//! Server with precomputed responses.
//!
//! It counts the texts of a request and copies that many rows of a response that was serialized at startup. The
//! remaining cost is copying in the kernel, so the bench measures the client. HTTP/1.1 is implemented here, HTTP/2 by
//! hyper; each has its own port.

use std::convert::Infallible;
use std::io::IoSlice;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Dimensions of MiniLM.
pub(crate) const DIMENSIONS: usize = 384;

/// Maximum texts of a request.
const ROWS: usize = 2048;

const BEFORE: &[u8] = br#"{"object":"list","data":["#;
const AFTER: &[u8] = br#"],"model":"bench","usage":{"prompt_tokens":1,"total_tokens":1}}"#;

/// Serialized rows, and the end of each.
struct CannedRows {
    text: Vec<u8>,
    ends: Vec<usize>,
}

struct CannedResponses {
    base64: CannedRows,
    floats: CannedRows,
}

impl CannedRows {
    fn new(write: impl Fn(&[f32]) -> String) -> CannedRows {
        let (mut text, mut ends) = (Vec::new(), Vec::new());
        for index in 0..ROWS {
            let embedding = write(&row(index));
            let comma = if index > 0 { "," } else { "" };
            let row = format!(r#"{comma}{{"object":"embedding","index":{index},"embedding":{embedding}}}"#);
            text.extend_from_slice(row.as_bytes());
            ends.push(text.len());
        }
        CannedRows { text, ends }
    }
}

impl CannedResponses {
    fn new() -> CannedResponses {
        let base64 = |row: &[f32]| {
            let bytes: Vec<u8> = row.iter().flat_map(|number| number.to_le_bytes()).collect();
            format!("\"{}\"", STANDARD.encode(bytes))
        };
        // Formatted by serde, as in servers written in Rust; those in Python send twice the digits.
        let floats = |row: &[f32]| serde_json::to_string(row).expect("numbers are JSON");
        CannedResponses { base64: CannedRows::new(base64), floats: CannedRows::new(floats) }
    }

    /// Returns the rows for a body like `{"input":["…","…"],…}`, whose texts have neither quotes nor commas.
    fn rows(&self, body: &[u8]) -> &[u8] {
        let list = memchr::memchr(b'[', body).map_or(body, |at| &body[at..]);
        let list = memchr::memchr(b']', list).map_or(list, |at| &list[..at]);
        let texts = (memchr::memchr_iter(b'"', list).count() / 2).clamp(1, ROWS);
        let as_base64 = memchr::memmem::find(body, b"\"base64\"").is_some();
        let rows = if as_base64 { &self.base64 } else { &self.floats };
        &rows.text[..rows.ends[texts - 1]]
    }
}

/// Creates a vector of small numbers with a norm of about one.
fn row(index: usize) -> Vec<f32> {
    let number = |column: usize| ((index * 31 + column * 17) % 1009) as f32 / 10_090.0 - 0.05;
    (0..DIMENSIONS).map(number).collect()
}

/// Serves until killed. Prints the URLs, HTTP/1.1 first.
pub(crate) fn serve() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let responses = Arc::new(CannedResponses::new());
        let one = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let two = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = |listener: &TcpListener| listener.local_addr().expect("it is bound");
        println!("http://{} http://{}", address(&one), address(&two));
        loop {
            tokio::select! {
                accepted = one.accept() => {
                    let (stream, _) = accepted.expect("a connection");
                    tokio::spawn(http1(stream, Arc::clone(&responses)));
                }
                accepted = two.accept() => {
                    let (stream, _) = accepted.expect("a connection");
                    tokio::spawn(http2(stream, Arc::clone(&responses)));
                }
            }
        }
    });
}

/// Serves one connection until the client closes it.
async fn http1(mut stream: TcpStream, responses: Arc<CannedResponses>) {
    stream.set_nodelay(true).expect("a TCP connection");
    let mut read: Vec<u8> = Vec::with_capacity(64 << 10);
    loop {
        let body = loop {
            if let Some(head) = memchr::memmem::find(&read, b"\r\n\r\n") {
                let end = head + 4 + content_length(&read[..head]);
                if read.len() >= end {
                    break head + 4..end;
                }
            }
            if !stream.read_buf(&mut read).await.is_ok_and(|bytes| bytes > 0) {
                return;
            }
        };
        let end = body.end;
        let rows = responses.rows(&read[body]);
        let length = BEFORE.len() + rows.len() + AFTER.len();
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
        if write(&mut stream, [head.as_bytes(), BEFORE, rows, AFTER]).await.is_err() {
            return;
        }
        read.drain(..end);
    }
}

fn content_length(head: &[u8]) -> usize {
    let head = std::str::from_utf8(head).expect("a head is text").to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    length.map_or(0, |length| length.trim().parse().expect("a length"))
}

async fn write(stream: &mut TcpStream, parts: [&[u8]; 4]) -> std::io::Result<()> {
    let mut slices = parts.map(IoSlice::new);
    let mut left = &mut slices[..];
    while !left.is_empty() {
        let written = stream.write_vectored(left).await?;
        IoSlice::advance_slices(&mut left, written);
    }
    Ok(())
}

async fn http2(stream: TcpStream, responses: Arc<CannedResponses>) {
    stream.set_nodelay(true).expect("a TCP connection");
    let service = service_fn(move |request: Request<Incoming>| {
        let responses = Arc::clone(&responses);
        async move {
            let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            let response = [BEFORE, responses.rows(&body), AFTER].concat();
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(response))))
        }
    });
    let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(256)
        .initial_connection_window_size(16 << 20)
        .max_send_buf_size(4 << 20)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        eprintln!("a connection ended: {error}");
    }
}
