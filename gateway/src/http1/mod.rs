//! HTTP/1.1 client for the next hop: one write per request, and as few reads as the response has segments.
//!
//! The next hop of a gateway is a region, that of an ingress a replica, and both speak HTTP/1.1 as in RFC 9112.
//! Pingora's client supports everything that a general proxy needs (it preserves the case of headers, upgrades,
//! measures every phase) and writes head and body separately; measured per request on one core that was a third of the
//! cost of a gateway, see docs/benchmarks.md. So the client is our own: the package `http1` parses responses and rejects
//! ambiguous ones, [`head`] converts their heads, [`pool`] keeps idle connections, and this module moves the bytes.
//! [`crate::hop`] decides about TLS and authenticates the peer; the client is the same with and without TLS.
//!
//! Opening a connection and writing a request are separate steps, so that the caller can check the identity of the peer
//! in between.

mod duplex;
mod head;
mod pool;

use crate::hop::{Connector, PeerConnection, TransportStream, UpstreamKey};
use crate::request_head::RequestHead;
use ::http1::{BodyFraming, BodyPart, FramingError, HEAD_BYTES_MAX};
use bytes::{Buf, Bytes};
pub(crate) use duplex::{DuplexRequest, DuplexResponse};
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use head::UpstreamHead;
use http::response::Parts;
use pool::{ConnectionPool, PooledConnection};
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

/// Bytes read at once: a usual response, an embedding of 1,024 numbers as text, with its head.
const READ_BYTES: usize = 16 << 10;
/// Bytes read at once of a streamed response.
const READ_BYTES_LARGE: usize = 64 << 10;

/// HTTP/1.1 client for the next hop.
pub(crate) struct Http1Client {
    connector: Arc<Connector>,
    pool: ConnectionPool,
}

/// Connection that is ready for a request.
pub(crate) struct Http1Connection<'a> {
    client: &'a Http1Client,
    connection: PooledConnection,
    /// Whether it was used before.
    reused: bool,
}

/// Response head, and the stream of its body.
pub(crate) struct Http1Response {
    pub(crate) head: Parts,
    pub(crate) body: Http1Body,
}

/// Response body that is being received.
pub(crate) struct Http1Body {
    connection: PooledConnection,
    framing: BodyFraming,
    keep_alive: bool,
}

/// Error of an exchange.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Http1Error {
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The response of a region or replica is not valid HTTP/1.1. The attempt has failed.
    #[error("invalid response: {0}")]
    Invalid(#[from] FramingError),
}

impl Http1Client {
    pub(crate) fn over(connector: Arc<Connector>) -> Http1Client {
        Http1Client { connector, pool: ConnectionPool::new() }
    }

    /// Returns an idle connection to `key`, or opens a new one. If [`pool::OPENING_MAX`] connections are being opened,
    /// waits for a permit or for an idle connection: as long as connects succeed, but not longer than the first connect
    /// attempt that times out meanwhile. Trying after that would wait for the timeout once more for each permit before.
    pub(crate) async fn open(
        &self,
        key: &UpstreamKey,
        connect_timeout: Duration,
    ) -> Result<Http1Connection<'_>, AttemptFailure> {
        if let Some(opened) = self.take_idle(key) {
            return Ok(opened);
        }
        let limiter = self.pool.connect_limiter(key);
        let permit = limiter.acquire().await;
        if let Some(opened) = self.take_idle(key) {
            return Ok(opened);
        }
        if permit.is_after_timeout {
            return Err(AttemptFailure::Unreachable);
        }
        let started = Instant::now();
        let connected = self.connector.connect(key, connect_timeout).await;
        if connected.is_err() && started.elapsed() >= connect_timeout {
            permit.timed_out();
        }
        Ok(self.ready(key, connected?))
    }

    /// Returns the connector.
    #[cfg(test)]
    pub(crate) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// Returns an idle connection.
    pub(crate) fn take_idle(&self, key: &UpstreamKey) -> Option<Http1Connection<'_>> {
        let connection = self.pool.take(key, |remote| self.connector.is_current(key, remote))?;
        Some(Http1Connection { client: self, connection, reused: true })
    }

    /// Returns whether there is an idle connection.
    pub(crate) fn has_idle(&self, key: &UpstreamKey) -> bool {
        self.pool.has(key)
    }

    /// Wraps a new connection.
    pub(crate) fn ready(&self, key: &UpstreamKey, connected: PeerConnection) -> Http1Connection<'_> {
        Http1Connection {
            client: self,
            connection: PooledConnection::new(key.clone(), connected),
            reused: false,
        }
    }

    /// Adds an idle connection to the pool.
    pub(crate) fn put_idle(&self, key: &UpstreamKey, connected: PeerConnection) {
        self.pool.put(PooledConnection::new(key.clone(), connected));
    }
}

impl Http1Connection<'_> {
    /// Returns the connection to the pool, unused.
    pub(crate) fn put_back(self) {
        self.client.pool.put(self.connection);
    }

    /// Returns the identity of the peer.
    pub(crate) fn peer(&self) -> Peer {
        self.connection.peer
    }

    /// Sends a request and waits for the head of its response; the caller bounds the time by dropping the future.
    pub(crate) async fn send(self, head: &RequestHead, body: &[u8]) -> Result<Http1Response, AttemptFailure> {
        let Http1Connection { client, mut connection, reused } = self;
        // A server that rejects a body early responds before it has read all of it and closes; so a failed write does
        // not end the exchange, the response does.
        let sent = write_request(&mut connection.stream, &head.to_http1(), body).await;
        match read_head(&mut connection).await {
            Ok(UpstreamHead { head, framing, keep_alive }) => {
                if !reused {
                    client.connector.mark_healthy(&connection.key);
                }
                // If the request was not written completely, the peer may still wait for the rest of it.
                let keep_alive = keep_alive && sent.is_ok();
                Ok(Http1Response { head, body: Http1Body { connection, framing, keep_alive } })
            }
            Err(error) => {
                // A connection to an upstream ended before its response. If it was `reused`, the upstream may have
                // closed it while it was idle.
                tracing::debug!(address = %connection.key.address, reused, %error, "connection failed before a response");
                if let Http1Error::Io(error) = &error {
                    client.connector.connection_failed(&connection.key, error);
                }
                let no_response = connection.buffer.is_empty() && matches!(error, Http1Error::Io(_));
                Err(if reused && no_response {
                    AttemptFailure::StaleConnection
                } else {
                    AttemptFailure::Unreachable
                })
            }
        }
    }
}

impl Http1Body {
    /// Returns the next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Http1Error> {
        loop {
            let PooledConnection { stream, buffer, .. } = &mut self.connection;
            let BodyPart { skipped, data } = self.framing.next(buffer)?;
            buffer.advance(skipped);
            if data > 0 {
                return Ok(Some(buffer.split_to(data).freeze()));
            }
            if self.framing.is_done() {
                return Ok(None);
            }
            buffer.reserve(READ_BYTES_LARGE);
            match stream.read_buf(buffer).await? {
                0 if self.framing == BodyFraming::UntilClosed => return Ok(None),
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                _ => {}
            }
        }
    }

    /// Returns a complete body of this declared length, without a copy if it arrived with its head. It is empty if the status
    /// allows no body.
    pub(crate) async fn whole(&mut self, length: usize) -> Result<Bytes, Http1Error> {
        let PooledConnection { stream, buffer, .. } = &mut self.connection;
        let length = if self.framing.is_done() { 0 } else { length };
        if buffer.len() < length {
            buffer.reserve(length - buffer.len());
        }
        while buffer.len() < length {
            if stream.read_buf(buffer).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        let BodyPart { data, .. } = self.framing.next(buffer)?;
        Ok(buffer.split_to(data).freeze())
    }

    /// Returns the connection to the pool if the body has ended.
    pub(crate) fn finish(self, client: &Http1Client) {
        if self.keep_alive && self.framing.is_done() {
            client.pool.put(self.connection);
        }
    }
}

/// Writes head and body in as few writes as the socket allows.
async fn write_request(stream: &mut TransportStream, head: &[u8], body: &[u8]) -> io::Result<()> {
    let mut slices = [IoSlice::new(head), IoSlice::new(body)];
    let mut left = slices.as_mut_slice();
    while !left.is_empty() {
        match stream.write_vectored(left).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => IoSlice::advance_slices(&mut left, written),
        }
    }
    // TLS buffers the bytes that the socket did not accept.
    stream.flush().await
}

/// Reads the head of the final response.
async fn read_head(connection: &mut PooledConnection) -> Result<UpstreamHead, Http1Error> {
    let PooledConnection { stream, buffer, .. } = connection;
    loop {
        if !buffer.is_empty()
            && let Some(head) = head::take(buffer)?
        {
            return Ok(head);
        }
        buffer.reserve(if buffer.len() < READ_BYTES { READ_BYTES } else { HEAD_BYTES_MAX });
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}

#[cfg(test)]
#[path = "../../../resolver/tests/dns_server/mod.rs"]
mod dns_server;

#[cfg(test)]
mod tests {
    use super::dns_server::{DnsServer, Zone, addresses};
    use super::*;
    use crate::request_head::UpstreamMethod;
    use pool::OPENING_MAX;
    use regions::HostPort;
    use regions::set::RegionIndex;
    use resolver::{DnsSection, Resolver};
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use tokio::net::TcpListener;

    const BODY: &[u8] = b"{\"input\":\"x\"}";

    fn request() -> RequestHead {
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path("/v1/embeddings");
        head.put("content-length", BODY.len().to_string());
        head
    }

    /// Starts a server that responds to each request on each connection with the next of `responses`, and closes the
    /// connection after a response that says so. The task returns the number of connections.
    async fn server(responses: &'static [&'static str]) -> (SocketAddr, tokio::task::JoinHandle<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async move {
            let (mut connections, mut responses) = (0, responses.iter());
            while responses.len() > 0 {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections += 1;
                for response in responses.by_ref() {
                    let mut read = Vec::new();
                    while !read.ends_with(BODY) {
                        assert_ne!(
                            stream.read_buf(&mut read).await.unwrap(),
                            0,
                            "the client disconnected early"
                        );
                    }
                    stream.write_all(response.as_bytes()).await.unwrap();
                    if response.contains("close") || response.is_empty() {
                        break;
                    }
                }
            }
            connections
        };
        (address, tokio::spawn(serve))
    }

    fn client_with(dns: &DnsSection) -> Http1Client {
        let catalogue = Arc::new(regions::Catalogue::builtin());
        let connector =
            Connector::to_replicas(&identity::Transport::Loopback, &catalogue, Resolver::new(dns));
        Http1Client::over(Arc::new(connector.unwrap()))
    }

    fn client() -> Http1Client {
        client_with(&DnsSection::default())
    }

    async fn post(client: &Http1Client, address: SocketAddr) -> Result<(u16, Vec<u8>), AttemptFailure> {
        let key = UpstreamKey { region: RegionIndex::new(0).expect("a number"), address: address.into() };
        let opened = client.open(&key, Duration::from_secs(5)).await?;
        let Http1Response { head, body: mut stream } = opened.send(&request(), BODY).await?;
        let mut body = Vec::new();
        while let Some(bytes) = stream.chunk().await.map_err(|_| AttemptFailure::Unreachable)? {
            body.extend_from_slice(&bytes);
        }
        stream.finish(client);
        Ok((head.status.as_u16(), body))
    }

    #[tokio::test]
    async fn every_framing_is_read_to_its_end_and_the_connection_reused_if_possible() {
        let (address, server) = server(&[
            "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "HTTP/1.1 204 No Content\r\n\r\n",
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\nx: close\r\n\r\nuntil the end",
        ])
        .await;
        let client = client();
        for expected in ["abc", "abc", "", "abc", "until the end"] {
            let (_, body) = post(&client, address).await.unwrap();
            assert_eq!(String::from_utf8(body).unwrap(), expected);
        }
        assert_eq!(
            server.await.unwrap(),
            2,
            "three on the first connection, one more that closes it, the last on its own"
        );
    }

    #[tokio::test]
    async fn a_status_without_a_body_overrides_the_declared_length() {
        let (address, _server) =
            server(&["HTTP/1.1 304 Not Modified\r\nx: close\r\ncontent-length: 3\r\n\r\n"]).await;
        let client = client();
        let key = UpstreamKey { region: RegionIndex::new(0).expect("a number"), address: address.into() };
        let opened = client.open(&key, Duration::from_secs(5)).await.unwrap();
        let mut response = opened.send(&request(), BODY).await.unwrap();
        assert_eq!(response.body.whole(3).await.unwrap(), "");
    }

    #[tokio::test]
    async fn a_reused_connection_that_closes_without_a_byte_is_stale_and_a_new_one_is_not() {
        let (address, _server) = server(&["HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "", "", ""]).await;
        let client = client();
        assert!(post(&client, address).await.is_ok());
        assert_eq!(post(&client, address).await, Err(AttemptFailure::StaleConnection));
        assert_eq!(post(&client, address).await, Err(AttemptFailure::Unreachable));
    }

    #[tokio::test]
    async fn connects_are_limited_and_a_waiting_request_takes_a_returned_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, limit) = (client(), Duration::from_secs(5));
        let key = UpstreamKey {
            region: RegionIndex::new(0).expect("a number"),
            address: listener.local_addr().unwrap().into(),
        };
        let limiter = client.pool.connect_limiter(&key);
        let all_but_one = futures_util::future::join_all((1..OPENING_MAX).map(|_| limiter.acquire())).await;
        assert!(!client.open(&key, limit).await.unwrap().reused, "at the limit");
        let last = limiter.acquire().await;
        let mut next = std::pin::pin!(client.open(&key, limit));
        assert!(tokio::time::timeout(Duration::ZERO, &mut next).await.is_err(), "one past it");
        assert!(!client.has_idle(&key));
        client.put_idle(&key, client.connector.connect(&key, limit).await.unwrap());
        assert!(client.has_idle(&key));
        drop((last, all_but_one));
        assert!(next.await.unwrap().reused);
    }

    /// Returns a listener that never accepts: its accept queue is full.
    async fn silent() -> (tokio::net::TcpListener, Vec<tokio::net::TcpStream>) {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(0).unwrap();
        let mut queued = Vec::new();
        let connect = || tokio::net::TcpStream::connect(listener.local_addr().unwrap());
        while let Ok(connected) = tokio::time::timeout(Duration::from_millis(100), connect()).await {
            queued.push(connected.unwrap());
        }
        (listener, queued)
    }

    /// With only a limit of concurrent connects, the last of a thousand concurrent requests failed after eight times
    /// the timeout.
    #[tokio::test]
    async fn a_request_that_waits_behind_a_connect_timeout_fails_with_it() {
        let (listener, _queued) = silent().await;
        let (client, limit) = (client(), Duration::from_millis(200));
        let key = UpstreamKey {
            region: RegionIndex::new(0).expect("a number"),
            address: listener.local_addr().unwrap().into(),
        };
        tokio::time::pause();
        let started = tokio::time::Instant::now();
        let all = (0..8 * OPENING_MAX).map(|_| async {
            assert_eq!(client.open(&key, limit).await.err(), Some(AttemptFailure::Unreachable));
            started.elapsed()
        });
        let slowest = futures_util::future::join_all(all).await.into_iter().max().unwrap();
        assert!(slowest < limit * 2, "{slowest:?}");
    }

    /// The next hop has received the request and begun a response: sending it again would be a second attempt.
    #[tokio::test]
    async fn a_reused_connection_that_closes_within_the_head_is_not_stale() {
        let (address, _server) =
            server(&["HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 200 OK\r\nx-close: "]).await;
        let client = client();
        assert!(post(&client, address).await.is_ok());
        assert_eq!(post(&client, address).await, Err(AttemptFailure::Unreachable));
    }

    #[tokio::test]
    async fn an_invalid_or_truncated_response_is_an_error() {
        for response in [
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
            "HTTP/1.1 101 Switch\r\nx: close\r\n\r\n",
            "close",
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 4\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\nx: close\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        ] {
            let (address, _server) = server(Vec::leak(vec![response])).await;
            assert_eq!(post(&client(), address).await, Err(AttemptFailure::Unreachable), "{response}");
        }
    }

    /// Serves requests until it is dropped; returns the number of requests.
    async fn endless_server(listener: TcpListener, served: Arc<AtomicUsize>) {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let served = served.clone();
            connections.spawn(async move {
                let mut read = Vec::new();
                while stream.read_buf(&mut read).await.unwrap_or(0) > 0 {
                    if read.ends_with(BODY) {
                        read.clear();
                        served.fetch_add(1, Ordering::Relaxed);
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                    }
                }
            });
        }
    }

    #[tokio::test]
    async fn a_change_of_the_addresses_under_load_moves_all_requests_and_loses_none() {
        let dns = DnsServer::start().await;
        let client = client_with(&DnsSection { servers: vec![dns.address] });
        let first = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let second = TcpListener::bind(("127.0.0.3", port)).await.unwrap();
        let (by_first, by_second) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let first = tokio::spawn(endless_server(first, by_first.clone()));
        let _second = tokio::spawn(endless_server(second, by_second.clone()));
        dns.set("spoke.example", addresses(&["127.0.0.2"], 1));
        let address: HostPort = format!("spoke.example:{port}").parse().unwrap();
        let key = UpstreamKey { region: RegionIndex::new(0).expect("a number"), address };
        let has_moved = AtomicBool::new(false);
        let load = (0..8).map(|_| async {
            let mut sent = 0;
            while !has_moved.load(Ordering::Relaxed) {
                let opened = client.open(&key, Duration::from_secs(5)).await.expect("a connection");
                let response = opened.send(&request(), BODY).await.expect("a response");
                response.body.finish(&client);
                sent += 1;
            }
            sent
        });
        let change = async {
            while by_first.load(Ordering::Relaxed) < 100 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(by_second.load(Ordering::Relaxed), 0);
            dns.set("spoke.example", addresses(&["127.0.0.3"], 1));
            while by_second.load(Ordering::Relaxed) < 100 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // Whatever was in flight at the change has ended.
            let before = by_first.load(Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(
                by_first.load(Ordering::Relaxed),
                before,
                "a connection to the former address was reused"
            );
            first.abort();
            // The requests continue while the server fails.
            dns.set("spoke.example", Zone::Silence);
            let (queries, requests) = (dns.queries(), by_second.load(Ordering::Relaxed));
            while dns.queries() < queries + 4 || by_second.load(Ordering::Relaxed) < requests + 100 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            has_moved.store(true, Ordering::Relaxed);
        };
        let load = futures_util::future::join_all(load);
        let timed = tokio::time::timeout(Duration::from_secs(30), futures_util::future::join(load, change));
        let (sent, ()) = timed.await.expect("the requests move");
        let served = by_first.load(Ordering::Relaxed) + by_second.load(Ordering::Relaxed);
        assert_eq!(sent.iter().sum::<usize>(), served);
    }

    /// More bytes arrived than the response has: the next response on this connection would not belong to the next
    /// request.
    #[tokio::test]
    async fn a_connection_with_bytes_after_its_response_is_not_reused() {
        let (address, server) = server(&[
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged",
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 3\r\n\r\ndef",
        ])
        .await;
        let client = client();
        assert_eq!(post(&client, address).await, Ok((200, b"abc".to_vec())));
        assert_eq!(post(&client, address).await, Ok((200, b"def".to_vec())));
        assert_eq!(server.await.unwrap(), 2);
    }
}
