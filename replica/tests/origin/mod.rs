//! A Python package index and a Hugging Face hub on loopback, with injected faults.
//!
//! Each path has its content and a list of faults: the first request gets the first fault, and so on; further requests
//! are served correctly. All requests are recorded.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use replica::cache::ModelOrigins;

/// Fault of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection is closed after this many bytes of the file.
    CutAfter(usize),
    /// The response stalls after this many bytes of the file, until [`OriginServer::release`].
    HoldAfter(usize),
    /// The requested range is ignored, and the whole file is sent.
    IgnoreRange,
}

/// Recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordedRequest {
    pub(crate) path: String,
    /// First requested byte, for a range request.
    pub(crate) from: Option<usize>,
    pub(crate) authorization: Option<String>,
}

struct Resource {
    content_type: &'static str,
    body: Vec<u8>,
    faults: VecDeque<Fault>,
}

#[derive(Default)]
struct ServerState {
    resources: BTreeMap<String, Resource>,
    requests: Vec<RecordedRequest>,
    released: bool,
}

/// Server thread; ends with the test process.
pub(crate) struct OriginServer {
    address: SocketAddr,
    state: Arc<(Mutex<ServerState>, Condvar)>,
}

impl OriginServer {
    pub(crate) fn start() -> OriginServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let state: Arc<(Mutex<ServerState>, Condvar)> = Arc::default();
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, state) = (stream.expect("a connection"), Arc::clone(&shared));
                // Clients may disconnect early; the write error is ignored.
                thread::spawn(move || serve(&stream, &state).ok());
            }
        });
        OriginServer { address, state }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Returns origins with this server as both index and hub.
    pub(crate) fn origins(&self) -> ModelOrigins {
        origins(self.address)
    }

    pub(crate) fn serve(
        &self,
        path: &str,
        content_type: &'static str,
        body: impl Into<Vec<u8>>,
        faults: &[Fault],
    ) {
        let resource = Resource { content_type, body: body.into(), faults: faults.iter().copied().collect() };
        self.state.0.lock().expect("the lock").resources.insert(path.to_owned(), resource);
    }

    /// Returns the requests for `path` so far.
    pub(crate) fn requests(&self, path: &str) -> Vec<RecordedRequest> {
        let state = self.state.0.lock().expect("the lock");
        state.requests.iter().filter(|request| request.path == path).cloned().collect()
    }

    /// Waits until `path` has been requested.
    pub(crate) fn wait_for(&self, path: &str) {
        let state = self.state.0.lock().expect("the lock");
        let not_requested =
            |state: &mut ServerState| !state.requests.iter().any(|request| request.path == path);
        drop(self.state.1.wait_while(state, not_requested).expect("the lock"));
    }

    /// Resumes all stalled responses.
    pub(crate) fn release(&self) {
        self.state.0.lock().expect("the lock").released = true;
        self.state.1.notify_all();
    }
}

fn origins(address: SocketAddr) -> ModelOrigins {
    ModelOrigins {
        pypi_index: format!("http://{address}/simple").parse().expect("a URL"),
        hf_endpoint: format!("http://{address}").parse().expect("a URL"),
        hf_token: Some("secret".to_owned()),
        buckets: buckets::BucketVariables::default(),
        netrc: None,
    }
}

/// Returns origins at an address without a listener.
pub(crate) fn unreachable() -> ModelOrigins {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    origins(listener.local_addr().expect("its address"))
}

fn serve(mut stream: &TcpStream, (state, changed): &(Mutex<ServerState>, Condvar)) -> std::io::Result<()> {
    let Some(request) = read_request(stream)? else { return Ok(()) };
    let from = request.from;
    let path = request.path.split('?').next().unwrap_or_default().to_owned();
    let (content_type, body, fault) = {
        let mut state = state.lock().expect("the lock");
        state.requests.push(RecordedRequest { path: path.clone(), ..request });
        changed.notify_all();
        match state.resources.get_mut(&path) {
            Some(resource) => (resource.content_type, resource.body.clone(), resource.faults.pop_front()),
            None => {
                return stream
                    .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            }
        }
    };
    let total = body.len();
    let from = from.filter(|_| fault != Some(Fault::IgnoreRange));
    let rest = body.get(from.unwrap_or(0)..).unwrap_or_default();
    let status = match from {
        Some(from) if from >= total => {
            let head = format!("HTTP/1.1 416 Range Not Satisfiable\r\ncontent-range: bytes */{total}\r\n");
            return stream
                .write_all(format!("{head}content-length: 0\r\nconnection: close\r\n\r\n").as_bytes());
        }
        Some(from) => format!("206 Partial Content\r\ncontent-range: bytes {from}-{}/{total}", total - 1),
        None => "200 OK".to_owned(),
    };
    let length = rest.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n");
    stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes())?;
    match fault {
        None | Some(Fault::IgnoreRange) => stream.write_all(rest),
        Some(Fault::CutAfter(bytes)) => stream.write_all(&rest[..bytes.min(length)]),
        Some(Fault::HoldAfter(bytes)) => {
            let (first, rest) = rest.split_at(bytes.min(length));
            stream.write_all(first)?;
            let state = state.lock().expect("the lock");
            drop(changed.wait_while(state, |state| !state.released).expect("the lock"));
            stream.write_all(rest)
        }
    }
}

fn read_request(stream: &TcpStream) -> std::io::Result<Option<RecordedRequest>> {
    let mut lines = BufReader::new(stream).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(None) };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut request = RecordedRequest { path, from: None, authorization: None };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                request.from =
                    value.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')?.parse().ok())
            }
            "authorization" => request.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(Some(request))
}
