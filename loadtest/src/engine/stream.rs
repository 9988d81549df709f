//! A socket that does not block, in the clear or over TLS.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

/// Whom to trust, and by which name the server has to prove itself.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) name: ServerName<'static>,
}

/// One connection's bytes.
pub(crate) enum Stream {
    Clear(TcpStream),
    Tls(TcpStream, Box<ClientConnection>),
}

impl Stream {
    /// Begins to connect; the socket becomes writable when it is, or is known not to be.
    pub(crate) fn connect(address: SocketAddr, tls: Option<&Tls>) -> io::Result<Stream> {
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
            None => Stream::Clear(socket),
            Some(tls) => {
                let session = ClientConnection::new(Arc::clone(&tls.config), tls.name.clone());
                Stream::Tls(socket, Box::new(session.map_err(io::Error::other)?))
            }
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Clear(socket) | Stream::Tls(socket, _) => socket.as_fd(),
        }
    }

    /// What became of connecting.
    pub(crate) fn connected(&self) -> io::Result<()> {
        let (Stream::Clear(socket) | Stream::Tls(socket, _)) = self;
        socket.take_error()?.map_or(Ok(()), Err)
    }

    /// Whether the server has proven who it is; in the clear nobody does.
    pub(crate) fn is_established(&self) -> bool {
        match self {
            Stream::Clear(_) => true,
            Stream::Tls(_, session) => !session.is_handshaking(),
        }
    }

    /// Whether bytes that were taken wait for the socket.
    pub(crate) fn wants_write(&self) -> bool {
        match self {
            Stream::Clear(_) => false,
            Stream::Tls(_, session) => session.wants_write(),
        }
    }

    /// Writes what the socket takes. `WouldBlock` when it takes nothing.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Clear(socket) => retried(|| socket.write(bytes)),
            Stream::Tls(socket, session) => {
                let taken = session.writer().write(bytes)?;
                while session.wants_write() {
                    match retried(|| session.write_tls(socket)) {
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

    /// Reads what there is; none at the end. `WouldBlock` when there is nothing.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Clear(socket) => retried(|| socket.read(buffer)),
            Stream::Tls(socket, session) => loop {
                match session.reader().read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // An end without a farewell is one all the same: what is cut short shows in the answer.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                    read => return read,
                }
                retried(|| session.read_tls(socket))?;
                let state = session.process_new_packets().map_err(io::Error::other)?;
                if state.peer_has_closed() && state.plaintext_bytes_to_read() == 0 {
                    return Ok(0);
                }
            },
        }
    }
}

fn retried<T>(mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
