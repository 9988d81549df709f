//! Combines the head of a response and the beginning of its body into one write.
//!
//! Pingora writes the two separately. Each write to a socket is a system call, a segment, and a wake-up of the
//! receiver; for a response of 8 KB that was a fifth of the cost of a request. Pingora's own remedy, a write buffer as
//! large as a response, copies every body and keeps its memory as long as the client keeps its connection. So small
//! writes are buffered and leave in front of the next write, by one `writev`; a flush sends what is still buffered.
//!
//! The caller must flush, as with every buffered writer; Pingora does, and so does `h2`.
//!
//! This is also where the write timeout applies. Pingora has a timeout for response bodies and none for response heads,
//! `100 Continue`, flushes or the close; a client that sends requests and reads no responses would keep its connection,
//! the request in it and that request's memory indefinitely. So a write or flush that cannot proceed fails after
//! `write_timeout`, like any broken connection.

use crate::forward_traits::forward_connection_traits;
use crate::metrics::{CloseReason, ListenerMetrics};
use async_trait::async_trait;
use pingora::protocols::{IO, Shutdown};
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, timeout};

/// Maximum number of buffered bytes. A response head has some 500 bytes; a larger write is sent on its own.
const BUFFER_BYTES_MAX: usize = 4 << 10;

/// Timeout for the close of a connection (its last bytes, of TLS the `close_notify`).
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Stream that buffers small writes, and fails writes that are blocked for too long.
#[derive(Debug)]
pub(crate) struct CoalescingStream<S> {
    stream: S,
    buffer: Vec<u8>,
    /// Maximum time that a write may be blocked.
    write_timeout: Duration,
    /// Timer of the write that is blocked.
    timer: Option<Pin<Box<Sleep>>>,
    /// A write has timed out; all further writes fail.
    timed_out: bool,
    counts: Arc<ListenerMetrics>,
}

impl<S> CoalescingStream<S> {
    /// Wraps `stream`; no write is blocked longer than `write_timeout`.
    pub(crate) fn new(
        stream: S,
        write_timeout: Duration,
        counts: Arc<ListenerMetrics>,
    ) -> CoalescingStream<S> {
        CoalescingStream { stream, buffer: Vec::new(), write_timeout, timer: None, timed_out: false, counts }
    }

    /// Applies the write timeout to the result of a write. All buffered bytes count as one write, so a client that
    /// reads one byte at a time gains no extra time.
    fn with_timeout<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        if !self.timed_out {
            let write_timeout = self.write_timeout;
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(write_timeout)));
            ready!(timer.as_mut().poll(cx));
            self.timed_out = true;
            self.counts.closed.count(CloseReason::WriteTimeout);
        }
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read the response")))
    }
}

impl<S: AsyncWrite + Unpin> CoalescingStream<S> {
    /// Writes the buffer until it is empty.
    fn poll_write_buffer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.buffer.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.buffer))?;
            self.consume(written)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Removes the first `written` bytes from the buffer.
    fn consume(&mut self, written: usize) -> io::Result<()> {
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        if written >= self.buffer.len() {
            // An idle connection holds no memory.
            self.buffer = Vec::new();
        } else {
            drop(self.buffer.drain(..written));
        }
        Ok(())
    }
}

impl<S: AsyncWrite + Unpin> CoalescingStream<S> {
    fn poll_coalesce(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.buffer.len() + bytes.len() <= BUFFER_BYTES_MAX {
            self.buffer.extend_from_slice(bytes);
            return Poll::Ready(Ok(bytes.len()));
        }
        while !self.buffer.is_empty() {
            let both = [IoSlice::new(&self.buffer), IoSlice::new(bytes)];
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &both))?;
            let buffered = self.buffer.len();
            self.consume(written)?;
            if written > buffered {
                return Poll::Ready(Ok(written - buffered));
            }
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_coalesce_vectored(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_write_buffer(cx))?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn poll_flush_all(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_buffer(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_buffer(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CoalescingStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.poll_coalesce(cx, bytes);
        self.with_timeout(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.poll_coalesce_vectored(cx, slices);
        self.with_timeout(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.poll_flush_all(cx);
        self.with_timeout(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = self.poll_close(cx);
        self.with_timeout(cx, closed)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CoalescingStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

#[async_trait]
impl<S: IO> Shutdown for CoalescingStream<S> {
    async fn shutdown(&mut self) {
        let close = async {
            // The connection may be broken; there is no error to report then.
            tokio::io::AsyncWriteExt::flush(self).await.ok();
            Shutdown::shutdown(&mut self.stream).await;
        };
        timeout(CLOSE_TIMEOUT, close).await.ok();
    }
}

forward_connection_traits!(CoalescingStream<S: IO>, stream);

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use tokio::io::AsyncWriteExt;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Accepts `room` bytes a write and records the writes; blocks after `writes_max` writes.
    struct Socket {
        room: usize,
        writes: Vec<Vec<u8>>,
        writes_max: usize,
    }

    impl Socket {
        fn new(room: usize) -> Socket {
            Socket { room, writes: Vec::new(), writes_max: usize::MAX }
        }
    }

    impl AsyncWrite for Socket {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.writes.len() == self.writes_max {
                return Poll::Pending;
            }
            let taken = bytes.len().min(self.room);
            self.writes.push(bytes[..taken].to_vec());
            Poll::Ready(Ok(taken))
        }

        fn poll_write_vectored(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            slices: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let all: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            self.poll_write(cx, &all)
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Writes the pieces to a socket that accepts `room` bytes at a time, flushes, and checks the sizes of the writes
    /// that reach it.
    async fn check(room: usize, pieces: &[usize], expected: &[usize]) {
        let mut stream = CoalescingStream::new(Socket::new(room), TIMEOUT, Arc::default());
        let mut sent = Vec::new();
        for (number, size) in pieces.iter().enumerate() {
            let piece = vec![number as u8; *size];
            stream.write_all(&piece).await.unwrap();
            sent.extend(piece);
        }
        stream.flush().await.unwrap();
        let sizes: Vec<usize> = stream.stream.writes.iter().map(Vec::len).collect();
        assert_eq!(sizes, expected, "{pieces:?} into a socket with room for {room}");
        assert_eq!(stream.stream.writes.concat(), sent, "nothing is lost, doubled or out of order");
        assert_eq!(stream.buffer.capacity(), 0, "an idle connection holds no memory");
    }

    #[tokio::test]
    async fn a_head_is_sent_with_its_body_for_every_size_of_socket_write() {
        const ALL: usize = usize::MAX;
        check(ALL, &[500, 8_192], &[8_692]).await;
        check(ALL, &[500], &[500]).await;
        check(ALL, &[500, 20], &[520]).await;
        check(ALL, &[8_192, 500], &[8_192, 500]).await;
        check(ALL, &[BUFFER_BYTES_MAX], &[BUFFER_BYTES_MAX]).await;
        check(ALL, &[1, BUFFER_BYTES_MAX], &[BUFFER_BYTES_MAX + 1]).await;
        check(ALL, &[BUFFER_BYTES_MAX + 1], &[BUFFER_BYTES_MAX + 1]).await;
        check(300, &[500, 8_192 - 200], &[[300; 28].as_slice(), &[92]].concat()).await;
        check(500, &[500, 5_000], &[500; 11]).await;
    }

    #[tokio::test]
    async fn a_socket_that_accepts_zero_bytes_is_an_error() {
        let mut stream = CoalescingStream::new(Socket::new(0), TIMEOUT, Arc::default());
        stream.write_all(b"head").await.unwrap();
        assert_eq!(stream.flush().await.unwrap_err().kind(), io::ErrorKind::WriteZero);
    }

    /// Returns a stream that accepts two bytes and then blocks.
    fn stuck() -> CoalescingStream<Socket> {
        CoalescingStream::new(Socket { writes_max: 2, ..Socket::new(1) }, SHORT, Arc::default())
    }

    const SHORT: Duration = Duration::from_millis(50);

    async fn times_out(what: &str, write: impl Future<Output = io::Result<()>>) {
        let started = Instant::now();
        let result = timeout(TIMEOUT, write).await.expect("the write times out");
        assert_eq!(result.expect_err(what).kind(), io::ErrorKind::TimedOut, "{what}");
        assert!(started.elapsed() >= SHORT, "{what}: not before the timeout");
    }

    #[tokio::test]
    async fn a_write_to_a_client_that_does_not_read_fails_after_the_timeout() {
        let (mut head, mut body, mut close) = (stuck(), stuck(), stuck());
        head.write_all(b"head").await.unwrap();
        times_out("a flush", head.flush()).await;
        // Two bytes are accepted; of the rest, one is too many for the buffer.
        times_out("a body", body.write_all(&[0; BUFFER_BYTES_MAX + 3])).await;
        close.write_all(b"head").await.unwrap();
        times_out("the close", AsyncWriteExt::shutdown(&mut close)).await;
    }

    #[tokio::test]
    async fn the_timeout_restarts_when_a_write_completes() {
        let mut stream = stuck();
        stream.write_all(b"head").await.unwrap();
        assert!(timeout(SHORT / 5, stream.flush()).await.is_err(), "the flush is blocked");
        // The client reads again, then stops again.
        stream.stream.writes_max += 2;
        stream.flush().await.unwrap();
        stream.write_all(b"head").await.unwrap();
        times_out("a flush", stream.flush()).await;
    }
}
