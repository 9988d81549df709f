//! Stream wrapper that passes the bytes of an HTTP/2 connection to [`gateway_core::flood::FloodMeter`] and
//! [`gateway_core::trailers::Guard`] as they are read.
//!
//! The `h2` crate does not report how many frames it received; so this wrapper sits between it and the connection.
//! After too many frames it stops reading and signals the owner of the connection, which closes it.

use super::filtered::{Filtered, ReadFilter};
use bytes::{Buf, Bytes, BytesMut};
use gateway_core::flood::{Flood, FloodMeter};
use gateway_core::trailers::Guard;
use pingora::protocols::Stream;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::oneshot;

/// Filter of an HTTP/2 connection.
#[derive(Debug)]
struct FloodFilter {
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

/// Wraps a connection, of which `read_before` was read already. The receiver gets a message when the client floods.
pub(super) fn wrap(inner: Stream, read_before: Bytes) -> (Stream, oneshot::Receiver<Flood>) {
    let (flooded, on_flood) = oneshot::channel();
    let filter = FloodFilter {
        read_before,
        meter: FloodMeter::new(Instant::now()),
        guard: Guard::default(),
        pending: BytesMut::new(),
        released: BytesMut::new(),
        flooded: Some(flooded),
    };
    (Box::new(Filtered { inner, filter }), on_flood)
}

impl FloodFilter {
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

impl ReadFilter for FloodFilter {
    fn poll_read(
        &mut self,
        inner: &mut Stream,
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
                std::task::ready!(Pin::new(&mut *inner).poll_read(context, buffer))?;
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
