//! Transport of a connection: TCP, or TLS over TCP.

use identity::client::ClientStream;
use rustls::ClientConnection;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Reads of an idle TLS connection at once. Its messages are some tickets; a peer that sends more is not waited for.
const IDLE_READS_MAX: usize = 4;

/// Transport of a connection.
#[derive(Debug)]
pub(crate) enum TransportStream {
    Plaintext(TcpStream),
    Tls(Box<ClientStream>),
}

impl TransportStream {
    /// Returns whether the connection is open and has no unread bytes. Messages of TLS itself are processed: a server sends
    /// its tickets after the handshake, so they are unread on a connection that has had no request yet.
    pub(crate) fn is_idle(&mut self) -> bool {
        match self {
            TransportStream::Plaintext(tcp) => {
                matches!(tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            TransportStream::Tls(tls) => {
                if tls.is_revoked() {
                    return false;
                }
                let (tcp, session) = tls.get_mut().get_mut();
                is_session_idle(tcp, session)
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn tcp(&self) -> &TcpStream {
        match self {
            TransportStream::Plaintext(tcp) => tcp,
            TransportStream::Tls(tls) => tls.get_ref().get_ref().0,
        }
    }
}

/// Reads and processes the messages that have arrived. A closing peer sends an alert.
fn is_session_idle(tcp: &TcpStream, session: &mut ClientConnection) -> bool {
    for _ in 0..IDLE_READS_MAX {
        let read = session.read_tls(&mut NonBlocking(tcp));
        match session.process_new_packets() {
            Ok(state) if state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed() => {}
            Ok(_) | Err(_) => return false,
        }
        match read {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
    }
    false
}

/// Bytes that have arrived on a connection.
struct NonBlocking<'a>(&'a TcpStream);

impl io::Read for NonBlocking<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(into)
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
