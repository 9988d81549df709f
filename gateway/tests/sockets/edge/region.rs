//! A region that does with a request what it is told to. It speaks raw HTTP, so that it can break off wherever a case
//! wants it to.

use super::http2;
use scheduler_core::wire::report::{ExchangeRequestV1, ReportV1};
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

/// What a region does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Answers,
    AnswersLarge,
    SaysElsewhere,
    SaysOverloaded,
    HangsUp,
    BreaksOffInTheHead,
    BreaksOffInASmallBody,
    BreaksOffInALargeBody,
    /// As the two above, with a reset instead of an end.
    ResetsInTheHead,
    ResetsInASmallBody,
    /// Answers the first request on a connection, and hangs up on the second: a connection that was kept too long.
    HangsUpOnTheSecond,
    /// Answers after so long.
    Takes(Duration),
    /// Waits for whatever else comes on the connection.
    Waits,
    /// Neither answers nor reports any more.
    FallsSilent,
}

/// More than is read whole before it is passed on.
pub(crate) const LARGE: usize = 3 << 20;

use Script::*;

pub(crate) struct Region {
    id: &'static str,
    /// To it and back.
    away: Duration,
    pub(crate) script: watch::Sender<Script>,
    requests: watch::Sender<u64>,
    /// Tokens that wait before whatever comes, by its reports, at a thousand a second.
    queue: AtomicU64,
    reports: watch::Sender<u64>,
    silent: watch::Sender<bool>,
    pub(crate) given_up: watch::Sender<bool>,
    door: watch::Sender<Door>,
    /// Connections on which requests have come and may come again.
    kept: watch::Sender<u64>,
}

/// What becomes of connections. Behind a door that is not open the reports go on, on the connection that they have, until a
/// request comes on it: so nobody hears of it from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    Open,
    /// New ones are refused, and kept ones were closed.
    Gone,
    /// New ones are not taken; once the queue is full, not even their SYN is answered. Kept ones were closed.
    Stuck,
    /// The process was killed: all of them end at once, in the middle of whatever it is.
    Dead,
}

/// What a request comes over.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Unpin + Send {
    /// Makes its end a reset.
    fn resets(self) -> Option<()>;
}

impl Wire for TcpStream {
    fn resets(self) -> Option<()> {
        self.set_zero_linger().ok()
    }
}

/// One stream of a connection, whose end is a reset unless it was answered.
impl Wire for DuplexStream {
    fn resets(self) -> Option<()> {
        Some(())
    }
}

/// Connections that wait to be taken: few, so that a queue can be filled.
pub(crate) const BACKLOG: u32 = 64;

impl Region {
    pub(crate) async fn start(id: &'static str, away: Duration, script: Script) -> (Arc<Region>, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let socket = socket.listen(BACKLOG).unwrap();
        let address = socket.local_addr().unwrap();
        let (script, silent) = (watch::Sender::new(script), watch::Sender::new(false));
        let (given_up, door) = (watch::Sender::new(false), watch::Sender::new(Door::Open));
        let [requests, reports, kept] = [(); 3].map(|()| watch::Sender::new(0));
        let queue = AtomicU64::new(0);
        let region =
            Arc::new(Region { id, away, script, requests, queue, reports, silent, given_up, door, kept });
        let shared = region.clone();
        tokio::spawn(async move {
            let mut connections = JoinSet::new();
            // When it dies, the socket and all connections go with this.
            loop {
                tokio::select! {
                    biased;
                    door = shared.shut() => match door {
                        Door::Open | Door::Dead => return,
                        Door::Gone => break,
                        Door::Stuck => {
                            shared.is(Door::Dead).await;
                            return;
                        }
                    },
                    accepted = socket.accept() => {
                        let (region, (stream, _)) = (shared.clone(), accepted.unwrap());
                        // An answer is two writes, and no client waits 40 ms between them for its own acknowledgement.
                        stream.set_nodelay(true).unwrap();
                        connections.spawn(async move { region.serve(BufReader::new(stream)).await });
                    }
                }
            }
            drop(socket);
            shared.is(Door::Dead).await;
        });
        (region, address)
    }

    /// Comes back when the door is not open any more.
    pub(crate) async fn shut(&self) -> Door {
        *self.door.subscribe().wait_for(|door| *door != Door::Open).await.unwrap()
    }

    async fn is(&self, wanted: Door) {
        self.door.subscribe().wait_for(|door| *door == wanted).await.unwrap();
    }

    /// Shuts its door; comes back when no connection is left on which a request came.
    pub(crate) async fn shuts(&self, door: Door) {
        self.door.send_replace(door);
        if door != Door::Dead {
            self.kept.subscribe().wait_for(|kept| *kept == 0).await.unwrap();
        }
    }

    pub(crate) fn door(&self) -> Door {
        *self.door.borrow()
    }

    pub(crate) async fn falls_silent(&self) {
        self.silent.subscribe().wait_for(|silent| *silent).await.unwrap();
    }

    async fn serve(self: &Arc<Region>, mut stream: BufReader<TcpStream>) {
        match stream.fill_buf().await {
            Ok(first) if first.starts_with(http2::PREFACE) => drop(http2::serve(self, stream).await),
            _ => self.converses(stream).await,
        }
    }

    /// Serves a connection until its end.
    pub(crate) async fn converses(&self, stream: BufReader<impl Wire>) {
        let mut requests = 0;
        let _ = self.converse(stream, &mut requests).await;
        if requests > 0 {
            self.kept.send_modify(|kept| *kept -= 1);
        }
    }

    async fn converse(&self, mut stream: BufReader<impl Wire>, on_this_connection: &mut u32) -> Option<()> {
        loop {
            let (method, path, body) = tokio::select! {
                request = read_request(&mut stream) => request?,
                _ = self.shut(), if *on_this_connection > 0 => return None,
            };
            if !self.away.is_zero() {
                tokio::time::sleep(self.away).await;
            }
            if self.silent.borrow().to_owned() {
                std::future::pending::<()>().await;
            }
            if path == "/spoke/v1/exchange" {
                let question: ExchangeRequestV1 = serde_json::from_slice(&body).ok()?;
                write(&mut stream, "200 OK", "", &self.report(question.sequence)).await?;
                continue;
            }
            // The report's connection is one of those that were closed, as soon as anything else comes on it.
            if *self.door.borrow() != Door::Open {
                return None;
            }
            if *on_this_connection == 0 {
                self.kept.send_modify(|kept| *kept += 1);
            }
            *on_this_connection += 1;
            self.requests.send_modify(|requests| *requests += 1);
            let script = *self.script.borrow();
            let error = |code: &str| format!("x-meridian-error: {code}\r\n");
            match script {
                Answers => serve(&mut stream, &method, &path).await?,
                HangsUpOnTheSecond if *on_this_connection > 1 => return None,
                HangsUpOnTheSecond => serve(&mut stream, &method, &path).await?,
                Takes(time) => {
                    tokio::select! {
                        () = tokio::time::sleep(time) => serve(&mut stream, &method, &path).await?,
                        // Whoever asked has left, and the work ends.
                        _ = stream.fill_buf() => {
                            self.given_up.send_replace(true);
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
                AnswersLarge => write(&mut stream, "200 OK", "", &vec![b' '; LARGE]).await?,
                SaysElsewhere => write(&mut stream, "503 No", &error("not_ready"), b"{}").await?,
                SaysOverloaded => write(&mut stream, "429 No", &error("overloaded"), b"{}").await?,
                HangsUp => return None,
                BreaksOffInTheHead => return stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").await.ok(),
                BreaksOffInASmallBody => {
                    return stream
                        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cut")
                        .await
                        .ok();
                }
                BreaksOffInALargeBody => {
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n");
                    stream.write_all(head.as_bytes()).await.ok()?;
                    return stream.write_all(&vec![b' '; LARGE / 2]).await.ok();
                }
                Waits => {
                    let _ = stream.read_u8().await;
                    self.given_up.send_replace(true);
                    return None;
                }
                FallsSilent => {
                    self.silent.send_replace(true);
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    fn report(&self, sequence: u64) -> Vec<u8> {
        self.reports.send_modify(|reports| *reports += 1);
        let queue = self.queue.load(Ordering::SeqCst);
        let speed = if queue > 0 { 1000.0 } else { 0.0 };
        let load = |name: &str| json!({"name": name, "ready": 1, "pending_tokens": queue, "tokens_per_second": speed});
        let report = json!({
            "version": 1, "region": self.id, "boot_id": 1, "sequence": sequence, "draining": false,
            "deployments": [load("anywhere"), load("locked")],
        });
        let wire: ReportV1 = serde_json::from_value(report).expect("a report as a spoke sends it");
        serde_json::to_vec(&wire).unwrap()
    }

    /// Says from now on that so many tokens wait, and comes back when the edge has heard it: it asks the next time once it has
    /// the last answer.
    pub(crate) async fn has_waiting(&self, tokens: u64) {
        self.queue.store(tokens, Ordering::SeqCst);
        let told = *self.reports.borrow();
        self.reports.subscribe().wait_for(|reports| *reports >= told + 3).await.unwrap();
    }

    /// Asked so many times.
    pub(crate) fn requests(&self) -> u64 {
        *self.requests.borrow()
    }

    /// Comes back when it was asked so many times.
    pub(crate) async fn until_requests(&self, wanted: u64) {
        self.requests.subscribe().wait_for(|requests| *requests >= wanted).await.unwrap();
    }
}

async fn read_request(stream: &mut BufReader<impl Wire>) -> Option<(String, String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?.to_lowercase();
    let (method, path) = (head.split(' ').next()?.to_owned(), head.split(' ').nth(1)?.to_owned());
    let length = head.split("content-length: ").nth(1)?.split("\r\n").next()?.parse().ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((method, path, body))
}

async fn serve(stream: &mut BufReader<impl Wire>, method: &str, path: &str) -> Option<()> {
    let served = json!({"served": true, "path": path}).to_string();
    if method == "head" {
        // RFC 9110, 9.3.2: the length of a body that does not follow.
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", served.len());
        return stream.write_all(head.as_bytes()).await.ok();
    }
    let headers = "server-timing: region;dur=1\r\nx-meridian-tokens: 100\r\n";
    write(stream, "200 OK", headers, served.as_bytes()).await
}

/// Ends a connection with a reset.
fn reset(stream: BufReader<impl Wire>) -> Option<()> {
    stream.into_inner().resets()
}

async fn write(stream: &mut BufReader<impl Wire>, status: &str, headers: &str, body: &[u8]) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body).await.ok()
}
