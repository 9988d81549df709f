//! Connection wrapper that changes how bytes are read, and nothing else.

use crate::forward_traits::forward_connection_traits;
use async_trait::async_trait;
use pingora::protocols::{Shutdown, Stream};
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Reads from a connection and inspects, delays or rejects the bytes.
pub(super) trait ReadFilter: Debug + Send + Sync + Unpin + 'static {
    fn poll_read(
        &mut self,
        inner: &mut Stream,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>>;
}

/// Connection that is read through a filter.
#[derive(Debug)]
pub(super) struct Filtered<F> {
    pub(super) inner: Stream,
    pub(super) filter: F,
}

impl<F: ReadFilter> AsyncRead for Filtered<F> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Filtered { inner, filter } = self.get_mut();
        filter.poll_read(inner, context, buffer)
    }
}

impl<F: ReadFilter> AsyncWrite for Filtered<F> {
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
impl<F: ReadFilter> Shutdown for Filtered<F> {
    async fn shutdown(&mut self) {
        self.inner.shutdown().await;
    }
}

forward_connection_traits!(Filtered<F: ReadFilter>, inner);
