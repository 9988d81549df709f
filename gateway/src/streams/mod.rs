//! Exchanges with a region in HTTP/2: many at once on one connection.
//!
//! HTTP/1.1 ([`crate::plain`]) needs a connection for each request under way, and giving a request up costs its connection, with
//! a handshake over an ocean for the next one. Here a request is a stream of a connection that is open anyway: giving it up
//! is one frame (RST_STREAM), and a region is told at once that nobody waits. Which of the two is spoken is the edge's
//! configuration (`region_http`), and the region agrees to it in the TLS handshake (ALPN) or does not, and then it is
//! HTTP/1.1. In the clear nobody can agree: the region has to know. `benches/hop.rs` runs the two beside each other.
//!
//! [`gateway_core::multiplex`] decides which connection takes a request and when one is given up; [`connection`] has one and
//! the task that drives it; here they are opened, one at a time for each way, kept and left.
//!
//! Framing and flow control are those of the `h2` crate. A connection that a region is leaving (GOAWAY) takes nothing new and
//! finishes what it has; what the region says it never looked at, and what was under way on a connection that broke and had
//! worked before, is [`AttemptFailure::StaleConnection`], which costs no budget.

mod connection;
#[cfg(test)]
mod tests;

use crate::hop::{Greeted, Outward};
use crate::metrics::{HopEvent, Tally};
use crate::plain::{Plain, Way};
use crate::upstream::RequestHead;
use bytes::{Bytes, BytesMut};
pub(crate) use connection::Rest;
use connection::{Connection, Lease};
use gateway_core::multiplex::{self, ConnectionLoad, Selected};
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use h2::client::SendRequest;
use http::response::Parts;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::task::contained;
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long a connection is used: its certificates, and those that it was checked against, may have changed meanwhile.
const AGE_MAX: Duration = Duration::from_secs(600);

/// Exchanges with regions.
pub(crate) struct Streams {
    outward: Arc<Outward>,
    ways: Mutex<BTreeMap<Way, Arc<Connections>>>,
    /// What opens and what drives connections; all of it ends with this.
    tasks: Mutex<JoinSet<()>>,
    counts: Arc<Tally<HopEvent>>,
}

/// The connections that lead one way.
struct Connections {
    inner: Mutex<Inner>,
    /// How many attempts to open one have ended, and how the last did.
    opened: watch::Sender<(u64, Result<(), AttemptFailure>)>,
    counts: Arc<Tally<HopEvent>>,
}

#[derive(Default)]
struct Inner {
    /// In the order in which they were opened.
    open: Vec<Arc<Connection>>,
    opening: bool,
    /// The other side speaks HTTP/1.1 alone, or did when it was last asked.
    plain: bool,
}

/// How a request can go.
pub(crate) enum Opened {
    /// As a stream of this connection.
    Stream(Stream),
    /// Over HTTP/1.1, because the region speaks nothing else.
    Plain,
}

/// A place on a connection, on which nothing was asked yet.
pub(crate) struct Stream {
    send: SendRequest<Bytes>,
    lease: Lease,
}

impl Streams {
    pub(crate) fn over(outward: Arc<Outward>) -> Streams {
        Streams {
            outward,
            ways: Mutex::default(),
            tasks: Mutex::independent(JoinSet::new()),
            counts: Arc::default(),
        }
    }

    /// What connections have met.
    pub(crate) fn counts(&self) -> &Tally<HopEvent> {
        &self.counts
    }

    /// How many are open, and how many requests are under way on them.
    pub(crate) fn size(&self) -> (usize, usize) {
        let ways = self.ways.lock();
        let sizes = ways.values().map(|way| {
            let inner = way.lock();
            (inner.open.len(), inner.open.iter().map(|one| one.requests()).sum::<usize>())
        });
        sizes.fold((0, 0), |(open, requests), (more, of_those)| (open + more, requests + of_those))
    }

    /// A place on a connection that leads there; a connection that has to be opened may take `connect_timeout`.
    pub(crate) async fn open(
        &self,
        way: Way,
        connect_timeout: Duration,
        plain: &Arc<Plain>,
    ) -> Result<Opened, AttemptFailure> {
        let connections = self.way(way);
        loop {
            // Heard from before it is looked, so that nothing falls between the two.
            let mut opened = connections.opened.subscribe();
            let (place, open_one) = connections.place();
            if open_one {
                let opening = open_one_more(
                    connections.clone(),
                    self.outward.clone(),
                    plain.clone(),
                    way,
                    connect_timeout,
                );
                self.spawn(opening);
            }
            match place {
                Place::Here(opened) => return Ok(opened),
                Place::Full => {
                    self.counts.count(HopEvent::Full);
                    return Err(AttemptFailure::Unreachable);
                }
                Place::Later => {
                    // The sender is in `connections`, which is held here.
                    opened.changed().await.ok();
                    opened.borrow().1?;
                }
            }
        }
    }

    /// Takes a connection that was opened for HTTP/1.1 to a region that speaks HTTP/2 after all.
    pub(crate) async fn adopt(&self, way: Way, greeted: Greeted) -> Result<(), AttemptFailure> {
        let connections = self.way(way);
        let driver = connections.take(way, greeted, &self.outward).await?;
        self.spawn(driver);
        Ok(())
    }

    fn way(&self, way: Way) -> Arc<Connections> {
        let mut ways = self.ways.lock();
        if let Some(connections) = ways.get(&way) {
            return connections.clone();
        }
        // A way that nobody goes any longer is forgotten when there is a new one.
        ways.retain(|_, connections| {
            Arc::strong_count(connections) > 1 || !connections.lock().open.is_empty()
        });
        let (opened, _) = watch::channel((0, Ok(())));
        let connections = Connections { inner: Mutex::default(), opened, counts: self.counts.clone() };
        ways.entry(way).or_insert(Arc::new(connections)).clone()
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async {
            contained("region connection", task).await;
        });
    }
}

/// Where a request goes.
enum Place {
    Here(Opened),
    Later,
    Full,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// A place for one more request, and whether another connection is to be opened.
    fn place(&self) -> (Place, bool) {
        let now = Instant::now();
        let mut inner = self.lock();
        if inner.plain {
            return (Place::Here(Opened::Plain), false);
        }
        loop {
            let loads = inner
                .open
                .iter()
                .map(|one| ConnectionLoad { requests: one.requests(), unresponsive: one.is_silent() });
            let (at, open_one) = match multiplex::select(loads, inner.opening) {
                Selected::Use(at) => (at, false),
                Selected::UseAndOpen(at) => (at, true),
                Selected::OpenAndWait => {
                    inner.opening = true;
                    return (Place::Later, true);
                }
                Selected::Wait => return (Place::Later, false),
                Selected::Full => return (Place::Full, false),
            };
            // One that is too old, or that the region is leaving, finishes what it has.
            let Some(stream) = inner.open[at].stream(now, AGE_MAX) else {
                inner.open.remove(at);
                self.counts.count(HopEvent::Left);
                continue;
            };
            inner.opening |= open_one;
            return (Place::Here(Opened::Stream(stream)), open_one);
        }
    }

    /// Begins HTTP/2 on a connection; what drives it is to be run.
    async fn take(
        self: &Arc<Connections>,
        way: Way,
        greeted: Greeted,
        outward: &Arc<Outward>,
    ) -> Result<impl Future<Output = ()> + Send + use<>, AttemptFailure> {
        let begun = Connection::begin(way, greeted, outward.clone(), self.counts.clone()).await;
        let (connection, driven) = begun.map_err(|error| {
            tracing::debug!(address = %way.address, %error, "no HTTP/2 handshake");
            AttemptFailure::Unreachable
        })?;
        self.counts.count(HopEvent::Opened);
        let mut inner = self.lock();
        inner.plain = false;
        inner.open.push(connection.clone());
        drop(inner);
        // Not the connection itself: it ends when nobody can ask for anything on it any longer.
        let (connections, this) = (self.clone(), Arc::downgrade(&connection));
        Ok(async move {
            contained("region connection", driven).await;
            connections.lock().open.retain(|one| !std::ptr::eq(Arc::as_ptr(one), this.as_ptr()));
        })
    }

    fn tell(&self, outcome: Result<(), AttemptFailure>) {
        self.lock().opening = false;
        self.opened.send_modify(|(count, last)| (*count, *last) = (*count + 1, outcome));
    }
}

/// Opens a connection and drives it until it ends. Nobody's request owns this: whoever asked first may have left.
async fn open_one_more(
    connections: Arc<Connections>,
    outward: Arc<Outward>,
    plain: Arc<Plain>,
    way: Way,
    connect_timeout: Duration,
) {
    let begun = async {
        let greeted = outward.connect(way, connect_timeout).await?;
        if greeted.http2 {
            return connections.take(way, greeted, &outward).await.map(Some);
        }
        connections.counts.count(HopEvent::Plain);
        connections.lock().plain = true;
        plain.keep(way, greeted);
        Ok(None)
    };
    // Others wait for what becomes of it, whatever that is.
    let begun = contained("region connection", begun).await.unwrap_or(Err(AttemptFailure::Unreachable));
    connections.tell(begun.as_ref().map(|_| ()).map_err(|failure| *failure));
    if let Ok(Some(driver)) = begun {
        driver.await;
    }
}

impl Stream {
    /// Who is at the other end.
    pub(crate) fn peer(&self) -> Peer {
        self.lease.peer()
    }

    /// Sends a request and waits for the head of its answer; the caller bounds the time by dropping this, and the region is
    /// told so.
    pub(crate) async fn ask(self, head: &RequestHead, body: Bytes) -> Result<(Parts, Rest), AttemptFailure> {
        let Stream { mut send, lease } = self;
        let used_before = lease.has_answered();
        let begun = async {
            let bodiless = body.is_empty();
            let (answer, stream) = send.send_request(head.over_http2(), bodiless)?;
            let mut rest = connection::Asked::new(stream, lease);
            if !bodiless {
                // It is shared, not copied, and goes out as the region makes room for it.
                rest.send(body)?;
            }
            let (head, body) = answer.await?.into_parts();
            Ok::<_, h2::Error>((head, rest.answered(body)))
        };
        begun.await.map_err(|error| {
            tracing::debug!(%error, used_before, "an exchange broke off before an answer");
            // What the region says it has not looked at; and what was under way on a connection that broke.
            let unseen = error.is_remote()
                && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM));
            if used_before && (unseen || error.is_io()) {
                AttemptFailure::StaleConnection
            } else {
                AttemptFailure::Unreachable
            }
        })
    }
}

impl Rest {
    /// All of a body of this length, in one piece: without a copy if it came in one. Its last byte is not its end, which may
    /// be a frame of its own: whoever leaves before that gives an answer up that is there.
    pub(crate) async fn whole(&mut self, length: usize) -> Result<Bytes, h2::Error> {
        let Some(first) = self.chunk().await? else { return Ok(Bytes::new()) };
        if first.len() == length {
            // A body that is longer than its head says is an error of the connection.
            self.chunk().await?;
            return Ok(first);
        }
        let mut whole = BytesMut::with_capacity(length);
        whole.extend_from_slice(&first);
        while let Some(chunk) = self.chunk().await? {
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    }
}
