//! Stream wrapper that passes the bytes of an HTTP/2 connection to [`gateway_core::flood::FloodMeter`] and
//! [`gateway_core::trailers::Guard`] as they are read.
//!
//! The `h2` crate does not report how many frames it received; so this wrapper sits between it and the connection.
//! After too many frames it stops reading and signals the owner of the connection, which closes it.

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

/// Metered HTTP/2 connection.
#[derive(Debug)]
pub(super) struct Metered {
    inner: Stream,
    /// Bytes that were read before the protocol was known to be HTTP/2.
    read_before: Bytes,
    meter: FloodMeter,
    guard: Guard,
    /// Start of a header block, buffered until its end arrives.
    pending: BytesMut,
    /// Bytes of complete header blocks, ready to be read.
    released: BytesMut,
    flooded: Option<oneshot::Sender<Flood>>,
}

impl Metered {
    /// Wraps `inner`, of which `read_before` was read already. The receiver gets a message when the client floods.
    pub(super) fn new(inner: Stream, read_before: Bytes) -> (Metered, oneshot::Receiver<Flood>) {
        let (flooded, on_flood) = oneshot::channel();
        let meter = FloodMeter::new(Instant::now());
        let (guard, pending, released) = (Guard::default(), BytesMut::new(), BytesMut::new());
        (Metered { inner, read_before, meter, guard, pending, released, flooded: Some(flooded) }, on_flood)
    }
}

impl Metered {
    /// Moves the bytes of an incomplete header block out of `buffer`; the bytes after `before` are new.
    fn hold_incomplete(&mut self, buffer: &mut ReadBuf<'_>, before: usize) {
        if self.pending.is_empty() {
            let released = self.guard.scan(&mut buffer.filled_mut()[before..]);
            self.pending.extend_from_slice(&buffer.filled()[before + released..]);
            buffer.set_filled(before + released);
        } else {
            self.pending.extend_from_slice(&buffer.filled()[before..]);
            buffer.set_filled(before);
            let released = self.guard.scan(&mut self.pending);
            self.released = self.pending.split_to(released);
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
                && let Some(flooded) = self.flooded.take()
            {
                // If the receiver is dropped, the connection is being closed already.
                flooded.send(flood).ok();
            }
            self.hold_incomplete(buffer, before);
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
