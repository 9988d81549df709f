//! Link to a region with the latency of a real one, which counts the traffic.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Bytes that each message of an exchange has once.
const MESSAGE: &[u8] = b"\"sequence\":";
/// One-way latency. Without it the far region would soon be measured as near as the near one.
const ONE_WAY: Duration = Duration::from_millis(30);

/// Traffic in both directions.
#[derive(Default)]
pub(crate) struct CountingLink {
    pub(crate) requests: TrafficCounter,
    pub(crate) responses: TrafficCounter,
}

/// Traffic in one direction.
#[derive(Default)]
pub(crate) struct TrafficCounter {
    bytes: AtomicU64,
    /// Number of requests, or responses.
    messages: AtomicU64,
}

impl TrafficCounter {
    pub(crate) fn counted(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::SeqCst), self.messages.load(Ordering::SeqCst))
    }

    /// Copies one connection; a message is recognized by bytes that it has once.
    async fn copy(
        &self,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        contained: &[u8],
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            let chunk = &buffer[..read];
            let messages = chunk.windows(contained.len()).filter(|window| *window == contained).count();
            self.messages.fetch_add(messages as u64, Ordering::SeqCst);
            self.bytes.fetch_add(read as u64, Ordering::SeqCst);
            tokio::time::sleep(ONE_WAY).await;
            if to.write_all(chunk).await.is_err() {
                return;
            }
        }
    }
}

impl CountingLink {
    /// Starts a link to `target`; returns the address that it listens on.
    pub(crate) async fn start(target: SocketAddr) -> (Arc<CountingLink>, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (link, address) = (Arc::<CountingLink>::default(), socket.local_addr().unwrap());
        let shared = link.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = socket.accept().await {
                let far = TcpStream::connect(target).await.unwrap();
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                let (to_region, to_gateway) = (shared.clone(), shared.clone());
                tokio::spawn(async move { to_region.requests.copy(near_read, far_write, MESSAGE).await });
                tokio::spawn(async move { to_gateway.responses.copy(far_read, near_write, MESSAGE).await });
            }
        });
        (link, address)
    }
}
