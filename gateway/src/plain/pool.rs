//! Connections to the next hop that wait for their next request.
//!
//! The one that was used last is used first, so that those which a quiet hour has made superfluous grow old at the front
//! and are let go. There is no task behind a waiting connection (Pingora's pool has one for each, started and stopped
//! with every request): whether the other side has closed it is looked at when it is taken, which costs nothing because
//! the reactor knows, and what is too old goes when another one comes back.

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

/// Connections kept idle, over all ways.
const IDLE_MAX: usize = 1024;
/// Connections to one address that are opened at once. A handshake is some half a millisecond of work at either end, and a
/// thousand at once are late all together: then nobody is through, everybody tries again, and a region that is well
/// cannot be reached. Over a round trip of 100 ms it is some 600 new ones a second.
pub(super) const OPENING_MAX: usize = 128;
/// How long a connection is kept idle. Shorter than the other side keeps it, so that the race in which a request meets
/// a closing connection is rare.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the old ones are looked for.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Where a connection leads. An address alone does not say: it may become that of another region, to which what is open
/// does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) region: RegionIndex,
    pub(crate) address: SocketAddr,
}

/// A connection, and what was read from it and not used yet.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) buffer: BytesMut,
    pub(super) way: Way,
    /// Who is at the other end.
    pub(super) peer: Peer,
}

impl Connection {
    pub(super) fn new(way: Way, greeted: Greeted) -> Connection {
        let Greeted { stream, peer, http2: _ } = greeted;
        Connection { stream, buffer: BytesMut::new(), way, peer }
    }
}

/// Those that wait.
pub(super) struct Pool(Mutex<Waiting>);

struct Waiting {
    /// The one that came last is at the back.
    by_way: BTreeMap<Way, VecDeque<Kept>>,
    /// Who may open one, by way; forgotten when nobody does and there is a new way.
    turns: BTreeMap<Way, Arc<Turns>>,
    count: usize,
    swept: Instant,
}

struct Kept {
    stream: Stream,
    peer: Peer,
    since: Instant,
}

/// Who may open a connection that leads one way.
pub(super) struct Turns {
    free: Semaphore,
    /// Attempts so far that nobody answered within their limit.
    in_vain: AtomicU64,
}

/// It is somebody's turn until this is dropped.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    /// Whether somebody before waited in vain while this one waited for the turn.
    pub(super) behind_one_in_vain: bool,
    _permit: SemaphorePermit<'a>,
}

impl Turns {
    /// Waits until fewer than [`OPENING_MAX`] are being opened, however long that takes.
    pub(super) async fn next(&self) -> Turn<'_> {
        let before = self.in_vain.load(Ordering::Relaxed);
        let permit = self.free.acquire().await.expect("nobody closes it");
        let behind_one_in_vain = self.in_vain.load(Ordering::Relaxed) != before;
        Turn { turns: self, behind_one_in_vain, _permit: permit }
    }
}

impl Turn<'_> {
    /// Nobody answered.
    pub(super) fn was_in_vain(self) {
        self.turns.in_vain.fetch_add(1, Ordering::Relaxed);
    }
}

impl Pool {
    pub(super) fn new() -> Pool {
        Pool(Mutex::new(Waiting {
            by_way: BTreeMap::new(),
            turns: BTreeMap::new(),
            count: 0,
            swept: Instant::now(),
        }))
    }

    /// One that leads there and is still open.
    pub(super) fn take(&self, way: Way) -> Option<Connection> {
        let now = Instant::now();
        loop {
            let Kept { mut stream, peer, since } = self.lock().pop(way)?;
            if now.saturating_duration_since(since) < IDLE_TIMEOUT && stream.is_quiet() {
                return Some(Connection { stream, buffer: BytesMut::new(), way, peer });
            }
        }
    }

    /// A connection whose answer has been read to its end. One with more in it than that is closed.
    pub(super) fn put(&self, connection: Connection) {
        let Connection { stream, buffer, way, peer } = connection;
        if buffer.is_empty() {
            let since = Instant::now();
            let old = self.lock().push(way, Kept { stream, peer, since });
            drop(old);
        }
    }

    /// Whose turn it is to open one that leads there.
    pub(super) fn turns(&self, way: Way) -> Arc<Turns> {
        let turns = &mut self.lock().turns;
        if let Some(turns) = turns.get(&way) {
            return turns.clone();
        }
        turns.retain(|_, turns| Arc::strong_count(turns) > 1);
        let begin = || Arc::new(Turns { free: Semaphore::new(OPENING_MAX), in_vain: AtomicU64::new(0) });
        turns.entry(way).or_insert_with(begin).clone()
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

    /// Keeps one more, and returns those that have to go, to be closed outside the lock.
    fn push(&mut self, way: Way, kept: Kept) -> Vec<Kept> {
        let (mut old, now) = (Vec::new(), kept.since);
        if now.saturating_duration_since(self.swept) >= SWEEP_PERIOD {
            self.swept = now;
            for waiting in self.by_way.values_mut() {
                let fresh =
                    waiting.partition_point(|kept| now.saturating_duration_since(kept.since) >= IDLE_TIMEOUT);
                old.extend(waiting.drain(..fresh));
            }
            self.by_way.retain(|_, waiting| !waiting.is_empty());
            self.count -= old.len();
        }
        if self.count >= IDLE_MAX {
            old.push(kept);
        } else {
            self.by_way.entry(way).or_default().push_back(kept);
            self.count += 1;
        }
        old
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
    async fn the_last_that_came_is_the_first_that_goes_and_only_where_it_leads() {
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
        assert!(pool.take(moved).is_none(), "the address is that of another region now");
        for expected in ports.into_iter().rev() {
            assert_eq!(port(&pool.take(way(address)).unwrap()), expected);
        }
        assert!(pool.take(way(address)).is_none());
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
            connection.stream.tcp().readable().await.unwrap();
            pool.put(connection);
            assert!(pool.take(way(address)).is_none(), "closed: {closes}");
        }
        let (mut connection, _other) = pair(&listener).await;
        connection.buffer.extend_from_slice(b"more than the answer");
        let pool = Pool::new();
        pool.put(connection);
        assert!(pool.take(way(address)).is_none());
    }

    #[tokio::test]
    async fn what_is_too_old_goes_and_what_is_too_many_is_not_kept() {
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
        let mut waiting = Waiting { by_way: BTreeMap::new(), turns: BTreeMap::new(), count: 0, swept: begin };
        assert!(waiting.push(way(address), first).is_empty());
        let elsewhere = way("127.0.0.1:1".parse().unwrap());
        let old = waiting.push(elsewhere, second);
        assert_eq!((old.len(), waiting.count), (1, 1));
        assert!(!waiting.by_way.contains_key(&way(address)), "a way that nobody uses is forgotten");
        waiting.count = IDLE_MAX;
        let old = waiting.push(elsewhere, third);
        assert_eq!((old.len(), waiting.count), (1, IDLE_MAX));
    }
}
