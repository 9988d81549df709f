//! An emulated wide-area link: a TCP relay that delivers late, and can be cut.
//!
//! Each direction reads, stamps what it read with the moment at which it is due, and delivers it then; so the delay is
//! that of distance and not of bandwidth, and order is kept. A link that is cut delivers nothing and closes nothing:
//! both ends see silence, as when a route is withdrawn or a cable breaks. When it heals, what was held arrives, as TCP
//! would have it after its retransmissions.
//!
//! Left out on purpose: loss, reordering and bandwidth, which TCP hides from its users but for delay; and the silence of
//! a handshake into a cut link, which a relay in user space cannot emulate, since the kernel has already answered.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Bytes that one read takes.
const READ_BYTES_MAX: usize = 64 << 10;
/// Reads under way in one direction of one connection: 64 MiB, more than the largest request or answer.
const UNDER_WAY_MAX: usize = 1024;

/// The first retransmission time-out: never less than this, and more than a round trip (RFC 6298, as Linux has it).
const RETRANSMIT_MIN: Duration = Duration::from_millis(200);
/// How often one piece is lost at most: with nine of ten lost, less than one piece in a thousand is lost as often.
const LOSSES_MAX: u32 = 6;

/// What a link does to what crosses it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weather {
    /// Nothing comes out at the region's end.
    pub cut_to: bool,
    /// Nothing comes out at the gateway's end.
    pub cut_from: bool,
    /// It is so many times as far.
    pub times: u32,
    /// And so much farther, there and back together.
    pub extra: Duration,
    /// The share of pieces that are lost at first, from 0 to below 1.
    pub lost: f64,
}

/// A direction of a link.
#[derive(Clone, Copy, Debug)]
enum Course {
    To,
    From,
}

impl Weather {
    /// Nothing but distance.
    pub(crate) const CALM: Weather =
        Weather { cut_to: false, cut_from: false, times: 1, extra: Duration::ZERO, lost: 0.0 };

    fn delivers(&self, course: Course) -> bool {
        match course {
            Course::To => !self.cut_to,
            Course::From => !self.cut_from,
        }
    }

    fn one_way(&self, one_way: Duration) -> Duration {
        one_way * self.times + self.extra / 2
    }

    /// How long a piece takes that is lost as often as `chance`, which draws from [0, 1), says.
    fn takes(&self, one_way: Duration, mut chance: impl FnMut() -> f64) -> Duration {
        let one_way = self.one_way(one_way);
        let mut wait = RETRANSMIT_MIN.max(one_way * 2);
        let mut takes = one_way;
        for _ in 0..LOSSES_MAX {
            if chance() >= self.lost {
                break;
            }
            takes += wait;
            wait *= 2;
        }
        takes
    }
}

/// The handle of a link.
#[derive(Clone)]
pub(crate) struct Link {
    weather: Arc<watch::Sender<Weather>>,
}

impl Link {
    /// A link that relays what comes to `socket` to `target`, each way after `one_way`; it lives as long as the runtime.
    pub(crate) fn open(socket: TcpListener, target: SocketAddr, one_way: Duration) -> Link {
        let weather = Arc::new(watch::Sender::new(Weather::CALM));
        tokio::spawn(accept(socket, target, one_way, weather.clone()));
        Link { weather }
    }

    /// Cuts, slows or heals it.
    pub(crate) fn set(&self, change: impl FnOnce(&mut Weather)) {
        self.weather.send_modify(change);
    }

    /// How it is.
    pub(crate) fn weather(&self) -> Weather {
        *self.weather.borrow()
    }
}

async fn accept(
    socket: TcpListener,
    target: SocketAddr,
    one_way: Duration,
    weather: Arc<watch::Sender<Weather>>,
) {
    loop {
        match socket.accept().await {
            Ok((near, _)) => {
                let weather = weather.subscribe();
                tokio::spawn(async move {
                    if let Err(error) = relay(near, target, one_way, weather).await {
                        tracing::debug!(%target, %error, "a connection over the link ended");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%target, %error, "a connection to the link could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn relay(
    near: TcpStream,
    target: SocketAddr,
    one_way: Duration,
    mut weather: watch::Receiver<Weather>,
) -> io::Result<()> {
    // The far end hears of the connection one way later, and a refusal takes its way back.
    crosses(one_way, &mut weather, Course::To).await;
    let far = match TcpStream::connect(target).await {
        Ok(far) => far,
        Err(error) => {
            crosses(one_way, &mut weather, Course::From).await;
            near.set_zero_linger()?;
            return Err(error);
        }
    };
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let there = one_direction(near_read, far_write, one_way, weather.clone(), Course::To);
    let back = one_direction(far_read, near_write, one_way, weather, Course::From);
    tokio::try_join!(there, back).map(|_| ())
}

/// Waits as long as one piece takes.
async fn crosses(one_way: Duration, weather: &mut watch::Receiver<Weather>, course: Course) {
    let takes = weather.borrow().takes(one_way, rand::random);
    tokio::time::sleep(takes).await;
    delivering(weather, course).await;
}

/// Waits until the link delivers.
async fn delivering(weather: &mut watch::Receiver<Weather>, course: Course) {
    // The sender lives as long as the link's accept loop; once it is gone nothing is delivered any more.
    if weather.wait_for(|weather| weather.delivers(course)).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Carries one direction to its end. An end of stream crosses as an end of stream, an error as a reset of both.
async fn one_direction(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    one_way: Duration,
    mut weather: watch::Receiver<Weather>,
    course: Course,
) -> io::Result<()> {
    let (queue, mut under_way) = mpsc::channel::<(Instant, io::Result<Vec<u8>>)>(UNDER_WAY_MAX);
    let sky = weather.clone();
    let reading = async move {
        loop {
            let mut chunk = Vec::with_capacity(READ_BYTES_MAX.min(16 << 10));
            let read = from.read_buf(&mut chunk).await.map(|_| chunk);
            let last = read.as_ref().map_or(true, |chunk| chunk.is_empty());
            let takes = sky.borrow().takes(one_way, rand::random);
            if queue.send((Instant::now() + takes, read)).await.is_err() || last {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, chunk)) = under_way.recv().await {
            tokio::time::sleep_until(due).await;
            delivering(&mut weather, course).await;
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

    /// An echo server behind a link.
    async fn echo(one_way: Duration) -> (Link, TcpStream) {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = server.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = server.accept().await {
                let (mut read, mut write) = stream.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut read, &mut write).await });
            }
        });
        let door = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = door.local_addr().unwrap();
        let link = Link::open(door, target, one_way);
        (link, TcpStream::connect(address).await.unwrap())
    }

    async fn round_trip(stream: &mut TcpStream, text: &[u8]) -> Vec<u8> {
        stream.write_all(text).await.unwrap();
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).await.unwrap();
        back
    }

    #[tokio::test]
    async fn what_crosses_comes_back_whole_and_not_before_its_time() {
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
    async fn a_cut_link_is_silent_and_a_healed_one_delivers_what_it_held() {
        let (link, mut stream) = echo(Duration::from_millis(1)).await;
        round_trip(&mut stream, b"before").await;
        link.set(|weather| weather.cut_to = true);
        stream.write_all(b"held").await.unwrap();
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "nothing crosses a cut link");
        link.set(|weather| *weather = Weather::CALM);
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"held");
    }

    #[tokio::test]
    async fn a_link_that_is_cut_one_way_takes_what_is_sent_and_gives_no_answer() {
        let (link, mut stream) = echo(Duration::from_millis(1)).await;
        link.set(|weather| weather.cut_from = true);
        stream.write_all(b"held").await.unwrap();
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "the answer is held");
        link.set(|weather| weather.cut_to = true);
        link.set(|weather| weather.cut_from = false);
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"held", "it had crossed before");
    }

    #[test]
    fn what_is_lost_is_late_by_time_outs_that_double() {
        let takes = |weather: Weather, one_way_ms: u64, losses: u32| {
            let mut left = losses;
            let chance = || {
                left = left.saturating_sub(1);
                if left > 0 { 0.0 } else { 0.99 }
            };
            weather.takes(Duration::from_millis(one_way_ms), chance).as_millis()
        };
        let lossy = Weather { lost: 0.5, ..Weather::CALM };
        assert_eq!(takes(Weather::CALM, 40, 5), 40);
        assert_eq!(takes(lossy, 40, 1), 40);
        assert_eq!(takes(lossy, 40, 2), 240);
        assert_eq!(takes(lossy, 40, 3), 640);
        assert_eq!(takes(lossy, 150, 2), 450, "a round trip, where that is longer");
        let limit = 40 + 200 * 63;
        assert_eq!((takes(lossy, 40, LOSSES_MAX + 1), takes(lossy, 40, LOSSES_MAX + 9)), (limit, limit));
        let farther = Weather { times: 3, extra: Duration::from_millis(10), ..Weather::CALM };
        assert_eq!(takes(farther, 40, 1), 125);
    }

    #[tokio::test]
    async fn a_far_end_that_is_gone_is_a_reset() {
        let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let door = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = door.local_addr().unwrap();
        let _link = Link::open(door, gone, Duration::from_millis(1));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let read = stream.read(&mut [0; 1]).await;
        assert!(read.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset));
    }
}
