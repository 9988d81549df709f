//! Pool of idle connections to the next hop.
//!
//! The most recently used connection is reused first, so that surplus connections age at the front of the queue and
//! expire. An idle connection has no task (Pingora's pool has one for each, started and stopped with every request):
//! whether the peer has closed it is checked when it is taken, which is free because the reactor knows, and expired
//! ones are removed when another one is returned.

use super::Stream;
use crate::hop::Greeted;
use bytes::BytesMut;
use gateway_core::residency::Peer;
use regions::set::RegionIndex;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of idle connections, over all upstreams.
const IDLE_MAX: usize = 1024;
/// Maximum number of concurrent connects to one address. A handshake takes some half a millisecond of CPU time at
/// either end, and a thousand at once time out together: then none completes, all retry, and a healthy region is
/// unreachable. With a round trip of 100 ms it allows some 600 new connections a second.
pub(super) const OPENING_MAX: usize = 128;
/// Idle timeout. Shorter than that of the peer, so that a request rarely meets a closing connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval in which expired connections are removed.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Upstream of a connection. The address alone is not sufficient: it may be reassigned to another region, to which open
/// connections do not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) region: RegionIndex,
    pub(crate) address: SocketAddr,
}

/// Connection, and the bytes read from it that are not consumed yet.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) buffer: BytesMut,
    pub(super) way: Way,
    /// Identity of the peer.
    pub(super) peer: Peer,
}

impl Connection {
    pub(super) fn new(way: Way, connected: Greeted) -> Connection {
        let Greeted { stream, peer, http2: _ } = connected;
        Connection { stream, buffer: BytesMut::new(), way, peer }
    }
}

/// Pool of idle connections.
pub(super) struct Pool(Mutex<Waiting>);

struct Waiting {
    /// The most recently returned connection is at the back.
    by_way: BTreeMap<Way, VecDeque<Kept>>,
    /// Limiters of concurrent connects; unused ones are removed when a new upstream is added.
    limiters: BTreeMap<Way, Arc<Turns>>,
    count: usize,
    swept: Instant,
}

struct Kept {
    stream: Stream,
    peer: Peer,
    since: Instant,
}

/// Limiter of concurrent connects to one upstream.
pub(super) struct Turns {
    free: Semaphore,
    /// Connect attempts so far that timed out.
    timeouts: AtomicU64,
}

/// Permit for one connect, until this is dropped.
pub(super) struct Turn<'a> {
    limiter: &'a Turns,
    /// Whether another connect timed out while this one waited for its permit.
    pub(super) is_after_timeout: bool,
    _permit: SemaphorePermit<'a>,
}

impl Turns {
    /// Waits, without a timeout, until fewer than [`OPENING_MAX`] connects are in progress.
    pub(super) async fn acquire(&self) -> Turn<'_> {
        let before = self.timeouts.load(Ordering::Relaxed);
        let permit = self.free.acquire().await.expect("the semaphore is never closed");
        let is_after_timeout = self.timeouts.load(Ordering::Relaxed) != before;
        Turn { limiter: self, is_after_timeout, _permit: permit }
    }
}

impl Turn<'_> {
    /// Records that the connect timed out.
    pub(super) fn timed_out(self) {
        self.limiter.timeouts.fetch_add(1, Ordering::Relaxed);
    }
}

impl Pool {
    pub(super) fn new() -> Pool {
        Pool(Mutex::new(Waiting {
            by_way: BTreeMap::new(),
            limiters: BTreeMap::new(),
            count: 0,
            swept: Instant::now(),
        }))
    }

    /// Takes an open connection to this upstream.
    pub(super) fn take(&self, way: Way) -> Option<Connection> {
        let now = Instant::now();
        loop {
            let Kept { mut stream, peer, since } = self.lock().pop(way)?;
            if now.saturating_duration_since(since) < IDLE_TIMEOUT && stream.is_idle() {
                return Some(Connection { stream, buffer: BytesMut::new(), way, peer });
            }
        }
    }

    /// Returns a connection whose response was read to its end. If it has unread bytes, it is closed.
    pub(super) fn put(&self, connection: Connection) {
        let Connection { stream, buffer, way, peer } = connection;
        if buffer.is_empty() {
            let since = Instant::now();
            let expired = self.lock().push(way, Kept { stream, peer, since });
            drop(expired);
        }
    }

    /// Returns the limiter of concurrent connects to this upstream.
    pub(super) fn connect_limiter(&self, way: Way) -> Arc<Turns> {
        let limiters = &mut self.lock().limiters;
        if let Some(limiter) = limiters.get(&way) {
            return limiter.clone();
        }
        limiters.retain(|_, limiter| Arc::strong_count(limiter) > 1);
        let create = || Arc::new(Turns { free: Semaphore::new(OPENING_MAX), timeouts: AtomicU64::new(0) });
        limiters.entry(way).or_insert_with(create).clone()
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock()
    }
}

impl Waiting {
    fn pop(&mut self, way: Way) -> Option<Kept> {
        let popped = self.by_way.get_mut(&way)?.pop_back()?;
        self.count -= 1;
        Some(popped)
    }

    /// Adds a connection, and returns the ones to be closed, outside the lock.
    fn push(&mut self, way: Way, idle: Kept) -> Vec<Kept> {
        let (mut expired, now) = (Vec::new(), idle.since);
        if now.saturating_duration_since(self.swept) >= SWEEP_PERIOD {
            self.swept = now;
            for waiting in self.by_way.values_mut() {
                let valid =
                    waiting.partition_point(|idle| now.saturating_duration_since(idle.since) >= IDLE_TIMEOUT);
                expired.extend(waiting.drain(..valid));
            }
            self.by_way.retain(|_, waiting| !waiting.is_empty());
            self.count -= expired.len();
        }
        if self.count >= IDLE_MAX {
            expired.push(idle);
        } else {
            self.by_way.entry(way).or_default().push_back(idle);
            self.count += 1;
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    fn way(address: SocketAddr) -> Way {
        Way { region: RegionIndex::new(0).expect("a number"), address }
    }

    async fn pair(listener: &TcpListener) -> (Connection, TcpStream) {
        let address = listener.local_addr().unwrap();
        let stream = Stream::Clear(TcpStream::connect(address).await.unwrap());
        let (other, _) = listener.accept().await.unwrap();
        (Connection { stream, buffer: BytesMut::new(), way: way(address), peer: Peer::UNPROVEN }, other)
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    fn port(connection: &Connection) -> SocketAddr {
        connection.stream.tcp().local_addr().unwrap()
    }

    #[tokio::test]
    async fn the_most_recent_connection_is_reused_first_and_only_for_its_upstream() {
        let (listener, address) = listener().await;
        let pool = Pool::new();
        let mut others = Vec::new();
        let mut ports = Vec::new();
        for _ in 0..3 {
            let (connection, other) = pair(&listener).await;
            ports.push(port(&connection));
            pool.put(connection);
            others.push(other);
        }
        assert!(pool.take(way("127.0.0.1:1".parse().unwrap())).is_none());
        let moved = Way { region: RegionIndex::new(1).expect("a number"), address };
        assert!(pool.take(moved).is_none(), "the address belongs to another region now");
        for expected in ports.into_iter().rev() {
            assert_eq!(port(&pool.take(way(address)).unwrap()), expected);
        }
        assert!(pool.take(way(address)).is_none());
    }

    #[tokio::test]
    async fn a_connection_that_the_peer_closed_or_wrote_to_is_not_reused() {
        let (listener, address) = listener().await;
        for closes in [true, false] {
            let pool = Pool::new();
            let (connection, mut other) = pair(&listener).await;
            if closes {
                drop(other);
            } else {
                other.write_all(b"unasked").await.unwrap();
            }
            connection.stream.tcp().readable().await.unwrap();
            pool.put(connection);
            assert!(pool.take(way(address)).is_none(), "closed: {closes}");
        }
        let (mut connection, _other) = pair(&listener).await;
        connection.buffer.extend_from_slice(b"more than the response");
        let pool = Pool::new();
        pool.put(connection);
        assert!(pool.take(way(address)).is_none());
    }

    #[tokio::test]
    async fn expired_connections_are_removed_and_the_pool_is_bounded() {
        let (listener, address) = listener().await;
        let begin = Instant::now();
        let mut others = Vec::new();
        let mut kept = async |since| {
            let (Connection { stream, peer, .. }, other) = pair(&listener).await;
            others.push(other);
            Kept { stream, peer, since }
        };
        let (first, second) = (kept(begin).await, kept(begin + IDLE_TIMEOUT).await);
        let third = kept(begin + IDLE_TIMEOUT).await;
        let mut waiting = Waiting { by_way: BTreeMap::new(), limiters: BTreeMap::new(), count: 0, swept: begin };
        assert!(waiting.push(way(address), first).is_empty());
        let other = way("127.0.0.1:1".parse().unwrap());
        let old = waiting.push(other, second);
        assert_eq!((old.len(), waiting.count), (1, 1));
        assert!(!waiting.by_way.contains_key(&way(address)), "an unused upstream is removed");
        waiting.count = IDLE_MAX;
        let old = waiting.push(other, third);
        assert_eq!((old.len(), waiting.count), (1, IDLE_MAX));
    }
}
