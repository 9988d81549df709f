//! An exchange in plain HTTP/1.1 with the next hop: one write, as few reads as the answer has segments.
//!
//! Behind the edge stands a region, behind the ingress a replica, and both speak HTTP/1.1 as it is in RFC 9112. Pingora's
//! client does all that a proxy of strangers needs (it keeps the case of headers, upgrades, times every part) and writes
//! head and body apart; measured per request on one core that was a third of what the edge costs, see
//! docs/benchmarks.md. So the exchange is our own: [`frame`] cuts answers and believes none that could be cut in two ways,
//! [`pool`] keeps connections, and here bytes are moved. Whether they cross in the clear or over TLS, and who is at the other
//! end, is [`crate::hop`]'s affair; the exchange is the same.
//!
//! A connection is opened first and written to second, so that who asks can look at who answers in between.

mod frame;
mod pool;
mod stream;

pub(crate) use pool::Way;
pub(crate) use stream::Stream;

use crate::hop::{Greeted, Outward};
use crate::upstream::RequestHead;
use bytes::Bytes;
use frame::{Body, HEAD_BYTES_MAX, Head, Unreadable};
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use http::response::Parts;
use pool::{Connection, Pool};
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

/// What is read at once: the answer to a usual request, an embedding of 1,024 numbers as text, with its head.
const READ_BYTES: usize = 16 << 10;
/// Of an answer that is passed on while it comes.
const READ_BYTES_LARGE: usize = 64 << 10;

/// Exchanges with the next hop.
pub(crate) struct Plain {
    outward: Arc<Outward>,
    pool: Pool,
}

/// A connection on which nothing was asked yet.
pub(crate) struct Opened<'a> {
    plain: &'a Plain,
    connection: Connection,
    /// It was used before.
    reused: bool,
}

/// An answer whose head has come, and the way to the rest of it.
pub(crate) struct Begun {
    pub(crate) head: Parts,
    pub(crate) rest: Rest,
}

/// A body that is still coming.
pub(crate) struct Rest {
    connection: Connection,
    body: Body,
    keep: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Unreadable(#[from] Unreadable),
}

impl Plain {
    pub(crate) fn over(outward: Arc<Outward>) -> Plain {
        Plain { outward, pool: Pool::new() }
    }

    /// A connection that leads there: one that waits, or a new one. Beyond so many that are being opened the next waits for
    /// its turn, or for one that somebody else has done with: as long as it takes while connections come about, and no longer
    /// than the first attempt that nobody answers. To try after that would be to wait the limit once more, for each turn before.
    pub(crate) async fn open(
        &self,
        way: Way,
        connect_timeout: Duration,
    ) -> Result<Opened<'_>, AttemptFailure> {
        if let Some(opened) = self.waiting(way) {
            return Ok(opened);
        }
        let turns = self.pool.turns(way);
        let turn = turns.next().await;
        if let Some(opened) = self.waiting(way) {
            return Ok(opened);
        }
        if turn.behind_one_in_vain {
            return Err(AttemptFailure::Unreachable);
        }
        let begun = Instant::now();
        let greeted = self.outward.connect(way, connect_timeout).await;
        if greeted.is_err() && begun.elapsed() >= connect_timeout {
            turn.was_in_vain();
        }
        Ok(self.begin(way, greeted?))
    }

    /// How connections are opened.
    #[cfg(test)]
    pub(crate) fn outward(&self) -> &Outward {
        &self.outward
    }

    /// One that waits.
    pub(crate) fn waiting(&self, way: Way) -> Option<Opened<'_>> {
        let connection = self.pool.take(way)?;
        Some(Opened { plain: self, connection, reused: true })
    }

    /// A new one.
    pub(crate) fn begin(&self, way: Way, greeted: Greeted) -> Opened<'_> {
        Opened { plain: self, connection: Connection::new(way, greeted), reused: false }
    }

    /// Keeps a connection for whoever comes next.
    pub(crate) fn keep(&self, way: Way, greeted: Greeted) {
        self.pool.put(Connection::new(way, greeted));
    }
}

impl Opened<'_> {
    /// Who is at the other end.
    pub(crate) fn peer(&self) -> Peer {
        self.connection.peer
    }

    /// Sends a request and waits for the head of its answer; the caller bounds the time by dropping this.
    pub(crate) async fn ask(self, head: &RequestHead, body: &[u8]) -> Result<Begun, AttemptFailure> {
        let Opened { plain, mut connection, reused } = self;
        let way = connection.way;
        // Whoever refuses a body early answers before it has read all of it and closes; so a failed write does not end
        // the exchange, the answer does.
        let sent = send(&mut connection.stream, &head.in_the_clear(), body).await;
        match read_head(&mut connection).await {
            Ok(Head { head, body, keep }) => {
                if !reused {
                    plain.outward.is_well(way.region);
                }
                // Of a request that did not go out whole the other side may still wait for the rest.
                let keep = keep && sent.is_ok();
                Ok(Begun { head, rest: Rest { connection, body, keep } })
            }
            Err(error) => {
                tracing::debug!(address = %way.address, reused, %error, "an attempt broke off before an answer");
                if let Broken::Io(error) = &error {
                    plain.outward.broke(way, error);
                }
                let unanswered = connection.buffer.is_empty() && matches!(error, Broken::Io(_));
                Err(if reused && unanswered {
                    AttemptFailure::StaleConnection
                } else {
                    AttemptFailure::Unreachable
                })
            }
        }
    }
}

impl Rest {
    /// The next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Broken> {
        loop {
            if let Some(bytes) = self.body.take(&mut self.connection.buffer)? {
                return Ok(Some(bytes));
            }
            if self.body.is_done() {
                return Ok(None);
            }
            self.connection.buffer.reserve(READ_BYTES_LARGE);
            match self.connection.stream.read_buf(&mut self.connection.buffer).await? {
                0 if self.body == Body::UntilClosed => return Ok(None),
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                _ => {}
            }
        }
    }

    /// All of a body of this length, in one piece: without a copy if it came with its head.
    pub(crate) async fn whole(&mut self, length: usize) -> Result<Bytes, Broken> {
        let Connection { stream, buffer, .. } = &mut self.connection;
        if buffer.len() < length {
            buffer.reserve(length - buffer.len());
        }
        while buffer.len() < length {
            if stream.read_buf(buffer).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(self.body.take(buffer)?.unwrap_or_default())
    }

    /// Gives the connection back once the body has ended.
    pub(crate) fn finish(self, plain: &Plain) {
        if self.keep && self.body.is_done() {
            plain.pool.put(self.connection);
        }
    }
}

/// Writes both in as few writes as the socket allows.
async fn send(stream: &mut Stream, head: &[u8], body: &[u8]) -> io::Result<()> {
    let mut slices = [IoSlice::new(head), IoSlice::new(body)];
    let mut left = slices.as_mut_slice();
    while !left.is_empty() {
        match stream.write_vectored(left).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => IoSlice::advance_slices(&mut left, written),
        }
    }
    // TLS holds what the socket did not take.
    stream.flush().await
}

/// Reads the head of the answer, past what is only information.
async fn read_head(connection: &mut Connection) -> Result<Head, Broken> {
    let Connection { stream, buffer, .. } = connection;
    loop {
        if !buffer.is_empty()
            && let Some(head) = frame::head(buffer)?
        {
            match head.head.status.as_u16() {
                101 => return Err(Unreadable("it changes the protocol").into()),
                100..200 => continue,
                _ => return Ok(head),
            }
        }
        buffer.reserve(if buffer.len() < READ_BYTES { READ_BYTES } else { HEAD_BYTES_MAX });
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::UpstreamMethod;
    use pool::OPENING_MAX;
    use regions::set::RegionIndex;
    use std::net::SocketAddr;
    use tokio::net::TcpListener;

    const BODY: &[u8] = b"{\"input\":\"x\"}";

    fn request() -> RequestHead {
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path("/v1/embeddings");
        head.put("content-length", BODY.len().to_string());
        head
    }

    /// A server that answers each request on each connection with the next of `answers`, and closes after an answer
    /// that says so. It tells what it read, and how many connections it saw.
    async fn server(answers: &'static [&'static str]) -> (SocketAddr, tokio::task::JoinHandle<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async move {
            let (mut connections, mut answers) = (0, answers.iter());
            while answers.len() > 0 {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections += 1;
                for answer in answers.by_ref() {
                    let mut read = Vec::new();
                    while !read.ends_with(BODY) {
                        assert_ne!(
                            stream.read_buf(&mut read).await.unwrap(),
                            0,
                            "a client that leaves early"
                        );
                    }
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    if answer.contains("close") || answer.is_empty() {
                        break;
                    }
                }
            }
            connections
        };
        (address, tokio::spawn(serve))
    }

    fn plain() -> Plain {
        Plain::over(Arc::new(Outward::within_the_region()))
    }

    async fn ask(plain: &Plain, address: SocketAddr) -> Result<(u16, Vec<u8>), AttemptFailure> {
        let way = Way { region: RegionIndex::new(0).expect("a number"), address };
        let opened = plain.open(way, Duration::from_secs(5)).await?;
        let Begun { head, mut rest } = opened.ask(&request(), BODY).await?;
        let mut body = Vec::new();
        while let Some(bytes) = rest.chunk().await.map_err(|_| AttemptFailure::Unreachable)? {
            body.extend_from_slice(&bytes);
        }
        rest.finish(plain);
        Ok((head.status.as_u16(), body))
    }

    #[tokio::test]
    async fn every_framing_is_read_to_its_end_and_the_connection_kept_where_it_can_be() {
        let (address, server) = server(&[
            "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "HTTP/1.1 204 No Content\r\n\r\n",
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\nx: close\r\n\r\nuntil the end",
        ])
        .await;
        let plain = plain();
        for expected in ["abc", "abc", "", "abc", "until the end"] {
            let (_, body) = ask(&plain, address).await.unwrap();
            assert_eq!(String::from_utf8(body).unwrap(), expected);
        }
        assert_eq!(
            server.await.unwrap(),
            2,
            "three on the first connection, one more that closes it, the last on its own"
        );
    }

    #[tokio::test]
    async fn a_kept_connection_that_closes_without_a_byte_is_stale_and_a_new_one_is_not() {
        let (address, _server) = server(&["HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "", "", ""]).await;
        let plain = plain();
        assert!(ask(&plain, address).await.is_ok());
        assert_eq!(ask(&plain, address).await, Err(AttemptFailure::StaleConnection));
        assert_eq!(ask(&plain, address).await, Err(AttemptFailure::Unreachable));
    }

    #[tokio::test]
    async fn so_many_are_opened_at_once_and_who_waits_takes_one_that_has_come_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (plain, limit) = (plain(), Duration::from_secs(5));
        let way =
            Way { region: RegionIndex::new(0).expect("a number"), address: listener.local_addr().unwrap() };
        let turns = plain.pool.turns(way);
        let all_but_one = futures_util::future::join_all((1..OPENING_MAX).map(|_| turns.next())).await;
        assert!(!plain.open(way, limit).await.unwrap().reused, "at the bound");
        let last = turns.next().await;
        let mut next = std::pin::pin!(plain.open(way, limit));
        assert!(tokio::time::timeout(Duration::ZERO, &mut next).await.is_err(), "one past it");
        plain.keep(way, plain.outward.connect(way, limit).await.unwrap());
        drop((last, all_but_one));
        assert!(next.await.unwrap().reused);
    }

    /// A region that swallows whatever is sent to it: its queue of connections is full, and nobody takes one out.
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

    /// With turns and no more than that, the last of a thousand that are asked at once heard of it after eight times the limit.
    #[tokio::test]
    async fn who_waits_behind_an_attempt_that_nobody_answers_waits_no_longer_than_it() {
        let (listener, _queued) = silent().await;
        let (plain, limit) = (plain(), Duration::from_millis(200));
        let way =
            Way { region: RegionIndex::new(0).expect("a number"), address: listener.local_addr().unwrap() };
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        let all = (0..8 * OPENING_MAX).map(|_| async {
            assert_eq!(plain.open(way, limit).await.err(), Some(AttemptFailure::Unreachable));
            begun.elapsed()
        });
        let slowest = futures_util::future::join_all(all).await.into_iter().max().unwrap();
        assert!(slowest < limit * 2, "{slowest:?}");
    }

    /// The next hop has seen the request and begun to answer: sending it once more would be a second attempt.
    #[tokio::test]
    async fn a_kept_connection_that_breaks_off_in_the_head_is_not_stale() {
        let (address, _server) =
            server(&["HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 200 OK\r\nx-close: "]).await;
        let plain = plain();
        assert!(ask(&plain, address).await.is_ok());
        assert_eq!(ask(&plain, address).await, Err(AttemptFailure::Unreachable));
    }

    #[tokio::test]
    async fn an_answer_that_nobody_can_read_or_that_breaks_off_is_none() {
        for answer in [
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
            "HTTP/1.1 101 Switch\r\nx: close\r\n\r\n",
            "close",
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 4\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\nx: close\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        ] {
            let (address, _server) = server(Vec::leak(vec![answer])).await;
            assert_eq!(ask(&plain(), address).await, Err(AttemptFailure::Unreachable), "{answer}");
        }
    }

    /// More came than the answer has: whatever it is, the next answer on this connection would not be the next request's.
    #[tokio::test]
    async fn a_connection_with_more_in_it_than_its_answer_is_not_used_again() {
        let (address, server) = server(&[
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged",
            "HTTP/1.1 200 OK\r\nx: close\r\ncontent-length: 3\r\n\r\ndef",
        ])
        .await;
        let plain = plain();
        assert_eq!(ask(&plain, address).await, Ok((200, b"abc".to_vec())));
        assert_eq!(ask(&plain, address).await, Ok((200, b"def".to_vec())));
        assert_eq!(server.await.unwrap(), 2);
    }
}
