//! Open connection of an authenticated peer, which ends when the certificate of the peer is revoked.

use crate::revocation::ConnectionGuard;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Stream with the registration of its connection. Costs one atomic read beside each call of the stream.
#[derive(Debug)]
pub struct GuardedStream<S> {
    stream: S,
    guard: ConnectionGuard,
}

impl<S> GuardedStream<S> {
    /// Puts a connection under a guard.
    pub fn new(stream: S, guard: ConnectionGuard) -> GuardedStream<S> {
        GuardedStream { stream, guard }
    }

    /// Returns the stream.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Returns the stream, mutable.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Returns whether the certificate of the peer has been revoked.
    pub fn is_revoked(&self) -> bool {
        self.guard.is_revoked()
    }
}

fn revoked() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the certificate of the peer was revoked")
}

impl<S: AsyncRead + Unpin> AsyncRead for GuardedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.guard.is_revoked() {
            return Poll::Ready(Err(revoked()));
        }
        if let Poll::Ready(read) = Pin::new(&mut this.stream).poll_read(cx, into) {
            return Poll::Ready(read);
        }
        this.guard.wakes_reader(cx.waker());
        if this.guard.is_revoked() { Poll::Ready(Err(revoked())) } else { Poll::Pending }
    }
}

impl<S: AsyncWrite + Unpin> GuardedStream<S> {
    fn poll_writing<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.guard.is_revoked() {
            return Poll::Ready(Err(revoked()));
        }
        if let Poll::Ready(written) = poll(Pin::new(&mut self.stream), cx) {
            return Poll::Ready(written);
        }
        self.guard.wakes_writer(cx.waker());
        if self.guard.is_revoked() { Poll::Ready(Err(revoked())) } else { Poll::Pending }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuardedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_writing(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_writing(cx, |stream, cx| stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_writing(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The connection may also be closed after a revocation.
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        Poll::Ready(Ok(()))
    }
}
