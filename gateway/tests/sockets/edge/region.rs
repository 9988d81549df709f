//! Scripted region. It speaks raw HTTP, so that it can abort at any point.

use super::http2;
use scheduler_api::report::ReportV1;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, DuplexStream,
};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Behaviour of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Responds,
    RespondsLarge,
    RejectsNotReady,
    RejectsOverloaded,
    ClosesConnection,
    ClosesInTheHead,
    ClosesInASmallBody,
    ClosesInALargeBody,
    /// Like the two above, with a reset instead of an end of stream.
    ResetsInTheHead,
    ResetsInASmallBody,
    /// Responds to the first request on a connection, and closes on the second: a stale connection.
    ClosesOnTheSecondRequest,
    /// Responds after this time.
    Takes(Duration),
    /// Waits for further bytes on the connection.
    Waits,
    /// Neither responds nor reports any more.
    StopsResponding,
}

/// Larger than a buffered response.
pub(crate) const LARGE: usize = 3 << 20;

use Script::*;

pub(crate) struct Region {
    id: &'static str,
    /// Round-trip time.
    away: Duration,
    pub(crate) script: watch::Sender<Script>,
    requests: watch::Sender<u64>,
    /// Queued tokens that it reports, at a thousand a second.
    queue: AtomicU64,
    reports: watch::Sender<u64>,
    silent: watch::Sender<bool>,
    pub(crate) cancelled: watch::Sender<bool>,
    listener: watch::Sender<ListenerState>,
    /// Idle connections that have carried requests.
    connections: watch::Sender<u64>,
}

/// State of the listener. Unless it is open, reports continue on their connection until a request arrives on it: so
/// reports do not reveal the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerState {
    Open,
    /// New connections are refused, and idle ones were closed.
    Closed,
    /// New connections are not accepted; once the queue is full, SYNs get no response. Idle ones were closed.
    NotAccepting,
    /// The process was killed: all connections end at once, at any point.
    Killed,
}

/// Transport of a request.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Unpin + Send {
    /// Ends with a reset.
    fn reset(self) -> Option<()>;
}

impl Transport for TcpStream {
    fn reset(self) -> Option<()> {
        self.set_zero_linger().ok()
    }
}

/// A stream of a connection, which ends with a reset unless a response was sent.
impl Transport for DuplexStream {
    fn reset(self) -> Option<()> {
        Some(())
    }
}

/// Accept queue length: short, so that it can be filled.
pub(crate) const BACKLOG: u32 = 64;

impl Region {
    pub(crate) async fn start(id: &'static str, away: Duration, script: Script) -> (Arc<Region>, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let socket = socket.listen(BACKLOG).unwrap();
        let address = socket.local_addr().unwrap();
        let (script, silent) = (watch::Sender::new(script), watch::Sender::new(false));
        let (cancelled, listener) = (watch::Sender::new(false), watch::Sender::new(ListenerState::Open));
        let [requests, reports, connections] = [(); 3].map(|()| watch::Sender::new(0));
        let queue = AtomicU64::new(0);
        let region = Arc::new(Region {
            id,
            away,
            script,
            requests,
            queue,
            reports,
            silent,
            cancelled,
            listener,
            connections,
        });
        let shared = region.clone();
        tokio::spawn(async move {
            let mut connections = JoinSet::new();
            // When the region is killed, the socket and all connections are dropped here.
            loop {
                tokio::select! {
                    biased;
                    listener = shared.wait_until_not_open() => match listener {
                        ListenerState::Open | ListenerState::Killed => return,
                        ListenerState::Closed => break,
                        ListenerState::NotAccepting => {
                            shared.wait_for_listener(ListenerState::Killed).await;
                            return;
                        }
                    },
                    accepted = socket.accept() => {
                        let (region, (stream, _)) = (shared.clone(), accepted.unwrap());
                        // A response is two writes, and the client's delayed acknowledgement must not add 40 ms between
                        // them.
                        stream.set_nodelay(true).unwrap();
                        connections.spawn(async move { region.serve(BufReader::new(stream)).await });
                    }
                }
            }
            drop(socket);
            shared.wait_for_listener(ListenerState::Killed).await;
        });
        (region, address)
    }

    /// Waits until the listener is not open any more.
    pub(crate) async fn wait_until_not_open(&self) -> ListenerState {
        *self.listener.subscribe().wait_for(|listener| *listener != ListenerState::Open).await.unwrap()
    }

    async fn wait_for_listener(&self, expected: ListenerState) {
        self.listener.subscribe().wait_for(|listener| *listener == expected).await.unwrap();
    }

    /// Closes the listener; returns when no connection remains that carried a request.
    pub(crate) async fn close_listener(&self, listener: ListenerState) {
        self.listener.send_replace(listener);
        if listener != ListenerState::Killed {
            self.connections.subscribe().wait_for(|connections| *connections == 0).await.unwrap();
        }
    }

    pub(crate) fn listener(&self) -> ListenerState {
        *self.listener.borrow()
    }

    pub(crate) async fn wait_until_silent(&self) {
        self.silent.subscribe().wait_for(|silent| *silent).await.unwrap();
    }

    async fn serve(self: &Arc<Region>, mut stream: BufReader<TcpStream>) {
        match stream.fill_buf().await {
            Ok(first) if first.starts_with(http2::PREFACE) => drop(http2::serve(self, stream).await),
            _ => self.serve_connection(stream).await,
        }
    }

    /// Serves a connection until its end.
    pub(crate) async fn serve_connection(&self, stream: BufReader<impl Transport>) {
        let mut requests = 0;
        let _ = self.serve_requests(stream, &mut requests).await;
        if requests > 0 {
            self.connections.send_modify(|connections| *connections -= 1);
        }
    }

    async fn serve_requests(
        &self,
        mut stream: BufReader<impl Transport>,
        on_this_connection: &mut u32,
    ) -> Option<()> {
        loop {
            let (method, path) = tokio::select! {
                request = read_request(&mut stream) => request?,
                _ = self.wait_until_not_open(), if *on_this_connection > 0 => return None,
            };
            if path == scheduler_api::paths::EXCHANGE {
                return crate::reports::serve(&mut stream, |sequence| async move {
                    self.travel().await;
                    self.report(sequence)
                })
                .await;
            }
            self.travel().await;
            // The connection of the reports is one of those that were closed, as soon as another request arrives on it.
            if *self.listener.borrow() != ListenerState::Open {
                return None;
            }
            if *on_this_connection == 0 {
                self.connections.send_modify(|connections| *connections += 1);
            }
            *on_this_connection += 1;
            self.requests.send_modify(|requests| *requests += 1);
            let script = *self.script.borrow();
            let error = |code: &str| format!("x-meridian-error: {code}\r\n");
            match script {
                Responds => serve(&mut stream, &method, &path).await?,
                ClosesOnTheSecondRequest if *on_this_connection > 1 => return None,
                ClosesOnTheSecondRequest => serve(&mut stream, &method, &path).await?,
                Takes(time) => {
                    tokio::select! {
                        () = tokio::time::sleep(time) => serve(&mut stream, &method, &path).await?,
                        // The gateway has cancelled the request, and the work ends.
                        _ = stream.fill_buf() => {
                            self.cancelled.send_replace(true);
                            return None;
                        }
                    }
                }
                ResetsInTheHead => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").await.ok()?;
                    return reset(stream);
                }
                ResetsInASmallBody => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cut").await.ok()?;
                    return reset(stream);
                }
                RespondsLarge => write(&mut stream, "200 OK", "", &vec![b' '; LARGE]).await?,
                RejectsNotReady => write(&mut stream, "503 No", &error("not_ready"), b"{}").await?,
                RejectsOverloaded => write(&mut stream, "429 No", &error("overloaded"), b"{}").await?,
                ClosesConnection => return None,
                ClosesInTheHead => return stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").await.ok(),
                ClosesInASmallBody => {
                    return stream
                        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cut")
                        .await
                        .ok();
                }
                ClosesInALargeBody => {
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n");
                    stream.write_all(head.as_bytes()).await.ok()?;
                    return stream.write_all(&vec![b' '; LARGE / 2]).await.ok();
                }
                Waits => {
                    let _ = stream.read_u8().await;
                    self.cancelled.send_replace(true);
                    return None;
                }
                StopsResponding => {
                    self.silent.send_replace(true);
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Waits for the round trip, or for ever if the region has stopped responding.
    async fn travel(&self) {
        if !self.away.is_zero() {
            tokio::time::sleep(self.away).await;
        }
        if self.silent.borrow().to_owned() {
            std::future::pending::<()>().await;
        }
    }

    fn report(&self, sequence: u64) -> Vec<u8> {
        self.reports.send_modify(|reports| *reports += 1);
        let queue = self.queue.load(Ordering::SeqCst);
        let speed = if queue > 0 { 1000.0 } else { 0.0 };
        let load = |name: &str| json!({"name": name, "ready": 1, "pending_tokens": queue, "tokens_per_second": speed});
        let report = json!({
            "version": 1, "region": self.id, "instance": "a", "boot_id": 1, "sequence": sequence, "draining": false,
            "deployments": [load("anywhere"), load("locked")],
        });
        let wire: ReportV1 = serde_json::from_value(report).expect("a report as a spoke sends it");
        serde_json::to_vec(&wire).unwrap()
    }

    /// Sets the reported queue, and returns when the gateway has received it: it polls again once it has the last
    /// report.
    pub(crate) async fn report_queue(&self, tokens: u64) {
        self.queue.store(tokens, Ordering::SeqCst);
        let before = *self.reports.borrow();
        self.reports.subscribe().wait_for(|reports| *reports >= before + 3).await.unwrap();
    }

    /// Returns the number of requests.
    pub(crate) fn requests(&self) -> u64 {
        *self.requests.borrow()
    }

    /// Waits for a number of requests.
    pub(crate) async fn wait_for_requests(&self, count: u64) {
        self.requests.subscribe().wait_for(|requests| *requests >= count).await.unwrap();
    }
}

async fn read_request(stream: &mut BufReader<impl Transport>) -> Option<(String, String)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?.to_lowercase();
    let (method, path) = (head.split(' ').next()?.to_owned(), head.split(' ').nth(1)?.to_owned());
    // The body of an exchange has no length.
    let length = head.split("content-length: ").nth(1).unwrap_or("0").split("\r\n").next()?.parse().ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((method, path))
}

async fn serve(stream: &mut BufReader<impl Transport>, method: &str, path: &str) -> Option<()> {
    let served = json!({"served": true, "path": path}).to_string();
    if method == "head" {
        // RFC 9110, 9.3.2: the length of an omitted body.
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", served.len());
        return stream.write_all(head.as_bytes()).await.ok();
    }
    let headers = "server-timing: region;dur=1\r\nx-meridian-tokens: 100\r\n";
    write(stream, "200 OK", headers, served.as_bytes()).await
}

/// Ends a connection with a reset.
fn reset(stream: BufReader<impl Transport>) -> Option<()> {
    stream.into_inner().reset()
}

async fn write(
    stream: &mut BufReader<impl Transport>,
    status: &str,
    headers: &str,
    body: &[u8],
) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body).await.ok()
}
