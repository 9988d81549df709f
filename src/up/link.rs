//! Emulated wide-area link: a TCP relay with a delay, which can be cut.
//!
//! Each direction reads data, timestamps it with its delivery time, and writes it then, so that the delay is that of
//! distance and not of bandwidth, and order is kept. A cut link delivers nothing and closes nothing: both ends observe
//! silence, as when a route is withdrawn or a cable breaks. When it heals, the held data is delivered, as by TCP's
//! retransmissions.
//!
//! Not emulated: reordering and bandwidth, which TCP hides except for delay, and an unanswered handshake into a
//! cut link, which a relay in user space cannot emulate, since the kernel has already accepted the connection. Loss is
//! emulated as the delay of retransmissions.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Maximum bytes of one read.
const READ_BYTES_MAX: usize = 64 << 10;
/// Maximum reads in flight in one direction of one connection: 64 MiB, more than the largest request or response.
const IN_FLIGHT_MAX: usize = 1024;

/// Minimum retransmission timeout; it is also at least a round trip (RFC 6298, as in Linux).
const RETRANSMIT_MIN: Duration = Duration::from_millis(200);
/// Maximum losses of one chunk: at the maximum loss rate of 90 %, about half of the chunks reach it.
const LOSSES_MAX: u32 = 6;

/// Conditions of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinkConditions {
    /// The direction to the region is cut.
    pub cut_to: bool,
    /// The direction from the region is cut.
    pub cut_from: bool,
    /// Factor of the delay.
    pub times: u32,
    /// Additional round-trip delay.
    pub extra: Duration,
    /// Probability that a chunk is lost, from 0 to below 1.
    pub lost: f64,
}

/// Direction of a link.
#[derive(Clone, Copy, Debug)]
enum Direction {
    To,
    From,
}

impl LinkConditions {
    /// Delay of distance only.
    pub(crate) const NORMAL: LinkConditions =
        LinkConditions { cut_to: false, cut_from: false, times: 1, extra: Duration::ZERO, lost: 0.0 };

    fn delivers(&self, direction: Direction) -> bool {
        match direction {
            Direction::To => !self.cut_to,
            Direction::From => !self.cut_from,
        }
    }

    fn one_way(&self, one_way: Duration) -> Duration {
        one_way * self.times + self.extra / 2
    }

    /// Returns the delivery delay of a chunk. It is lost once per draw of `chance`, from [0, 1), that is below the loss rate.
    fn delay(&self, one_way: Duration, mut chance: impl FnMut() -> f64) -> Duration {
        let one_way = self.one_way(one_way);
        let mut retransmit_timeout = RETRANSMIT_MIN.max(one_way * 2);
        let mut delay = one_way;
        for _ in 0..LOSSES_MAX {
            if chance() >= self.lost {
                break;
            }
            delay += retransmit_timeout;
            retransmit_timeout *= 2;
        }
        delay
    }
}

/// One-way delays of a link, by the gateway from which a connection comes. A relay in front of each gateway would need as
/// many addresses of each spoke, but a spoke has one in the route table; so the link distinguishes gateways by their local address.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkDelays {
    /// Delay of connections from any other address.
    pub other: Duration,
    /// Delay by local address of a gateway.
    pub by_source: BTreeMap<IpAddr, Duration>,
}

impl LinkDelays {
    pub(super) fn one_way(&self, source: IpAddr) -> Duration {
        self.by_source.get(&source).copied().unwrap_or(self.other)
    }
}

/// Handle of an emulated link.
#[derive(Clone)]
pub(crate) struct EmulatedLink {
    conditions: Arc<watch::Sender<LinkConditions>>,
}

impl EmulatedLink {
    /// Opens a link from `socket` to `target` with these delays in each direction. It lives as long as the runtime.
    pub(crate) fn open(socket: TcpListener, target: SocketAddr, delays: LinkDelays) -> EmulatedLink {
        let conditions = Arc::new(watch::Sender::new(LinkConditions::NORMAL));
        tokio::spawn(accept(socket, target, delays, conditions.clone()));
        EmulatedLink { conditions }
    }

    /// Changes the conditions.
    pub(crate) fn set(&self, change: impl FnOnce(&mut LinkConditions)) {
        self.conditions.send_modify(change);
    }

    /// Returns the current conditions.
    pub(crate) fn conditions(&self) -> LinkConditions {
        *self.conditions.borrow()
    }
}

async fn accept(
    socket: TcpListener,
    target: SocketAddr,
    delays: LinkDelays,
    conditions: Arc<watch::Sender<LinkConditions>>,
) {
    loop {
        match socket.accept().await {
            Ok((near, source)) => {
                let one_way = delays.one_way(source.ip());
                let conditions = conditions.subscribe();
                tokio::spawn(async move {
                    if let Err(error) = relay(near, target, one_way, conditions).await {
                        // A connection over an emulated link ended with an error.
                        tracing::debug!(%target, %error, "link connection ended");
                    }
                });
            }
            Err(error) => {
                // The emulator of a link could not accept a connection, and accepts again after a pause. Check the
                // limit of open files.
                tracing::warn!(%target, %error, "failed to accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn relay(
    near: TcpStream,
    target: SocketAddr,
    one_way: Duration,
    mut conditions: watch::Receiver<LinkConditions>,
) -> io::Result<()> {
    // The connection reaches the far end after one delay, and a refusal takes another to return.
    cross(one_way, &mut conditions, Direction::To).await;
    let far = match TcpStream::connect(target).await {
        Ok(far) => far,
        Err(error) => {
            cross(one_way, &mut conditions, Direction::From).await;
            near.set_zero_linger()?;
            return Err(error);
        }
    };
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let forward = one_direction(near_read, far_write, one_way, conditions.clone(), Direction::To);
    let backward = one_direction(far_read, near_write, one_way, conditions, Direction::From);
    tokio::try_join!(forward, backward).map(|_| ())
}

/// Waits for the delay of one chunk.
async fn cross(one_way: Duration, conditions: &mut watch::Receiver<LinkConditions>, direction: Direction) {
    let delay = conditions.borrow().delay(one_way, rand::random);
    tokio::time::sleep(delay).await;
    until_delivering(conditions, direction).await;
}

/// Waits until the direction is not cut.
async fn until_delivering(conditions: &mut watch::Receiver<LinkConditions>, direction: Direction) {
    // The sender lives as long as the link's accept loop; after its end nothing is delivered.
    if conditions.wait_for(|conditions| conditions.delivers(direction)).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Relays one direction until its end. An end of stream is relayed as such, an error as a reset of both directions.
async fn one_direction(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    one_way: Duration,
    mut conditions: watch::Receiver<LinkConditions>,
    direction: Direction,
) -> io::Result<()> {
    let (queue, mut in_flight) = mpsc::channel::<(Instant, io::Result<Vec<u8>>)>(IN_FLIGHT_MAX);
    let reader_conditions = conditions.clone();
    let reading = async move {
        loop {
            let mut chunk = Vec::with_capacity(READ_BYTES_MAX.min(16 << 10));
            let read = from.read_buf(&mut chunk).await.map(|_| chunk);
            let last = read.as_ref().map_or(true, |chunk| chunk.is_empty());
            let delay = reader_conditions.borrow().delay(one_way, rand::random);
            if queue.send((Instant::now() + delay, read)).await.is_err() || last {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, chunk)) = in_flight.recv().await {
            tokio::time::sleep_until(due).await;
            until_delivering(&mut conditions, direction).await;
            let chunk = chunk?;
            if chunk.is_empty() {
                return to.shutdown().await;
            }
            to.write_all(&chunk).await?;
        }
        Ok(())
    };
    let ((), written) = tokio::join!(reading, writing);
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(one_way: Duration) -> LinkDelays {
        LinkDelays { other: one_way, ..LinkDelays::default() }
    }

    /// Starts an echo server behind a link, and connects to it.
    async fn echo(one_way: Duration) -> (EmulatedLink, TcpStream) {
        let (link, address) = echo_server(delays(one_way)).await;
        (link, TcpStream::connect(address).await.unwrap())
    }

    async fn echo_server(delays: LinkDelays) -> (EmulatedLink, SocketAddr) {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = server.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = server.accept().await {
                let (mut read, mut write) = stream.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut read, &mut write).await });
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (EmulatedLink::open(listener, target, delays), address)
    }

    async fn round_trip(stream: &mut TcpStream, text: &[u8]) -> Vec<u8> {
        stream.write_all(text).await.unwrap();
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).await.unwrap();
        back
    }

    #[tokio::test]
    async fn data_is_delivered_complete_and_after_the_delay() {
        let (_link, mut stream) = echo(Duration::from_millis(20)).await;
        let begun = Instant::now();
        assert_eq!(round_trip(&mut stream, b"hello").await, b"hello");
        assert!(begun.elapsed() >= Duration::from_millis(40), "{:?}", begun.elapsed());
        let large: Vec<u8> = (0..300_000u32).map(|at| at as u8).collect();
        let (mut read, mut write) = stream.into_split();
        let sent = large.clone();
        let writer = tokio::spawn(async move { write.write_all(&sent).await });
        let mut back = vec![0; large.len()];
        read.read_exact(&mut back).await.unwrap();
        writer.await.unwrap().unwrap();
        assert!(back == large);
    }

    #[tokio::test]
    async fn a_connection_has_the_delay_of_the_gateway_from_which_it_comes() {
        let far = IpAddr::from([127, 0, 0, 2]);
        let by_source = [(far, Duration::from_millis(60))].into();
        let (_link, address) = echo_server(LinkDelays { other: Duration::from_millis(1), by_source }).await;
        let mut near_stream = TcpStream::connect(address).await.unwrap();
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(far, 0)).unwrap();
        let mut far_stream = socket.connect(address).await.unwrap();
        // The fastest of several, because the machine may be busy.
        let mut fastest = [Duration::MAX; 2];
        for _ in 0..10 {
            for (stream, fastest) in [&mut near_stream, &mut far_stream].into_iter().zip(&mut fastest) {
                let begun = Instant::now();
                round_trip(stream, b"hello").await;
                *fastest = begun.elapsed().min(*fastest);
            }
        }
        assert!(
            fastest[0] < Duration::from_millis(60) && fastest[1] >= Duration::from_millis(120),
            "{fastest:?}"
        );
    }

    #[tokio::test]
    async fn a_cut_link_is_silent_and_a_healed_one_delivers_the_held_data() {
        let (link, mut stream) = echo(Duration::from_millis(1)).await;
        round_trip(&mut stream, b"before").await;
        link.set(|conditions| conditions.cut_to = true);
        stream.write_all(b"held").await.unwrap();
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "nothing crosses a cut link");
        link.set(|conditions| *conditions = LinkConditions::NORMAL);
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"held");
    }

    #[tokio::test]
    async fn a_link_cut_in_one_direction_delivers_requests_and_holds_responses() {
        let (link, mut stream) = echo(Duration::from_millis(1)).await;
        link.set(|conditions| conditions.cut_from = true);
        stream.write_all(b"held").await.unwrap();
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "the response is held");
        link.set(|conditions| conditions.cut_to = true);
        link.set(|conditions| conditions.cut_from = false);
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"held", "the request had been delivered before");
    }

    #[test]
    fn a_lost_chunk_is_delayed_by_doubling_retransmission_timeouts() {
        let delay = |conditions: LinkConditions, one_way_ms: u64, losses: u32| {
            let mut left = losses;
            let chance = || {
                left = left.saturating_sub(1);
                if left > 0 { 0.0 } else { 0.99 }
            };
            conditions.delay(Duration::from_millis(one_way_ms), chance).as_millis()
        };
        let lossy = LinkConditions { lost: 0.5, ..LinkConditions::NORMAL };
        assert_eq!(delay(LinkConditions::NORMAL, 40, 5), 40);
        assert_eq!(delay(lossy, 40, 1), 40);
        assert_eq!(delay(lossy, 40, 2), 240);
        assert_eq!(delay(lossy, 40, 3), 640);
        assert_eq!(delay(lossy, 150, 2), 450, "the timeout is at least a round trip");
        let limit = 40 + 200 * 63;
        assert_eq!((delay(lossy, 40, LOSSES_MAX + 1), delay(lossy, 40, LOSSES_MAX + 9)), (limit, limit));
        let farther = LinkConditions { times: 3, extra: Duration::from_millis(10), ..LinkConditions::NORMAL };
        assert_eq!(delay(farther, 40, 1), 125);
    }

    #[tokio::test]
    async fn a_refused_connection_is_relayed_as_a_reset() {
        let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let _link = EmulatedLink::open(listener, gone, delays(Duration::from_millis(1)));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let read = stream.read(&mut [0; 1]).await;
        assert!(read.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset));
    }
}
