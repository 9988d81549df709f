//! Transport of a connection: TCP, or TLS over TCP.

use identity::client::ClientStream;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Transport of a connection.
#[derive(Debug)]
pub(crate) enum TransportStream {
    Plaintext(TcpStream),
    Tls(Box<ClientStream>),
}

impl TransportStream {
    /// Returns whether the connection is open and has no unread bytes. Over TLS, a closing peer first sends an alert,
    /// which counts as unread.
    pub(crate) fn is_idle(&mut self) -> bool {
        let tcp = match self {
            TransportStream::Plaintext(tcp) => &*tcp,
            TransportStream::Tls(tls) => {
                if tls.is_revoked() {
                    return false;
                }
                let (tcp, session) = tls.get_mut().get_mut();
                let unread = session.process_new_packets().map(|state| state.plaintext_bytes_to_read());
                if !matches!(unread, Ok(0)) {
                    return false;
                }
                tcp
            }
        };
        matches!(tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    #[cfg(test)]
    pub(crate) fn tcp(&self) -> &TcpStream {
        match self {
            TransportStream::Plaintext(tcp) => tcp,
            TransportStream::Tls(tls) => tls.get_ref().get_ref().0,
        }
    }
}

impl AsyncRead for TransportStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            TransportStream::Plaintext(stream) => Pin::new(stream).poll_read(cx, into),
            TransportStream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for TransportStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            TransportStream::Plaintext(stream) => Pin::new(stream).poll_write(cx, bytes),
            TransportStream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            TransportStream::Plaintext(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            TransportStream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            TransportStream::Plaintext(stream) => Pin::new(stream).poll_flush(cx),
            TransportStream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            TransportStream::Plaintext(stream) => Pin::new(stream).poll_shutdown(cx),
            TransportStream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
