//! Stream wrapper that passes the bytes of a chunked body to [`http1::ChunkDecoder`] as they are read, and fails
//! the read when the chunks are invalid.

use async_trait::async_trait;
use http1::{ChunkDecoder, FramingError};
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

/// Connection while the body of one request is read from it.
#[derive(Debug)]
pub(super) struct Chunked {
    inner: Stream,
    chunks: ChunkDecoder,
    /// Error of the body; all further reads fail.
    problem: Option<FramingError>,
}

/// Read error of a body with invalid chunks.
#[derive(Debug, thiserror::Error)]
#[error("the chunked body is malformed: {0}")]
pub(crate) struct InvalidChunks(&'static str);

impl Chunked {
    /// Wraps `inner`. `chunks` has consumed the bytes after the head already, and `problem` is the error it found there.
    pub(super) fn new(inner: Stream, chunks: ChunkDecoder, problem: Option<FramingError>) -> Chunked {
        Chunked { inner, chunks, problem }
    }

    /// Returns the underlying connection when the request has ended.
    pub(super) fn unwrap(stream: Stream) -> Stream {
        if (*stream).as_any().is::<Chunked>() {
            let chunked = stream.into_any().downcast::<Chunked>();
            return chunked.expect("the type was checked").inner;
        }
        stream
    }
}

/// Returns the reason why the chunks of a body are invalid, if that is why reading it failed.
pub(crate) fn chunk_error(error: &pingora::Error) -> Option<&'static str> {
    let error = error.root_cause().downcast_ref::<io::Error>()?;
    error.get_ref()?.downcast_ref::<InvalidChunks>().map(|InvalidChunks(why)| *why)
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
            self.problem = self.chunks.scan(&buffer.filled()[before..]).err();
        }
        Poll::Ready(match self.problem {
            None => Ok(()),
            Some(FramingError(why)) => Err(io::Error::new(io::ErrorKind::InvalidData, InvalidChunks(why))),
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
