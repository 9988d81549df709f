//! Non-blocking socket, with or without TLS.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

/// TLS configuration and expected server name.
#[derive(Clone, Debug)]
pub(crate) struct TlsTarget {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) name: ServerName<'static>,
}

/// Byte stream of one connection.
pub(crate) enum SocketStream {
    Clear(TcpStream),
    Tls(TcpStream, Box<ClientConnection>),
}

impl SocketStream {
    /// Starts to connect; the socket becomes writable when the attempt has succeeded or failed.
    pub(crate) fn connect(address: SocketAddr, tls: Option<&TlsTarget>) -> io::Result<SocketStream> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true)?;
        Ok(match tls {
            None => SocketStream::Clear(socket),
            Some(tls) => {
                let session = ClientConnection::new(Arc::clone(&tls.config), tls.name.clone());
                SocketStream::Tls(socket, Box::new(session.map_err(io::Error::other)?))
            }
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            SocketStream::Clear(socket) | SocketStream::Tls(socket, _) => socket.as_fd(),
        }
    }

    /// Returns the result of the connection attempt.
    pub(crate) fn connected(&self) -> io::Result<()> {
        let (SocketStream::Clear(socket) | SocketStream::Tls(socket, _)) = self;
        socket.take_error()?.map_or(Ok(()), Err)
    }

    /// Returns whether the TLS handshake is complete; always true without TLS.
    pub(crate) fn is_established(&self) -> bool {
        match self {
            SocketStream::Clear(_) => true,
            SocketStream::Tls(_, session) => !session.is_handshaking(),
        }
    }

    /// Returns whether buffered bytes wait to be written to the socket.
    pub(crate) fn wants_write(&self) -> bool {
        match self {
            SocketStream::Clear(_) => false,
            SocketStream::Tls(_, session) => session.wants_write(),
        }
    }

    /// Writes as much as the socket accepts. `WouldBlock` if it accepts nothing.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            SocketStream::Clear(socket) => retry_interrupted(|| socket.write(bytes)),
            SocketStream::Tls(socket, session) => {
                let taken = session.writer().write(bytes)?;
                while session.wants_write() {
                    match retry_interrupted(|| session.write_tls(socket)) {
                        Ok(_) => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        Err(error) => return Err(error),
                    }
                }
                if taken == 0 && !bytes.is_empty() {
                    Err(io::ErrorKind::WouldBlock.into())
                } else {
                    Ok(taken)
                }
            }
        }
    }

    /// Reads available bytes; 0 at the end. `WouldBlock` if there are none.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            SocketStream::Clear(socket) => retry_interrupted(|| socket.read(buffer)),
            SocketStream::Tls(socket, session) => loop {
                match session.reader().read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // An end without close_notify is accepted; truncation is detected in the response.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                    read => return read,
                }
                retry_interrupted(|| session.read_tls(socket))?;
                let state = session.process_new_packets().map_err(io::Error::other)?;
                if state.peer_has_closed() && state.plaintext_bytes_to_read() == 0 {
                    return Ok(0);
                }
            },
        }
    }
}

fn retry_interrupted<T>(mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
