//! Puts the head of an answer and the beginning of its body into one write.
//!
//! Pingora writes the two apart. Each write to a socket is a system call, a segment, and a wake-up of whoever reads; on
//! an answer of 8 KB that was a fifth of what a request costs. Its own remedy, a write buffer as large as an answer,
//! copies every body and keeps its memory for as long as a client keeps its connection. So what is small is held, and
//! goes out in front of what follows it, by one `writev`; a flush sends what nothing followed.
//!
//! Whoever writes must flush, as with every buffered writer; Pingora does, and so does the `h2` below it.
//!
//! It is also where a client that does not read is given up. Pingora has a timeout for the bodies of answers and none for
//! their heads, for `100 Continue`, for a flush or for the close; a client that asks and asks and reads nothing would keep
//! its connection, the request in it and that request's room for as long as it likes. So a write or a flush that has to
//! wait is given a time, after which it is an error like any broken connection.

use crate::metrics::{Closed, ListenerMetrics};
use async_trait::async_trait;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::tls::{SslDigest, TlsRef};
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, IO, Peek, Shutdown, SocketDigest, Ssl,
    TimingDigest, UniqueID, UniqueIDType,
};
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, timeout};

/// What is held at most. The head of an answer has some 500 bytes; what is larger is worth a write of its own.
const HELD_BYTES_MAX: usize = 4 << 10;

/// How long the last words of a connection may take (of TLS its `close_notify`): nobody waits for them.
const GOODBYE: Duration = Duration::from_secs(1);

/// A stream whose small writes wait for what follows them, and none for ever.
#[derive(Debug)]
pub(crate) struct Gathered<S> {
    stream: S,
    held: Vec<u8>,
    /// How long a write may wait.
    patience: Duration,
    /// Runs while one does.
    alarm: Option<Pin<Box<Sleep>>>,
    /// One has waited for too long: nothing else does.
    given_up: bool,
    counts: Arc<ListenerMetrics>,
}

impl<S> Gathered<S> {
    /// In which no write waits longer than `patience`.
    pub(crate) fn new(stream: S, patience: Duration, counts: Arc<ListenerMetrics>) -> Gathered<S> {
        Gathered { stream, held: Vec::new(), patience, alarm: None, given_up: false, counts }
    }

    /// What became of a write: one that waits does so until the alarm. What is held counts as one write, so that a client
    /// which takes a byte at a time gains nothing.
    fn in_time<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.alarm = None;
            return written;
        }
        if !self.given_up {
            let patience = self.patience;
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
            ready!(alarm.as_mut().poll(cx));
            self.given_up = true;
            self.counts.closed.count(Closed::DoesNotRead);
        }
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<S: AsyncWrite + Unpin> Gathered<S> {
    /// Writes what is held until nothing is.
    fn poll_let_go(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.held.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.held))?;
            self.went_out(written)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Of what is held, `written` bytes are gone.
    fn went_out(&mut self, written: usize) -> io::Result<()> {
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        if written >= self.held.len() {
            // An idle connection holds no memory.
            self.held = Vec::new();
        } else {
            drop(self.held.drain(..written));
        }
        Ok(())
    }
}

impl<S: AsyncWrite + Unpin> Gathered<S> {
    fn poll_gather(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.held.len() + bytes.len() <= HELD_BYTES_MAX {
            self.held.extend_from_slice(bytes);
            return Poll::Ready(Ok(bytes.len()));
        }
        while !self.held.is_empty() {
            let both = [IoSlice::new(&self.held), IoSlice::new(bytes)];
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &both))?;
            let held = self.held.len();
            self.went_out(written)?;
            if written > held {
                return Poll::Ready(Ok(written - held));
            }
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_gather_vectored(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_let_go(cx))?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn poll_flush_all(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_let_go(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_let_go(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.poll_gather(cx, bytes);
        self.in_time(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.poll_gather_vectored(cx, slices);
        self.in_time(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.poll_flush_all(cx);
        self.in_time(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = self.poll_close(cx);
        self.in_time(cx, closed)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

#[async_trait]
impl<S: IO> Shutdown for Gathered<S> {
    async fn shutdown(&mut self) {
        let last_words = async {
            // Whoever shuts a broken connection down has nobody to tell.
            tokio::io::AsyncWriteExt::flush(self).await.ok();
            Shutdown::shutdown(&mut self.stream).await;
        };
        timeout(GOODBYE, last_words).await.ok();
    }
}

impl<S: IO> UniqueID for Gathered<S> {
    fn id(&self) -> UniqueIDType {
        self.stream.id()
    }
}

impl<S: IO> Ssl for Gathered<S> {
    fn get_ssl(&self) -> Option<&TlsRef> {
        self.stream.get_ssl()
    }

    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.stream.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.stream.selected_alpn_proto()
    }
}

impl<S: IO> GetTimingDigest for Gathered<S> {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.stream.get_timing_digest()
    }

    fn get_read_pending_time(&self) -> Duration {
        self.stream.get_read_pending_time()
    }

    fn get_write_pending_time(&self) -> Duration {
        self.stream.get_write_pending_time()
    }
}

impl<S: IO> GetProxyDigest for Gathered<S> {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.stream.get_proxy_digest()
    }

    fn set_proxy_digest(&mut self, digest: ProxyDigest) {
        self.stream.set_proxy_digest(digest);
    }
}

impl<S: IO> GetSocketDigest for Gathered<S> {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.stream.get_socket_digest()
    }

    fn set_socket_digest(&mut self, digest: SocketDigest) {
        self.stream.set_socket_digest(digest);
    }
}

#[async_trait]
impl<S: IO> Peek for Gathered<S> {
    async fn try_peek(&mut self, into: &mut [u8]) -> io::Result<bool> {
        self.stream.try_peek(into).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use tokio::io::AsyncWriteExt;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Takes so many bytes a write and remembers the writes; and takes none any more after so many.
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

    /// Writes the pieces to a socket that takes `room` at a time, then flushes; the sizes of the writes that reach it.
    async fn check(room: usize, pieces: &[usize], expected: &[usize]) {
        let mut gathered = Gathered::new(Socket::new(room), PATIENCE, Arc::default());
        let mut sent = Vec::new();
        for (number, size) in pieces.iter().enumerate() {
            let piece = vec![number as u8; *size];
            gathered.write_all(&piece).await.unwrap();
            sent.extend(piece);
        }
        gathered.flush().await.unwrap();
        let sizes: Vec<usize> = gathered.stream.writes.iter().map(Vec::len).collect();
        assert_eq!(sizes, expected, "{pieces:?} into a socket with room for {room}");
        assert_eq!(gathered.stream.writes.concat(), sent, "nothing is lost, doubled or out of order");
        assert_eq!(gathered.held.capacity(), 0, "an idle connection holds no memory");
    }

    #[tokio::test]
    async fn a_head_goes_out_with_its_body_whatever_the_socket_takes_at_a_time() {
        const ALL: usize = usize::MAX;
        check(ALL, &[500, 8_192], &[8_692]).await;
        check(ALL, &[500], &[500]).await;
        check(ALL, &[500, 20], &[520]).await;
        check(ALL, &[8_192, 500], &[8_192, 500]).await;
        check(ALL, &[HELD_BYTES_MAX], &[HELD_BYTES_MAX]).await;
        check(ALL, &[1, HELD_BYTES_MAX], &[HELD_BYTES_MAX + 1]).await;
        check(ALL, &[HELD_BYTES_MAX + 1], &[HELD_BYTES_MAX + 1]).await;
        check(300, &[500, 8_192 - 200], &[[300; 28].as_slice(), &[92]].concat()).await;
        check(500, &[500, 5_000], &[500; 11]).await;
    }

    #[tokio::test]
    async fn a_socket_that_takes_nothing_more_is_an_error_and_no_loop() {
        let mut gathered = Gathered::new(Socket::new(0), PATIENCE, Arc::default());
        gathered.write_all(b"head").await.unwrap();
        assert_eq!(gathered.flush().await.unwrap_err().kind(), io::ErrorKind::WriteZero);
    }

    /// A stream that takes two bytes and then nothing.
    fn stuck() -> Gathered<Socket> {
        Gathered::new(Socket { writes_max: 2, ..Socket::new(1) }, SHORT, Arc::default())
    }

    const SHORT: Duration = Duration::from_millis(50);

    async fn is_given_up(what: &str, write: impl Future<Output = io::Result<()>>) {
        let begun = Instant::now();
        let given_up = timeout(PATIENCE, write).await.expect("it does not wait for ever");
        assert_eq!(given_up.expect_err(what).kind(), io::ErrorKind::TimedOut, "{what}");
        assert!(begun.elapsed() >= SHORT, "{what}: not before its time");
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_given_up_after_its_time_and_not_before() {
        let (mut head, mut body, mut close) = (stuck(), stuck(), stuck());
        head.write_all(b"head").await.unwrap();
        is_given_up("a flush", head.flush()).await;
        // Two bytes are taken, and of what is left one is too many to be held.
        is_given_up("a body", body.write_all(&[0; HELD_BYTES_MAX + 3])).await;
        close.write_all(b"head").await.unwrap();
        is_given_up("the close", AsyncWriteExt::shutdown(&mut close)).await;
    }

    #[tokio::test]
    async fn the_time_begins_anew_when_everything_got_through() {
        let mut gathered = stuck();
        gathered.write_all(b"head").await.unwrap();
        assert!(timeout(SHORT / 5, gathered.flush()).await.is_err(), "it waits");
        // The client reads again; then it stops again.
        gathered.stream.writes_max += 2;
        gathered.flush().await.unwrap();
        gathered.write_all(b"head").await.unwrap();
        is_given_up("a flush", gathered.flush()).await;
    }
}
