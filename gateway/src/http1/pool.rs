//! Pool of idle connections to the next hop.
//!
//! The most recently used connection is reused first, so that surplus connections age at the front of the queue and
//! expire. An idle connection has no task (Pingora's pool has one for each, started and stopped with every request):
//! whether the peer has closed it is checked when it is taken, which is free because the reactor knows, and expired
//! ones are removed when another one is returned.

use crate::hop::{IDLE_TIMEOUT, PeerConnection, TransportStream, UpstreamKey};
use bytes::BytesMut;
use gateway_core::residency::Peer;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of idle connections, over all upstreams. A limit of one gateway's sockets; that of a client of the API
/// (`loadtest`) limits the sockets of another process.
const IDLE_MAX: usize = 1024;
/// Maximum number of concurrent connects to one address. A handshake takes some half a millisecond of CPU time at
/// either end, and a thousand at once time out together: then none completes, all retry, and a healthy region is
/// unreachable. With a round trip of 100 ms it allows some 600 new connections a second.
pub(super) const OPENING_MAX: usize = 128;
/// Interval in which expired connections are removed.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Connection, and the bytes read from it that are not consumed yet.
#[derive(Debug)]
pub(super) struct PooledConnection {
    pub(super) stream: TransportStream,
    pub(super) buffer: BytesMut,
    pub(super) key: UpstreamKey,
    /// Identity of the peer.
    pub(super) peer: Peer,
    /// Address of the peer.
    pub(super) remote: IpAddr,
}

impl PooledConnection {
    pub(super) fn new(key: UpstreamKey, connected: PeerConnection) -> PooledConnection {
        let PeerConnection { stream, peer, http2: _, remote } = connected;
        PooledConnection { stream, buffer: BytesMut::new(), key, peer, remote }
    }
}

/// Pool of idle connections.
pub(super) struct ConnectionPool(Mutex<IdleConnections>);

struct IdleConnections {
    /// The most recently returned connection is at the back.
    by_upstream: BTreeMap<UpstreamKey, VecDeque<IdleConnection>>,
    /// Limiters of concurrent connects; unused ones are removed when a new upstream is added.
    limiters: BTreeMap<UpstreamKey, Arc<ConnectLimiter>>,
    count: usize,
    swept: Instant,
}

struct IdleConnection {
    stream: TransportStream,
    peer: Peer,
    remote: IpAddr,
    since: Instant,
}

/// Limiter of concurrent connects to one upstream.
pub(super) struct ConnectLimiter {
    free: Semaphore,
    /// Connect attempts so far that timed out.
    timeouts: AtomicU64,
}

/// Permit for one connect, until this is dropped.
pub(super) struct ConnectPermit<'a> {
    limiter: &'a ConnectLimiter,
    /// Whether another connect timed out while this one waited for its permit.
    pub(super) is_after_timeout: bool,
    _permit: SemaphorePermit<'a>,
}

impl ConnectLimiter {
    /// Waits, without a timeout, until fewer than [`OPENING_MAX`] connects are in progress.
    pub(super) async fn acquire(&self) -> ConnectPermit<'_> {
        let before = self.timeouts.load(Ordering::Relaxed);
        let permit = self.free.acquire().await.expect("the semaphore is never closed");
        let is_after_timeout = self.timeouts.load(Ordering::Relaxed) != before;
        ConnectPermit { limiter: self, is_after_timeout, _permit: permit }
    }
}

impl ConnectPermit<'_> {
    /// Records that the connect timed out.
    pub(super) fn timed_out(self) {
        self.limiter.timeouts.fetch_add(1, Ordering::Relaxed);
    }
}

impl ConnectionPool {
    pub(super) fn new() -> ConnectionPool {
        ConnectionPool(Mutex::new(IdleConnections {
            by_upstream: BTreeMap::new(),
            limiters: BTreeMap::new(),
            count: 0,
            swept: Instant::now(),
        }))
    }

    /// Takes an open connection to this upstream; one to an address that is not `current` any more is closed.
    pub(super) fn take(
        &self,
        key: &UpstreamKey,
        current: impl Fn(IpAddr) -> bool,
    ) -> Option<PooledConnection> {
        let now = Instant::now();
        loop {
            let IdleConnection { mut stream, peer, remote, since } = self.lock().pop(key)?;
            let is_young = now.saturating_duration_since(since) < IDLE_TIMEOUT;
            if is_young && stream.is_idle() && current(remote) {
                return Some(PooledConnection {
                    stream,
                    buffer: BytesMut::new(),
                    key: key.clone(),
                    peer,
                    remote,
                });
            }
        }
    }

    /// Returns whether there is an open connection to this upstream that has not expired.
    pub(super) fn has(&self, key: &UpstreamKey) -> bool {
        let now = Instant::now();
        let mut connections = self.lock();
        let newest = connections.by_upstream.get_mut(key).and_then(VecDeque::back_mut);
        newest.is_some_and(|idle| {
            now.saturating_duration_since(idle.since) < IDLE_TIMEOUT && idle.stream.is_idle()
        })
    }

    /// Returns a connection whose response was read to its end. If it has unread bytes, it is closed.
    pub(super) fn put(&self, connection: PooledConnection) {
        let PooledConnection { stream, buffer, key, peer, remote } = connection;
        if buffer.is_empty() {
            let since = Instant::now();
            let expired = self.lock().push(key, IdleConnection { stream, peer, remote, since });
            drop(expired);
        }
    }

    /// Returns the limiter of concurrent connects to this upstream.
    pub(super) fn connect_limiter(&self, key: &UpstreamKey) -> Arc<ConnectLimiter> {
        let limiters = &mut self.lock().limiters;
        if let Some(limiter) = limiters.get(key) {
            return limiter.clone();
        }
        limiters.retain(|_, limiter| Arc::strong_count(limiter) > 1);
        let create =
            || Arc::new(ConnectLimiter { free: Semaphore::new(OPENING_MAX), timeouts: AtomicU64::new(0) });
        limiters.entry(key.clone()).or_insert_with(create).clone()
    }

    fn lock(&self) -> MutexGuard<'_, IdleConnections> {
        self.0.lock()
    }
}

impl IdleConnections {
    fn pop(&mut self, key: &UpstreamKey) -> Option<IdleConnection> {
        let popped = self.by_upstream.get_mut(key)?.pop_back()?;
        self.count -= 1;
        Some(popped)
    }

    /// Adds a connection, and returns the ones to be closed, outside the lock.
    fn push(&mut self, key: UpstreamKey, idle: IdleConnection) -> Vec<IdleConnection> {
        let (mut expired, now) = (Vec::new(), idle.since);
        if now.saturating_duration_since(self.swept) >= SWEEP_PERIOD {
            self.swept = now;
            for idle in self.by_upstream.values_mut() {
                let valid =
                    idle.partition_point(|idle| now.saturating_duration_since(idle.since) >= IDLE_TIMEOUT);
                expired.extend(idle.drain(..valid));
            }
            self.by_upstream.retain(|_, idle| !idle.is_empty());
            self.count -= expired.len();
        }
        if self.count >= IDLE_MAX {
            expired.push(idle);
        } else {
            self.by_upstream.entry(key).or_default().push_back(idle);
            self.count += 1;
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::set::RegionIndex;
    use std::net::SocketAddr;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    fn key(address: SocketAddr) -> UpstreamKey {
        UpstreamKey { region: RegionIndex::new(0).expect("a number"), address: address.into() }
    }

    async fn pair(listener: &TcpListener) -> (PooledConnection, TcpStream) {
        let address = listener.local_addr().unwrap();
        let stream = TransportStream::Plaintext(TcpStream::connect(address).await.unwrap());
        let (other, _) = listener.accept().await.unwrap();
        let remote = address.ip();
        (
            PooledConnection {
                stream,
                buffer: BytesMut::new(),
                key: key(address),
                peer: Peer::UNPROVEN,
                remote,
            },
            other,
        )
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    fn port(connection: &PooledConnection) -> SocketAddr {
        connection.stream.tcp().local_addr().unwrap()
    }

    #[tokio::test]
    async fn the_most_recent_connection_is_reused_first_and_only_for_its_upstream() {
        let (listener, address) = listener().await;
        let pool = ConnectionPool::new();
        let mut others = Vec::new();
        let mut ports = Vec::new();
        for _ in 0..3 {
            let (connection, other) = pair(&listener).await;
            ports.push(port(&connection));
            pool.put(connection);
            others.push(other);
        }
        assert!(pool.take(&key("127.0.0.1:1".parse().unwrap()), |_| true).is_none());
        let moved = UpstreamKey { region: RegionIndex::new(1).expect("a number"), address: address.into() };
        assert!(pool.take(&moved, |_| true).is_none(), "the address belongs to another region now");
        for expected in ports.into_iter().rev() {
            assert_eq!(port(&pool.take(&key(address), |_| true).unwrap()), expected);
        }
        assert!(pool.take(&key(address), |_| true).is_none());
    }

    #[tokio::test]
    async fn a_connection_that_the_peer_closed_or_wrote_to_is_not_reused() {
        let (listener, address) = listener().await;
        for closes in [true, false] {
            let pool = ConnectionPool::new();
            let (connection, mut other) = pair(&listener).await;
            if closes {
                drop(other);
            } else {
                other.write_all(b"unasked").await.unwrap();
            }
            connection.stream.tcp().readable().await.unwrap();
            pool.put(connection);
            assert!(pool.take(&key(address), |_| true).is_none(), "closed: {closes}");
        }
        let (mut connection, _other) = pair(&listener).await;
        connection.buffer.extend_from_slice(b"more than the response");
        let pool = ConnectionPool::new();
        pool.put(connection);
        assert!(pool.take(&key(address), |_| true).is_none());
    }

    #[tokio::test]
    async fn expired_connections_are_removed_and_the_pool_is_bounded() {
        let (listener, address) = listener().await;
        let begin = Instant::now();
        let mut others = Vec::new();
        let mut idle = async |since| {
            let (PooledConnection { stream, peer, remote, .. }, other) = pair(&listener).await;
            others.push(other);
            IdleConnection { stream, peer, remote, since }
        };
        let (first, second) = (idle(begin).await, idle(begin + IDLE_TIMEOUT).await);
        let third = idle(begin + IDLE_TIMEOUT).await;
        let mut idle = IdleConnections {
            by_upstream: BTreeMap::new(),
            limiters: BTreeMap::new(),
            count: 0,
            swept: begin,
        };
        assert!(idle.push(key(address), first).is_empty());
        let other = key("127.0.0.1:1".parse().unwrap());
        let old = idle.push(other.clone(), second);
        assert_eq!((old.len(), idle.count), (1, 1));
        assert!(!idle.by_upstream.contains_key(&key(address)), "an unused upstream is removed");
        idle.count = IDLE_MAX;
        let old = idle.push(other, third);
        assert_eq!((old.len(), idle.count), (1, IDLE_MAX));
    }
}
