//! Link to a region with the latency of a real one, which counts the traffic.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One-way latency. Without it the far region would soon be measured as near as the near one.
const ONE_WAY: Duration = Duration::from_millis(30);

/// Traffic in both directions.
#[derive(Default)]
pub(crate) struct Wire {
    pub(crate) there: Crossed,
    pub(crate) back: Crossed,
}

/// Traffic in one direction.
#[derive(Default)]
pub(crate) struct Crossed {
    bytes: AtomicU64,
    /// Number of requests, or responses.
    messages: AtomicU64,
}

impl Crossed {
    pub(crate) fn counted(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::SeqCst), self.messages.load(Ordering::SeqCst))
    }

    /// Copies one connection; a message is recognized by its first bytes.
    async fn carry(
        &self,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        begins: &[u8],
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            let chunk = &buffer[..read];
            let messages = chunk.windows(begins.len()).filter(|window| *window == begins).count();
            self.messages.fetch_add(messages as u64, Ordering::SeqCst);
            self.bytes.fetch_add(read as u64, Ordering::SeqCst);
            tokio::time::sleep(ONE_WAY).await;
            if to.write_all(chunk).await.is_err() {
                return;
            }
        }
    }
}

impl Wire {
    /// Creates a link before `door`; returns its address.
    pub(crate) async fn before(door: SocketAddr) -> (Arc<Wire>, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (wire, address) = (Arc::<Wire>::default(), socket.local_addr().unwrap());
        let crossing = wire.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = socket.accept().await {
                let far = TcpStream::connect(door).await.unwrap();
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                let (there, back) = (crossing.clone(), crossing.clone());
                tokio::spawn(async move { there.there.carry(near_read, far_write, b"POST /").await });
                tokio::spawn(async move { back.back.carry(far_read, near_write, b"HTTP/1.1 200").await });
            }
        });
        (wire, address)
    }
}
