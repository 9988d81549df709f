//! Shows [`gateway_core::chunks::ChunkScanner`] the bytes of a chunked body as they are read, and ends the reading where it objects.

use async_trait::async_trait;
use gateway_core::chunks::{ChunkProblem, ChunkScanner};
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::tls::{SslDigest, TlsRef};
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType,
};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection while the body of one request is read from it.
#[derive(Debug)]
pub(super) struct Chunked {
    inner: Stream,
    scan: ChunkScanner,
    /// Nothing more is read.
    problem: Option<ChunkProblem>,
}

/// Why the body ended, as an error of reading.
#[derive(Debug, thiserror::Error)]
#[error("the chunks of the body cannot be read: {0}")]
pub(crate) struct ChunksRefused(&'static str);

impl Chunked {
    /// Of which `scan` has seen what stands behind the head already, with a problem if it found one there.
    pub(super) fn new(inner: Stream, scan: ChunkScanner, problem: Option<ChunkProblem>) -> Chunked {
        Chunked { inner, scan, problem }
    }

    /// The connection itself, when the request is over.
    pub(super) fn unwrap(stream: Stream) -> Stream {
        if (*stream).as_any().is::<Chunked>() {
            let chunked = stream.into_any().downcast::<Chunked>();
            return chunked.expect("it was asked what it is").inner;
        }
        stream
    }
}

/// Why the body of a request broke off, if it was for its chunks.
pub(crate) fn refused(error: &pingora::Error) -> Option<&'static str> {
    let error = error.root_cause().downcast_ref::<io::Error>()?;
    error.get_ref()?.downcast_ref::<ChunksRefused>().map(|ChunksRefused(why)| *why)
}

impl AsyncRead for Chunked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.problem.is_none() {
            let before = buffer.filled().len();
            std::task::ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
            self.problem = self.scan.advance(&buffer.filled()[before..]).err();
        }
        Poll::Ready(match self.problem {
            None => Ok(()),
            Some(ChunkProblem(why)) => Err(io::Error::new(io::ErrorKind::InvalidData, ChunksRefused(why))),
        })
    }
}

impl AsyncWrite for Chunked {
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
impl Shutdown for Chunked {
    async fn shutdown(&mut self) {
        self.inner.shutdown().await;
    }
}

impl UniqueID for Chunked {
    fn id(&self) -> UniqueIDType {
        self.inner.id()
    }
}

impl Ssl for Chunked {
    fn get_ssl(&self) -> Option<&TlsRef> {
        self.inner.get_ssl()
    }

    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.inner.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.inner.selected_alpn_proto()
    }
}

#[async_trait]
impl Peek for Chunked {
    async fn try_peek(&mut self, into: &mut [u8]) -> io::Result<bool> {
        self.inner.try_peek(into).await
    }
}

impl GetTimingDigest for Chunked {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_timing_digest()
    }

    fn get_read_pending_time(&self) -> Duration {
        self.inner.get_read_pending_time()
    }

    fn get_write_pending_time(&self) -> Duration {
        self.inner.get_write_pending_time()
    }
}

impl GetProxyDigest for Chunked {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_proxy_digest()
    }

    fn set_proxy_digest(&mut self, digest: ProxyDigest) {
        self.inner.set_proxy_digest(digest);
    }
}

impl GetSocketDigest for Chunked {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_socket_digest()
    }

    fn set_socket_digest(&mut self, digest: SocketDigest) {
        self.inner.set_socket_digest(digest);
    }
}
