//! A server of the S3 protocol that stores objects in a folder, verifies signatures, and injects faults.
//!
//! Requests without signatures are served to servers of [`Access::Public`], which so are web servers as well. Faults apply to
//! the next requests for an object, in order; all requests are recorded.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{ACCEPT_RANGES, AUTHORIZATION, CONTENT_LENGTH, HeaderValue, RANGE};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::sync::watch;

pub(crate) const KEY_ID: &str = "key";
pub(crate) const SECRET: &str = "secret";
pub(crate) const BUCKET: &str = "models";

/// Bytes that are sent at once.
const PIECE: usize = 16 << 10;

/// Access to the buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Signed,
    Public,
}

/// Fault of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None, before the next fault.
    Nothing,
    /// This status and body.
    Status(u16, &'static str),
    /// The connection is closed after this many bytes of the body.
    CutAfter(usize),
    /// The response stalls after this many bytes of the body, until [`S3Server::release`].
    HoldAfter(usize),
    /// No response.
    Stall,
    /// The head says this length.
    Length(u64),
}

/// Recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordedRequest {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) range: Option<String>,
    pub(crate) authorization: Option<String>,
}

#[derive(Default)]
struct ServerState {
    faults: Vec<(Method, String, VecDeque<Fault>)>,
    requests: Vec<RecordedRequest>,
    in_flight: usize,
    in_flight_max: usize,
}

/// Server on a thread of its own, which ends with the test process.
pub(crate) struct S3Server {
    pub(crate) port: u16,
    folder: PathBuf,
    state: Arc<(Mutex<ServerState>, Condvar)>,
    released: watch::Sender<bool>,
}

impl S3Server {
    /// Starts a server of the buckets in a folder.
    pub(crate) fn start(folder: &Path, access: Access) -> S3Server {
        std::fs::create_dir_all(folder.join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder).unwrap());
        if access == Access::Signed {
            service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        }
        let service = service.build();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let state: Arc<(Mutex<ServerState>, Condvar)> = Arc::default();
        let (released, is_released) = watch::channel(false);
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.unwrap().block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                while let Ok((stream, _)) = listener.accept().await {
                    let (service, state) = (service.clone(), Arc::clone(&shared));
                    let is_released = is_released.clone();
                    tokio::spawn(async move {
                        let respond = service_fn(|request| {
                            respond(service.clone(), Arc::clone(&state), is_released.clone(), request)
                        });
                        // Clients may disconnect early.
                        let served =
                            http1::Builder::new().serve_connection(TokioIo::new(stream), respond).await;
                        drop(served);
                    });
                }
            });
        });
        S3Server { port, folder: folder.to_owned(), state, released }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Writes an object into the bucket.
    pub(crate) fn put(&self, key: &str, content: &[u8]) {
        let path = self.folder.join(BUCKET).join(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// Deletes an object.
    pub(crate) fn delete(&self, key: &str) {
        std::fs::remove_file(self.folder.join(BUCKET).join(key)).unwrap();
    }

    /// Injects faults into the next requests of this method whose path has this end.
    pub(crate) fn fail(&self, method: Method, end: &str, faults: &[Fault]) {
        let faults = (method, end.to_owned(), faults.iter().copied().collect());
        self.state.0.lock().unwrap().faults.push(faults);
    }

    /// Serves all further requests without faults.
    pub(crate) fn recover(&self) {
        self.state.0.lock().unwrap().faults.clear();
    }

    /// Returns the requests of a method whose path has this end.
    pub(crate) fn requests(&self, method: &Method, end: &str) -> Vec<RecordedRequest> {
        let state = self.state.0.lock().unwrap();
        let matches = |request: &&RecordedRequest| request.method == *method && request.path.ends_with(end);
        state.requests.iter().filter(matches).cloned().collect()
    }

    /// Returns the bytes that were requested of an object of this size.
    pub(crate) fn requested_bytes(&self, end: &str, size: u64) -> u64 {
        let requests = self.requests(&Method::GET, end);
        requests.iter().map(|request| range(request.range.as_deref(), size)).sum()
    }

    pub(crate) fn forget_requests(&self) {
        self.state.0.lock().unwrap().requests.clear();
    }

    /// Waits until this many responses to requests for objects are held at the same time.
    pub(crate) fn wait_for_held(&self, count: usize) {
        let state = self.state.0.lock().unwrap();
        drop(self.state.1.wait_while(state, |state| state.in_flight < count).unwrap());
    }

    /// Returns the maximum number of responses that were held at the same time.
    pub(crate) fn held_max(&self) -> usize {
        self.state.0.lock().unwrap().in_flight_max
    }

    /// Resumes all held responses.
    pub(crate) fn release(&self) {
        self.released.send_replace(true);
    }
}

/// Returns the length of `bytes=FIRST-LAST`, `bytes=FIRST-`, or of the whole object.
fn range(range: Option<&str>, size: u64) -> u64 {
    let Some(range) = range else { return size };
    let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let last = if last.is_empty() { size - 1 } else { last.parse().unwrap() };
    last + 1 - first.parse::<u64>().unwrap()
}

type ServedBody = UnsyncBoxBody<Bytes, io::Error>;

async fn respond(
    service: S3Service,
    state: Arc<(Mutex<ServerState>, Condvar)>,
    released: watch::Receiver<bool>,
    request: Request<Incoming>,
) -> Result<Response<ServedBody>, io::Error> {
    let text = |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let recorded = RecordedRequest {
        method: request.method().clone(),
        path: request.uri().path().to_owned(),
        range: text(RANGE),
        authorization: text(AUTHORIZATION),
    };
    let fault = {
        let mut state = state.0.lock().unwrap();
        let RecordedRequest { method, path, .. } = &recorded;
        let applies = |(of, end, faults): &&mut (Method, String, VecDeque<Fault>)| {
            of == method && path.ends_with(end.as_str()) && !faults.is_empty()
        };
        let fault = state.faults.iter_mut().find(applies).and_then(|(_, _, faults)| faults.pop_front());
        state.requests.push(recorded);
        fault
    };
    if fault == Some(Fault::Stall) {
        std::future::pending::<()>().await;
    }
    if let Some(Fault::Status(status, body)) = fault {
        let body = pieces(Bytes::from_static(body.as_bytes()), None, state, released);
        return Ok(Response::builder().status(status).body(body).unwrap());
    }
    // The service has a method of the same name for bodies of its own.
    let response = Service::call(&service, request).await.map_err(io::Error::other)?;
    let (mut head, body) = response.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    head.headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(Fault::Length(length)) = fault {
        head.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    Ok(Response::from_parts(head, pieces(body, fault, state, released)))
}

/// Returns a body in pieces, with the fault at its position.
fn pieces(
    body: Bytes,
    fault: Option<Fault>,
    state: Arc<(Mutex<ServerState>, Condvar)>,
    released: watch::Receiver<bool>,
) -> ServedBody {
    let at = match fault {
        Some(Fault::CutAfter(at) | Fault::HoldAfter(at)) => at.min(body.len()),
        Some(_) | None => usize::MAX,
    };
    let start = (0_usize, body, released, state);
    let stream = stream::unfold(start, move |(sent, body, mut released, state)| async move {
        if sent == at {
            if matches!(fault, Some(Fault::CutAfter(_))) {
                // The bytes before the cut are flushed to the client first.
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                return Some((Err(io::Error::other("cut")), (usize::MAX, body, released, state)));
            }
            hold(&state, &mut released).await;
        }
        if sent >= body.len() {
            return None;
        }
        let end = body.len().min(sent + PIECE);
        let end = if sent < at { end.min(at) } else { end };
        let piece = body.slice(sent..end);
        Some((Ok(Frame::data(piece)), (end, body, released, state)))
    });
    StreamBody::new(stream).boxed_unsync()
}

async fn hold(state: &(Mutex<ServerState>, Condvar), released: &mut watch::Receiver<bool>) {
    let count = |change: fn(&mut ServerState)| {
        change(&mut state.0.lock().unwrap());
        state.1.notify_all();
    };
    count(|state| {
        state.in_flight += 1;
        state.in_flight_max = state.in_flight_max.max(state.in_flight);
    });
    // An error means that the test has ended.
    let _ = released.wait_for(|released| *released).await;
    count(|state| state.in_flight -= 1);
}
