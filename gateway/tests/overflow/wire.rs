//! A wire to a region: as long as a real one, and what crosses it is counted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One way. Without it the far region would soon be found to be as near as the near one.
const ONE_WAY: Duration = Duration::from_millis(30);

/// Counts what crosses it, and the questions.
#[derive(Default)]
pub(crate) struct Wire {
    pub(crate) there: AtomicU64,
    pub(crate) back: AtomicU64,
    pub(crate) questions: AtomicU64,
}

impl Wire {
    /// A wire before `door`, and where it begins.
    pub(crate) async fn before(door: SocketAddr) -> (Arc<Wire>, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (wire, address) = (Arc::<Wire>::default(), socket.local_addr().unwrap());
        let crossing = wire.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = socket.accept().await {
                let far = TcpStream::connect(door).await.unwrap();
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                tokio::spawn(crossing.clone().carry(near_read, far_write, true));
                tokio::spawn(crossing.clone().carry(far_read, near_write, false));
            }
        });
        (wire, address)
    }

    async fn carry(
        self: Arc<Wire>,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        there: bool,
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            let chunk = &buffer[..read];
            if there {
                let begins = |window: &[u8]| window == b"POST /spoke/v1/exchange";
                let questions = chunk.windows(23).filter(|window| begins(window)).count();
                self.questions.fetch_add(questions as u64, Ordering::SeqCst);
            }
            let counted = if there { &self.there } else { &self.back };
            counted.fetch_add(read as u64, Ordering::SeqCst);
            tokio::time::sleep(ONE_WAY).await;
            if to.write_all(chunk).await.is_err() {
                return;
            }
        }
    }
}
