//! Connections to the next hop that wait for their next request.
//!
//! The one that was used last is used first, so that those which a quiet hour has made superfluous grow old at the front
//! and are let go. There is no task behind a waiting connection (Pingora's pool has one for each, started and stopped
//! with every request): whether the other side has closed it is looked at when it is taken, which costs nothing because
//! the reactor knows, and what is too old goes when another one comes back.

use bytes::BytesMut;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Connections kept idle, over all addresses.
const IDLE_MAX: usize = 1024;
/// How long a connection is kept idle. Shorter than the other side keeps it, so that the race in which a request meets
/// a closing connection is rare.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the old ones are looked for.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// A connection, and what was read from it and not used yet.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) buffer: BytesMut,
    pub(super) address: SocketAddr,
}

/// Those that wait.
pub(super) struct Pool(Mutex<Waiting>);

struct Waiting {
    /// The one that came last is at the back.
    by_address: BTreeMap<SocketAddr, VecDeque<(TcpStream, Instant)>>,
    count: usize,
    swept: Instant,
}

impl Pool {
    pub(super) fn new() -> Pool {
        Pool(Mutex::new(Waiting { by_address: BTreeMap::new(), count: 0, swept: Instant::now() }))
    }

    /// One that waits for `address` and is still open.
    pub(super) fn take(&self, address: SocketAddr) -> Option<Connection> {
        let now = Instant::now();
        loop {
            let (stream, since) = self.lock().pop(address)?;
            if now.saturating_duration_since(since) < IDLE_TIMEOUT && is_quiet(&stream) {
                return Some(Connection { stream, buffer: BytesMut::new(), address });
            }
        }
    }

    /// A connection whose answer has been read to its end. One with more in it than that is closed.
    pub(super) fn put(&self, connection: Connection) {
        let Connection { stream, buffer, address } = connection;
        if buffer.is_empty() {
            let old = self.lock().push(address, stream, Instant::now());
            drop(old);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().expect("nothing panics while it holds the lock")
    }
}

impl Waiting {
    fn pop(&mut self, address: SocketAddr) -> Option<(TcpStream, Instant)> {
        let popped = self.by_address.get_mut(&address)?.pop_back()?;
        self.count -= 1;
        Some(popped)
    }

    /// Keeps one more, and returns those that have to go, to be closed outside the lock.
    fn push(&mut self, address: SocketAddr, stream: TcpStream, now: Instant) -> Vec<TcpStream> {
        let mut old = Vec::new();
        if now.saturating_duration_since(self.swept) >= SWEEP_PERIOD {
            self.swept = now;
            for waiting in self.by_address.values_mut() {
                let fresh = waiting
                    .partition_point(|(_, since)| now.saturating_duration_since(*since) >= IDLE_TIMEOUT);
                old.extend(waiting.drain(..fresh).map(|(stream, _)| stream));
            }
            self.by_address.retain(|_, waiting| !waiting.is_empty());
            self.count -= old.len();
        }
        if self.count >= IDLE_MAX {
            old.push(stream);
        } else {
            self.by_address.entry(address).or_default().push_back((stream, now));
            self.count += 1;
        }
        old
    }
}

/// Neither closed by the other side nor holding anything that nobody asked for.
fn is_quiet(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    async fn pair(listener: &TcpListener) -> (Connection, TcpStream) {
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let (other, _) = listener.accept().await.unwrap();
        (Connection { stream, buffer: BytesMut::new(), address }, other)
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[tokio::test]
    async fn the_last_that_came_is_the_first_that_goes_and_only_to_its_own_address() {
        let (listener, address) = listener().await;
        let pool = Pool::new();
        let mut others = Vec::new();
        let mut ports = Vec::new();
        for _ in 0..3 {
            let (connection, other) = pair(&listener).await;
            ports.push(connection.stream.local_addr().unwrap());
            pool.put(connection);
            others.push(other);
        }
        assert!(pool.take("127.0.0.1:1".parse().unwrap()).is_none());
        for port in ports.into_iter().rev() {
            assert_eq!(pool.take(address).unwrap().stream.local_addr().unwrap(), port);
        }
        assert!(pool.take(address).is_none());
    }

    #[tokio::test]
    async fn one_that_the_other_side_has_closed_or_written_to_unasked_is_not_given_out() {
        let (listener, address) = listener().await;
        for closes in [true, false] {
            let pool = Pool::new();
            let (connection, mut other) = pair(&listener).await;
            if closes {
                drop(other);
            } else {
                other.write_all(b"unasked").await.unwrap();
            }
            connection.stream.readable().await.unwrap();
            pool.put(connection);
            assert!(pool.take(address).is_none(), "closed: {closes}");
        }
        let (mut connection, _other) = pair(&listener).await;
        connection.buffer.extend_from_slice(b"more than the answer");
        let pool = Pool::new();
        pool.put(connection);
        assert!(pool.take(address).is_none());
    }

    #[tokio::test]
    async fn what_is_too_old_goes_and_what_is_too_many_is_not_kept() {
        let (listener, address) = listener().await;
        let (first, _first) = pair(&listener).await;
        let (second, _second) = pair(&listener).await;
        let (third, _third) = pair(&listener).await;
        let begin = Instant::now();
        let mut waiting = Waiting { by_address: BTreeMap::new(), count: 0, swept: begin };
        assert!(waiting.push(address, first.stream, begin).is_empty());
        let elsewhere = "127.0.0.1:1".parse().unwrap();
        let old = waiting.push(elsewhere, second.stream, begin + IDLE_TIMEOUT);
        assert_eq!((old.len(), waiting.count), (1, 1));
        assert!(!waiting.by_address.contains_key(&address), "an address that nobody uses is forgotten");
        waiting.count = IDLE_MAX;
        let old = waiting.push(elsewhere, third.stream, begin + IDLE_TIMEOUT);
        assert_eq!((old.len(), waiting.count), (1, IDLE_MAX));
    }
}
