//! Shows [`gateway_core::flood::FloodMeter`] and [`gateway_core::trailers::Guard`] the bytes of an HTTP/2 connection as they are
//! read.
//!
//! The protocol library does not tell how many frames it was sent; so this stands between it and the connection. Once
//! there were too many it reads nothing more and rings: whoever owns the connection ends it.

use async_trait::async_trait;
use bytes::{Buf, Bytes, BytesMut};
use gateway_core::flood::{Flood, FloodMeter};
use gateway_core::trailers::Guard;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType,
};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

#[derive(Debug)]
pub(super) struct Metered {
    inner: Stream,
    /// What was read before it was known that this is HTTP/2.
    read_before: Bytes,
    meter: FloodMeter,
    guard: Guard,
    /// The beginning of a header block, which waits for its end.
    held: BytesMut,
    /// What was held and may be read.
    released: BytesMut,
    flooded: Option<oneshot::Sender<Flood>>,
}

impl Metered {
    /// Of which `read_before` was read already; with the bell that rings when the client floods.
    pub(super) fn new(inner: Stream, read_before: Bytes) -> (Metered, oneshot::Receiver<Flood>) {
        let (flooded, bell) = oneshot::channel();
        let meter = FloodMeter::new(Instant::now());
        let (guard, held, released) = (Guard::default(), BytesMut::new(), BytesMut::new());
        (Metered { inner, read_before, meter, guard, held, released, flooded: Some(flooded) }, bell)
    }
}

impl Metered {
    /// Takes out of `buffer` what has to wait for the end of its header block, from what was read behind `before`.
    fn hold_back(&mut self, buffer: &mut ReadBuf<'_>, before: usize) {
        if self.held.is_empty() {
            let released = self.guard.scan(&mut buffer.filled_mut()[before..]);
            self.held.extend_from_slice(&buffer.filled()[before + released..]);
            buffer.set_filled(before + released);
        } else {
            self.held.extend_from_slice(&buffer.filled()[before..]);
            buffer.set_filled(before);
            let released = self.guard.scan(&mut self.held);
            self.released = self.held.split_to(released);
        }
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        loop {
            if !self.released.is_empty() {
                let now = self.released.len().min(buffer.remaining());
                buffer.put_slice(&self.released[..now]);
                self.released.advance(now);
                return Poll::Ready(Ok(()));
            }
            if self.flooded.is_none() {
                return Poll::Pending;
            }
            if self.read_before.is_empty() {
                std::task::ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
            } else {
                let now = self.read_before.len().min(buffer.remaining());
                buffer.put_slice(&self.read_before.split_to(now));
            }
            if buffer.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            if let Err(flood) = self.meter.read(&buffer.filled()[before..], Instant::now())
                && let Some(bell) = self.flooded.take()
            {
                // Whoever does not listen any longer is ending the connection already.
                bell.send(flood).ok();
            }
            self.hold_back(buffer, before);
            if buffer.filled().len() > before {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[async_trait]
impl Shutdown for Metered {
    async fn shutdown(&mut self) {
        self.inner.shutdown().await;
    }
}

impl UniqueID for Metered {
    fn id(&self) -> UniqueIDType {
        self.inner.id()
    }
}

impl Ssl for Metered {}

impl Peek for Metered {}

impl GetTimingDigest for Metered {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_timing_digest()
    }
}

impl GetProxyDigest for Metered {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_proxy_digest()
    }
}

impl GetSocketDigest for Metered {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_socket_digest()
    }
}
