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

/// Whether a link delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// It delivers.
    Up,
    /// It holds everything.
    Cut,
}

/// The handle of a link.
#[derive(Clone)]
pub(crate) struct Link {
    state: Arc<watch::Sender<LinkState>>,
}

impl Link {
    /// A link that relays what comes to `socket` to `target`, each way after `one_way`; it lives as long as the runtime.
    pub(crate) fn open(socket: TcpListener, target: SocketAddr, one_way: Duration) -> Link {
        let state = Arc::new(watch::Sender::new(LinkState::Up));
        tokio::spawn(accept(socket, target, one_way, state.clone()));
        Link { state }
    }

    /// Cuts or heals it.
    pub(crate) fn set(&self, state: LinkState) {
        self.state.send_replace(state);
    }

    /// Whether it delivers.
    pub(crate) fn state(&self) -> LinkState {
        *self.state.borrow()
    }
}

async fn accept(
    socket: TcpListener,
    target: SocketAddr,
    one_way: Duration,
    state: Arc<watch::Sender<LinkState>>,
) {
    loop {
        match socket.accept().await {
            Ok((near, _)) => {
                let state = state.subscribe();
                tokio::spawn(async move {
                    if let Err(error) = relay(near, target, one_way, state).await {
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
    mut state: watch::Receiver<LinkState>,
) -> io::Result<()> {
    // The far end hears of the connection one way later, and a refusal takes its way back.
    tokio::time::sleep(one_way).await;
    delivering(&mut state).await;
    let far = match TcpStream::connect(target).await {
        Ok(far) => far,
        Err(error) => {
            tokio::time::sleep(one_way).await;
            delivering(&mut state).await;
            near.set_zero_linger()?;
            return Err(error);
        }
    };
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let there = one_direction(near_read, far_write, one_way, state.clone());
    let back = one_direction(far_read, near_write, one_way, state);
    tokio::try_join!(there, back).map(|_| ())
}

/// Waits until the link delivers.
async fn delivering(state: &mut watch::Receiver<LinkState>) {
    // The sender lives as long as the link's accept loop; once it is gone nothing is delivered any more.
    if state.wait_for(|state| *state == LinkState::Up).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Carries one direction to its end. An end of stream crosses as an end of stream, an error as a reset of both.
async fn one_direction(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    one_way: Duration,
    mut state: watch::Receiver<LinkState>,
) -> io::Result<()> {
    let (queue, mut under_way) = mpsc::channel::<(Instant, io::Result<Vec<u8>>)>(UNDER_WAY_MAX);
    let reading = async move {
        loop {
            let mut chunk = Vec::with_capacity(READ_BYTES_MAX.min(16 << 10));
            let read = from.read_buf(&mut chunk).await.map(|_| chunk);
            let last = read.as_ref().map_or(true, |chunk| chunk.is_empty());
            if queue.send((Instant::now() + one_way, read)).await.is_err() || last {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, chunk)) = under_way.recv().await {
            tokio::time::sleep_until(due).await;
            delivering(&mut state).await;
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
        link.set(LinkState::Cut);
        stream.write_all(b"held").await.unwrap();
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "nothing crosses a cut link");
        link.set(LinkState::Up);
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"held");
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
