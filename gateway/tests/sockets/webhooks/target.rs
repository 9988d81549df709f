//! Target of webhooks: it records every message, and responds as the test says.

use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// Response of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// This status.
    Status(u16),
    /// 503 with this `retry-after`, in seconds.
    RetryAfter(u64),
    /// The connection is closed without a response.
    Closed,
    /// No response.
    None,
}

/// Message that a target has received.
#[derive(Clone, Debug)]
pub(super) struct Received {
    pub(super) path: String,
    pub(super) headers: BTreeMap<String, String>,
    pub(super) body: String,
    pub(super) reply: Reply,
    pub(super) at: Instant,
}

impl Received {
    pub(super) fn id(&self) -> &str {
        &self.headers["webhook-id"]
    }

    pub(super) fn event(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    pub(super) fn signatures(&self) -> Vec<&str> {
        self.headers["webhook-signature"].split(' ').collect()
    }
}

/// Target, which ends when it is dropped.
pub(super) struct Target {
    pub(super) address: SocketAddr,
    state: Arc<State>,
    _tasks: JoinSet<()>,
}

#[derive(Default)]
struct State {
    /// Replies to the next messages of a path; afterwards it is 200.
    replies: Mutex<BTreeMap<String, VecDeque<Reply>>>,
    received: Mutex<Vec<Received>>,
}

impl Target {
    pub(super) async fn start(address: SocketAddr) -> Target {
        Target::start_with(address, None).await
    }

    /// Starts a target, over TLS if there is an acceptor.
    pub(super) async fn start_with(address: SocketAddr, tls: Option<TlsAcceptor>) -> Target {
        let listener = TcpListener::bind(address).await.unwrap();
        let (address, state) = (listener.local_addr().unwrap(), Arc::<State>::default());
        let mut tasks = JoinSet::new();
        let shared = state.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (state, tls) = (shared.clone(), tls.clone());
                connections.spawn(async move {
                    let served = match tls {
                        None => serve(BufReader::new(stream), &state).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => serve(BufReader::new(stream), &state).await,
                            Err(_) => None,
                        },
                    };
                    served.unwrap_or_default()
                });
            }
        });
        Target { address, state, _tasks: tasks }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Selects the replies to the next messages of a path.
    pub(super) fn replies(&self, path: &str, replies: &[Reply]) {
        let replies = replies.iter().copied().collect();
        self.state.replies.lock().unwrap().insert(path.to_owned(), replies);
    }

    pub(super) fn received(&self) -> Vec<Received> {
        self.state.received.lock().unwrap().clone()
    }

    /// Messages of a path.
    pub(super) fn at(&self, path: &str) -> Vec<Received> {
        self.received().into_iter().filter(|message| message.path == path).collect()
    }

    /// Waits until this number of messages of a path have arrived, and returns them.
    pub(super) async fn wait(&self, path: &str, count: usize) -> Vec<Received> {
        let begun = Instant::now();
        loop {
            let received = self.at(path);
            if received.len() >= count {
                return received;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{path}: {} messages", received.len());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Serves one request.
async fn serve(mut stream: BufReader<impl AsyncRead + AsyncWrite + Unpin>, state: &State) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let mut lines = head.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers: BTreeMap<_, _> =
        headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    let mut body = vec![0; headers.get("content-length")?.parse().ok()?];
    stream.read_exact(&mut body).await.ok()?;
    let reply = state.replies.lock().unwrap().get_mut(&path).and_then(VecDeque::pop_front);
    let reply = reply.unwrap_or(Reply::Status(200));
    let body = String::from_utf8(body).ok()?;
    state.received.lock().unwrap().push(Received { path, headers, body, reply, at: Instant::now() });
    let (status, more) = match reply {
        Reply::Status(status) => (status, String::new()),
        Reply::RetryAfter(seconds) => (503, format!("retry-after: {seconds}\r\n")),
        Reply::Closed => return None,
        Reply::None => std::future::pending().await,
    };
    let response =
        format!("HTTP/1.1 {status} S\r\n{more}location: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n");
    stream.write_all(response.as_bytes()).await.ok()?;
    stream.flush().await.ok()
}
